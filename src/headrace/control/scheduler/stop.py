"""When a token ends a request: EOS, then stop token ids, then length."""

from __future__ import annotations

from headrace.control.scheduler.request import Request
from headrace.messages.outputs import FinishReason


def find_stop(request: Request, token_id: int) -> tuple[FinishReason, int | None] | None:
    """Judge the newest token, which ``request.token_ids`` already holds.

    Returns:
        The reason and, for a stop token id, the id; ``None`` when the request goes on.
    """
    if token_id in request.stop_ids and request.num_output_tokens >= request.record.sampling.min_tokens:
        return FinishReason.STOP, None if token_id in request.record.eos_token_ids else token_id
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
