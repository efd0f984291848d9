"""Run every engine side by side on the same prompts and compare medians. See README.md beside this file."""

from __future__ import annotations

import argparse
import json
import platform
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ENGINES = HERE / "engines"
PEERS = ("llama_cpp", "openvino", "vllm_cpu")
START_TIMEOUT_S = 600.0
CASE_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """``requests`` prompts of ``prompt`` ids, ``output`` tokens each; a prefill case counts prompt tokens."""

    requests: int
    prompt: int
    output: int

    @property
    def name(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.output}"

    @property
    def counted_tokens(self) -> int:
        return self.requests * (self.prompt if self.output == 1 else self.output)


CASES = [Case(1, 32, 128), Case(8, 32, 128), Case(32, 32, 128), Case(8, 1024, 1), Case(32, 256, 64)]


class EngineError(Exception):
    """An engine ended or does not answer."""


class Engine:
    """A process that answers cases with one engine."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self.description = ""
        self._log = (Path(tempfile.gettempdir()) / f"peer-{name}.log").open("w")
        self._process = subprocess.Popen(
            command, cwd=ENGINES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def wait_ready(self) -> None:
        """Until its model is loaded."""
        self.description = self._read(START_TIMEOUT_S)["ready"]

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One line answers one question, so nothing waits in the stream's buffer.
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise EngineError(f"no answer within {timeout_s:.0f} s; see {self._log.name}")
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"it ended; see {self._log.name}")
        return json.loads(line)

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Seconds for one batch, and the first tokens of each answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"it ended; see {self._log.name}") from None
        return self._read(CASE_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def make_prompts(case: Case, seed: int) -> list[list[int]]:
    """Random token ids of ordinary words, fresh for every repeat, equal for all engines."""
    rng = random.Random(f"{case.name}/{seed}")
    return [[rng.randrange(300, 40000) for _ in range(case.prompt)] for _ in range(case.requests)]


def find_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """How to start headrace, its variants and every installed peer."""
    common = [str(args.gguf), str(args.threads)]
    commands = {"headrace": [sys.executable, "headrace_engine.py", *common]}
    for variant in args.variant:
        name, _, settings = variant.partition(":")
        commands[name] = [sys.executable, "headrace_engine.py", *common, *settings.split()]
    for peer in PEERS:
        python = args.peers / peer / "bin" / "python" if args.peers else None
        if python is not None and python.exists():
            commands[peer] = [str(python), f"{peer}_engine.py", *common]
    return {name: command for name, command in commands.items() if not args.engine or name in args.engine}


class Bench:
    """The engines that still answer, and what they measured. One that fails is named and left out from then on."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.failed: dict[str, str] = {}
        self.rates: dict[str, dict[str, list[float]]] = {}

    def start(self, commands: dict[str, list[str]]) -> None:
        """Load one engine after the other, and let each answer once."""
        for name, command in tqdm(commands.items(), desc="start"):
            engine = Engine(name, command)
            self.engines.append(engine)
            with self._leaving_out(engine):
                engine.wait_ready()
                engine.run(make_prompts(Case(2, 16, 4), 0), 4)

    def measure(self, cases: list[Case], repeats: int) -> None:
        """Tokens per second by case, engine and repeat; engines take turns within each repeat."""
        self.rates = {case.name: {engine.name: [] for engine in self.engines} for case in cases}
        for repeat, case in tqdm(list(product(range(repeats), cases)), desc="measure"):
            prompts, first = make_prompts(case, repeat), repeat % max(1, len(self.engines))
            for engine in self.engines[first:] + self.engines[:first]:
                with self._leaving_out(engine):
                    seconds = engine.run(prompts, case.output)["seconds"]
                    self.rates[case.name][engine.name].append(case.counted_tokens / seconds)

    @contextmanager
    def _leaving_out(self, engine: Engine) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self.failed[engine.name] = str(error)
            self.engines.remove(engine)
            engine.close()
            tqdm.write(f"{engine.name} is left out: {error}")

    def medians(self) -> dict[str, dict[str, float]]:
        """By case and engine; those without any figure are missing."""
        return {case: {name: median(r) for name, r in rows.items() if r} for case, rows in self.rates.items()}

    def close(self) -> None:
        """End all processes."""
        for engine in self.engines:
            engine.close()


def print_table(medians: dict[str, dict[str, float]]) -> None:
    """Medians, and headrace's ratio to the best peer."""
    names = list(dict.fromkeys(name for row in medians.values() for name in row))
    print("case".ljust(12), *(n.rjust(14) for n in names), "x best peer".rjust(12))
    for case, row in medians.items():
        peers = [value for name, value in row.items() if name in PEERS]
        ratio = f"{row['headrace'] / max(peers):.2f}" if peers and "headrace" in row else "-"
        print(case.ljust(12), *(f"{row[n]:14.1f}" if n in row else "-".rjust(14) for n in names), ratio.rjust(12))


def plot(rates: dict[str, dict[str, list[float]]], described: dict[str, str], path: Path) -> None:
    """One panel per case: bars of the medians with their figures and the range of the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for row in rates.values() for name, values in row.items() if values))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    figure, axes = plt.subplots(1, len(rates), figsize=(2.9 * len(rates), 4.2), squeeze=False)
    for axis, (case, row) in zip(axes[0], rates.items(), strict=True):
        present = [name for name in names if row.get(name)]
        values = [median(row[name]) for name in present]
        low = [v - min(row[n]) for v, n in zip(values, present, strict=True)]
        high = [max(row[n]) - v for v, n in zip(values, present, strict=True)]
        bars = axis.bar(range(len(present)), values, yerr=[low, high], capsize=3, color=[colors[n] for n in present])
        axis.bar_label(bars, labels=[f"{value:.0f}" for value in values], padding=4, fontsize=8)
        axis.margins(y=0.12)
        axis.set_title(describe_case(case), fontsize=9)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("tokens per second (more is better)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[name]) for name in names]
    labels = [name if described.get(name, name).startswith(name) else f"{name}: {described[name]}" for name in names]
    figure.legend(handles, labels, loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04 + 0.05 * ((len(names) + 1) // 2), 1, 1))
    figure.savefig(path, dpi=110)


def describe_case(name: str) -> str:
    """A case in words."""
    case = next(case for case in CASES if case.name == name)
    if case.output == 1:
        return f"{case.requests} prompts of {case.prompt}\n(prompt tokens)"
    return f"{case.requests} x ({case.prompt} in, {case.output} out)"


def describe_machine() -> dict[str, str]:
    """CPU, system and commit, so that a figure can be placed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    return {"cpu": cpu, "system": platform.platform(), "commit": commit, "date": datetime.now(UTC).isoformat()}


def main() -> None:
    """Parse the command line, measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="folder that install.py filled")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", action="append", help="only these cases")
    parser.add_argument("--engine", action="append", help="only these engines")
    parser.add_argument("--variant", action="append", default=[], help="another headrace: 'exact:activations=exact'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.gguf = args.gguf.resolve()
    cases = [c for c in CASES if not args.case or c.name in args.case]
    bench = Bench()
    try:
        bench.start(find_commands(args))
        described = {engine.name: engine.description for engine in bench.engines}
        bench.measure(cases, args.repeats)
    finally:
        bench.close()
    print_table(bench.medians())
    if args.json:
        kept = {"machine": describe_machine(), "engines": described, "failed": bench.failed}
        args.json.write_text(json.dumps({**kept, "tokens_per_second": bench.rates}, indent=1))
    if args.plot:
        plot(bench.rates, described, args.plot)


if __name__ == "__main__":
    main()
