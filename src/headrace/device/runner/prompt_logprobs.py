"""Log-probabilities of prompt tokens, from the hidden states of a step, a bounded number of rows at a time."""

from __future__ import annotations

import numpy as np
import torch

from headrace.device.ops.interface import Ops
from headrace.device.runner.graphs import ForwardModel
from headrace.device.runner.input_batch import InputBatch, PromptRows
from headrace.device.runner.request_states import RequestStates
from headrace.device.sampling.kernels import WantedLogprobs
from headrace.messages.runner_output import PromptLogprobs, TokenLogprobs

SLICE_ROWS = 32
"""Rows whose logits are held at once: 6 MiB for a vocabulary of 49,152."""


def compute_prompt_logprobs(
    batch: InputBatch, hidden: torch.Tensor, states: RequestStates, model: ForwardModel, ops: Ops
) -> tuple[dict[str, PromptLogprobs], dict[str, str]]:
    """Entries of this step's prompt positions, and errors of requests whose logits are not finite."""
    entries: dict[str, PromptLogprobs] = {}
    errors: dict[str, str] = {}
    for wanted in batch.prompt_rows:
        request_id = batch.request_ids[wanted.place]
        try:
            made = _compute_entries(wanted, int(batch.rows[wanted.place]), hidden, states, model, ops)
        except FloatingPointError as error:
            errors[request_id] = str(error)
        else:
            entries[request_id] = PromptLogprobs(wanted.start, made)
    return entries, errors


def _compute_entries(
    wanted: PromptRows, row: int, hidden: torch.Tensor, states: RequestStates, model: ForwardModel, ops: Ops
) -> list[TokenLogprobs]:
    num_logprobs = int(states.sampling.num_prompt_logprobs[row])
    tokens = states.token_ids[row, wanted.start : wanted.start + wanted.count].tolist()
    entries: list[TokenLogprobs] = []
    for first in range(0, wanted.count, SLICE_ROWS):
        count = min(SLICE_ROWS, wanted.count - first)
        index = torch.arange(count, dtype=torch.int32) + (wanted.first_row + first)
        logits = model.compute_logits(ops.gather_rows(hidden, index)).float().cpu().numpy()
        if not np.isfinite(logits.max()):
            raise FloatingPointError("the model produced logits that are not finite")
        pairs = zip(logits, tokens[first : first + count], strict=True)
        entries += ops.sampling.token_logprobs([WantedLogprobs(raw, token, num_logprobs) for raw, token in pairs])
    return entries
