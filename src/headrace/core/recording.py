"""Records what the scheduler was told and what it decided, so that a run can be repeated without a model.

The format is in ``docs/operators/recording.md``: msgpack values, first a header, then one array per call of the
scheduler. It holds lengths, block hashes, durations and outcomes, and never a token or a text.

`RecordingScheduler` is the scheduler; every call goes to the real one and is written down with its decision. What
grammars and connectors answered inside a call is part of the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict
from hashlib import sha256
from time import monotonic
from typing import Any, BinaryIO

import msgspec

from headrace.base.errors import ConfigError
from headrace.control.grammar.null import NullGrammar
from headrace.control.scheduler.request import Request
from headrace.control.scheduler.scheduler import Scheduler
from headrace.core.recorded_parts import Answers, RecordedConnector, RecordedGrammar
from headrace.kv_connector.null import NullConnector
from headrace.messages.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ModelRunnerOutput
from headrace.messages.scheduler_output import SchedulerOutput

FORMAT, VERSION = "headrace recording", 1
HASH_BYTES = 8
_FLUSH_BYTES = 1 << 16
_FLUSH_S = 1.0
Decision = list[Any]


class RecordWriter:
    """A file of msgpack values, written in large pieces; what a killed process leaves is a valid beginning."""

    def __init__(self, path: str) -> None:
        try:
            self._file: BinaryIO | None = open(path, "wb")  # noqa: SIM115 - closed in `close`
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from None
        self._encoder = msgspec.msgpack.Encoder()
        self._pieces: list[bytes] = []
        self._size = 0
        self._flushed = monotonic()

    def write(self, value: Any) -> None:
        """Append a value."""
        data = self._encoder.encode(value)
        self._pieces.append(len(data).to_bytes(4, "little") + data)
        self._size += len(data)
        if self._size >= _FLUSH_BYTES or monotonic() - self._flushed >= _FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        assert self._file is not None
        self._file.write(b"".join(self._pieces))
        self._file.flush()
        self._pieces, self._size, self._flushed = [], 0, monotonic()

    def close(self) -> None:
        """Write the rest. Idempotent."""
        if self._file is not None:
            self._flush()
            self._file.close()
            self._file = None


def short_hashes(hashes: Iterable[bytes]) -> bytes:
    """The beginnings of block hashes, one after the other."""
    return b"".join(block_hash[:HASH_BYTES] for block_hash in hashes)


def decide_schedule(step: SchedulerOutput, numbers: dict[str, int], num_free: int) -> Decision:
    """What `schedule` decided, as plain data to compare."""
    blocks = sha256()
    for new in step.new:
        blocks.update(repr((numbers[new.request_id], new.num_computed_tokens, new.block_ids)).encode())
    for request_id, block_ids in step.cached.new_block_ids.items():
        blocks.update(repr((numbers[request_id], block_ids)).encode())
    return [
        step.step_id,
        [[numbers[request_id], count] for request_id, count in step.num_scheduled_tokens.items()],
        [numbers[new.request_id] for new in step.new],
        [numbers[request_id] for request_id in step.preempted],
        [numbers[request_id] for request_id in step.finished],
        blocks.digest()[:HASH_BYTES],
        num_free,
    ]


def decide_outputs(outputs: Iterable[EngineCoreOutput], numbers: dict[str, int], num_free: int) -> Decision:
    """What a commit handed out: tokens and ends, without the tokens themselves."""
    ends = [
        [numbers[o.request_id], len(o.new_token_ids), o.finish_reason.value if o.finish_reason is not None else None]
        for o in outputs
    ]
    return [ends, num_free]


class RecordingScheduler(Scheduler):
    """See the module. Takes the arguments of `Scheduler` after the writer."""

    def __init__(self, writer: RecordWriter, section: Any, kv: Any, **parts: Any) -> None:
        self._writer = writer
        self._answers = Answers()
        given = parts.pop("connector", None)
        connector = given or NullConnector()
        grammar = parts.pop("grammar", None) or NullGrammar()
        super().__init__(
            section,
            kv,
            connector=RecordedConnector(connector, self._answers),
            grammar=RecordedGrammar(grammar, self._answers),
            **parts,
        )
        self._state.has_connector = given is not None
        self._numbers: dict[str, int] = {}
        self._num_requests = 0
        self._known: dict[str, Request] = {}
        self._committing = False
        names = ("max_model_len", "enable_prefix_caching", "num_draft_tokens")
        writer.write(
            {
                "format": FORMAT,
                "version": VERSION,
                "scheduler": asdict(section),
                "kv": msgspec.to_builtins(kv),
                "load_failure_policy": connector.load_failure_policy,
                **{name: parts[name] for name in names if name in parts},
            }
        )

    def add_request(self, record: EngineCoreRequest, now: float) -> None:
        super().add_request(record, now)
        request = self.get_request(record.request_id)
        assert request is not None
        number = self._numbers[record.request_id] = self._num_requests
        self._num_requests += 1
        self._known[record.request_id] = request
        sampling = record.sampling
        self._writer.write(
            [
                "add",
                now,
                number,
                len(record.prompt_token_ids),
                sampling.max_tokens,
                record.priority,
                record.arrival_time,
                request.uses_grammar,
                sampling.prompt_logprobs is not None,
                short_hashes(request.hash_chain.hashes),
            ]
        )

    def finish_requests(
        self, ids: Iterable[str] | None, reason: FinishReason, error: str | None = None
    ) -> dict[int, list[EngineCoreOutput]]:
        wanted = None if ids is None else list(ids)
        with self._answers.of_call() as answers:
            outputs = super().finish_requests(wanted, reason, error)
        ended = [output for of_client in outputs.values() for output in of_client]
        if ended:
            numbers = None if wanted is None else [self._numbers[i] for i in wanted if i in self._numbers]
            decision = decide_outputs(ended, self._numbers, self.kv.pool.num_free)
            self._writer.write(["finish", numbers, reason.value, answers, decision])
            self._note_ends(ended)
        return outputs

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        outputs = super().take_outputs()
        news = [output for message in outputs.values() for output in message.outputs]
        if news and not self._committing:
            self._writer.write(["take", decide_outputs(news, self._numbers, self.kv.pool.num_free)])
        self._note_ends(news)
        return outputs

    def schedule(
        self, now: float, throttle_prefills: bool = False, only: Collection[str] | None = None
    ) -> SchedulerOutput:
        with self._answers.of_call() as answers:
            step = super().schedule(now, throttle_prefills, only)
        parts = None if only is None else sorted(self._numbers[i] for i in only if i in self._numbers)
        decision = decide_schedule(step, self._numbers, self.kv.pool.num_free)
        self._writer.write(["schedule", now, throttle_prefills, parts, answers, decision])
        return step

    def update_from_output(
        self, step: SchedulerOutput, runner_output: ModelRunnerOutput, now: float
    ) -> dict[int, EngineCoreOutputs]:
        numbers = self._numbers
        ids, sampled = runner_output.request_ids, runner_output.sampled_token_ids
        # A row whose request has been forgotten is told by its place alone.
        rows = [[numbers.get(i, -1), len(tokens)] for i, tokens in zip(ids, sampled, strict=True)]
        stats = runner_output.stats
        outcome = {
            "rows": rows,
            "drafts": [[numbers[i], len(drafts)] for i, drafts in runner_output.drafts.items() if i in numbers],
            "errors": [numbers[i] for i in runner_output.errors if i in numbers],
            "connector": self._number_connector(runner_output),
            "seconds": [stats.prepare_s, stats.forward_s, stats.sample_s] if stats is not None else [],
        }
        self._committing = True
        with self._answers.of_call() as answers:
            outputs = super().update_from_output(step, runner_output, now)
        self._committing = False
        news = [output for message in outputs.values() for output in message.outputs]
        decision = decide_outputs(news, numbers, self.kv.pool.num_free)
        self._writer.write(["commit", now, step.step_id, outcome, answers, decision])
        self._drop_ended()
        return outputs

    def rewind(self, step: SchedulerOutput) -> list[str]:
        with self._answers.of_call() as answers:
            running = super().rewind(step)
        decision = [[self._numbers[i] for i in running], self.kv.pool.num_free]
        self._writer.write(["rewind", step.step_id, answers, decision])
        return running

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        with self._answers.of_call() as answers:
            done = super().reset_prefix_cache(reset_running)
        self._writer.write(["reset", reset_running, answers, [done, self.kv.pool.num_free]])
        return done

    def close(self) -> None:
        """Write what is known of requests that still live, and the rest of the file."""
        for request_id in list(self._known):
            self._write_end(request_id)
        self._writer.close()

    def _number_connector(self, output: ModelRunnerOutput) -> dict[str, Any] | None:
        news = output.connector
        if news is None:
            return None
        names = ("finished_sending", "finished_receiving", "failed_receiving")
        numbered = {n: [self._numbers[i] for i in getattr(news, n) if i in self._numbers] for n in names}
        return {**numbered, "invalid_block_ids": list(news.invalid_block_ids)}

    def _note_ends(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self._known:
                self._write_end(output.request_id)

    def _drop_ended(self) -> None:
        """Keep the table of numbers small: rows and transfers of ended requests are still spoken of for a while."""
        live = self._known.keys()
        if len(self._numbers) > 2 * len(live) + 4096:
            newest = set(list(self._numbers)[-2048:])
            self._numbers = {i: self._numbers[i] for i in self._numbers if i in live or i in newest}

    def _write_end(self, request_id: str) -> None:
        request = self._known.pop(request_id)
        self._writer.write(
            ["end", self._numbers[request_id], request.num_output_tokens, short_hashes(request.hash_chain.hashes)]
        )
