"""The four forms of a prompt in OpenAI's bodies: text, token ids, or a list of one or the other."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator

from ..integers import as_integer


def _read(value: Any) -> Any:
    match value:
        case str():
            return value
        case [str(), *_] as items if all(isinstance(item, str) for item in items):
            return items
        case [list(), *_] as items if all(isinstance(item, list) for item in items):
            return list(map(_token_ids, items))
        case [_, *_] as items:
            return _token_ids(items)
    raise ValueError(_FORMS)


def _token_ids(value: list[Any]) -> list[int]:
    if all(type(item) is int and item >= 0 for item in value):
        return value
    integers = list(map(as_integer, value))
    if all(type(item) is int and item >= 0 for item in integers):
        return integers
    raise ValueError(_FORMS)


_Prompt = str | list[str] | list[int] | list[list[int]]
_FORMS = "must be a string, a list of strings, a list of token ids or a list of such lists"

# One pass over the ids, which may be 300,000, is enough.
Prompt = Annotated[_Prompt, PlainValidator(_read, json_schema_input_type=_Prompt)]


def as_list(prompt: Prompt) -> list[str | list[int]]:
    """Each prompt as text or as token ids."""
    if isinstance(prompt, str):
        return [prompt]
    one = [token for token in prompt if isinstance(token, int)]
    return [one] if one else [each for each in prompt if not isinstance(each, int)]
