"""``headrace serve`` with a simulated executor: the real processes and the real tokenizer, but no forward.

``python -m tests.http.simulated_server MODEL STEP_S [flags of serve]``
"""

from __future__ import annotations

import argparse
import sys

from headrace.base.logging import setup_logging
from headrace.config.flags import settings_from_args
from headrace.config.sections import EngineConfig
from headrace.core.client import EngineCoreClient
from headrace.core.make_client import make_client
from headrace.entrypoints.cli import serve
from headrace.entrypoints.engine_config import load_engine_config
from headrace.entrypoints.openai.options import options_from_args
from headrace.entrypoints.openai.server import run_server


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    model, step_s, *flags = sys.argv[1:]
    args = parser.parse_args([model, *flags])

    def make_core(config: EngineConfig) -> EngineCoreClient:
        path = "headrace.testing.simulated_executor:make_executor"
        return make_client(config, "process", executor=path, options={"step_s": float(step_s)})

    settings = settings_from_args(args)
    setup_logging(settings.get("log_level", "info"), settings.get("log_format", "text"))
    return run_server(load_engine_config(settings), options_from_args(args), make_core)


if __name__ == "__main__":
    sys.exit(main())
