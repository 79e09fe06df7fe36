"""Token by token from ids to text, never half a character.

`tokenizers.decoders.DecodeStream` does the same for valid text, but it cannot be flushed and raises on some invalid
UTF-8; this works for any tokenizer with a `decode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tokenizer_port import TokenizerLike

_PRIMING = 6  # prompt tokens in front, since a decoder may treat the first token of a text differently
_WINDOW = 16  # tokens decoded together before the window moves on
_MAX_INCOMPLETE = 64  # a character has four bytes: a longer run is no text, and decoding it again would be quadratic


class Detokenizer:
    """The clean text of one choice: special tokens give none, but for those named as visible.

    The pieces of `push` and the final `flush` together are the decoding of all tokens at once (after the prompt).
    Only a run of more than 64 tokens that is no valid UTF-8 may give other replacement characters.
    """

    def __init__(
        self, tokenizer: TokenizerLike, prompt: Sequence[int], visible: Iterable[int] = (), *, spaces: bool = True
    ) -> None:
        """Without `spaces` there is none between two special tokens that are visible."""
        self._decode = tokenizer.decode
        self._special = tokenizer.special_token_ids.difference(visible)
        self._close = frozenset[int]() if spaces else tokenizer.special_token_ids.intersection(visible)
        self._window = [token for token in prompt[-_PRIMING:] if token not in self._special]
        self._complete = len(self._window)  # tokens of the window whose characters are all out
        self._shown = len(self._decode(self._window))  # characters of the window's text that are out

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith("\ufffd") and len(self._window) - self._complete < _MAX_INCOMPLETE:
            return ""
        piece = text[self._shown :]
        if token in self._close and self._window[-2:-1] and self._window[-2] in self._close:
            piece = piece.lstrip(" ")
        if len(self._window) > _WINDOW:
            del self._window[: self._complete]
            text = self._decode(self._window)
        self._complete = len(self._window)
        self._shown = len(text)
        return piece

    def flush(self) -> str:
        """What is left at the end: an incomplete character, as replacement characters. Nothing may be pushed after."""
        return self._decode(self._window)[self._shown :]
