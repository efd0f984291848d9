"""A file of requests to a file of answers, in OpenAI's batch form.

Every input line gets exactly one output line, in the input's order; what is wrong with a line stands in its place and
harms no other. Lines pass the same checks and the same code as requests over HTTP.

While it runs, finished lines are appended to ``OUTPUT.partial`` with their numbers; the output appears whole at the
end. A run that was cut off goes on from that file, if the input is still the same. When the engine dies nothing is
written for the lines that it took along.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from headrace.base.errors import ConfigError, EngineDeadError, InvalidRequestError, NotAcceptingError, QueueFullError
from headrace.entrypoints.openai.body import parse
from headrace.entrypoints.openai.chat import ChatCall
from headrace.entrypoints.openai.completions import CompletionCall
from headrace.entrypoints.openai.context import ServerContext
from headrace.entrypoints.openai.errors import describe
from headrace.entrypoints.openai.generate import answer
from headrace.entrypoints.openai.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from headrace.entrypoints.openai.responses import ResponsesCall

ROUTES: dict[str, tuple[type[Any], type[Any]]] = {
    "/v1/completions": (CompletionRequest, CompletionCall),
    "/v1/chat/completions": (ChatRequest, ChatCall),
    "/v1/responses": (ResponsesRequest, ResponsesCall),
}
MAX_CUSTOM_ID_CHARS = 512
_encode = msgspec.json.encode


class _Line(msgspec.Struct, kw_only=True):
    """One line of the input; other fields are ignored."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _CustomId(msgspec.Struct):
    """What can be told of a line that is wrong otherwise."""

    custom_id: str | None = None


@dataclass
class Tally:
    """Lines that have an answer, and how many of these are errors."""

    num_lines: int = 0
    num_failed: int = 0


@dataclass
class BatchRun:
    """See the module.

    Args:
        context: the engine and the options, as the server has them.
        source: the input.
        target: the output; its folder must exist.
        window: lines that are worked on at once.
        on_line: called for each finished line.
    """

    context: ServerContext
    source: Path
    target: Path
    window: int
    on_line: Callable[[], None] = lambda: None
    tally: Tally = field(default_factory=Tally)

    @property
    def partial(self) -> Path:
        """Where finished lines are kept until all are there."""
        return self.target.with_name(self.target.name + ".partial")

    async def run(self) -> Tally:
        """Answer every line.

        Raises:
            ConfigError: the input cannot be read, or the partial output belongs to another input.
            EngineDeadError: the engine is gone; run again to go on.
        """
        digest = _digest(self.source)
        done = self._read_partial(digest)
        with self.partial.open("ab") as out:
            if not done and out.tell() == 0:
                _append(out, {"input": digest})
            await self._answer_all(out, done)
        self._finish()
        return self.tally

    async def _answer_all(self, out: IO[bytes], done: set[int]) -> None:
        seen: set[str] = set()
        tasks: set[asyncio.Task[None]] = set()
        try:
            for number, data in _lines(self.source, self.context.options.max_body):
                duplicate = _note(data, seen)
                if number in done:
                    continue
                while len(tasks) >= self.window:
                    tasks = await _some(tasks)
                tasks.add(asyncio.create_task(self._answer_line(number, data, duplicate, out)))
            while tasks:
                tasks = await _some(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_line(self, number: int, data: bytes, duplicate: bool, out: IO[bytes]) -> None:
        request_id = uuid.uuid4().hex
        while True:
            try:
                body = await self._answer(data, duplicate, request_id)
                result = _result(data, request_id, 200, msgspec.Raw(body), None)
                failed = False
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)
                continue
            except (EngineDeadError, NotAcceptingError):
                raise
            except Exception as error:  # noqa: BLE001 - the border between a line and the run
                info = describe(error, request_id)
                reply = msgspec.json.decode(info.body())
                fault = {"code": info.code or str(info.status), "message": info.message}
                result = _result(data, request_id, info.status, reply, fault)
                failed = True
            break
        _append(out, {"line": number, "failed": failed, "answer": result})
        self._count(failed)

    async def _answer(self, data: bytes, duplicate: bool, request_id: str) -> bytes:
        if not data.strip():
            raise InvalidRequestError("the line is empty", code="empty_line")
        line = _parse_line(data)
        if duplicate:
            raise InvalidRequestError("another line has the same custom_id", param="custom_id")
        if line.method.upper() != "POST":
            raise InvalidRequestError("method must be POST", param="method")
        if line.url not in ROUTES:
            raise InvalidRequestError(f"url must be one of {', '.join(ROUTES)}", param="url")
        kind, call = ROUTES[line.url]
        body = parse(bytes(line.body), kind)
        if body.stream:
            raise InvalidRequestError("answers of a batch cannot be streamed", param="stream")
        return await answer(self.context, await call.prepare(self.context, body, request_id))

    def _count(self, failed: bool) -> None:
        self.tally.num_lines += 1
        self.tally.num_failed += failed
        self.on_line()

    def _read_partial(self, digest: str) -> set[int]:
        """Numbers of the lines that an earlier run finished; a last line that was cut off is taken away."""
        if not self.partial.exists():
            return set()
        done: set[int] = set()
        with self.partial.open("r+b") as kept:
            header = _decode(kept.readline())
            end = kept.tell()
            if header is not None and header.get("input") != digest:
                raise ConfigError(f"{self.partial} belongs to another input; remove it or choose another output")
            while header is not None and (record := _decode(kept.readline())) is not None:
                end = kept.tell()
                done.add(record["line"])
                self._count(record["failed"])
            kept.truncate(end if header is not None else 0)
        return done

    def _finish(self) -> None:
        """Put the finished lines into order; the output appears whole or not at all."""
        places: dict[int, int] = {}
        temporary = self.target.with_name(self.target.name + ".tmp")
        with self.partial.open("rb") as kept:
            kept.readline()
            while True:
                place = kept.tell()
                record = _decode(kept.readline())
                if record is None:
                    break
                places[record["line"]] = place
            with temporary.open("wb") as out:
                for number in sorted(places):
                    kept.seek(places[number])
                    record = _decode(kept.readline())
                    assert record is not None
                    out.write(_encode(record["answer"]) + b"\n")
                out.flush()
                os.fsync(out.fileno())
        temporary.replace(self.target)
        self.partial.unlink()


async def _some(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait for one of the tasks and return those that still run; a failed one raises."""
    finished, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in finished:
        task.result()
    return pending


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None


def _lines(path: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    """Numbered lines from 1; of one that is too long only the first part, which is no JSON."""
    with path.open("rb") as source:
        number = 0
        while data := source.readline(limit):
            number += 1
            rest = data
            while not rest.endswith(b"\n") and (rest := source.readline(limit)):
                pass
            yield number, data


def _note(data: bytes, seen: set[str]) -> bool:
    """Whether the line's ``custom_id`` has been seen before."""
    name = _custom_id(data)
    if name is None:
        return False
    if name in seen:
        return True
    seen.add(name)
    return False


def _custom_id(data: bytes) -> str | None:
    try:
        name = msgspec.json.decode(data, type=_CustomId).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return name[:MAX_CUSTOM_ID_CHARS] if name else None


def _parse_line(data: bytes) -> _Line:
    try:
        return msgspec.json.decode(data, type=_Line)
    except msgspec.ValidationError:
        message = "a line must be an object with the texts custom_id and url and the object body"
        raise InvalidRequestError(message, code="invalid_line") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequestError("the line is not valid JSON", code="invalid_json") from None


def _result(data: bytes, request_id: str, status: int, body: Any, error: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": _custom_id(data),
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": error,
    }


def _append(out: IO[bytes], record: dict[str, Any]) -> None:
    out.write(_encode(record) + b"\n")
    out.flush()


def _decode(data: bytes) -> dict[str, Any] | None:
    """One kept record; ``None`` at the end or for one that was cut off."""
    if not data.endswith(b"\n"):
        return None
    try:
        record: dict[str, Any] = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return record
