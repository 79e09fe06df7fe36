"""Prompts for the gap between two texts, as models of code are trained to fill it, each with markers of its own."""

from __future__ import annotations

from typing import NamedTuple

from ...schemas.errors import InvalidRequest
from ..text.tokenizer_port import TokenizerLike, encode_within


class _Form(NamedTuple):
    """The markers in front of what precedes the gap and of what follows it, and the one behind both, if there is one.
    `suffix_first`: what follows the gap comes first."""

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False

    @property
    def marks(self) -> list[str]:
        return [mark for mark in (self.prefix, self.suffix, self.middle) if mark is not None]


_FORMS = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma, Granite 4
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Form("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    _Form("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed Coder
    _Form("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
# What such models write where the file, and with it the gap, ends; the tokens that end an answer may be a chat's alone.
_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|cursor|>"),
    *("<fim_pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>"),
)


class Infill:
    """The form of one model."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.vocabulary
        self._form = next((form for form in _FORMS if known.keys() >= {*form.marks}), None)
        names = [*self._form.marks, *_ENDS] if self._form else []
        self.is_known = self._form is not None
        self.end_ids = tuple(known[name] for name in names if name in known)

    def prompt(
        self, prefix: str | list[int], suffix: str, context_length: int, *, add_special_tokens: bool
    ) -> list[int]:
        """The tokens after which the model writes what stands between `prefix` and `suffix`.

        Raises `InvalidRequest` for a model without markers, and for far too long texts.
        """
        if self._form is None:
            raise InvalidRequest(
                "This model has no markers for the gap before a suffix; leave suffix out, or ask a model of code.",
                code="unsupported_parameter",
                param="suffix",
            )
        known = self._tokenizer.vocabulary
        before = self._encode(prefix, context_length, "prompt") if isinstance(prefix, str) else prefix
        before = [known[self._form.prefix], *before]
        after = [known[self._form.suffix], *self._encode(suffix, context_length, "suffix")]
        end = [known[self._form.middle]] if self._form.middle is not None else []
        begin = self._beginning() if add_special_tokens else []
        return [*begin, *(after + before if self._form.suffix_first else before + after), *end]

    def _encode(self, text: str, context_length: int, param: str) -> list[int]:
        """The tokens of a text that does not begin the prompt."""
        # SentencePiece puts a space before a text, so that it begins with a character that is taken away again.
        before = "\u263a" if "\u2581" in self._tokenizer.vocabulary else ""
        lead = self._tokenizer.encode(before, add_special_tokens=False)
        ids = encode_within(self._tokenizer, before + text, context_length, param, add_special_tokens=False)
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
        return self._tokenizer.encode(text, add_special_tokens=False)  # the character is part of a token

    def _beginning(self) -> list[int]:
        """The tokens that the model wants in front of any text."""
        bare, whole = (self._tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])
