"""Repeats a recording on the control plane alone, and compares every decision.

No model, no clock, no text: prompts are spelt from block hashes, so that what was equal is equal again, and what the
model said is reduced to how many tokens came and which of them ended a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.clock import ManualClock
from headrace.base.errors import ModelFileError
from headrace.config.sections import SchedulerSection
from headrace.control.scheduler.recorder import StepRecorder
from headrace.control.scheduler.scheduler import Scheduler
from headrace.core.recorded_parts import ReplayedParts
from headrace.core.recording import FORMAT, HASH_BYTES, VERSION, decide_outputs, decide_schedule
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput, StepStats
from headrace.messages.sampling_params import SamplingParams, StructuredOutputParams
from headrace.messages.scheduler_output import SchedulerOutput
from headrace.observability.flight_recorder.recorder import FlightRecorder
from headrace.observability.flight_recorder.views import RecorderViews
from headrace.observability.trace import make_trace

_END_TOKEN = 1
_FIRST_TOKEN = 10
_TOKEN_SPACE = (1 << 30) - _FIRST_TOKEN


@dataclass(slots=True)
class ReplayResult:
    """How a replay went. ``difference`` describes the first decision that differed."""

    num_steps: int = 0
    num_decisions: int = 0
    num_requests: int = 0
    difference: str | None = None


@dataclass(slots=True)
class _Story:
    """A request of the recording: all that was ever known of its blocks."""

    hashes: bytes = b""
    tokens: dict[int, list[int]] = field(default_factory=dict)


def read_recording(path: str) -> Iterator[Any]:
    """The values of a file, the header first; a piece that was cut off at the end is left out.

    Raises:
        ModelFileError: it cannot be read, or is no recording of this version.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    decoder = msgspec.msgpack.Decoder()
    offset = 0
    while offset + 4 <= len(data):
        size = int.from_bytes(data[offset : offset + 4], "little")
        if offset + 4 + size > len(data):
            break
        try:
            value = decoder.decode(data[offset + 4 : offset + 4 + size])
        except msgspec.DecodeError:
            raise ModelFileError(f"{path} is not a recording, or is damaged at byte {offset}") from None
        if not offset and (not isinstance(value, dict) or value.get("format") != FORMAT):
            raise ModelFileError(f"{path} is not a recording of headrace serve --record")
        if not offset and value["version"] != VERSION:
            raise ModelFileError(f"{path} has version {value['version']}; this headrace reads version {VERSION}")
        yield value
        offset += 4 + size
    if not offset:
        raise ModelFileError(f"{path} is not a recording of headrace serve --record")


class Replay:
    """One recording, to be run once.

    Args:
        path: of the file.
        recorder: follows the replayed scheduler.
    """

    def __init__(self, path: str, recorder: StepRecorder | None = None) -> None:
        header, *self._entries = read_recording(path)
        self.result = ReplayResult()
        self._recorder = recorder
        self._parts = ReplayedParts(header["load_failure_policy"])
        self._block_size = header["kv"]["block_size"]
        section = SchedulerSection(**header["scheduler"])
        options = {k: header[k] for k in ("num_draft_tokens",) if k in header}
        self._scheduler = Scheduler(
            section,
            msgspec.convert(header["kv"], KVCacheConfig),
            max_model_len=header["max_model_len"],
            enable_prefix_caching=header["enable_prefix_caching"],
            connector=self._parts,
            grammar=self._parts,
            recorder=recorder,
            **options,
        )
        self._numbers: dict[str, int] = {}
        self._steps: deque[SchedulerOutput] = deque()
        self._stories: dict[int, _Story] = {}
        for entry in self._entries:
            if entry[0] == "end":
                self._stories[entry[1]] = _Story(entry[3])
        self._calls: dict[str, Callable[..., Any]] = {
            "add": self._add,
            "schedule": self._schedule,
            "commit": self._commit,
            "finish": self._finish,
            "take": self._take,
            "rewind": self._rewind,
            "reset": self._reset,
            "end": lambda *_: None,
        }

    def run(self) -> ReplayResult:
        """Repeat everything; stops at the first difference."""
        for place, entry in enumerate(self._entries):
            kind, *values = entry
            try:
                difference = self._calls[kind](*values)
            except (AssertionError, IndexError, KeyError, ValueError) as error:
                difference = f"the replay could not go on: {type(error).__name__}: {error}"
            if difference is not None:
                self.result.difference = f"entry {place} ({kind}): {difference}"
                break
        return self.result

    def _compare(self, recorded: Any, replayed: Any) -> str | None:
        self.result.num_decisions += 1
        return None if recorded == replayed else f"recorded {recorded}, now {replayed}"

    def _add(
        self,
        now: float,
        number: int,
        num_prompt: int,
        max_tokens: int | None,
        priority: int,
        arrival: float,
        uses_grammar: bool,
        wants_prompt_logprobs: bool,
        hashes: bytes,
    ) -> None:
        story = self._stories.setdefault(number, _Story(hashes))
        if len(hashes) > len(story.hashes):
            story.hashes = hashes
        request_id = f"request-{number}"
        self._numbers[request_id] = number
        self.result.num_requests += 1
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=0,
            prompt_logprobs=0 if wants_prompt_logprobs else None,
            structured_outputs=StructuredOutputParams(json_object=True) if uses_grammar else None,
        )
        self._scheduler.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=[self._token(number, place) for place in range(num_prompt)],
                sampling=sampling,
                eos_token_ids=(_END_TOKEN,),
                arrival_time=arrival,
                priority=priority,
            ),
            now,
        )

    def _token(self, number: int, place: int) -> int:
        """A stand-in for the token at a place of a request: the same wherever the whole block was the same."""
        story = self._stories[number]
        block, offset = divmod(place, self._block_size)
        tokens = story.tokens.get(block)
        if tokens is None:
            block_hash = story.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
            seed = block_hash or f"{number} {block}".encode()
            digests = b"".join(sha256(seed + bytes([n])).digest() for n in range(-(-self._block_size // 8)))
            tokens = story.tokens[block] = [
                _FIRST_TOKEN + int.from_bytes(digests[4 * i : 4 * i + 4], "little") % _TOKEN_SPACE
                for i in range(self._block_size)
            ]
        return tokens[offset]

    def _schedule(
        self, now: float, throttle: bool, only: list[int] | None, answers: list[Any], decision: list[Any]
    ) -> str | None:
        self._parts.answers.extend(answers)
        wanted = None if only is None else frozenset(f"request-{number}" for number in only)
        step = self._scheduler.schedule(now, throttle, wanted)
        if step.num_scheduled_tokens or step.connector is not None:
            self._steps.append(step)
            self.result.num_steps += 1
        return self._compare(decision, decide_schedule(step, self._numbers, self._scheduler.kv.pool.num_free))

    def _commit(
        self, now: float, step_id: int, outcome: dict[str, Any], answers: list[Any], decision: list[Any]
    ) -> str | None:
        self._parts.answers.extend(answers)
        step = self._steps.popleft()
        ends = {number: (count, reason) for number, count, reason in decision[0]}
        output = self._make_output(outcome, ends)
        outputs = self._scheduler.update_from_output(step, output, now)
        if self._recorder is not None:
            self._recorder.on_updated(step_id, output.stats, self._scheduler.kv.usage, now)
            self._recorder.on_output(now)
        news = [o for message in outputs.values() for o in message.outputs]
        return self._compare(decision, decide_outputs(news, self._numbers, self._scheduler.kv.pool.num_free))

    def _make_output(self, outcome: dict[str, Any], ends: dict[int, tuple[int, str | None]]) -> ModelRunnerOutput:
        rows = [(number, count) for number, count in outcome["rows"] if number >= 0]
        seconds = outcome["seconds"]
        news = outcome["connector"]
        return ModelRunnerOutput(
            request_ids=[f"request-{number}" for number, _ in rows],
            sampled_token_ids=[self._sample(number, count, *ends.get(number, (0, None))) for number, count in rows],
            drafts={f"request-{n}": [_FIRST_TOKEN] * count for n, count in outcome["drafts"]},
            errors={f"request-{number}": "error" for number in outcome["errors"]},
            stats=_make_stats(*seconds) if seconds else None,
            connector=_name_connector(news) if news is not None else None,
        )

    def _sample(self, number: int, count: int, num_kept: int, reason: str | None) -> list[int]:
        request = self._scheduler.get_request(f"request-{number}")
        start = request.num_tokens if request is not None else 0
        tokens = [self._token(number, start + place) for place in range(count)]
        if reason == FinishReason.STOP.value and tokens:
            tokens[max(num_kept, 1) - 1] = _END_TOKEN
        return tokens

    def _finish(self, numbers: list[int] | None, reason: str, answers: list[Any], decision: list[Any]) -> str | None:
        self._parts.answers.extend(answers)
        ids = None if numbers is None else [f"request-{number}" for number in numbers]
        ended = self._scheduler.finish_requests(ids, FinishReason(reason))
        news = [output for of_client in ended.values() for output in of_client]
        return self._compare(decision, decide_outputs(news, self._numbers, self._scheduler.kv.pool.num_free))

    def _take(self, decision: list[Any]) -> str | None:
        news = [o for message in self._scheduler.take_outputs().values() for o in message.outputs]
        return self._compare(decision, decide_outputs(news, self._numbers, self._scheduler.kv.pool.num_free))

    def _rewind(self, step_id: int, answers: list[Any], decision: list[Any]) -> str | None:
        self._parts.answers.extend(answers)
        running = self._scheduler.rewind(self._steps[0])
        self._steps.clear()
        return self._compare(decision, [[self._numbers[i] for i in running], self._scheduler.kv.pool.num_free])

    def _reset(self, reset_running: bool, answers: list[Any], decision: list[Any]) -> str | None:
        self._parts.answers.extend(answers)
        done = self._scheduler.reset_prefix_cache(reset_running)
        return self._compare(decision, [done, self._scheduler.kv.pool.num_free])


def _name_connector(news: dict[str, Any]) -> ConnectorOutput:
    named = {
        name: tuple(f"request-{n}" for n in values) for name, values in news.items() if name != "invalid_block_ids"
    }
    return ConnectorOutput(**named, invalid_block_ids=tuple(news["invalid_block_ids"]))


def trace_recording(path: str) -> dict[str, Any]:
    """A recording as a Chrome trace."""
    recorder = FlightRecorder(max_steps=1 << 40, max_finished=1 << 40)
    result = Replay(path, recorder).run()
    if result.difference is not None:
        raise ModelFileError(f"{path} does not replay with this version: {result.difference}")
    clock = ManualClock(recorder.last_commit)
    return make_trace(RecorderViews(recorder, clock).trace_all())


def _make_stats(prepare_s: float, forward_s: float, sample_s: float) -> StepStats:
    """A step's times; its graph mode is not in a recording."""
    return StepStats(prepare_s=prepare_s, forward_s=forward_s, sample_s=sample_s, graph_mode="")
