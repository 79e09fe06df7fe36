"""A tokenizer without files: every byte of UTF-8 is a token. For the echo backend and for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .chat_messages import flatten, normalise
from .tokenizer_port import Piece

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
_SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": TURN_START, "<|im_end|>": TURN_END}
_NAMES = {token: name for name, token in _SPECIAL.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _SPECIAL)) + ")")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, three more end a text, open and close a turn. Chats are written as ChatML."""

    vocabulary_size = 259
    eos_token_ids = (END_OF_TEXT, TURN_END)
    special_token_ids = frozenset(_NAMES)
    vocabulary: Mapping[str, int] = MappingProxyType(_SPECIAL)
    chat_template = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` changes nothing: there is no token for the beginning of a text."""
        ids: list[int] = []
        for part in _SPLIT.split(text):
            special = _SPECIAL.get(part)
            ids.extend(part.encode() if special is None else [special])
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        try:
            return bytes(ids).decode("utf-8", errors="replace")
        except ValueError:  # a special token is no byte
            names = {} if skip_special_tokens else _NAMES
            raw = b"".join(bytes([token]) if token < 256 else names.get(token, "").encode() for token in ids)
            return raw.decode("utf-8", errors="replace")

    def piece(self, token: int) -> Piece:
        text = self.decode([token])
        return Piece(text, (token,) if token < 256 else tuple(text.encode()))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """ChatML; tools go in front as JSON, and template arguments change nothing."""
        turns = [("system", json.dumps(list(tools), sort_keys=True))] if tools else []
        turns += [(str(message.get("role")), flatten(message["content"])) for message in normalise(messages, "")]
        body = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return body + "<|im_start|>assistant\n"

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        return self.encode(self.render_chat(messages, tools, **template_kwargs), add_special_tokens=False)
