"""Why a request took as long as it did: one timeline from the frontend's marks and the core's view.

Pure. Every span has one cause out of `CAUSES`; spans do not overlap, and what none covers counts as unattributed. Times
are milliseconds from arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headrace.observability.marks import Marks

CAUSES = {
    "edge": "reading and checking the request",
    "tokenise": "turning text into tokens",
    "to_core": "on its way to the engine core",
    "waiting_next_step": "waiting for the step in progress to end",
    "waiting_token_budget": "waiting: the step's token budget was spent",
    "waiting_input_budget": "waiting: the step's input budget was spent",
    "waiting_running_limit": "waiting: as many requests ran as may run at once",
    "waiting_no_blocks": "waiting: too few free KV blocks",
    "waiting_grammar": "waiting for its grammar to compile",
    "waiting_remote_kvs": "waiting for KV from another engine",
    "waiting_external_hit": "waiting to hear what the KV connector has",
    "waiting_steps_in_flight": "waiting for its own steps in flight",
    "waiting_throttled": "waiting: prompts were held back for running streams",
    "waiting_preemption": "waiting: somebody had just been preempted",
    "waiting_priority": "waiting: more urgent requests that came later went first",
    "waiting_drain": "waiting: the engine slept, loaded weights or ran a failed step again",
    "step_in_flight": "admitted, behind the step that was still running",
    "prefill": "computing the prompt",
    "decode": "generating",
    "decode_beside_prefill": "generating, in steps that also computed others' prompts",
    "not_granted_token_budget": "running, but the step's token budget was spent",
    "not_granted_input_budget": "running, but the step's input budget was spent",
    "not_granted_no_blocks": "running, but too few KV blocks were free",
    "not_granted_throttled": "running, but its prompt was held back for running streams",
    "not_granted_steps_in_flight": "running, but its own steps in flight had to end first",
    "not_granted_drain": "running, but a failed step was run again without it",
    "step_running": "in the step that runs now",
    "between_steps": "the engine committed a step and prepared the next",
    "failed_step": "a step failed and was run again",
    "preempted": "preempted: it had given back its KV blocks",
    "recompute": "computing again what a preemption had dropped",
    "from_core": "on its way back from the engine core",
    "detokenise": "turning tokens into text",
    "socket_wait": "delivering the answer to the client",
}

GIVEN_UP = {
    "no_blocks": "no block was free and none less urgent had any",
    "drain": "the engine slept, loaded weights or emptied its cache",
    "external_hit": "the step that was to load its KV failed",
    "remote_kvs": "the KV that was loaded for it was not valid",
}
"""Why a request gave its blocks back when it was not for another one."""

MISSES = {
    "never_seen": "it was never seen here",
    "evicted": "it was evicted at step {step}",
    "cleared": "the cache was emptied at step {step}",
    "different_adapter": "it was computed for another adapter ({other})",
    "different_media": "it was computed with other media",
    "different_salt": "it belongs to another cache salt",
    "text_differs": "the text differs from the cached one at token {token}",
    "left_index": "it is unknown, for it left the bounded index",
    "prompt_logprobs": "prompt logprobs need every prompt token computed",
    "caching_off": "prefix caching is off",
}

Piece = tuple[str, float, float, dict[str, Any], int]


def explain_request(
    marks: Marks,
    request_id: str,
    core: dict[str, Any] | None,
    busy: Iterable[tuple[float, float]],
    name_of: Callable[[str], str],
    now: float,
) -> dict[str, Any]:
    """The explanation of one answer as plain data.

    Args:
        marks: of its request.
        request_id: internal.
        core: the core's view; ``None`` when it knows nothing of it.
        busy: when the frontend worked on outputs.
        name_of: internal id to the client's id.
        now: end of the timeline while the request lives.
    """
    pieces, end = _collect(marks, request_id, core, list(busy), now)
    zero = marks.arrival
    wall = max(end - zero, 0.0)
    spans: list[dict[str, Any]] = []
    totals: dict[str, float] = {}
    covered = 0.0
    for cause, start, stop, detail, num_steps in pieces:
        length = 1e3 * (stop - start)
        covered += stop - start
        totals[cause] = totals.get(cause, 0.0) + length
        span: dict[str, Any] = {"cause": cause, "start_ms": 1e3 * (start - zero), "length_ms": length}
        if num_steps:
            span["num_steps"] = num_steps
        if detail:
            span["detail"] = {k: name_of(v) if k == "for" else v for k, v in detail.items()}
            if "for" in detail:
                span["detail"]["why"] = _why_preempted(detail, request_id, name_of)
        spans.append(span)
    return {
        "id": marks.external_id,
        "request_id": request_id,
        "state": _state(marks, request_id, core),
        "finish_reason": (core or {}).get("finish_reason") or None,
        "num_prompt_tokens": (core or {}).get("num_prompt_tokens"),
        "num_output_tokens": (core or {}).get("num_output_tokens"),
        "wall_ms": 1e3 * wall,
        "first_token_ms": _first_token(spans),
        "attributed_share": covered / wall if wall > 0 else 1.0,
        "causes": {cause: CAUSES.get(cause, cause) for cause in totals},
        "totals_ms": dict(sorted(totals.items(), key=lambda item: -item[1])),
        "spans": spans,
        "prefix": (core or {}).get("prefix", {}),
        "grants": (core or {}).get("grants", []),
        "phases_ms": (core or {}).get("phases_ms", {}),
        "preemptions": [
            {
                "at_ms": 1e3 * (p["time"] - zero),
                "step": p["step"],
                "cause": p["cause"],
                "for": name_of(p["for"]),
                "why": _why_preempted(p, request_id, name_of),
            }
            for p in (core or {}).get("preemptions", ())
        ],
    }


def _why_preempted(preemption: dict[str, Any], request_id: str, name_of: Callable[[str], str]) -> str:
    """Half a sentence: for whom, or what else."""
    cause, beneficiary = preemption["cause"], preemption["for"]
    return GIVEN_UP.get(cause, cause) if beneficiary == request_id else f"its KV blocks went to {name_of(beneficiary)}"


def _first_token(spans: list[dict[str, Any]]) -> float | None:
    """When the core had the first token: at the end of the prompt, once something follows it."""
    ends = [span["start_ms"] + span["length_ms"] for span in spans if span["cause"] == "prefill"]
    follows = ends and spans[-1]["start_ms"] >= ends[-1] and spans[-1]["cause"] != "prefill"
    return ends[-1] if follows else None


def _state(marks: Marks, request_id: str, core: dict[str, Any] | None) -> str:
    if request_id in marks.ends:
        return "finished"
    state: str = (core or {}).get("state", "unknown")
    return state


def _collect(
    marks: Marks, request_id: str, core: dict[str, Any] | None, busy: list[tuple[float, float]], now: float
) -> tuple[list[Piece], float]:
    """Spans in order, and where the timeline ends."""
    ended = marks.ends.get(request_id)
    if core is not None and not ended:
        # The core answered a while ago; what it did since then is not known here.
        now = core["now"]
    processed = ended[1] if ended else now
    end = (marks.delivered or now) if marks.http and ended else processed
    pieces: list[Piece] = []
    cursor = marks.arrival
    for start, stop in sorted(marks.tokenising):
        cursor = _put(pieces, "edge", cursor, min(start, marks.sent))
        cursor = _put(pieces, "tokenise", cursor, min(stop, marks.sent))
    cursor = _put(pieces, "edge", cursor, marks.sent)
    if core is not None:
        limit = ended[0] if ended else now
        cursor = _put(pieces, "to_core", cursor, min(core["queued"], limit))
        for span in core["spans"]:
            start, stop = max(span["start"], cursor), min(span["end"], limit)
            if stop > start:
                pieces.append((span["cause"], start, stop, span["detail"], span["num_steps"]))
                cursor = stop
        if core["finished"]:
            cursor = max(cursor, min(core["finished"], limit))
    if ended:
        if core is not None and core["finished"]:
            cursor = _put_way_back(pieces, cursor, ended[0], busy)
        cursor = max(cursor, ended[0])
        cursor = _put(pieces, "detokenise", cursor, processed)
        if marks.http:
            _put(pieces, "socket_wait", cursor, end)
    return pieces, end


def _put(pieces: list[Piece], cause: str, start: float, end: float) -> float:
    """Append a span unless it is empty; returns where the next one begins."""
    if end <= start:
        return start
    last = pieces[-1] if pieces else None
    if last is not None and last[0] == cause and last[2] == start and not last[3]:
        pieces[-1] = (cause, last[1], end, last[3], last[4])
    else:
        pieces.append((cause, start, end, {}, 0))
    return end


def _put_way_back(pieces: list[Piece], start: float, end: float, busy: list[tuple[float, float]]) -> float:
    """Between the core's last word and its arrival: while the frontend still worked on earlier outputs, that is why."""
    for began, stopped in busy:
        if stopped <= start:
            continue
        if began >= end:
            break
        start = _put(pieces, "from_core", start, min(began, end))
        start = _put(pieces, "detokenise", start, min(stopped, end))
    return _put(pieces, "from_core", start, end)


# For people

MAX_LINES = 60


def as_text(explanation: dict[str, Any]) -> str:
    """The explanation in lines for a terminal."""
    share = 100 * explanation["attributed_share"]
    head = f"request {explanation['id']}: {explanation['state']}"
    if explanation["finish_reason"]:
        head += f" ({explanation['finish_reason']})"
    lines = [f"{head}, {explanation['wall_ms']:,.1f} ms, {share:.1f} % of it attributed", *_prefix_lines(explanation)]
    for preemption in explanation["preemptions"]:
        lines.append(f"preempted at {preemption['at_ms']:,.1f} ms: {preemption['why']}")
    lines += ["", "where the time went"]
    for cause, total in explanation["totals_ms"].items():
        lines.append(f"  {total:>12,.1f} ms  {CAUSES.get(cause, cause)}")
    lines += ["", "timeline", f"  {'from':>12} {'length':>12}  cause"]
    spans = explanation["spans"]
    for span in spans[:MAX_LINES]:
        steps = f" ({span['num_steps']} steps)" if span.get("num_steps", 0) > 1 else ""
        why = span.get("detail", {}).get("why")
        why = f"; {why}" if why else ""
        cause = CAUSES.get(span["cause"], span["cause"])
        lines.append(f"  {span['start_ms']:>12,.1f} {span['length_ms']:>12,.1f}  {cause}{steps}{why}")
    if len(spans) > MAX_LINES:
        lines.append(f"  … and {len(spans) - MAX_LINES} more; --json shows all")
    return "\n".join(lines)


def _prefix_lines(explanation: dict[str, Any]) -> list[str]:
    prefix = explanation["prefix"]
    if not prefix:
        return []
    line = f"prompt of {prefix['num_prompt_tokens']} tokens, {prefix['local_hit']} of them from the prefix cache"
    if prefix["external_hit"]:
        line += f", {prefix['external_hit']} from another engine"
    lines = [line]
    miss = prefix.get("miss")
    if miss:
        where = f"block {miss['block']} (from token {miss['first_token']}) missed: " if "block" in miss else "no hit: "
        lines.append(where + MISSES.get(miss["reason"], miss["reason"]).format(**miss))
    return lines
