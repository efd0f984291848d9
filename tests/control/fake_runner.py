"""A runner that keeps rows as the real one does and 'samples' a function of the tokens before.

A token depends on every token that its row holds, read through the block table, so that a wrong position, a stale row,
a lost block or foreign KV gives another token than `expected_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.control.kv_cache.events import KVEvent
from headrace.messages.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheKind, KVCacheSpec
from headrace.messages.requests import EngineCoreRequest
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput, PromptLogprobs, TokenLogprobs
from headrace.messages.sampling_params import SamplingParams
from headrace.messages.scheduler_output import NewRequest, SchedulerOutput

BLOCK = 4
VOCAB = 1000


def make_spec(kind: KVCacheKind = KVCacheKind.FULL, window: int = 0, block_size: int = BLOCK) -> KVCacheSpec:
    return KVCacheSpec(
        kind=kind,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        tensors=(),
        page_bytes=64,
        window=window,
    )


def make_kv(num_blocks: int, *specs: KVCacheSpec, block_size: int = BLOCK) -> KVCacheConfig:
    specs = specs or (make_spec(block_size=block_size),)
    groups = tuple(KVCacheGroup((index,), spec) for index, spec in enumerate(specs))
    return KVCacheConfig(num_blocks=num_blocks, block_size=block_size, groups=groups)


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int | None = 8,
    *,
    eos: tuple[int, ...] = (),
    priority: int = 0,
    client: int = 0,
    arrival: float = 0.0,
    salt: str | None = None,
    lora: str | None = None,
    **sampling: object,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, **sampling),  # type: ignore[arg-type]
        eos_token_ids=eos,
        priority=priority,
        client_index=client,
        arrival_time=arrival,
        cache_salt=salt,
        lora_name=lora,
    )


def next_token(tokens: list[int]) -> int:
    value = len(tokens) * 7919
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def expected_tokens(request: EngineCoreRequest, max_model_len: int) -> list[int]:
    """What the request generates alone."""
    tokens = list(request.prompt_token_ids)
    limit = min(len(tokens) + (request.sampling.max_tokens or max_model_len), max_model_len)
    stops = set(request.eos_token_ids) | set(request.sampling.stop_token_ids)
    made = 0
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        made += 1
        if tokens[-1] in stops and made >= request.sampling.min_tokens:
            break
    return tokens[len(request.prompt_token_ids) :]


@dataclass
class Row:
    """A request's row: tokens known to the device, and its block tables."""

    new: NewRequest
    tokens: list[int]
    tables: list[list[int]]
    specs: list[KVCacheSpec] = field(default_factory=list)


class FakeRunner:
    """Executes steps in order; KV is what was written to (group, block, offset)."""

    def __init__(self, kv: KVCacheConfig) -> None:
        self.kv = kv
        self.rows: dict[str, Row] = {}
        self.memory: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.fail: set[str] = set()
        self.connector_outputs: list[ConnectorOutput] = []
        self.num_executed = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in [*step.finished, *step.preempted]:
            self.rows.pop(request_id, None)
        for new in step.new:
            assert new.request_id not in self.rows, f"{new.request_id} was sent whole while it has a row"
            self.rows[new.request_id] = Row(new, list(new.token_ids), [list(ids) for ids in new.block_ids])
        for request_id, ids in step.cached.new_block_ids.items():
            for table, added in zip(self.rows[request_id].tables, ids, strict=True):
                table.extend(added)
        if self.fail & set(step.num_scheduled_tokens):
            raise RuntimeError("forward failed")
        starts = {new.request_id: new.num_computed_tokens for new in step.new}
        starts |= dict(zip(step.cached.request_ids, step.cached.num_computed_tokens, strict=True))
        assert (
            list(step.num_scheduled_tokens)
            and sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens
        ) or not step.num_scheduled_tokens
        sampled: list[list[int]] = []
        prompt_logprobs: dict[str, PromptLogprobs] = {}
        for request_id, count in step.num_scheduled_tokens.items():
            sampled.append(
                self._run(request_id, starts[request_id], count, step.spec.get(request_id, []), prompt_logprobs)
            )
        self.num_executed += 1
        connector = self.connector_outputs.pop(0) if self.connector_outputs else None
        # Batch order is not scheduling order.
        ids = list(step.num_scheduled_tokens)[::-1]
        return ModelRunnerOutput(
            request_ids=ids, sampled_token_ids=sampled[::-1], prompt_logprobs=prompt_logprobs, connector=connector
        )

    def _run(
        self, request_id: str, start: int, count: int, drafts: list[int], prompt_logprobs: dict[str, PromptLogprobs]
    ) -> list[int]:
        row = self.rows[request_id]
        tokens = row.tokens + drafts
        end = start + count
        assert end <= len(tokens), f"{request_id}: computing tokens that nobody knows"
        for position in range(start, end):
            for group, table in enumerate(row.tables):
                block_id = table[position // BLOCK]
                assert block_id != 0, "write to the null block"
                self.memory[group, block_id, position % BLOCK] = (position, tokens[position])
        for position in range(start, end):
            self._check_view(row, tokens, position)
        if row.new.sampling.prompt_logprobs is not None:
            stop = min(end, row.new.num_prompt_tokens - 1)
            if start < stop:
                entries = [TokenLogprobs([tokens[p + 1]], [0.0], 1) for p in range(start, stop)]
                prompt_logprobs[request_id] = PromptLogprobs(start + 1, entries)
        if end < len(tokens):
            return []
        # Verify drafts as a target model would: keep those it would have sampled, then its own token.
        known = len(row.tokens)
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = next_token(tokens[: known + len(sampled)])
            sampled.append(token)
            if token != draft:
                break
        row.tokens.extend(sampled)
        return sampled

    def _check_view(self, row: Row, tokens: list[int], position: int) -> None:
        for group, (table, spec) in enumerate(zip(row.tables, (g.spec for g in self.kv.groups), strict=True)):
            first = 0
            if spec.kind is KVCacheKind.SLIDING_WINDOW:
                first = max(0, position - spec.window + 1)
            elif spec.kind is KVCacheKind.CHUNKED_LOCAL:
                first = position // spec.window * spec.window
            for seen in range(first, position + 1):
                stored = self.memory.get((group, table[seen // BLOCK], seen % BLOCK))
                assert stored == (seen, tokens[seen]), (
                    f"{row.new.request_id}: token {position} reads foreign KV at {seen}"
                )


class EventLog:
    """Keeps what happens to findable blocks."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def emit(self, event: KVEvent) -> None:
        self.events.append(event)
