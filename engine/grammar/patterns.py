"""Checks regular expressions and writes them for xgrammar, which would read some of them differently."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf

from ...schemas.errors import InvalidRequest
from ...schemas.params import Grammar
from .expressions.lengths import held_to
from .expressions.reading import Fault
from .expressions.whole import containing, whole
from .expressions.writing import Strings, by_automaton, in_quotes, is_automatic, written

__all__ = ["Strings", "both_patterns", "check_pattern", "key_pattern", "schema_pattern", "text_grammar"]

_MAX_NAMES = 250_000  # sum of the squares of their lengths, to which the length of `key_pattern` is proportional
_ESCAPED_IN_JSON = r'\x00-\x1f"\\'  # in a class: what a JSON string has to escape


def check_pattern(pattern: str, path: str, *, strings: Strings | None = None) -> str:
    """The pattern as xgrammar needs it, of a whole text, or of the `strings` in a document in JSON.

    Raises `InvalidRequest` with `path` as its `param`.
    """
    with _refusals(path):
        return written(whole(pattern), strings)


def text_grammar(pattern: str, path: str) -> Grammar:
    """The grammar of the texts that a pattern matches as a whole. Raises `InvalidRequest`."""
    text = check_pattern(pattern, path)
    return Grammar(kind="ebnf", text=by_automaton(text)) if is_automatic(text) else Grammar(kind="regex", text=text)


def schema_pattern(
    pattern: str,
    path: str,
    *,
    strings: Strings,
    is_contained: bool = False,
    least: int = 0,
    most: float = inf,
) -> str | None:
    """The pattern of the strings in which a schema's `pattern` is found, and that have `least` to `most` characters.

    One that says neither where a string begins nor where it ends has to match the whole, unless it `is_contained`:
    a string that matches as a whole is right for those who meant that, too. None where the lengths cannot be held to.
    Raises `InvalidRequest` with `path` as its `param`.
    """
    with _refusals(path):
        held = held_to(containing(pattern, anywhere=is_contained), least, most)
        return None if held is None else written(held, strings)


def both_patterns(one: str, two: str) -> str:
    """A pattern that is found where both are."""
    return f"^(?=(?s:.*)(?:{one}))(?=(?s:.*)(?:{two}))"


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Raises `InvalidRequest` for what is wrong with a pattern."""
    try:
        yield
    except Fault as fault:
        message = f"{path}: {fault}."
    except RecursionError:
        message = f"{path}: its parts are within each other too deeply."
    else:
        return
    raise InvalidRequest(message, code="invalid_grammar", param=path)


def key_pattern(names: Iterable[str]) -> str:
    """A pattern of every text except `names`, without escapes. Raises `ValueError` for names that are too long."""
    names = set(names)
    if sum(len(name) ** 2 for name in names) > _MAX_NAMES:
        raise ValueError("the names are too long")
    following: dict[str, set[str]] = {"": set()}  # by prefix of a name: the next characters of names
    for name in names:
        for index, character in enumerate(name):
            following.setdefault(name[:index], set()).add(character)
    parts = [name + ".+" for name in map(_escape, names - following.keys())]
    for prefix, characters in following.items():
        start = _escape(prefix)
        parts += [start] if prefix not in names else []
        others = "".join(f"\\u{{{ord(character):x}}}" for character in sorted(characters))
        parts.append(f"{start}[^{_ESCAPED_IN_JSON}{others}].*")
    return f"^(?:{'|'.join(parts)})$"


def _escape(text: str) -> str:
    return re.escape(in_quotes(text))
