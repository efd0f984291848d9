"""What a model at a path is, whichever format it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFileError
from headrace.config.architecture import Architecture
from headrace.model_files.checkpoint import find_gguf
from headrace.model_files.gguf import GGUFFile
from headrace.model_files.gguf_config import architecture_from_gguf, eos_ids_from_gguf
from headrace.model_files.hf_config import architecture_from_config
from headrace.model_files.json_file import Fields, read_fields

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


def read_architecture(path: str | Path) -> Architecture:
    """Read sizes and switches of the model at ``path`` (a folder in the hub's layout or a ``.gguf`` file).

    Raises:
        ModelFileError: no model there, an architecture that is not supported (the message lists those that are), or a
            missing or impossible setting.
    """
    path = Path(path)
    gguf = find_gguf(path)
    if gguf is not None:
        file = GGUFFile.open(gguf)
        try:
            architecture = architecture_from_gguf(file)
        finally:
            file.close()
    else:
        folder = path if path.is_dir() else path.parent
        generation = _generation_fields(folder)
        eos = generation.ids("eos_token_id") if generation is not None else ()
        architecture = architecture_from_config(read_fields(folder / CONFIG_NAME), eos)
    _check(architecture, path)
    # An id beyond the head can never be sampled; small derived models keep those of their big parent.
    reachable = tuple(i for i in architecture.eos_token_ids if i < architecture.vocab_size)
    return replace(architecture, eos_token_ids=reachable)


def generation_defaults(path: str | Path) -> dict[str, Any]:
    """Sampling values that the model's makers recommend; only those that are given.

    Keys: ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, ``max_new_tokens`` and
    ``eos_token_ids`` (a tuple).

    Raises:
        ModelFileError: a value of the wrong type.
    """
    path = Path(path)
    gguf = find_gguf(path)
    if gguf is not None:
        file = GGUFFile.open(gguf)
        try:
            eos = eos_ids_from_gguf(file)
        finally:
            file.close()
        return {"eos_token_ids": eos} if eos else {}
    generation = _generation_fields(path if path.is_dir() else path.parent)
    if generation is None:
        return {}
    result: dict[str, Any] = {}
    for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if generation.get(key) is not None:
            result[key] = generation.number(key)
    for key in ("top_k", "max_new_tokens"):
        if generation.get(key) is not None:
            result[key] = generation.whole(key, minimum=0)
    if ids := generation.ids("eos_token_id"):
        result["eos_token_ids"] = ids
    return result


def _generation_fields(folder: Path) -> Fields | None:
    file = folder / GENERATION_CONFIG_NAME
    return read_fields(file) if file.is_file() else None


def _check(arch: Architecture, path: Path) -> None:
    """Relations that every decoder must keep; checked here so that no kernel meets them broken."""
    problems = {
        f"{arch.num_heads} heads are not a multiple of {arch.num_kv_heads} key-value heads": (
            arch.num_heads % arch.num_kv_heads
        ),
        f"rotary dimensions {arch.rope.rotary_dim} are odd or more than a head's {arch.head_dim}": (
            arch.rope.rotary_dim % 2 or not 0 < arch.rope.rotary_dim <= arch.head_dim
        ),
    }
    for problem, found in problems.items():
        if found:
            raise ModelFileError(f"{path}: {problem}")
