"""Grammars through llguidance, compiled on threads and followed in the core's own.

Owns the library's tokenizer (built once, on the first use, from the model's tokenizer with the width of the logits and
every id that ends a text), the bounds on what a grammar may cost, and a cache of compiled ones. A grammar that is not
ready in its time counts as failed, even while its thread is still at work. It knows nothing of requests.

llguidance compiles lazily and within a budget of its own for each step, so that neither a compilation nor a mask can
take long; the time limit stands behind that.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.base.clock import Clock
from headrace.base.errors import HeadraceError
from headrace.base.free_memory import give_back_memory
from headrace.base.logging import get_logger
from headrace.core.daemon_pool import DaemonPool, PoolFullError
from headrace.core.grammar_source import is_json_throughout, make_source
from headrace.messages.runner_output import GRAMMAR_TOO_COSTLY
from headrace.messages.sampling_params import StructuredOutputParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

    from headrace.model_files.tokenizer import LoadedTokenizer

logger = get_logger(__name__)

CACHE_SIZE = 128
MAX_TOKENIZER_S = 60.0
# What a grammar may cost: a step that needs more fails. A lexer state is a kilobyte or two.
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 50_000
MAX_LEXER_STATES = 50_000
MAX_GRAMMAR_SIZE = 500_000
_TOO_COSTLY = (
    ("too many states", f"more than {MAX_LEXER_STATES:,} states of its patterns"),
    ("fuel", f"more than {STEP_LEXER_FUEL:,} units of work on its patterns for a token"),
    ("too many items", f"more than {STEP_MAX_ITEMS:,} open rules at a token"),
)
"""What the library says when a limit is passed while a text is followed, and what that is."""

_RUNS = ((b"0123456789.eE+-", 40), (b" \t\r\n", 24))
"""Numbers and white space: their bytes, and how many of them may follow each other outside strings of a JSON text."""


class GrammarError(Exception):
    """A grammar that cannot be enforced; the message is for the client."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """What the library's tokenizer is built from.

    Attributes:
        json: the text of ``tokenizer.json``.
        eos_token_ids: every id that ends a text.
        added_token_ids: tokens beside the vocabulary proper, by name.
    """

    json: str
    eos_token_ids: Sequence[int]
    added_token_ids: Mapping[str, int]

    @staticmethod
    def from_loaded(loaded: LoadedTokenizer, more_eos_ids: Sequence[int] = ()) -> TokenizerSource:
        """From a tokenizer and the ids that the model's own configuration adds."""
        eos = tuple(dict.fromkeys([*loaded.info.eos_token_ids, *more_eos_ids]))
        return TokenizerSource.from_backend(loaded.tokenizer, eos)

    @staticmethod
    def from_backend(backend: Tokenizer, eos_token_ids: Sequence[int]) -> TokenizerSource:
        """From a fast tokenizer."""
        added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
        return TokenizerSource(backend.to_str(), eos_token_ids, added)


class GrammarTokenizer:
    """The vocabulary as grammars see it; ``mark_token_ids`` holds the tokens that are no text there, by name.

    Args:
        source: of the model.
        vocab_size: width of the logits; ids beyond the tokenizer are never allowed.

    Raises:
        GrammarError: the tokenizer is of a kind that the library cannot read.
    """

    def __init__(self, source: TokenizerSource, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        self.eos_token_ids = frozenset(i for i in source.eos_token_ids if 0 <= i < vocab_size)
        if not self.eos_token_ids:
            raise GrammarError("the model has no token that ends a text, so nothing could end a structured output")
        try:
            self.backend: LLTokenizer = LLTokenizer(
                source.json, n_vocab=vocab_size, eos_token=sorted(self.eos_token_ids)
            )
        except Exception as error:  # noqa: BLE001 (the library raises plain exceptions)
            raise GrammarError(f"this model's tokenizer cannot be used for structured output: {error}") from None
        # The library also counts some added tokens as special that the tokenizer itself counts as text.
        added = source.added_token_ids.items()
        self.mark_token_ids = {name: i for name, i in added if i < vocab_size and self.backend.is_special_token(i)}
        self.num_words = -(-vocab_size // 32)
        self._starts: dict[bytes, np.ndarray] = {}
        self._lock = threading.Lock()
        self._vocab_size = vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, none for special ones."""
        return b"" if self.backend.is_special_token(token_id) else self.backend.decode_bytes([token_id])

    def find_runs(self) -> None:
        """Make the masks that bound runs of numbers and white space."""
        for alphabet, _ in _RUNS:
            self.starting_with(alphabet)

    def starting_with(self, alphabet: bytes) -> np.ndarray:
        """The words of a mask of the tokens whose first byte is in ``alphabet``."""
        with self._lock:
            if alphabet not in self._starts:
                firsts = {bytes([byte]) for byte in alphabet}
                hits = [self.token_bytes(i)[:1] in firsts for i in range(self._vocab_size)]
                bits = np.zeros(self.num_words * 32, dtype=np.uint8)
                bits[: len(hits)] = hits
                self._starts[alphabet] = np.packbits(bits, bitorder="little").view(np.int32)
            return self._starts[alphabet]


class _RunBounds:
    """Keeps numbers and white space between the strings of a JSON text from going on for ever.

    JSON sets no limit to either, and small models find no way out. After so many bytes of one, tokens that begin with
    another are left out, as long as others remain.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._in_string = False
        self._escaped = False
        self._tail = b""

    def accept(self, token_id: int) -> None:
        """Follow a token."""
        for byte in self._tokenizer.token_bytes(token_id):
            if self._in_string:
                self._in_string = self._escaped or byte != 0x22
                self._escaped = byte == 0x5C and not self._escaped
                self._tail = b""
            else:
                self._in_string = byte == 0x22
                self._tail = (self._tail + bytes([byte]))[-64:]

    def apply(self, words: np.ndarray) -> None:
        """Take what would go on too long out of a mask."""
        for alphabet, limit in _RUNS:
            if len(self._tail) - len(self._tail.rstrip(alphabet)) >= limit:
                rest = words & ~self._tokenizer.starting_with(alphabet)
                if rest.any():
                    words[:] = rest


class LLGuidanceMatcher:
    """One text under one grammar; see `headrace.control.grammar.protocol.Matcher`."""

    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer, bounds: _RunBounds | None) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._bounds = bounds
        self._over = False

    def accept(self, token_ids: list[int]) -> str | None:
        """Advance over tokens; the error when one of them is not allowed."""
        for token_id in token_ids:
            if self._over:
                # A request that ignores the end of a text goes on with the token that ends it.
                return None
            if not self._matcher.consume_token(token_id):
                reason = self._matcher.get_error()
                return explain_limit(reason) or f"the grammar does not allow token {token_id}: {explain(reason)}"
            if token_id in self._tokenizer.eos_token_ids and self._matcher.is_stopped():
                self._over = True
            elif self._bounds is not None:
                self._bounds.accept(token_id)
        return None

    def fill_mask(self, words: np.ndarray) -> str | None:
        """Set the bits of the tokens that may come next."""
        assert words.dtype == np.int32 and words.flags.c_contiguous and len(words) == self._tokenizer.num_words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(0)
            return explain_limit(self._matcher.get_error()) or explain(self._matcher.get_error())
        if self._bounds is not None:
            self._bounds.apply(words)
        return None


class CompiledGrammar:
    """A grammar at the start of a text, never advanced itself; ``first`` is the mask there."""

    def __init__(self, matcher: LLMatcher, tokenizer: GrammarTokenizer, bounds_runs: bool, first: np.ndarray) -> None:
        self.first = first
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._bounds_runs = bounds_runs

    def make_matcher(self) -> LLGuidanceMatcher:
        """A matcher at the start of a text."""
        bounds = _RunBounds(self._tokenizer) if self._bounds_runs else None
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._tokenizer, bounds)


def compile_grammar(params: StructuredOutputParams, tokenizer: GrammarTokenizer) -> CompiledGrammar:
    """Compile, and make the first mask, so that what nothing can satisfy is found before any token.

    Raises:
        GrammarError: it cannot be enforced as asked.
        InvalidRequestError: it has a wrong shape.
    """
    from llguidance import LLMatcher, LLParserLimits

    source = make_source(params, tokenizer.mark_token_ids)
    limits = LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer.backend, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarError(explain(matcher.get_error()))
    if matcher.get_grammar_warnings():
        raise GrammarError(explain(matcher.get_grammar_warnings()[0]))
    probe = matcher.deep_copy()
    first = np.zeros(tokenizer.num_words, dtype=np.int32)
    probe.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
    if probe.is_error():
        if probe.get_error().startswith("NoExtension"):
            raise GrammarError("no text can satisfy it")
        raise GrammarError(explain_limit(probe.get_error()) or explain(probe.get_error()))
    bounds_runs = is_json_throughout(params)
    if bounds_runs:
        # Here, on a thread, and not when the first run is met.
        tokenizer.find_runs()
    return CompiledGrammar(matcher, tokenizer, bounds_runs, first)


def explain_limit(text: str) -> str | None:
    """Which limit the library's message is about, if any."""
    for words, limit in _TOO_COSTLY:
        if words in text.lower():
            return f"{GRAMMAR_TOO_COSTLY}: {limit}; use a simpler one"
    return None


def explain(text: str) -> str:
    """The library's message in one short line that does not repeat what the client sent."""
    named = re.search(r"^error: (.*)$", text, re.MULTILINE) or re.search(r"\(in regex\): ([^;\n]*)", text)
    if named:
        return f"the regular expression is not supported: {named.group(1)[:200].rstrip()}"
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    line = re.sub(r"^at \d+\(\d+\): ", "", line)
    line = re.sub(r"following special tokens are available.*", "", line)
    return line[:200].rstrip("; ")


class GrammarCompilation:
    """See `headrace.control.grammar.protocol.Compilation`; who may wait waits for ``future``, which never raises."""

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._deadline = clock.monotonic() + limit_s + MAX_TOKENIZER_S
        self._outcome: CompiledGrammar | GrammarError | None = None
        self.future: Future[CompiledGrammar | GrammarError] = Future()

    def begin(self) -> None:
        """The work proper begins: from now on its own limit counts."""
        self._deadline = self._clock.monotonic() + self._limit_s

    def refuse(self, reason: str) -> None:
        """There will be no grammar."""
        self._outcome = GrammarError(reason)

    @property
    def done(self) -> bool:
        """Whether it has ended: well, with an error, or because its time was over."""
        if self._outcome is None:
            if self.future.done():
                self._outcome = self.future.result()
            elif self._clock.monotonic() > self._deadline:
                self.refuse(f"compiling the grammar took longer than {self._limit_s:g} s")
        return self._outcome is not None

    def get_error(self) -> str | None:
        """Why there is no grammar."""
        return str(self._outcome) if isinstance(self._outcome, GrammarError) else None

    def may_begin_with(self, token_id: int) -> bool:
        """Whether a text can begin with a token; never with one that is out of range."""
        assert isinstance(self._outcome, CompiledGrammar)
        words = self._outcome.first
        return 0 <= token_id < 32 * len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)

    def make_matcher(self) -> LLGuidanceMatcher:
        """A matcher at the start of a text."""
        assert isinstance(self._outcome, CompiledGrammar)
        return self._outcome.make_matcher()


class LLGuidanceCompiler:
    """Compiles on a few threads.

    Args:
        load: gives the model's tokenizer; called once, on a thread.
        vocab_size: width of the logits.
        clock: for the time limit.
        limit_s: most seconds that one compilation may take.
    """

    def __init__(self, load: Callable[[], TokenizerSource], vocab_size: int, clock: Clock, limit_s: float) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._clock = clock
        self._limit_s = limit_s
        self._pool = DaemonPool("grammar")
        self._lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | GrammarError | None = None
        self._cache: OrderedDict[StructuredOutputParams, GrammarCompilation] = OrderedDict()

    def prepare(self) -> Future[None]:
        """Begin to make the library's tokenizer, which holds the interpreter for a while and stalls all threads."""
        return self._pool.submit(self._prepare)

    def compile(self, params: StructuredOutputParams) -> GrammarCompilation:
        """Begin to compile, or return what is there for equal parameters."""
        known = self._cache.get(params)
        if known is not None and not (known.done and known.get_error()):
            self._cache.move_to_end(params)
            return known
        made = GrammarCompilation(self._clock, self._limit_s)
        try:
            made.future = self._pool.submit(lambda: self._work(params, made))
        except PoolFullError:
            made.refuse("too many grammars wait to be compiled")
            return made
        self._cache[params] = made
        if len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return made

    def _work(self, params: StructuredOutputParams, compilation: GrammarCompilation) -> CompiledGrammar | GrammarError:
        tokenizer = self._get_tokenizer()
        if isinstance(tokenizer, GrammarError):
            return tokenizer
        compilation.begin()
        try:
            return compile_grammar(params, tokenizer)
        except (GrammarError, HeadraceError) as error:
            return GrammarError(str(error))
        except Exception as error:
            logger.exception("compiling a grammar failed")
            return GrammarError(f"compiling the grammar failed: {type(error).__name__}")

    def _prepare(self) -> None:
        tokenizer = self._get_tokenizer()
        if isinstance(tokenizer, GrammarTokenizer):
            tokenizer.find_runs()
        # Reading tokenizers leaves a heap behind that is larger than they are.
        give_back_memory()

    def _get_tokenizer(self) -> GrammarTokenizer | GrammarError:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = GrammarTokenizer(self._load(), self._vocab_size)
                except GrammarError as error:
                    self._tokenizer = error
                except Exception:
                    # Its words may name files, and what is said here goes to clients.
                    logger.exception("the tokenizer cannot be read for structured outputs")
                    self._tokenizer = GrammarError("the tokenizer cannot be read; the server's log has the cause")
            return self._tokenizer
