"""Grammars for one model's vocabulary, and the state of one answer in one of them.

xgrammar does the work; it is imported with the first grammar, since it takes seconds, and numpy with it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...schemas.errors import GenerationFailed, InvalidRequest
from ...schemas.params import GenerationParams, Grammar
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_port import TokenizerLike
from .free_text import free_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from xgrammar import CompiledGrammar, GrammarMatcher

    Mask = NDArray[np.int32]
    """One bit a token of the vocabulary, lowest bit first; set: the token may come next."""

_CACHE_BYTES = 256 << 20  # of compiled grammars; those used least recently go first
_DEAREST = 0.02  # seconds of computing for one mask; one of 150,000 tokens takes 0.0002
_LONGEST_REASON = 200
# xgrammar lets strings with a bounded length hold control characters, which JSON does not.
_UNFIT = {"json_schema": re.compile(rb"[\x00-\x1f]"), "structural_tag": re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")}


class GrammarCompiler:
    """Compiles grammars for one tokenizer, remembering the latest; may be used from several threads."""

    def __init__(self, tokenizer: TokenizerLike, *, cache_bytes: int = _CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()  # guards `_made`
        self._made: Any = None
        self._texts: list[bytes] = []  # of each token; set by `_make`
        self._permitted = lru_cache(maxsize=16)(self._permit)
        self._words = lru_cache(maxsize=16)(self._find_words)
        self._ends: Mask  # of the end tokens; set by `_make`

    def matcher(self, params: GenerationParams) -> Matcher | None:
        """A fresh matcher for `params.grammar`, if there is one. Raises as `compile` does."""
        if params.grammar is None:
            return None
        return self._begin(params.grammar, self._compiled(params.grammar), frozenset(params.visible_token_ids))

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Fast for a grammar that is remembered; others may take seconds, in which other threads go on.

        White space in JSON is what `json.dumps` writes: a model could go on with it for ever.
        Raises `InvalidRequest` for a grammar that xgrammar does not take, that allows no answer at all, or that is too
        ambiguous to follow.
        """
        compiled = self._compiled(grammar)
        first = self._begin(grammar, compiled, self._tokenizer.special_token_ids)
        if not first.mask().any():
            raise _refusal("the grammar allows no answer")
        if first.cost > _DEAREST:
            raise _refusal(f"the grammar is too ambiguous: it takes {first.cost * 1000:.0f} ms a token")
        return compiled

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        compiler = self._compiler()
        try:
            match grammar.kind:
                case "json_schema":
                    compiled: CompiledGrammar = compiler.compile_json_schema(grammar.text, any_whitespace=False)
                case "regex":
                    compiled = compiler.compile_regex(grammar.text)
                case "ebnf":
                    compiled = compiler.compile_grammar(grammar.text)
                case "structural_tag":
                    compiled = compiler.compile_structural_tag(grammar.text)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise _refusal(f"the grammar cannot be used: {_reason(error)}") from error
        return compiled

    @property
    def cached_bytes(self) -> int:
        """What the remembered grammars take."""
        return int(self._compiler().get_cache_size_bytes())

    def load(self) -> None:
        """Do now what the first grammar would wait for. Raises `InvalidRequest` where the tokenizer is not fit."""
        self._compiler()

    def _begin(self, grammar: Grammar, compiled: CompiledGrammar, visible: frozenset[int]) -> Matcher:
        from xgrammar import GrammarMatcher

        free = free_text(grammar)
        words = None if free is None else Words(self._texts, self._words(free.openers), free.literals)
        return Matcher(GrammarMatcher(compiled), self._permitted(grammar.kind, visible), self._ends, words)

    def _compiler(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        if not isinstance(self._tokenizer, Tokenizer) or not self._tokenizer.eos_token_ids:
            raise InvalidRequest(
                "answers with a grammar need a Hugging Face tokenizer with an end token",
                code="unsupported_parameter",
                param="response_format",
            )
        import xgrammar

        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.huggingface,
            vocab_size=self._tokenizer.vocabulary_size,
            stop_token_ids=list(self._tokenizer.eos_token_ids),
        )
        self._texts = vocabulary.decoded_vocab
        self._ends = _bits(self._tokenizer.eos_token_ids, self._tokenizer.vocabulary_size)
        return xgrammar.GrammarCompiler(
            vocabulary, max_threads=1, cache_enabled=self._cache_bytes > 0, cache_limit_bytes=self._cache_bytes
        )

    def _permit(self, kind: str, visible: frozenset[int]) -> Mask:
        """All tokens but those unfit, and the special ones that the text would not show: no grammar can count them."""
        forbidden = set(self._tokenizer.special_token_ids - visible)
        if (unfit := _UNFIT.get(kind)) is not None:
            forbidden |= {token for token, text in enumerate(self._texts) if unfit.search(text)}
        return ~_bits(forbidden, self._tokenizer.vocabulary_size) | self._ends

    def _find_words(self, openers: frozenset[str]) -> Mask:
        """All tokens that are whole characters, printable and none of `openers`."""
        special = self._tokenizer.special_token_ids
        words = (one for one, text in enumerate(self._texts) if one not in special and _is_printable(text, openers))
        return _bits(words, self._tokenizer.vocabulary_size) & ~self._ends


class Words(NamedTuple):
    """What leaves free text as it is: tokens of `mask`, once one of them has shown that no literal is under way."""

    texts: Sequence[bytes]  # of all tokens
    mask: Mask
    literals: tuple[str, ...]

    def has(self, token: int) -> bool:
        return bool(self.mask[token >> 5] >> (token & 31) & 1)

    def settles(self, token: int) -> bool:
        """Whether a token of `mask`, none of which begins a literal, is not the middle of one either."""
        text = self.texts[token].decode()
        return not any(text in literal for literal in self.literals)


class Matcher:
    """Where one answer is in its grammar. Used by one thread at a time.

    A mask of 150,000 tokens takes 0.17 ms within free text, where many tokens hold what may end it and something behind
    that, and 0.05 to 0.1 elsewhere. Words leave it as it is.
    """

    def __init__(self, matcher: GrammarMatcher, permitted: Mask, ends: Mask, words: Words | None = None) -> None:
        """`permitted` is a mask of what any place in the grammar may allow, `ends` one of the end tokens."""
        self._matcher = matcher
        self._permitted = permitted
        self._mask = permitted.copy()
        self._current = False  # whether `_mask` is of this place; set by `mask` and `accept`
        self._ends = ends
        self._words = words
        self._free = False  # whether `_mask` is one of free text; set by `mask`
        self._settled = False  # whether no literal can be under way; set by `accept`
        self.cost = 0.0  # seconds of computing that the newest mask took; set by `mask`

    def mask(self) -> Mask:
        """The tokens that may come next; valid until `accept`. An end token is among them once the answer is whole."""
        if not self._current:
            begun = time.thread_time()
            self._matcher.fill_next_token_bitmask(self._mask)
            self.cost = time.thread_time() - begun
            self._mask &= self._permitted
            words = self._words
            settled = words is not None and (self._settled or not words.literals)
            self._free = words is not None and settled and not (words.mask & ~self._mask).any()
            self._current = True
        return self._mask

    def accept(self, token: int) -> None:
        """Go on by a token that is not an end token.

        Raises `GenerationFailed` where the grammar has no such place, or is so ambiguous that others would wait for it.
        """
        if self.cost > _DEAREST:
            raise GenerationFailed(
                f"the answer's grammar is too ambiguous: it takes {self.cost * 1000:.0f} ms a token; "
                "repetitions of repetitions, as in (a*)*, do that"
            )
        if not self._matcher.accept_token(token):
            raise GenerationFailed(f"token {token} does not fit into the answer's grammar")
        words = self._words
        is_word = words is not None and words.has(token)
        self._current = self._current and self._free and is_word
        self._settled = words is not None and is_word and (self._settled or words.settles(token))

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole and nothing can follow but its end."""
        return self._matcher.is_completed() and not (self.mask() & ~self._ends).any()


def _is_printable(raw: bytes, but: Collection[str]) -> bool:
    """Whether it is whole characters, all printable and none of `but`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() and text != "" and not any(character in text for character in but)


def _bits(tokens: Iterable[int], size: int) -> Mask:
    import numpy as np

    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[[token for token in tokens if token < size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_grammar", param="response_format")


def _reason(error: Exception) -> str:
    """xgrammar's message without its time stamp and place in the source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip() or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"
