"""What int8 activations and smaller KV types change: KL divergence, perplexity and agreement over a fixed text.

    python benchmarks/accuracy.py MODEL.gguf [--text FILE ...] [--tokens 2560] [--json FILE]

Every variant reads the same text, token by token as given, in windows that each begin with nothing before them; the
first variant, exact activations over a float32 cache, is what the others are compared with. The text is the
repository's own pages unless files are named. Exits with 1 when the default variant misses its targets: a divergence of
5e-3 and a perplexity within 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headrace.device.attention.metadata import AttentionMetadata, ForwardContext, LayerCache
from headrace.device.loading.loader import LoadedModel, load_model
from headrace.device.ops.registry import make_ops
from headrace.entrypoints.engine_config import load_engine_config
from headrace.model_files.tokenizer import load_tokenizer

PAGES = ("docs/numerics.md", "docs/request.md", "docs/benchmarking.md", "docs/structured-output.md", "docs/api.md")
VARIANTS = (("exact", "float32"), ("int8", "float16"), ("int8", "int8"), ("exact", "float16"))
DEFAULT = 1
WINDOW, SLICE, BLOCK = 512, 64, 32
MAX_DIVERGENCE, MAX_PERPLEXITY_RATIO = 5e-3, 0.01


@dataclass
class Totals:
    """Sums over positions; each position predicts the token behind it."""

    positions: int = 0
    negative_log_likelihood: float = 0.0
    divergences: list[float] = field(default_factory=list)
    agreements: int = 0

    def add(self, reference: np.ndarray, log_probs: np.ndarray, targets: np.ndarray) -> None:
        """Count rows of log-probabilities ``[n, V]``."""
        self.positions += len(targets)
        self.negative_log_likelihood -= float(log_probs[np.arange(len(targets)), targets].sum())
        self.divergences += (np.exp(reference) * (reference - log_probs)).sum(axis=1).tolist()
        self.agreements += int((reference.argmax(axis=1) == log_probs.argmax(axis=1)).sum())

    def summary(self, reference: Totals) -> dict[str, float]:
        """What is printed."""
        perplexity = math.exp(self.negative_log_likelihood / self.positions)
        base = math.exp(reference.negative_log_likelihood / reference.positions)
        return {
            "divergence": float(np.mean(self.divergences)),
            "divergence_p99": float(np.quantile(self.divergences, 0.99)),
            "agreement": self.agreements / self.positions,
            "perplexity": perplexity,
            "perplexity_change": perplexity / base - 1,
        }


class Variant:
    """A model with a cache for one window."""

    def __init__(self, model: str, activations: str, kv_dtype: str) -> None:
        settings = {"model": model, "ops": "native", "activations": activations, "kv_cache_dtype": kv_dtype}
        config = load_engine_config(settings)
        self._ops = make_ops(config)
        loaded: LoadedModel = load_model(config, self._ops)
        self._model, backend = loaded.model, loaded.attention.backend
        blocks = 1 + WINDOW // BLOCK
        self._caches: list[LayerCache] = [
            backend.allocate(backend.make_spec(facts, BLOCK, kv_dtype), blocks) for facts in self._model.layer_facts()
        ]

    def forward(self, ids: np.ndarray) -> torch.Tensor:
        """Hidden states of a window."""
        count = len(ids)
        position = torch.arange(count, dtype=torch.int32)
        meta = AttentionMetadata(
            num_tokens=count,
            num_reqs=1,
            max_query_len=count,
            max_seq_len=count,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=torch.arange(1, 1 + WINDOW // BLOCK, dtype=torch.int32)[None],
            slot_mapping=position.long() + BLOCK,
        )
        ctx = ForwardContext(position, [meta], [0] * len(self._caches), self._caches)
        hidden = self._model.forward(torch.from_numpy(ids), ctx)
        assert isinstance(hidden, torch.Tensor)
        return hidden.clone()

    def log_probs(self, hidden: torch.Tensor) -> np.ndarray:
        """Log-probabilities of the next token, float64."""
        logits = self._model.compute_logits(hidden).double()
        return np.asarray(torch.log_softmax(logits, dim=1).numpy())


def measure(variants: list[Variant], ids: np.ndarray) -> list[Totals]:
    """Run all variants over all windows."""
    totals = [Totals() for _ in variants]
    for start in range(0, len(ids) - 1, WINDOW):
        window, targets = ids[start : start + WINDOW], ids[start + 1 : start + WINDOW + 1].astype(np.int64)
        hidden = [variant.forward(window) for variant in variants]
        for first in range(0, len(targets), SLICE):
            rows = slice(first, min(first + SLICE, len(targets)))
            reference = variants[0].log_probs(hidden[0][rows])
            for i, variant in enumerate(variants):
                log_probs = variant.log_probs(hidden[i][rows]) if i else reference
                totals[i].add(reference, log_probs, targets[rows])
    return totals


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", type=Path, default=[root / page for page in PAGES])
    parser.add_argument("--tokens", type=int, default=2560)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = "\n".join(path.read_text() for path in args.text)
    ids = np.array(load_tokenizer(args.model).tokenizer.encode(text).ids[: args.tokens + 1], dtype=np.int32)
    totals = measure([Variant(args.model, *names) for names in VARIANTS], ids)
    results = {
        f"{activations} activations, {kv_dtype} cache": total.summary(totals[0])
        for (activations, kv_dtype), total in zip(VARIANTS, totals, strict=True)
    }
    print(f"{totals[0].positions} positions")
    for name, result in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in result.items()))
    if args.json:
        args.json.write_text(json.dumps({"positions": totals[0].positions, "variants": results}, indent=1) + "\n")
    default = list(results.values())[DEFAULT]
    fine = default["divergence"] <= MAX_DIVERGENCE and abs(default["perplexity_change"]) <= MAX_PERPLEXITY_RATIO
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
