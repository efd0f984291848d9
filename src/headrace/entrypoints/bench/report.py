"""Results as a table, as JSON and as a figure."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace.base.errors import ConfigError, HeadraceError
from headrace.entrypoints.bench.statistics import RequestRecord

_LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "gap_ms": "gap between tokens",
    "e2e_ms": "whole request",
    "batch_ms": "whole batch",
}
_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_RATES = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "tokens/s with prompts",
}


def as_table(summary: Mapping[str, Any]) -> str:
    """The numbers for people."""
    lines = []
    if "num_completed" in summary:
        failed = f", {summary['num_failed']} failed" if summary["num_failed"] else ""
        lines.append(f"{summary['num_completed']} requests completed{failed} in {summary['duration_s']:.2f} s")
    lines += [f"  {count} x {kind}" for kind, count in summary.get("errors", {}).items()]
    if "num_prompt_tokens" in summary:
        cached = summary.get("num_cached_tokens", 0)
        note = f" ({cached} of them cached)" if cached else ""
        lines.append(
            f"{summary['num_prompt_tokens']} prompt tokens{note}, {summary['num_output_tokens']} output tokens"
        )
    lines += [f"{label:24}{summary[key]:10.2f}" for key, label in _RATES.items() if key in summary]
    shown = {label: summary[key] for key, label in _LATENCIES.items() if summary.get(key)}
    if shown:
        lines.append(f"{'milliseconds':24}" + "".join(f"{name:>10}" for name in _COLUMNS))
        lines += [f"{label:24}" + "".join(f"{row[c]:10.1f}" for c in _COLUMNS) for label, row in shown.items()]
    if (goodput := summary.get("goodput")) is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["limits_ms"].items() if limit is not None)
        lines.append(
            f"goodput within {limits}: {goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} of all"
        )
    return "\n".join(lines)


def write_json(path: str, command: str, settings: Mapping[str, Any], summary: Mapping[str, Any], **more: Any) -> None:
    """Write a run with what it was asked and where it ran.

    Raises:
        HeadraceError: the file cannot be written.
    """
    machine = {"platform": platform.platform(), "python": platform.python_version(), "node": platform.machine()}
    data = {
        "benchmark": command,
        "headrace": headrace.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine,
        "settings": settings,
        "results": summary,
        **more,
    }
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise HeadraceError(f"cannot write {path}: {error.strerror}") from None


def check_plots() -> None:
    """Raise `ConfigError` unless figures can be drawn; called before the work whose figure is wanted."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError('--plot needs matplotlib: pip install "headrace[bench]"') from None


def write_plot(path: str, records: Sequence[RequestRecord], start: float) -> None:
    """Draw first-token times, gaps between tokens and throughput over time as a PNG file.

    Raises:
        HeadraceError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    fine = [record for record in records if record.error is None and record.token_times]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    first, gaps, rate = figure.subplots(1, 3)
    _draw_shares(first, [1e3 * record.first_token_s for record in fine], "time to first token (ms)")
    _draw_shares(gaps, [1e3 * gap for record in fine for gap in record.gaps_s()], "gap between tokens (ms)")
    times = np.array([time for record in fine for time in record.token_times]) - start
    if len(times):
        edges = np.linspace(0.0, max(1.0, float(times.max())), 61)
        counts, _ = np.histogram(times, edges)
        rate.stairs(counts / np.diff(edges), edges, fill=True)
    rate.set(xlabel="time (s)", ylabel="token events/s")
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise HeadraceError(f"cannot write {path}: {error.strerror}") from None


def _draw_shares(axes: Any, values: Sequence[float], label: str) -> None:
    """The share of values up to each value."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    if len(ordered):
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
        for share in (50, 90, 99):
            axes.axvline(np.percentile(ordered, share), linewidth=0.8, linestyle=":", color="gray")
    axes.set(xlabel=label, ylabel="share", ylim=(0.0, 1.02))
