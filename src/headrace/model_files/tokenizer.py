"""The tokenizer of a model, with the facts around it that serving needs.

Owns where they are looked up: ``tokenizer.json`` as it is, or the vocabulary of a GGUF file, built once and kept as
``tokenizer.json`` under ``<home>/tokenizers/<key>``, the key being the hash of the metadata that it was built from. A
spoilt entry of that cache is built again.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from headrace.base.errors import ModelFileError
from headrace.base.logging import get_logger
from headrace.config import env
from headrace.model_files.architecture import generation_defaults
from headrace.model_files.checkpoint import find_gguf
from headrace.model_files.gguf import GGUFFile
from headrace.model_files.gguf_config import eos_ids_from_gguf
from headrace.model_files.gguf_tokenizer import GGUFVocabulary, build_tokenizer
from headrace.model_files.json_file import read_json

logger = get_logger(__name__)
# Part of the cache key: raise it when the same metadata gives another tokenizer than before.
_CACHE_VERSION = 1


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """Facts beside the vocabulary.

    ``vocab_size`` counts the tokenizer's own ids; a model's head may have more rows. ``add_bos`` says whether encoding
    plain text with special tokens begins with BOS (the tokenizer does it itself). ``special_tokens`` maps the text of
    each special token to its id.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None
    special_tokens: dict[str, int]


class LoadedTokenizer(NamedTuple):
    """A tokenizer and the facts around it."""

    tokenizer: Tokenizer
    info: TokenizerInfo


def load_tokenizer(path: str | Path) -> LoadedTokenizer:
    """Load the tokenizer of the model at ``path``: a folder, a ``.gguf`` file or a ``tokenizer.json``.

    Raises:
        ModelFileError: none there, or broken, or of an unknown kind.
    """
    path = Path(path)
    gguf = find_gguf(path)
    if gguf is not None:
        return _load_gguf(gguf)
    return _load_folder(path if path.is_dir() else path.parent)


def _load_gguf(path: Path) -> LoadedTokenizer:
    file = GGUFFile.open(path)
    try:
        vocabulary = GGUFVocabulary(file)
        tokenizer = _cached(vocabulary, file.metadata_key())
        template = file.metadata.get("tokenizer.chat_template")
        info = TokenizerInfo(
            vocab_size=len(vocabulary.tokens),
            bos_token_id=vocabulary.token_id("bos_token_id"),
            eos_token_ids=eos_ids_from_gguf(file),
            add_bos=vocabulary.add_bos,
            chat_template=template if isinstance(template, str) else None,
            special_tokens=_special_tokens(tokenizer),
        )
    finally:
        file.close()
    return LoadedTokenizer(tokenizer, info)


def _cached(vocabulary: GGUFVocabulary, metadata_key: str) -> Tokenizer:
    """The tokenizer of a vocabulary, from the cache when it is there."""
    key = hashlib.sha256(f"{_CACHE_VERSION} {metadata_key}".encode()).hexdigest()[:32]
    target = env.home() / "tokenizers" / key / "tokenizer.json"
    if target.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(target))
        except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
            logger.warning("%s is spoilt and is built again: %s", target, error)
        else:
            if tokenizer.get_vocab_size() == len(vocabulary.tokens):
                return tokenizer
            logger.warning("%s does not fit its key and is built again", target)
    tokenizer = build_tokenizer(vocabulary)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        staged.write_text(tokenizer.to_str(), encoding="utf-8")
        staged.replace(target)
    except OSError as error:
        logger.warning("the tokenizer cannot be kept in %s (%s); starts will be slower", target.parent, error)
    return tokenizer


def _load_folder(folder: Path) -> LoadedTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        hint = " (a tokenizer.model alone is not supported)" if (folder / "tokenizer.model").is_file() else ""
        raise ModelFileError(f"{folder}: has no tokenizer.json{hint}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
        raise ModelFileError(f"{file}: is not a tokenizer ({error}); fetch it again") from None
    config = _optional_json(folder / "tokenizer_config.json")
    model_config = _optional_json(folder / "config.json")
    bos = _token_id(tokenizer, config.get("bos_token"), model_config.get("bos_token_id"))
    eos = _token_id(tokenizer, config.get("eos_token"), model_config.get("eos_token_id"))
    eos_ids = dict.fromkeys(generation_defaults(folder).get("eos_token_ids", ()) if file.parent == folder else ())
    start = tokenizer.encode("", add_special_tokens=True).ids[:1]
    info = TokenizerInfo(
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=bos,
        eos_token_ids=tuple(eos_ids) or (() if eos is None else (eos,)),
        add_bos=bos is not None and start == [bos],
        chat_template=read_chat_template(folder),
        special_tokens=_special_tokens(tokenizer),
    )
    return LoadedTokenizer(tokenizer, info)


def read_chat_template(folder: Path) -> str | None:
    """The folder's chat template: ``chat_template.jinja``, ``chat_template.json`` or ``tokenizer_config.json``.

    Where several are listed by name, the one called ``default``.
    """
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return template_file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _optional_json(folder / name).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            if isinstance(named.get("default"), str):
                return str(named["default"])
    return None


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_id(tokenizer: Tokenizer, token: Any, fallback: Any) -> int | None:
    """Id of a special token written as text or as a table with ``content``; else the model's own number."""
    content = token.get("content") if isinstance(token, dict) else token
    if isinstance(content, str):
        found = tokenizer.token_to_id(content)
        if found is not None:
            return int(found)
    first = fallback[0] if isinstance(fallback, list) and fallback else fallback
    return first if isinstance(first, int) else None


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    return {token.content: i for i, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special}
