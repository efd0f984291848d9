"""One model on one device: turns a `SchedulerOutput` into a forward and the forward into tokens.

Owns the rows, the block tables, the KV memory, the step's buffers and the state between the two calls. It knows
nothing of queues or budgets. The order of `execute_model`: end rows, add rows, append blocks, apply staged writes,
zero and copy blocks, run encoders, prepare inputs, dispatch, connector, forward, connector, save `ExecuteModelState`.
`sample_tokens` takes that state, computes logits of the needed rows, samples, writes the tokens into their rows and
answers.

A call that raises leaves no state behind, and everything that it may have changed before is changed again in the same
way when the step runs again (see `request_states` and `block_tables`). A new `execute_model` replaces a forward that
was never sampled: the core has dropped that step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.clock import Clock
from headrace.base.progress import ProgressWord
from headrace.device.attention.metadata import AttentionMetadata, ForwardContext
from headrace.device.distributed.groups import IntermediateTensors
from headrace.device.ops.interface import Ops
from headrace.device.runner.attn_inputs import prepare_attn, whole_buffers
from headrace.device.runner.block_tables import BlockTables
from headrace.device.runner.faults import FaultHook
from headrace.device.runner.graphs import (
    BatchDescriptor,
    CapturedGraphs,
    Dispatch,
    ForwardInputs,
    ForwardModel,
    GraphRunner,
    dispatch,
)
from headrace.device.runner.hooks import RunnerHooks
from headrace.device.runner.input_batch import InputBatch, InputBuffers, SampledRows, prepare_inputs
from headrace.device.runner.kv_memory import KVMemory
from headrace.device.runner.prompt_logprobs import compute_prompt_logprobs
from headrace.device.runner.request_states import RequestStates
from headrace.device.sampling.sampler import NO_TOKEN, Sampler, SamplerOutput, SamplingMetadata
from headrace.messages.kv_cache import KVCacheConfig
from headrace.messages.runner_output import ConnectorOutput, ModelRunnerOutput, StepStats
from headrace.messages.scheduler_output import GrammarOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes of rows and buffers."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int


@dataclass(slots=True)
class ExecuteModelState:
    """A forward that waits for its sampling; nobody changes it."""

    batch: InputBatch
    hidden: torch.Tensor
    choice: Dispatch
    connector: ConnectorOutput | None
    prepare_s: float
    forward_s: float


class ModelRunner:
    """See the module.

    Args:
        model, ops: the loaded model and the operators it uses.
        graphs: runs forwards.
        memory: KV blocks, as ``config`` plans them.
        clock: for the step's times.
        progress: moved by every layer.
    """

    def __init__(
        self,
        model: ForwardModel,
        ops: Ops,
        graphs: GraphRunner,
        config: KVCacheConfig,
        memory: KVMemory,
        limits: RunnerLimits,
        clock: Clock,
        progress: ProgressWord,
        hooks: RunnerHooks | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._graphs = graphs
        self._memory = memory
        self._clock = clock
        self._progress = progress
        self._hooks = hooks or RunnerHooks()
        self._hooks.connector.register_caches(memory.caches)
        self._faults = FaultHook()
        self.states = RequestStates(limits.max_num_seqs, limits.max_model_len, limits.vocab_size)
        self.tables = BlockTables(
            limits.max_num_seqs, limits.max_model_len + 1, [group.spec.block_size for group in config.groups]
        )
        self.buffers = InputBuffers(
            limits.max_num_batched_tokens, limits.max_num_seqs, [table.shape[1] for table in self.tables.tables]
        )
        self._inputs = ops.make_step_inputs(self.buffers.memory(self.states.token_ids, self.tables))
        self._sampler = Sampler(self.states.sampling, self.states.token_ids, self.states.num_prompt, ops.sampling)
        self._state: ExecuteModelState | None = None
        self._batch: InputBatch | None = None
        self._dispatched: tuple[BatchDescriptor, Dispatch] | None = None

    def capture_graphs(self) -> CapturedGraphs:
        """Record what can be replayed, once, before the first step."""
        ctx = self._make_context(self.buffers.max_tokens, whole_buffers(self.buffers))
        self._graphs.capture(self.buffers.ids.torch, ctx)
        return self._graphs.captured

    def execute_model(
        self, step: SchedulerOutput, intermediate: IntermediateTensors | None = None
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Run the forward of a step.

        Args:
            intermediate: what the pipeline stage before returned.

        Returns:
            ``None`` when `sample_tokens` must follow, the answer of a step without tokens, or what the next pipeline
            stage takes.
        """
        self._state = None
        before, self._batch = self._batch, None
        start = self._clock.monotonic()
        self._apply_changes(step)
        self._hooks.encoder.run(step)
        if not step.num_scheduled_tokens:
            self._hooks.connector.before_forward(step.connector)
            connector = self._hooks.connector.after_forward()
            return ModelRunnerOutput(request_ids=[], sampled_token_ids=[], connector=connector)
        batch = prepare_inputs(step, self.states, self._inputs, before)
        choice = self._dispatch(batch)
        if choice.num_tokens > batch.num_tokens:
            self._inputs.pad(batch.num_reqs, batch.num_tokens, choice.num_tokens)
        prepared = self._clock.monotonic()
        self._faults.raise_if_due("forward", batch.request_ids, batch.seq_lens)
        self._hooks.connector.before_forward(step.connector)
        inputs = ForwardInputs(
            choice.num_tokens,
            batch.num_reqs,
            lambda: self._make_tensors(batch, choice.num_tokens),
            batch.sampled.first_head,
        )
        hidden = self._graphs.run(choice, inputs, intermediate)
        connector = self._hooks.connector.after_forward()
        if isinstance(hidden, IntermediateTensors):
            return hidden
        self._batch = batch
        self._state = ExecuteModelState(
            batch=batch,
            hidden=hidden,
            choice=choice,
            connector=connector,
            prepare_s=prepared - start,
            forward_s=self._clock.monotonic() - prepared,
        )
        return None

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample the last forward.

        Raises:
            RuntimeError: there is none (it raised, or it was sampled already).
        """
        state, self._state = self._state, None
        if state is None:
            raise RuntimeError("no forward waits for its sampling")
        start = self._clock.monotonic()
        batch = state.batch
        self._faults.raise_if_due("sample", batch.request_ids, batch.seq_lens)
        hidden = self._hooks.pipeline.receive(state.hidden)
        sampled, names = batch.sampled, batch.sampled.request_ids
        positions = [batch.seq_lens[place] for place in sampled.places]
        meta = SamplingMetadata(sampled.rows, positions, _masks_by_place(sampled, grammar))
        output = self._sample_rows(hidden, sampled, meta)
        prompt_logprobs, errors = compute_prompt_logprobs(batch, hidden, self.states, self._model, self._ops)
        errors |= {names[i]: message for i, message in output.errors.items()}
        tokens: list[list[int]] = [[] for _ in batch.request_ids]
        for place, name, row, position, token in zip(
            sampled.places, names, sampled.rows, positions, output.token_ids, strict=True
        ):
            if token == NO_TOKEN:
                continue
            self.states.write_sampled(row, position, token)
            if name not in errors:
                tokens[place] = [token]
        return ModelRunnerOutput(
            request_ids=batch.request_ids,
            sampled_token_ids=tokens,
            logprobs={names[i]: [entry] for i, entry in output.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            drafts=self._hooks.drafter.propose(batch, hidden),
            errors=errors,
            connector=state.connector,
            stats=StepStats(
                prepare_s=state.prepare_s,
                forward_s=state.forward_s,
                sample_s=self._clock.monotonic() - start,
                graph_mode=state.choice.mode.value,
                graph_reason=state.choice.reason,
            ),
        )

    def _apply_changes(self, step: SchedulerOutput) -> None:
        """Bring rows, tables and blocks up to date with a step."""
        for request_id in step.finished:
            self.states.remove(request_id)
            self._faults.remove(request_id)
        for request_id in step.preempted:
            self.states.remove(request_id)
        self.tables.drop_staged()
        for request in step.new:
            self._faults.add(request)
            self.tables.stage_row(self.states.add(request), request.block_ids)
        cached = step.cached
        if cached.new_block_ids:
            for request_id, computed in zip(cached.request_ids, cached.num_computed_tokens, strict=True):
                new_blocks = cached.new_block_ids.get(request_id)
                if new_blocks is not None:
                    self.tables.stage_append(self.states.row(request_id), new_blocks, computed)
        self.tables.apply_staged()
        self._memory.zero(step.kv.zero)
        self._memory.copy(step.kv.copy)

    def _dispatch(self, batch: InputBatch) -> Dispatch:
        has_lora = self._hooks.lora.apply(batch.lora_names)
        own = BatchDescriptor(batch.num_tokens, batch.num_reqs, batch.uniform_query_len, has_lora)
        descriptor = self._hooks.batch_sync.sync_batch(own)
        if self._dispatched is None or self._dispatched[0] != descriptor:
            self._dispatched = (descriptor, dispatch(descriptor, self._graphs.captured))
        return self._dispatched[1]

    def _make_tensors(self, batch: InputBatch, num_tokens: int) -> tuple[torch.Tensor, ForwardContext]:
        """Token ids and context of a step for the model itself."""
        groups = prepare_attn(batch, self.buffers, num_tokens)
        return self.buffers.ids.torch[:num_tokens], self._make_context(num_tokens, groups)

    def _make_context(self, num_tokens: int, groups: list[AttentionMetadata]) -> ForwardContext:
        return ForwardContext(
            positions=self.buffers.positions.torch[:num_tokens],
            groups=groups,
            layer_groups=self._memory.layer_groups,
            caches=self._memory.caches,
            progress=self._progress,
        )

    def _sample_rows(self, hidden: torch.Tensor, sampled: SampledRows, meta: SamplingMetadata) -> SamplerOutput:
        """Sample rows of ``hidden``, as many at once as logits may be held."""
        whole = SamplerOutput([])
        num_rows = len(sampled.places)
        struck = self._faults.take_due("logits", sampled.request_ids, meta.positions)
        first = 0
        while first < num_rows:
            rows, num_best = sampled.cut_head(first) if first else sampled.first_head
            end = first + len(rows)
            head = self._graphs.run_head(hidden, rows, num_best)
            for place in struck:
                if first <= place < end:
                    head.peaks[place - first] = np.nan
            if len(rows) == num_rows:
                return self._sampler.sample(head, meta)
            whole.extend(self._sampler.sample(head, meta.slice(first, end)))
            first = end
        return whole


def _masks_by_place(sampled: SampledRows, grammar: GrammarOutput | None) -> dict[int, np.ndarray]:
    """Bitmask words of the sampled places that are under a grammar."""
    if grammar is None or not grammar.request_ids:
        return {}
    words = np.frombuffer(grammar.bitmask, dtype=np.int32).reshape(-1, grammar.num_words)
    mask_of = dict(zip(grammar.request_ids, words, strict=True))
    masks = {place: mask_of[name] for place, name in enumerate(sampled.request_ids) if name in mask_of}
    assert all(place >= sampled.num_best for place in masks), "the step names its rows under a grammar"
    return masks
