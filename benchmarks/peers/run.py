"""Run every engine side by side on the same prompts and compare medians. See README.md beside this file."""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
ENGINES = HERE / "engines"


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


class Engine:
    """A running engine process that answers cases."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._log = (Path("/tmp") / f"peer-{name}.log").open("w")
        self._process = subprocess.Popen(
            command, cwd=ENGINES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.description: str = self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; see {self._log.name}")
        return json.loads(line)

    def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Seconds for one batch, and the first tokens of each answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def make_prompts(case: Case, seed: int) -> list[list[int]]:
    """Random token ids of ordinary words, fresh for every repeat, equal for all engines."""
    rng = random.Random(f"{case.name}/{seed}")
    return [[rng.randrange(300, 40000) for _ in range(case.prompt)] for _ in range(case.requests)]


def start_engines(args: argparse.Namespace) -> list[Engine]:
    """Start headrace, its variants and every installed peer."""
    common = [str(args.gguf), str(args.threads)]
    commands = {"headrace": [sys.executable, "headrace_engine.py", *common]}
    for variant in args.variant:
        name, _, settings = variant.partition(":")
        commands[name] = [sys.executable, "headrace_engine.py", *common, *settings.split()]
    for peer in ("llama_cpp", "openvino", "vllm_cpu"):
        python = args.peers / peer / "bin" / "python" if args.peers else None
        if python is not None and python.exists():
            commands[peer] = [str(python), f"{peer}_engine.py", *common]
    chosen = {name: command for name, command in commands.items() if not args.engine or name in args.engine}
    return [Engine(name, command) for name, command in tqdm(chosen.items(), desc="start")]


def measure(engines: list[Engine], cases: list[Case], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by case, engine and repeat; engines take turns within each repeat."""
    rates: dict[str, dict[str, list[float]]] = {c.name: {e.name: [] for e in engines} for c in cases}
    for engine in engines:
        engine.run(make_prompts(Case(2, 16, 4), 0), 4)
    total = len(engines) * len(cases) * repeats
    with tqdm(total=total, desc="measure") as bar:
        for repeat in range(repeats):
            for case in cases:
                prompts = make_prompts(case, repeat)
                order = engines[repeat % len(engines) :] + engines[: repeat % len(engines)]
                for engine in order:
                    seconds = engine.run(prompts, case.output)["seconds"]
                    rates[case.name][engine.name].append(case.counted_tokens / seconds)
                    bar.update()
    return rates


def print_table(rates: dict[str, dict[str, list[float]]]) -> None:
    """Medians, and headrace's ratio to the best peer."""
    names = list(next(iter(rates.values())))
    print("case".ljust(12), *(n.rjust(14) for n in names), "x best peer".rjust(12))
    for case, by_engine in rates.items():
        medians = {n: median(r) for n, r in by_engine.items()}
        peers = [v for n, v in medians.items() if n in ("llama_cpp", "openvino", "vllm_cpu")]
        ratio = f"{medians['headrace'] / max(peers):.2f}" if peers and "headrace" in medians else "-"
        print(case.ljust(12), *(f"{medians[n]:14.1f}" for n in names), ratio.rjust(12))


def plot(rates: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Grouped bars of the medians with the range of the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases, names = list(rates), list(next(iter(rates.values())))
    figure, axes = plt.subplots(1, len(cases), figsize=(3 * len(cases), 3.6))
    for axis, case in zip(axes, cases, strict=True):
        values = [median(rates[case][n]) for n in names]
        low = [v - min(rates[case][n]) for v, n in zip(values, names, strict=True)]
        high = [max(rates[case][n]) - v for v, n in zip(values, names, strict=True)]
        axis.bar(names, values, yerr=[low, high], capsize=3, color=[f"C{i}" for i in range(len(names))])
        axis.set_title(case)
        axis.tick_params(axis="x", rotation=60)
    axes[0].set_ylabel("tokens per second")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


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
    engines = start_engines(args)
    try:
        rates = measure(engines, cases, args.repeats)
    finally:
        for engine in engines:
            engine.close()
    print_table(rates)
    if args.json:
        described = {e.name: e.description for e in engines}
        kept = {"machine": describe_machine(), "engines": described, "tokens_per_second": rates}
        args.json.write_text(json.dumps(kept, indent=1))
    if args.plot:
        plot(rates, args.plot)


if __name__ == "__main__":
    main()
