"""The tokenizer: byte-level BPE that is easy to copy with, and conversations as tokens with the weight of each.

Letters, single digits, line ends and everything between them are separate pieces: ` Paris` and `"Paris` then hold the
same token, so that a small model copies a word out of a sentence into JSON without knowing how to spell it. Phrases
that every definition of a tool repeats are tokens of their own, which makes a prompt with tools three times shorter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from corpus import Sample
from jinja2 import Environment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Not special, as in Qwen3: they are part of what the model says.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
PHRASES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n",
    "</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call>"
    '</tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "string',
    '": {"type": "integer',
    '": {"type": "number',
    '": {"type": "boolean',
    '"}}, "required": ["',
)
PIECES = r"\p{Lu}?\p{Ll}+|\p{Lu}+|\p{L}+|\p{N}|\n+|[^\p{L}\p{N}\n]+"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
THINK = "<think>\n"


class Encoded(NamedTuple):
    """A conversation in tokens; `said[i]` tells whether token i is the assistant's own and so to be learnt."""

    ids: list[int]
    said: list[bool]


def train_tokenizer(texts: Iterable[str], size: int) -> Tokenizer:
    """A tokenizer of `size` entries for texts like these; the same texts give the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    own: list[str | AddedToken] = [AddedToken(text, normalized=False) for text in (*SPECIAL, *TAGS, *PHRASES)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=own,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    cut = [piece for text in texts for piece in _without(text, (*SPECIAL, *TAGS, *PHRASES))]
    tokenizer.train_from_iterator(cut, trainer)
    written = json.loads(tokenizer.to_str())
    for token in written["added_tokens"]:  # the trainer makes all of them special
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(written))


def _without(text: str, tokens: tuple[str, ...]) -> list[str]:
    """What lies between these tokens in `text`; the longest comes first."""
    pieces = [text]
    for token in sorted(tokens, key=len, reverse=True):
        pieces = [piece for whole in pieces for piece in whole.split(token)]
    return pieces


class Codec:
    """Renders conversations with the chat template, and encodes them."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        environment = Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(TEMPLATE.read_text())
        self.tokenizer = tokenizer

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **switches: bool
    ) -> str:
        """The conversation as text, as `apply_chat_template` of transformers renders it."""
        return self._template.render(messages=messages, tools=tools, **switches)

    def encode(self, sample: Sample) -> Encoded:
        """A whole conversation. The opening of a thought is the template's to write, and so not learnt."""
        assert self.tokenizer is not None
        text = self.render(sample.messages, sample.tools)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        opening = self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
        thought = self.tokenizer.encode(THINK, add_special_tokens=False).ids
        end = self.tokenizer.token_to_id("<|im_end|>")
        said = [False] * len(ids)
        place = 0
        while place < len(ids):
            if ids[place] != opening[0] or ids[place : place + len(opening)] != opening:
                place += 1
                continue
            place += len(opening)
            if ids[place : place + len(thought)] == thought:
                place += len(thought)
            while ids[place] != end:
                said[place] = True
                place += 1
            said[place] = True
        return Encoded(ids, said)
