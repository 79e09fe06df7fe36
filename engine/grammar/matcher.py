"""Compiles grammars for one model's vocabulary, and follows one answer through its grammar, both with xgrammar.

xgrammar and numpy are imported with the first grammar: that takes seconds.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ...schemas.errors import GenerationFailed, InvalidRequest
from ...schemas.params import GenerationParams, Grammar
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_port import TokenizerLike
from .faults import reason, refusal
from .free_text import FreeTokens, free_text
from .importing import for_xgrammar
from .schema_facts import is_bounded, longest_counted
from .string_schemas import MAX_CHEAP_LENGTH, MAX_PATTERNS
from .tabs import Tabs, may_be_counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from xgrammar import CompiledGrammar, GrammarMatcher

    Mask = NDArray[np.int32]
    """One bit a token of the vocabulary, lowest bit first; set: the token may come next."""

_CACHE_BYTES = 256 << 20  # of compiled grammars; then all are forgotten
_COUNTED = 3  # xgrammar counts a third of the memory that grammars take
_MAX_COMPILED_BYTES = 64 << 20  # of one grammar; what schemas in use take is a few MiB at most
_MOST_COUNTING = 50_000  # tokens of a vocabulary, with which xgrammar may count: it looks at most of them for each mask
_MAX_MASK_SECONDS = 0.02  # of CPU time; a mask of 150,000 tokens takes 0.0002
_MAX_MEAN_SECONDS = 0.004  # of CPU time that a token may take in all, masks included
_MAX_AHEAD_SECONDS = 0.05  # by which the sum may exceed that
_MAX_FORCED_SECONDS = 0.001  # that a mask may take where those behind it are made ahead
_MAX_LOOK_SECONDS = 0.004  # that looking ahead may take; an answer where it once takes longer does without
_MAX_FORCED_TOKENS = 32  # that are looked ahead for what has to come
_MAX_FORCED_WORDS = 64  # of a mask, that have bits where all tokens begin alike
# xgrammar allows control characters in strings with a bounded length; JSON does not. In all grammars it allows what
# looks like UTF-8 and is none: characters in too many bytes, halves of surrogate pairs, and characters beyond the last
# one. By the first byte of a character, what its second cannot be:
_NO_SECOND = {b"\xe0": rb"[\x80-\x9f]", b"\xed": rb"[\xa0-\xbf]", b"\xf0": rb"[\x80-\x8f]", b"\xf4": rb"[\x90-\xbf]"}
_NO_CHARACTER = b"|".join(map(b"".join, _NO_SECOND.items()))
_FORBIDDEN = {
    "json_schema": re.compile(rb"[\x00-\x1f]|" + _NO_CHARACTER),
    "structural_tag": re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\"[^\"]*\t|" + _NO_CHARACTER),
    "regex": re.compile(_NO_CHARACTER),
    "ebnf": re.compile(_NO_CHARACTER),
}
_FORBIDDEN_AFTER = {first: re.compile(second) for first, second in _NO_SECOND.items()}


class GrammarCompiler:
    """Compiles grammars for one tokenizer and caches them; may be used from several threads."""

    def __init__(
        self, tokenizer: TokenizerLike, *, cache_bytes: int = _CACHE_BYTES, max_bytes: int = _MAX_COMPILED_BYTES
    ) -> None:
        """`cache_bytes` of compiled grammars are kept, and one that takes more than `max_bytes` is refused."""
        self._tokenizer = tokenizer
        self._cache_bytes, self._max_bytes = cache_bytes, max_bytes
        self._kept: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()  # that somebody holds
        self._lock = threading.Lock()  # guards the next two
        self._vocabulary: Any = None  # xgrammar's
        self._xgrammar: Any = None
        self._texts: list[bytes] = []  # of each token; set by `_read_vocabulary`
        self._permitted = lru_cache(maxsize=16)(self._permit)
        self._free_tokens = lru_cache(maxsize=16)(self._find_free_tokens)
        self._after = lru_cache(maxsize=1)(self._find_after)
        self._tabs = lru_cache(maxsize=1)(self._find_tabs)
        self._ends: Mask  # of the end tokens; set by `_read_vocabulary`

    def matcher(self, params: GenerationParams) -> Matcher | None:
        """A fresh matcher for `params.grammar`, if there is one. Raises as `compile` does."""
        if params.grammar is None:
            return None
        return self._matcher(params.grammar, self._compiled(params.grammar), frozenset(params.visible_token_ids))

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or return it from the cache; may take seconds, without holding up other threads.

        White space in JSON is what `json.dumps` writes; if any were allowed, a model could write it forever.
        Raises `InvalidRequest` for a grammar that xgrammar refuses, that allows no answer at all, or that is too
        ambiguous to follow.
        """
        compiled = self._compiled(grammar)
        first = self._matcher(grammar, compiled, self._tokenizer.special_token_ids)
        if not first.mask().any():
            raise refusal("the grammar allows no answer")
        if first.cost > _MAX_MASK_SECONDS:
            raise refusal(f"the grammar is too ambiguous: it takes {first.cost * 1000:.0f} ms a token")
        if (size := compiled.memory_size_bytes >> 10) > (most := self._max_bytes >> 10):
            raise refusal(f"the grammar takes {size} KiB when it is compiled, and may take {most}; make it shorter")
        return compiled

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        if (kept := self._kept.get(grammar)) is not None:
            return kept
        compiled = self._kept[grammar] = self._compile(grammar)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        tokens = self._tokenizer.vocabulary_size
        if tokens > _MOST_COUNTING and longest_counted(grammar) > MAX_CHEAP_LENGTH:
            raise refusal(
                f"minLength and maxLength above {MAX_CHEAP_LENGTH} may come to {MAX_PATTERNS} characters together with "
                f"this model's vocabulary of {tokens:,} tokens, each length counted once; leave some out"
            )
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
            raise refusal(f"the grammar cannot be used: {reason(error)}") from error
        return compiled

    def load(self) -> None:
        """Import and set up xgrammar now, before the first grammar. Raises `InvalidRequest` for a wrong tokenizer."""
        self._compiler()

    def _matcher(self, grammar: Grammar, compiled: CompiledGrammar, visible: frozenset[int]) -> Matcher:
        from xgrammar import GrammarMatcher

        free = free_text(grammar)
        tokens = None if free is None else FreeTokens(self._texts, self._free_tokens(free.openers), free.literals)
        permitted = self._permitted(grammar.kind, visible)
        tabs = self._tabs() if may_be_counted(grammar) else None
        following, bounded = GrammarMatcher(compiled), is_bounded(grammar)
        return Matcher(following, permitted, self._ends, self._texts, self._after(), tokens, tabs, bounded=bounded)

    def _compiler(self) -> Any:
        """xgrammar's compiler, an empty one where the cache is full.

        Its own limit forgets parts that are shared before the grammars that hold them, and then counts neither.
        """
        with self._lock:
            if self._xgrammar is not None and self._xgrammar.get_cache_size_bytes() * _COUNTED <= self._cache_bytes:
                return self._xgrammar
            self._vocabulary = self._vocabulary or self._read_vocabulary()
            from xgrammar import GrammarCompiler as Compiler

            self._xgrammar = Compiler(self._vocabulary, max_threads=1, cache_enabled=self._cache_bytes > 0)
            return self._xgrammar

    def _read_vocabulary(self) -> Any:
        if not isinstance(self._tokenizer, Tokenizer) or not self._tokenizer.eos_token_ids:
            raise InvalidRequest(
                "answers with a grammar need a Hugging Face tokenizer with an end token",
                code="unsupported_parameter",
                param="response_format",
            )
        import xgrammar

        vocabulary = xgrammar.TokenizerInfo.from_huggingface(
            for_xgrammar(self._tokenizer),
            vocab_size=self._tokenizer.vocabulary_size,
            stop_token_ids=list(self._tokenizer.eos_token_ids),
        )
        self._texts = vocabulary.decoded_vocab
        self._ends = _bits(self._tokenizer.eos_token_ids, self._tokenizer.vocabulary_size)
        return vocabulary

    def _permit(self, kind: str, visible: frozenset[int]) -> Mask:
        """All tokens but those forbidden, and special tokens that the text does not show: no grammar sees them."""
        special = _bits(self._tokenizer.special_token_ids - visible, self._tokenizer.vocabulary_size)
        known = _bits(range(self._tokenizer.vocabulary_size), self._tokenizer.vocabulary_size)
        return (known & ~(special | self._tokens_with(_FORBIDDEN[kind].search))) | self._ends

    def _find_after(self) -> dict[bytes, Mask]:
        """What may follow a token that ends with one of these bytes."""
        return {byte: ~self._tokens_with(pattern.match) for byte, pattern in _FORBIDDEN_AFTER.items()}

    def _find_tabs(self) -> Tabs:
        return Tabs(*(self._tokens_with(re.compile(pattern).search) for pattern in (rb"\t", rb"\A\n")))

    def _tokens_with(self, found: Callable[[bytes], object]) -> Mask:
        tokens = (token for token, text in enumerate(self._texts) if found(text))
        return _bits(tokens, self._tokenizer.vocabulary_size)

    def _find_free_tokens(self, openers: frozenset[str]) -> Mask:
        """All tokens that are whole printable characters, none of them in `openers`."""
        excluded = {*openers, "\ufffd"}  # which stands for what is no whole character
        texts = enumerate(raw.decode(errors="replace") for raw in self._texts)
        tokens = {token for token, text in texts if text and text.isprintable() and excluded.isdisjoint(text)}
        return _bits(tokens - self._tokenizer.special_token_ids, self._tokenizer.vocabulary_size) & ~self._ends


class Matcher:
    """The state of one answer in its grammar. Used by one thread at a time.

    xgrammar takes 0.17 ms for a mask of 150,000 tokens within free text, where many tokens hold both what may end it
    and something after that, and 0.05 to 0.1 ms elsewhere. The mask is kept where only free tokens came since.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        permitted: Mask,
        ends: Mask,
        texts: Sequence[bytes],
        after: Mapping[bytes, Mask],
        free: FreeTokens | None = None,
        tabs: Tabs | None = None,
        *,
        bounded: bool = False,
    ) -> None:
        """`permitted` is a mask of the tokens that any state of the grammar may allow, `ends` of the end tokens.
        `texts` are those of all tokens, and `after` has what may follow those that end with a byte. `bounded`: no text
        is long that the grammar forces."""
        self._matcher = matcher
        self._is_bounded = bounded
        self._texts = texts
        self._after = after
        self._permitted = permitted
        self._follows: Mask | None = None  # the newest token; set by `accept`
        self._mask = permitted.copy()
        self._is_current = False  # whether `_mask` is of this state; set by `mask` and `accept`
        self._ends = ends
        self._free = free
        self._tabs = tabs
        self._is_free = False  # whether `_mask` is one of free text; set by `mask`
        self._is_settled = False  # whether a free token has ruled out an unfinished literal; set by `accept`
        self.cost = 0.0  # seconds of CPU time that the newest mask took; set by `mask`
        self._newest = 0.0  # seconds that the newest token took; set by `accept`
        self._was_slow = False  # whether the one before took too long, as one does now and then; set by `accept`
        self._spent = 0.0  # seconds that all masks and tokens took; set by `mask` and `accept`
        self._num_taken = 0  # tokens; set by `accept`
        self._looks_ahead = True  # set by `forced`

    def mask(self) -> Mask:
        """The tokens that may come next; valid until `accept`. An end token is among them once the answer is whole."""
        if not self._is_current:
            begun = time.thread_time()
            self._matcher.fill_next_token_bitmask(self._mask)
            self.cost = time.thread_time() - begun
            self._spent += self.cost
            self._mask &= self._permitted
            if self._follows is not None:
                self._mask &= self._follows
            if self._tabs is not None:
                self._tabs.remove(self._mask)
            free = self._free
            settled = free is not None and (self._is_settled or not free.literals)
            self._is_free = free is not None and settled and not (free.mask & ~self._mask).any()
            self._is_current = True
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by a token that is not an end token.

        Raises `GenerationFailed` where the grammar does not allow it, or is so ambiguous that others would wait for it.
        """
        took, allowed = max(self.cost, self._newest), _MAX_AHEAD_SECONDS + _MAX_MEAN_SECONDS * self._num_taken
        if (took > _MAX_MASK_SECONDS and self._was_slow) or self._spent > allowed:
            took = max(took, self._spent / (self._num_taken + 1))
            raise GenerationFailed(
                f"the answer's grammar is too ambiguous: it takes {took * 1000:.0f} ms a token; "
                "repetitions of repetitions, as in (a*)*, do that"
            )
        self._was_slow, self.cost = took > _MAX_MASK_SECONDS, 0.0
        begun = time.thread_time()
        if not self._matcher.accept_token(token):
            raise GenerationFailed(f"token {token} does not fit into the answer's grammar")
        self._newest = time.thread_time() - begun
        self._spent += self._newest
        self._num_taken += 1
        self._follows = self._after.get(self._texts[token][-1:])
        free = self._free
        is_free = free is not None and free.has(token)
        self._is_current = self._is_current and self._is_free and is_free
        self._is_settled = free is not None and is_free and (self._is_settled or free.settles(token))

    def forced(self, most: int) -> str:
        """The text that is likely to have to come next, in whatever tokens; empty where there is a choice.

        It ends soon after `most` bytes, unless the grammar is bounded. xgrammar's own search for it takes less time,
        but has no end where the text has none, as with `root ::= "a" root`, and fills the memory. The other takes what
        tokens there are: a text may follow that no longer token begins with.
        """
        mask = self.mask()
        if self._is_free or self.cost > _MAX_FORCED_SECONDS or not self._looks_ahead:
            return ""
        begun = time.thread_time()
        try:
            if self._is_bounded:
                return str(self._matcher.find_jump_forward_string())
            return self._ahead(mask, most).decode()
        except UnicodeDecodeError as error:  # it ends within a character, where several begin with the same byte
            return bytes(error.object[: error.start]).decode()
        finally:
            self._looks_ahead = time.thread_time() - begun <= _MAX_LOOK_SECONDS

    def _ahead(self, mask: Mask, most: int) -> bytes:
        """What all tokens of `mask` begin with, and those behind the longest of them, until there is a choice."""
        found, ahead = b"", None
        for _ in range(_MAX_FORCED_TOKENS):
            piece, has_more = self._common(mask)
            found += piece
            if not has_more or len(found) >= most:
                break
            ahead = ahead or self._matcher.fork()
            if not ahead.accept_string(piece):
                break
            mask = self._permitted.copy()
            ahead.fill_next_token_bitmask(mask)
            mask &= self._permitted
        return found

    def _common(self, mask: Mask) -> tuple[bytes, bool]:
        """How all tokens of a mask begin, and whether that is one of them, so that more may have to follow."""
        import numpy as np

        words = np.flatnonzero(mask)
        if not 0 < len(words) <= _MAX_FORCED_WORDS or (mask & self._ends).any():
            return b"", False
        bits = np.flatnonzero(np.unpackbits(mask[words].view(np.uint8), bitorder="little"))
        texts = [self._texts[token] for token in (words[bits >> 5] << 5) + (bits & 31)]
        longest = max(texts, key=len)
        if all(map(longest.startswith, texts)):
            return longest, True
        first, last = min(texts), max(texts)
        common = next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), 0)
        return first[:common], False

    @property
    def is_over(self) -> bool:
        """Whether the answer is whole and nothing can follow but its end."""
        return self._matcher.is_completed() and not (self.mask() & ~self._ends).any()


def _bits(tokens: Iterable[int], size: int) -> Mask:
    import numpy as np

    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[[token for token in tokens if token < size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
