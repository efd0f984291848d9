"""Tokenizers of each kind, small and made here, and an engine that plays scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from headrace.base.clock import ManualClock
from headrace.frontend.async_llm import AsyncLLM
from headrace.frontend.tokenizer import Tokenizer
from headrace.messages.outputs import CoreReady
from headrace.testing.engine_config import make_architecture, make_engine_config
from headrace.testing.fake_client import FakeCoreClient, Script

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "One, two, three, four. Count up: one, two, three, and then the end of it all.",
    "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u3002",
]


def make_byte_level() -> Tokenizer:
    """Byte-level BPE with three special tokens; 0 ends a text, 1 begins one."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        special_tokens=["<end>", "<begin>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=(0,))


def make_byte_fallback() -> Tokenizer:
    """SentencePiece-style BPE with byte fallback, whose post-processor adds BOS."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", *".,:()+0123456789"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("o", "n"), ("on", "e"), ("\u2581", "one"), ("i", "t")]
    tokens += [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens([AddedToken(name, special=True) for name in tokens[:3]])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, bos_token_id=1, eos_token_ids=(2,))


def make_wordpiece() -> Tokenizer:
    """A kind whose tokens are not bytes."""
    words = ["[UNK]", "the", "fox", "jump", "##s", "##ed", "over", ".", ",", "a", "dog", "one", "two", "##ing"]
    backend = Backend(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return Tokenizer(backend)


MAKERS = {"byte_level": make_byte_level, "byte_fallback": make_byte_fallback, "wordpiece": make_wordpiece}


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return make_byte_level()


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return make_byte_fallback()


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    return make_wordpiece()


READY = CoreReady(
    max_model_len=128, vocab_size=1000, num_blocks=65, block_size=4, kv_cache_tokens=256, max_concurrency=2.0
)

Start = Callable[..., Any]


@pytest.fixture
def start(byte_level: Tokenizer) -> Start:
    """``async with start(script) as (llm, client)``: an engine that plays ``script``, shut down at the end."""

    @asynccontextmanager
    async def run(script: Script, **options: Any) -> AsyncIterator[tuple[AsyncLLM, FakeCoreClient]]:
        client = FakeCoreClient(
            script,
            options.pop("ready", READY),
            auto=options.pop("auto", False),
            tokens_per_step=options.pop("tokens_per_step", 1),
        )
        config = make_engine_config(make_architecture(eos_token_ids=(0,)), **options.pop("settings", {}))
        llm = AsyncLLM(client, config, byte_level, clock=options.pop("clock", ManualClock()), **options)
        await llm.start()
        try:
            yield llm, client
        finally:
            await llm.shutdown()

    return run
