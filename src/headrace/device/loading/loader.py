"""From a configuration to a model with its weights in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.base.errors import ModelFileError
from headrace.config.sections import EngineConfig
from headrace.device.attention.backend import AttentionNeeds
from headrace.device.attention.registry import make_backends
from headrace.device.attention.selector import AttentionChoice, select_backend
from headrace.device.distributed.groups import ParallelGroups
from headrace.device.loading.name_maps import SourceKind
from headrace.device.loading.weights import Progress, WeightReader
from headrace.device.models.decoder import Decoder
from headrace.device.models.registry import get_model_class
from headrace.device.ops.interface import Ops
from headrace.model_files.checkpoint import find_gguf, open_checkpoint


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the attention backend that was chosen for it."""

    model: Decoder
    attention: AttentionChoice


def load_model(
    config: EngineConfig, ops: Ops, parallel: ParallelGroups | None = None, progress: Progress | None = None
) -> LoadedModel:
    """Choose the attention backend, build the model and fill it from ``config.model_path``.

    Args:
        progress: called with the bytes done and the bytes in all.

    Raises:
        ModelFileError: unknown architecture or format, or a checkpoint that does not fit; the message names the tensor.
        ConfigError: no attention backend can serve, or the layers cannot be shared by the ranks.
    """
    arch = config.architecture
    model_class = get_model_class(arch.name)
    choice = select_backend(make_backends(ops), make_needs(config, ops), config.device.attention_backend)
    model = model_class(arch, ops, choice.backend, parallel, config.max_model_len)
    kind: SourceKind = "gguf" if find_gguf(config.model_path) is not None else "hf"
    source = open_checkpoint(config.model_path)
    try:
        weights = WeightReader(source, model.weight_map(kind), progress)
        with _packed_cache(config, ops, parallel):
            model.load(weights)
        weights.finish()
    except ModelFileError as error:
        raise ModelFileError(f"{config.model_path}: {error}") from None
    finally:
        source.close()
    return LoadedModel(model, choice)


@contextmanager
def _packed_cache(config: EngineConfig, ops: Ops, parallel: ParallelGroups | None) -> Iterator[None]:
    """While the model loads, packed weights come from an earlier start where they can."""
    if not config.model.packed_cache:
        yield
        return
    from headrace.device.loading.packed_cache import open_packed_cache

    cache = open_packed_cache(config, parallel)
    ops.set_packed_store(cache)
    try:
        yield
    finally:
        ops.set_packed_store(None)
    cache.finish()


def make_needs(config: EngineConfig, ops: Ops) -> AttentionNeeds:
    """What the configured model asks of attention."""
    arch = config.architecture
    ranks = config.parallel.tensor_parallel_size
    return AttentionNeeds(
        platform=config.device.platform,
        ops=ops.name,
        head_dim=arch.head_dim,
        num_heads=arch.num_heads // ranks,
        num_kv_heads=max(1, arch.num_kv_heads // ranks),
        dtype=config.model.dtype,
        kv_dtype=config.cache.kv_cache_dtype,
        block_size=config.cache.block_size,
        window="sliding_window" in arch.layer_kinds,
        chunk="chunked_local" in arch.layer_kinds,
        softcap=arch.attn_softcap > 0,
    )
