"""``headrace serve``.

examples:
  headrace serve
  headrace serve smollm2-135m --port 9000 --max-model-len 2048
  headrace serve ./my-model --served-model-name mine --api-key SECRET
  headrace serve model.gguf --kv-cache-memory 512MiB --max-num-seqs 32

MODEL is an alias, a local folder, a .gguf file or a hub id. Sizes take units
(512MiB, 2GB). SIGTERM or Ctrl-C lets running requests finish; a second one
stops at once.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from headrace.config.env import api_key
from headrace.config.flags import add_flags, settings_from_args
from headrace.entrypoints.openai.options import add_server_flags, options_from_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add its flags."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="what to serve (default: smollm2-135m)")
    add_server_flags(parser)
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from headrace.core.make_client import EXECUTORS, make_client
    from headrace.core.spawn import CoreProcess

    # The interpreter and PyTorch load while this process finds out what to serve.
    with CoreProcess(EXECUTORS["uniproc"].partition(":")[0]) as child:
        from headrace.base.logging import setup_logging
        from headrace.entrypoints.engine_config import load_engine_config
        from headrace.entrypoints.openai.server import run_server

        options = options_from_args(args)
        if not options.api_key and (key := api_key()):
            options = replace(options, api_key=(key,))
        settings = settings_from_args(args)
        setup_logging(settings.get("log_level", "info"), settings.get("log_format", "text"))
        return run_server(
            load_engine_config(settings), options, lambda config: make_client(config, "process", child=child)
        )
