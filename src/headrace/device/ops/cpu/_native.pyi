"""Types of the extension module that `csrc/cpu/bindings.cpp` defines."""

from collections.abc import Sequence
from enum import Enum

import numpy as np
import torch

from headrace.device.ops.interface import Weight as AnyWeight

class Rows(Enum):
    TOKENS = ...
    LOGITS = ...

class Weight:
    out_features: int
    in_features: int
    num_bytes: int
    format: str
    quantized: bool
    pieces: list[np.ndarray]

class Op:
    name: str

class StepView: ...
class CacheView: ...

class Team:
    num_threads: int
    isa: str

    def __init__(self, num_threads: int, isa: str = "") -> None: ...
    def set_progress(self, address: int) -> None: ...
    def run(self, op: Op, tokens: int = 0, reqs: int = 0, logit_rows: int = 0, best_rows: int = 0) -> None: ...

class Plan:
    op_names: list[str]

    def __init__(self, tokens: int, reqs: int, logit_rows: int) -> None: ...
    def append(self, op: Op) -> None: ...
    def finish(self, team: Team, kept: list[int]) -> None: ...
    def replay(self, team: Team, tokens: int, reqs: int, logit_rows: int = 0, best_rows: int = 0) -> None: ...
    def profile(self, team: Team, tokens: int, reqs: int, logit_rows: int = 0) -> list[float]: ...

class StepInputs:
    def __init__(
        self,
        token_ids: np.ndarray,
        ids: np.ndarray,
        positions: np.ndarray,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        groups: list[tuple[np.ndarray, np.ndarray, int, np.ndarray, np.ndarray]],
    ) -> None: ...
    def fill(self, rows: list[int], num_computed: list[int], num_new: list[int]) -> int: ...
    def pad(self, reqs: int, begin: int, end: int) -> None: ...

class HeadReplay:
    def __init__(self, plan: Plan, index: np.ndarray, best: np.ndarray, peaks: np.ndarray) -> None: ...
    def replay(
        self, team: Team, forward: Plan | None, tokens: int, reqs: int, rows: list[int], num_best: int
    ) -> tuple[list[int], list[float]]: ...

def isas() -> list[str]: ...
def is_packable(format: str) -> bool: ...
def pack(
    team: Team, parts: list[tuple[str, np.ndarray]], in_features: int, quantize: str = "", gated: bool = False
) -> Weight: ...
def adopt(
    team: Team,
    forms: list[tuple[str, int]],
    in_features: int,
    quantize: str,
    gated: bool,
    pieces: list[np.ndarray],
) -> Weight: ...
def hash_bytes(bytes: np.ndarray) -> int: ...
def embedding(ids: torch.Tensor, table: AnyWeight, scale: float, out: torch.Tensor) -> Op: ...
def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    sum_out: torch.Tensor | None,
    rows: Rows,
) -> Op: ...
def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, rows: Rows) -> Op: ...
def gather(x: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> Op: ...
def linear(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    softcap: float,
    exact: bool,
    out: torch.Tensor,
    rows: Rows,
) -> Op: ...
def head(
    x: torch.Tensor,
    weight: AnyWeight,
    softcap: float,
    exact: bool,
    best: np.ndarray,
    peaks: np.ndarray,
    logits: np.ndarray,
) -> Op: ...
def gated(x: torch.Tensor, weight: AnyWeight, activation: str, exact: bool, out: torch.Tensor, rows: Rows) -> Op: ...
def step(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> StepView: ...
def cache(key: torch.Tensor, value: torch.Tensor, scales: torch.Tensor | None) -> CacheView: ...
def rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    step: StepView,
    cache: CacheView,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> Op: ...
def attention(
    q: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: torch.Tensor | None,
    exact: bool,
    step: StepView,
    cache: CacheView,
    out: torch.Tensor,
) -> Op: ...
def moe(
    x: torch.Tensor,
    router: AnyWeight,
    gate_up: list[AnyWeight],
    down: list[AnyWeight],
    top_k: int,
    activation: str,
    renormalize: bool,
    exact: bool,
    out: torch.Tensor,
) -> Op: ...
def arg_max(x: torch.Tensor, out: torch.Tensor) -> Op: ...
def apply_bitmask(team: Team, x: np.ndarray, words: np.ndarray) -> None: ...
def apply_penalties(
    team: Team,
    x: np.ndarray,
    in_prompt: np.ndarray,
    counts: np.ndarray,
    repetition: float,
    frequency: float,
    presence: float,
) -> None: ...
def draw(team: Team, rows: list[tuple[np.ndarray, float, float, int, float, float, int, int]]) -> list[int]: ...
def token_logprobs(
    team: Team, rows: Sequence[tuple[np.ndarray, int, int]]
) -> list[tuple[list[int], list[float], int]]: ...
