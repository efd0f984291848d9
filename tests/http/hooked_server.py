"""``headrace serve`` with hooks for tests: the real processes and the real tokenizer, and faults on demand.

``python -m tests.http.hooked_server MODEL OPTIONS [flags of serve]``, where OPTIONS are those of the simulated executor
as JSON, or ``null`` for the real one. A request whose name holds ``fault.PHASE.REPEAT.AT`` carries that fault.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

import msgspec

from headrace.base.logging import setup_logging
from headrace.config.flags import settings_from_args
from headrace.config.sections import EngineConfig
from headrace.core.client import EngineCoreClient
from headrace.core.make_client import EXECUTORS
from headrace.core.process_client import ProcessClient
from headrace.entrypoints.cli import main as cli
from headrace.entrypoints.cli import serve
from headrace.entrypoints.engine_config import load_engine_config
from headrace.entrypoints.openai.options import options_from_args
from headrace.entrypoints.openai.server import run_server
from headrace.messages.requests import EngineCoreRequest

SIMULATED = "headrace.testing.simulated_executor:make_executor"
_FAULT = re.compile(r"fault\.(\w+)\.(once|always)\.(\d+)")


class FaultyClient(ProcessClient):
    """Gives requests the faults that their names ask for."""

    async def add_request(self, request: EngineCoreRequest) -> None:
        if match := _FAULT.search(request.request_id):
            fault = {"phase": match[1], "repeat": match[2], "at": int(match[3])}
            request = msgspec.structs.replace(request, fault=fault)
        await super().add_request(request)


def main() -> int:
    """Serve, through the command line like everybody."""
    model, given, *flags = sys.argv[1:]
    options = json.loads(given)

    def make_core(config: EngineConfig) -> EngineCoreClient:
        path = EXECUTORS[config.parallel.executor] if options is None else SIMULATED
        return FaultyClient(config, path, options)

    def run(args: argparse.Namespace) -> int:
        settings = settings_from_args(args)
        setup_logging(settings.get("log_level", "info"), settings.get("log_format", "text"))
        return run_server(load_engine_config(settings), options_from_args(args), make_core)

    serve.run = run
    return cli.main(["serve", model, *flags])


if __name__ == "__main__":
    sys.exit(main())
