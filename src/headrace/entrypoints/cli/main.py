"""``headrace``: one command, its subcommands loaded only when named, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

EXAMPLES = """\
examples:
  headrace serve                        serve the default model on 127.0.0.1:8000
  headrace serve model.gguf --port 9000 serve a GGUF file
  headrace chat                         talk to the default model here
  headrace chat --url http://host:8000  talk to a running server
  headrace generate "Once upon a time"  one answer, streamed to the terminal
  headrace explain-config --dtype float32
                                        what would be decided, and why

'headrace COMMAND --help' explains a command.
"""

COMMANDS = {
    "serve": "answer OpenAI's HTTP API",
    "chat": "talk to a model in the terminal",
    "generate": "continue a text once",
    "bench": "measure latency, throughput or a server under load",
    "run-batch": "answer a file of requests",
    "pull": "fetch a model into the cache",
    "explain-config": "print every resolved setting with its reason",
    "explain": "say why a request took its time",
    "trace": "write what a server or a recording did as a Perfetto trace",
    "replay": "repeat the decisions of a recording and compare them",
    "doctor": "look at the machine and name problems with their remedies",
}


class Command(Protocol):
    """What a module of a subcommand offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status."""
        ...


def load_command(name: str) -> Command:
    """Import the module of a subcommand."""
    module: Command = import_module(f"headrace.entrypoints.cli.{name.replace('-', '_')}")  # type: ignore[assignment]
    return module


def _overview() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:16}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="headrace",
        usage="headrace COMMAND [options]",
        description=f"Serve open-weight language models.\n\ncommands:\n{listing}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status. Faults of the operator are one clear line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        args = _overview().parse_args(words)
        if args.version:
            import headrace

            print(headrace.__version__)
        else:
            _overview().print_help()
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"headrace: error: there is no command '{name}'; there are {known}", file=sys.stderr)
        return 2
    command = load_command(name)
    parser = argparse.ArgumentParser(
        prog=f"headrace {name}",
        description=COMMANDS[name][:1].upper() + COMMANDS[name][1:] + ".",
        epilog=command.__doc__ and command.__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return _run(command, parser.parse_args(rest))


def _run(command: Command, args: argparse.Namespace) -> int:
    from headrace.base.errors import ConfigError, HeadraceError

    try:
        return command.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe has seen enough; Python must not complain again when it flushes at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 141
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
