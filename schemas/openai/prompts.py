"""The four forms of a prompt in OpenAI's bodies: text, token ids, or a list of one or the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator


def _is_prompt(value: object) -> object:
    match value:
        case str():
            return value
        case [_, *_] as items if all(isinstance(item, str) for item in items) or _are_token_ids(items):
            return value
        case [_, *_] as items if all(isinstance(item, list) and _are_token_ids(item) for item in items):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def _are_token_ids(value: Sequence[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], BeforeValidator(_is_prompt)]


def as_list(prompt: Prompt) -> list[str | list[int]]:
    """Each prompt as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    one = [token for token in prompt if isinstance(token, int)]
    return [one] if one else [each for each in prompt if not isinstance(each, int)]
