"""The server process: starts the core, serves HTTP, drains, and dies aloud.

Order of effects at start: the socket is bound (so that a taken port costs no model load), the core process is started,
only then are FastAPI and the rest imported while the model loads, and the port answers when the core is ready.

At the end: the first SIGTERM or SIGINT drains (new work is refused, what runs may finish for ``drain_s``, then it is
ended); a second one stops at once. A dead core turns health red immediately and ends every stream; after its grace the
process exits with status 1 and the root cause as its last line.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError, EngineDeadError
from headrace.base.logging import get_logger
from headrace.base.start_time import seconds_since_start
from headrace.config.sections import EngineConfig
from headrace.entrypoints.openai.options import ServerOptions

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from headrace.core.client import EngineCoreClient
    from headrace.entrypoints.openai.context import ServerContext

logger = get_logger(__name__)

POLL_S = 0.05
SHUTDOWN_GRACE_S = 3.0


def start_core(config: EngineConfig) -> EngineCoreClient:
    """Start the core's process; it loads while the caller goes on."""
    from headrace.core.make_client import make_client

    return make_client(config, "process")


def run_server(
    config: EngineConfig,
    options: ServerOptions,
    make_core: Callable[[EngineConfig], EngineCoreClient] = start_core,
) -> int:
    """Serve until told to stop; returns the process's exit status.

    Raises:
        ConfigError: the port is taken, TLS files are unusable, or a setting cannot work.
        ModelFileError: the model cannot be loaded.
    """
    started = time.monotonic() - seconds_since_start()
    check_tls(options)
    listener = bind(options)
    try:
        setup_ms = 1e3 * (time.monotonic() - started)
        client = make_core(config)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, options, listener, client, StartUp(started, setup_ms)))
    finally:
        listener.close()


def bind(options: ServerOptions) -> socket.socket:
    """Return the bound, not yet listening socket."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # The protocol is spelt out: by it event loops decide to switch Nagle's delay off, which costs 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        message = f"cannot listen on {options.host}:{options.port}: {reason}; choose another --host or --port"
        raise ConfigError(message) from None
    listener.setblocking(False)
    return listener


def check_tls(options: ServerOptions) -> None:
    """Raise `ConfigError` for TLS files that cannot be used."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None or options.ssl_ca_certs is not None:
            raise ConfigError("TLS needs --ssl-certfile")
        return
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        trial.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        if options.ssl_ca_certs is not None:
            trial.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"TLS: {reason}; check --ssl-certfile, --ssl-keyfile and --ssl-ca-certs") from None


async def _serve(
    config: EngineConfig, options: ServerOptions, listener: socket.socket, client: EngineCoreClient, start_up: StartUp
) -> int:
    signals = _Signals()
    starting = asyncio.ensure_future(_start(config, options, client, start_up))
    try:
        # A signal while the model loads stops at once.
        stop = asyncio.ensure_future(signals.first.wait())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not starting.done():
            logger.info("stopped while starting")
            return 0
        context = starting.result()
        start_up.engine_is_ready(context.llm.ready.phases_ms)
        return await _Service(context, options, listener, signals, config.observability.stats_interval_s).run(start_up)
    finally:
        starting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await starting
        await client.shutdown()


async def _start(
    config: EngineConfig, options: ServerOptions, client: EngineCoreClient, start_up: StartUp
) -> ServerContext:
    """Wait for the core while importing and building everything else."""
    from headrace.entrypoints.async_engine import make_async_llm
    from headrace.entrypoints.openai.context import ServerContext
    from headrace.observability.metrics import EngineMetrics

    name = config.model.served_model_name or config.model.model
    samples_blocks = config.observability.kv_block_sample > 0
    metrics = EngineMetrics(name, config.max_model_len, samples_blocks=samples_blocks)
    llm = make_async_llm(config, client, metrics)
    starting = asyncio.ensure_future(llm.start())
    try:
        # Once the core has its message: everything that the first request needs.
        await asyncio.sleep(0)
        await asyncio.to_thread(_import_http)
        await llm.prepare_grammars()
        start_up.front_end_is_ready()
        ready = await starting
    finally:
        starting.cancel()
    cache = {
        "block_size": ready.block_size,
        "num_gpu_blocks": ready.num_blocks,
        "cache_dtype": config.cache.kv_cache_dtype,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
    }
    metrics.attach(cache, lambda: llm.progress_age_s)
    return ServerContext(llm, name, options, metrics)


class StartUp:
    """The time to ready, in phases that follow each other without a gap.

    Args:
        started: `time.monotonic` when the process was made.
        setup_ms: up to here: the interpreter, imports, the configuration, the model's download.
    """

    def __init__(self, started: float, setup_ms: float) -> None:
        self._started = started
        self.phases_ms = {"setup": setup_ms}
        self._engine_ms: dict[str, float] = {}
        self._front_end_ms = 0.0

    @property
    def seconds(self) -> float:
        """Since the process was made."""
        return time.monotonic() - self._started

    def front_end_is_ready(self) -> None:
        """Tokenizer, grammars and HTTP are there; they were made while the core started."""
        self._front_end_ms = 1e3 * self.seconds - self.phases_ms["setup"]

    def engine_is_ready(self, phases_ms: dict[str, float]) -> None:
        """The core can serve; it took these phases, which the time since ``setup`` contains."""
        self._engine_ms = phases_ms
        self.phases_ms["engine"] = 1e3 * self.seconds - self.phases_ms["setup"]

    def listens(self) -> None:
        """The port answers."""
        self.phases_ms["listen"] = 1e3 * self.seconds - sum(self.phases_ms.values())

    def __str__(self) -> str:
        parts = [f"{name} {ms:.0f}" for name, ms in self.phases_ms.items()]
        inner = ", ".join(f"{name} {ms:.0f}" for name, ms in self._engine_ms.items())
        beside = f"front end {self._front_end_ms:.0f} beside it"
        return f"start-up in ms: {', '.join(parts)}; inside engine: {inner or 'not told'}; {beside}"


class _Signals:
    """Counts SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _import_http() -> None:
    """Load what serving needs while the model loads."""
    import uvicorn.lifespan.off
    import uvicorn.protocols.http.httptools_impl  # noqa: F401

    import headrace.entrypoints.openai.app  # noqa: F401


class _Service:
    """The time from ready to exit."""

    def __init__(
        self,
        context: ServerContext,
        options: ServerOptions,
        listener: socket.socket,
        signals: _Signals,
        stats_interval_s: float,
    ) -> None:
        self._context = context
        self._options = options
        self._listener = listener
        self._signals = signals
        self._stats_interval_s = stats_interval_s

    async def run(self, start_up: StartUp) -> int:
        """Serve; returns the exit status."""
        from headrace.entrypoints.openai.app import make_app

        server = make_http_server(make_app(self._context), self._options)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]), name="http")
        helpers = [asyncio.create_task(work, name="helper") for work in self._background()]
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(POLL_S)
            start_up.listens()
            self._context.start_up_ms = start_up.phases_ms
            logger.info("%s", start_up)
            self._say_ready(start_up.seconds)
            return await self._until_end(server, serving)
        finally:
            await self._stop_http(server, serving)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._context.llm.shutdown()

    def _background(self) -> list[Any]:
        from headrace.base.clock import SystemClock
        from headrace.observability.stats_log import StatsLog

        if self._stats_interval_s <= 0:
            return []
        return [StatsLog(self._context.metrics, SystemClock()).run(self._stats_interval_s)]

    async def _until_end(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> int:
        while not serving.done():
            if self._context.dead_reason is not None:
                return await self._die()
            if self._signals.first.is_set():
                return 0 if await self._drain() else await self._die()
            await asyncio.sleep(POLL_S)
        serving.result()
        raise EngineDeadError("the HTTP server ended by itself")

    async def _die(self) -> int:
        """Stay red for the grace, so that probes and clients see it, then leave with the cause."""
        reason = self._context.dead_reason
        logger.error("the engine has stopped: %s", reason)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._signals.second.wait(), self._options.death_grace_s)
        print(f"headrace: error: {reason}", file=sys.stderr, flush=True)
        return 1

    async def _drain(self) -> bool:
        """Refuse new work and wait for what runs; what remains after ``drain_s`` is ended. False if the core died."""
        context = self._context
        context.draining = True
        logger.info("shutting down: %d requests may finish within %g s", context.num_in_flight, self._options.drain_s)
        deadline = time.monotonic() + self._options.drain_s
        while context.num_in_flight and time.monotonic() < deadline and not self._signals.second.is_set():
            if context.dead_reason is not None:
                return False
            await asyncio.sleep(POLL_S)
        if context.num_in_flight:
            logger.warning("ending %d requests that still run", context.num_in_flight)
            await context.llm.shutdown()
        return True

    async def _stop_http(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        """Let answers leave, for a bounded time."""
        server.should_exit = True
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_GRACE_S):
                while self._context.num_in_flight:
                    await asyncio.sleep(POLL_S)
        server.force_exit = True
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(serving, SHUTDOWN_GRACE_S)

    def _say_ready(self, seconds: float) -> None:
        host, port = self._listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        scheme = "https" if self._options.ssl_certfile else "http"
        url = f"{scheme}://{shown}:{port}"
        key = ' -H "Authorization: Bearer $KEY"' if self._options.api_key else ""
        body = f'{{"model": "{self._context.model_name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        logger.info("ready on %s after %.1f s (context of %d tokens). Try:", url, seconds, self._context.max_model_len)
        logger.info("curl %s/v1/chat/completions -H 'Content-Type: application/json'%s -d '%s'", url, key, body)


def make_http_server(app: ASGIApp, options: ServerOptions) -> uvicorn.Server:
    """A uvicorn server that leaves signals to `_Signals`."""
    import uvicorn

    from headrace.entrypoints.openai.http_protocol import BoundedProtocol

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    # uvicorn's own messages matter only when something is wrong; requests are logged on demand.
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = logging.getLogger("headrace").handlers
        theirs.setLevel(level)
        theirs.propagate = False
    settings = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=options.keep_alive_s,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
    )
    return Server(settings)
