"""What the HTTP server is told beside the engine's configuration: one dataclass that gives its flags too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_type_hints

from headrace.base.errors import ConfigError
from headrace.config.sections import setting
from headrace.config.units import parse_size

_KINDS: dict[Any, tuple[Callable[[str], Any], str]] = {int: (int, "N"), float: (float, "X")}


def _many(help_text: str, **more: Any) -> Any:
    return field(default=(), metadata={"help": help_text, **more})


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen, whom to let in and how to stop."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = _many("Key that clients must send; may be given several times.", secret=True)
    max_body: int = setting(8 << 20, "Largest body of a request.", unit="bytes")
    response_store: int = setting(
        0, "Memory for answers of /v1/responses that clients may go on from; 0 stores none.", unit="bytes"
    )
    ssl_keyfile: str | None = setting(None, "Private key for TLS.")
    ssl_certfile: str | None = setting(None, "Certificate for TLS.")
    ssl_ca_certs: str | None = setting(None, "Authorities whose client certificates are required.")
    allowed_origin: tuple[str, ...] = _many("Web origin that may call (CORS); may be given several times.")
    root_path: str = setting("", "Path prefix that a proxy in front takes off.")
    keep_alive_s: int = setting(5, "Seconds for which an idle connection is kept.")
    drain_s: float = setting(30.0, "Seconds that running requests get to finish after SIGTERM; 0 ends them at once.")
    death_grace_s: float = setting(5.0, "Seconds between the engine's death and the server's exit.")
    access_log: bool = setting(False, "Log a line per request.")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per option."""
    group = parser.add_argument_group("server")
    hints = get_type_hints(ServerOptions)
    for one in fields(ServerOptions):
        _add(group, one, hints[one.name])


def _add(group: argparse._ArgumentGroup, one: Field[Any], hint: Any) -> None:
    name = "--" + one.name.replace("_", "-")
    default = one.default if one.default is not MISSING else None
    help_text = one.metadata["help"]
    if default not in (None, "", ()) and not isinstance(default, bool):
        help_text += f" (default: {default})"
    options: dict[str, Any] = {"dest": one.name, "default": default, "help": help_text}
    if hint is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
    elif hint == tuple[str, ...]:
        group.add_argument(name, action="append", metavar="TEXT", **{**options, "default": None})
    else:
        is_size = one.metadata.get("unit") == "bytes"
        kind, metavar = (_size, "SIZE") if is_size else _KINDS.get(hint, (str, "TEXT"))
        group.add_argument(name, type=kind, metavar=metavar, **options)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def options_from_args(args: argparse.Namespace) -> ServerOptions:
    """The options that the flags set.

    Raises:
        ConfigError: a key that is empty, as from a variable that is not set; it would leave the server open.
    """
    given: dict[str, Any] = {one.name: getattr(args, one.name) for one in fields(ServerOptions)}
    given |= {name: tuple(given[name] or ()) for name in ("api_key", "allowed_origin")}
    if not all(key.strip() for key in given["api_key"]):
        raise ConfigError("--api-key must not be empty; leave it out for a server that anybody may call")
    return ServerOptions(**given)
