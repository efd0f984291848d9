"""PyTorch calls between the pieces of a captured plan.

While native ops are recorded, a guard sees every call of PyTorch. A view computes nothing and passes. Any other call is
kept, when a replay can repeat it: it works on tensors with one row per token and on constants, and leaves tensors with
one row per token. It then runs on the rows of the step, and so sees what it would see in an eager forward. Everything
else refuses the capture by name: in-place writes, results whose size depends on values, tensors with other axes of
tokens or of requests.

One forward cannot tell a number that counts tokens from any other. So a forward with such calls is recorded again for a
smaller step, and calls that differ in more than their rows are refused.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from headrace.device.ops.cpu.recorder import Recorder


class CaptureRefusedError(Exception):
    """The forward does something that a plan cannot hold."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """An argument with one row per token: as many rows as were captured, and where in its buffer the first one lies."""

    whole: torch.Tensor
    offset: int


class TorchCall:
    """One call of PyTorch, repeated on the rows of each step."""

    def __init__(self, func: Any, leaves: list[Any], spec: TreeSpec, results: list[torch.Tensor]) -> None:
        self.name: str = func.name()
        self._func = func
        self._leaves = leaves
        self._spec = spec
        self._results = results

    def run(self, num_tokens: int) -> None:
        """Compute the first rows."""
        leaves = [leaf.whole[:num_tokens] if isinstance(leaf, _Rows) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._spec)
        for kept, made in zip(self._results, _tensors_of(self._func(*args, **kwargs)), strict=True):
            kept[:num_tokens].copy_(made)

    def is_like(self, other: TorchCall) -> bool:
        """Whether both are the same call but for the number of rows."""
        if self._func is not other._func or self._spec != other._spec:
            return False
        mine = [*self._leaves, *(_Rows(kept, 0) for kept in self._results)]
        theirs = [*other._leaves, *(_Rows(kept, 0) for kept in other._results)]
        return len(mine) == len(theirs) and all(map(_is_like, mine, theirs))


def _is_like(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, _Rows):
        return all(
            (
                a.offset == b.offset,
                a.whole.dtype == b.whole.dtype,
                a.whole.shape[1:] == b.whole.shape[1:],
                a.whole.stride() == b.whole.stride(),
            )
        )
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return (a.data_ptr(), a.stride()) == (b.data_ptr(), b.stride()) or torch.equal(a, b)
    return bool(a == b)


class CaptureGuard(TorchDispatchMode):
    """Sees the PyTorch calls of a forward while its native ops are recorded.

    Args:
        recorder: takes the calls that a replay can repeat; without one every call but a view is refused.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__()
        self._recorder = recorder
        self.calls: list[TorchCall] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would load its compiler to keep it away from this class: seconds and 100 MB, and no compiler runs."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        if _may_be_view(func):
            result = func(*args, **(kwargs or {}))
            # Some calls that are declared as views copy when they must, as `reshape` does.
            if _shares_memory(result, leaves):
                return result
        if self._recorder is None:
            raise CaptureRefusedError(f"{func.name()} is not a native operator")
        kept = self._keep_arguments(self._recorder, func, leaves)
        try:
            result = func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError, ValueError) as error:
            raise CaptureRefusedError(f"{func.name()} needs the values of a step: {error}") from error
        results = [self._keep_result(self._recorder, func, made) for made in _tensors_of(result)]
        call = TorchCall(func, kept, spec, [whole for _, whole in results])
        self.calls.append(call)
        self._recorder.split(call)
        shown = [shown for shown, _ in results]
        return shown[0] if isinstance(result, torch.Tensor) else type(result)(shown)

    def _keep_arguments(self, recorder: Recorder, func: Any, leaves: list[Any]) -> list[Any]:
        """The arguments as a replay takes them; refuses what it cannot repeat."""
        # Others need not say in their schema what they write; collectives do not.
        if func.namespace != "aten":
            raise CaptureRefusedError(f"{func.name()} is neither a native operator nor one of PyTorch's own")
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            raise CaptureRefusedError(f"{func.name()} writes in place")
        if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            raise CaptureRefusedError(f"{func.name()} depends on the values of a step")
        kept = [_keep_argument(recorder, func, leaf) for leaf in leaves]
        if not any(isinstance(leaf, _Rows) for leaf in kept):
            raise CaptureRefusedError(f"{func.name()} works on no tensor with one row per token")
        return kept

    @staticmethod
    def _keep_result(recorder: Recorder, func: Any, made: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The result as the model sees it, and over memory that the call may write."""
        if not isinstance(made, torch.Tensor):
            raise CaptureRefusedError(f"{func.name()} leaves something else than tensors")
        if made.dim() == 0 or len(made) != recorder.num_tokens or not made.is_contiguous():
            raise CaptureRefusedError(f"{func.name()} leaves a tensor without one row per token: {list(made.shape)}")
        if made.dtype is torch.float32:
            made = recorder.take(len(made), made[0].numel(), None).view(made.shape)
            return made, _unclaimed(made)
        recorder.add_rows(made)
        return made, made


def _keep_argument(recorder: Recorder, func: Any, leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not recorder.is_of_step(leaf):
        return leaf
    if not recorder.has_rows(leaf):
        raise CaptureRefusedError(f"{func.name()} takes a tensor without one row per token: {list(leaf.shape)}")
    offset = leaf.data_ptr() - leaf.untyped_storage().data_ptr()
    return _Rows(_unclaimed(leaf) if recorder.is_lent(leaf) else leaf, offset)


def _unclaimed(x: torch.Tensor) -> torch.Tensor:
    """The same memory without holding it: the arena gets it back when the captured code drops its tensor."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    memory = (ctypes.c_byte * (size * x.element_size())).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())


def _may_be_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _shares_memory(result: Any, leaves: list[Any]) -> bool:
    theirs = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    made = _tensors_of(result)
    return all(isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() in theirs for one in made)


def _tensors_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def check_same_calls(calls: list[TorchCall], again: list[TorchCall]) -> None:
    """Refuse calls that differ in more than the number of rows from those of a step of another size."""
    for call, other in zip(calls, again, strict=False):
        if not call.is_like(other):
            raise CaptureRefusedError(f"{call.name} depends on the size of the step in more than its rows")
    if len(calls) != len(again):
        longer = max(calls, again, key=len)
        raise CaptureRefusedError(f"{longer[min(len(calls), len(again))].name} is called at some step sizes alone")
