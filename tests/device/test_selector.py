"""The choice of an attention backend is pure, and every backend that was not chosen has a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from headrace.base.errors import ConfigError
from headrace.device.attention.backend import AttentionBackend, AttentionNeeds, LayerFacts
from headrace.device.attention.backends.cpu_native import CpuNativeBackend
from headrace.device.attention.backends.reference import ReferenceBackend
from headrace.device.attention.registry import make_backends
from headrace.device.attention.selector import select_backend
from headrace.device.ops.reference.ops import ReferenceOps
from headrace.messages.kv_cache import KVCacheKind

NEEDS = AttentionNeeds(
    platform="cpu",
    ops="reference",
    head_dim=64,
    num_heads=9,
    num_kv_heads=3,
    dtype="float32",
    kv_dtype="float32",
    block_size=16,
)


@dataclass
class Stub:
    """A backend that gives a fixed answer."""

    name: str
    answer: str | None

    def refuse(self, needs: AttentionNeeds) -> str | None:
        return self.answer


def stubs(*answers: tuple[str, str | None]) -> list[AttentionBackend]:
    return [Stub(name, answer) for name, answer in answers]  # type: ignore[misc]


def test_the_first_that_can_serve_wins_and_all_others_have_reasons() -> None:
    choice = select_backend(stubs(("a", "is broken"), ("b", None), ("c", None), ("d", "is slow")), NEEDS)
    assert choice.backend.name == "b"
    assert choice.refused == {"a": "is broken", "d": "is slow", "c": "b is preferred"}


def test_a_wanted_backend_wins_over_preferred_ones() -> None:
    choice = select_backend(stubs(("a", None), ("b", None)), NEEDS, "b")
    assert (choice.backend.name, choice.reason, choice.refused) == ("b", "asked for", {"a": "b was asked for"})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("a", "'a' cannot serve: it is broken"),
        ("x", "unknown attention backend 'x'; known: a, b"),
        (None, "a is broken"),
    ],
)
def test_an_impossible_choice_is_an_error_with_reasons(wanted: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_backend(stubs(("a", "is broken"), ("b", "is slow")), NEEDS, wanted)


@pytest.mark.parametrize(
    ("needs", "chosen"),
    [
        (NEEDS, "reference"),
        (replace(NEEDS, kv_dtype="bfloat16", window=True, sinks=True, softcap=True, chunk=True), "reference"),
        (replace(NEEDS, ops="native"), "cpu_native"),
        (replace(NEEDS, ops="native", kv_dtype="float16", window=True), "cpu_native"),
    ],
)
def test_known_needs(needs: AttentionNeeds, chosen: str) -> None:
    choice = select_backend(make_backends(ReferenceOps()), needs)
    assert choice.backend.name == chosen
    assert set(choice.refused) == {"cpu_native", "reference"} - {chosen}


@pytest.mark.parametrize("kind", [CpuNativeBackend, ReferenceBackend])
@pytest.mark.parametrize("change", [{"platform": "cuda"}, {"mla": True}, {"kv_dtype": "int3"}, {"ops": "triton"}])
def test_refusals(kind: type[CpuNativeBackend | ReferenceBackend], change: dict[str, object]) -> None:
    backend = kind(ReferenceOps())
    own = replace(NEEDS, ops="native" if kind is CpuNativeBackend else "reference")
    assert backend.refuse(own) is None
    assert backend.refuse(replace(own, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "kind", "window"),
    [
        (LayerFacts(3, 64), KVCacheKind.FULL, 0),
        (LayerFacts(3, 64, window=128), KVCacheKind.SLIDING_WINDOW, 128),
        (LayerFacts(3, 64, chunk=256), KVCacheKind.CHUNKED_LOCAL, 256),
    ],
)
def test_spec_describes_the_blocks(facts: LayerFacts, kind: KVCacheKind, window: int) -> None:
    backend = ReferenceBackend(ReferenceOps())
    spec = backend.make_spec(facts, 16, "float16")
    assert (spec.kind, spec.window, spec.page_bytes) == (kind, window, 2 * 3 * 64 * 16 * 2)
    cache = backend.allocate(spec, 5)
    for layout, tensor in zip(spec.tensors, (cache.key, cache.value), strict=True):
        assert tuple(tensor.shape) == (5, *layout.block_shape)
        assert tensor.stride() == layout.strides
        assert not tensor.any()
    assert backend.make_spec(facts, 16, "int8").page_bytes == 2 * 3 * 64 * 16 + 2 * 3 * 16 * 4
    assert spec.tensors[0].dims == ("kv_head", "head_dim", "token")
    assert spec.tensors[1].dims == ("kv_head", "token", "head_dim")
