"""What the engine and the validate stage ask of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ...schemas.errors import prompt_too_long

PIECE = 1 << 16  # characters that are tokenised before a long prompt is asked whether it is too long
BORDER = 64  # tokens of a piece that may be there only because it was cut, or that a tokenizer adds to each text


class Piece(NamedTuple):
    """One token by itself: its text, and its bytes where the text is only part of a character."""

    text: str
    bytes: tuple[int, ...]


class TokenizerLike(Protocol):
    """What the engine and the validate stage ask of a tokenizer. May be used from several threads."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids run from 0 to one less than this."""
        ...

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids by the tokens' own names."""
        ...

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template, of all of them where it has several; empty without any."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that clean text leaves out."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those that the model wants around a bare text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`, a replacement character for what is not valid UTF-8."""
        ...

    def piece(self, token: int) -> Piece:
        """One token by itself, for reporting log-probabilities."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that the chat template makes of `messages`. Raises `InvalidRequest`."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """`render_chat` in tokens."""
        ...


def encode_within(
    tokenizer: TokenizerLike, text: str, context_length: int, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """The tokens of a prompt. One that is far too long is refused before all of it is tokenised, which for a few
    megabytes takes seconds and hundreds of megabytes. Raises `InvalidRequest`.
    """
    refuse_far_too_long(tokenizer, text, context_length, param)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def refuse_far_too_long(tokenizer: TokenizerLike, text: str, context_length: int, param: str) -> None:
    """Raise `InvalidRequest` as soon as a long text has more tokens than the context."""
    found = 0
    for start in range(0, len(text), PIECE) if len(text) > PIECE else ():
        found += len(tokenizer.encode(text[start : start + PIECE], add_special_tokens=False)) - BORDER
        if found > context_length:
            raise prompt_too_long(f"more than {found}", context_length, param=param)
