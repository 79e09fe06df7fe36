"""Rewrites regular expressions for xgrammar, or refuses what it would silently ignore."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from ...schemas.errors import InvalidRequest

_MAX_REPEATS = 128  # of one part of a pattern within JSON; xgrammar fails above
_TOKENS = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)|\[\^?(?:\\.|[^\]\\])*\]|\[.*|\(\?<?[=!]|\{[\d,]*\}|.",
    re.DOTALL,
)
_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
_MAX_NAMES = 250_000  # sum of the squares of their lengths, to which the length of `key_pattern` is proportional
_ESCAPED_IN_JSON = r'\x00-\x1f"\\'  # in a class: what a JSON string has to escape
_ASCII = "".join(map(chr, range(128)))
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_ESCAPES = frozenset("dDwWsSxu") | _CONTROL.keys()  # of letters and digits; any other character stands for itself


def check_pattern(pattern: str, path: str, *, in_json: bool = False) -> str:
    """The pattern as xgrammar needs it; with `in_json`, for the text between the quotes of a JSON string.

    Raises `InvalidRequest` with `path` as its `param`.
    """
    try:
        return _checked(pattern, path, in_json)
    except (ValueError, OverflowError):
        message = f"{path}: a number in it is too large."
        raise InvalidRequest(message, code="invalid_grammar", param=path) from None


def _checked(pattern: str, path: str, in_json: bool) -> str:
    tokens = _TOKENS.findall(pattern)
    parts = []
    for index, token in enumerate(tokens):
        fault = None
        if token in ("^", "$") and index != (0 if token == "^" else len(tokens) - 1):
            fault = "^ and $ can only stand at the beginning and the end"
        elif token.startswith("(?") and len(token) > 2:
            fault = "a pattern cannot look ahead or behind"
        elif re.match(r"\\[A-Za-z0-9]", token) and token[1] not in _ESCAPES:
            fault = f"{token} is not supported"
        elif token.startswith("["):
            fault = _class_fault(token, in_json) if _CLASS.fullmatch(token) else "a class is not closed"
        elif in_json and re.match(r"\{\d", token) and max(map(int, re.findall(r"\d+", token))) > _MAX_REPEATS:
            fault = f"nothing can be repeated more than {_MAX_REPEATS} times"
        if fault:
            raise InvalidRequest(f"{path}: {fault}.", code="invalid_grammar", param=path)
        if in_json and token == "?" and index and tokens[index - 1] != "(":
            # Where an optional group ends in a repetition, xgrammar makes only the beginning of the group optional.
            parts.append("" if re.match(r"[*+?]|\{\d", tokens[index - 1]) else "{0,1}")
        else:
            parts.append(_literal(token) if in_json else token)
    return "".join(parts)


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
    return "".join(map(_literal, map(re.escape, text)))


def _class_fault(token: str, in_json: bool) -> str | None:
    inside = token[1:-1].removeprefix("^")
    if not inside:
        return "an empty class is not supported"
    escapes = re.findall(r"\\(.)", inside)
    if unknown := [one for one in escapes if one.isalnum() and one.isascii() and one not in _ESCAPES]:
        return f"\\{unknown[0]} is not supported"
    if in_json and not token.startswith("[^"):
        # xgrammar excludes what JSON has to escape only from classes that have other characters, all ASCII.
        try:
            found = re.findall(re.sub(r"\\u\{0*(\w+)\}", _unicode, _in_json(token)), _ASCII, re.ASCII)
        except re.error as error:
            return f"{token}: {error}"
        escaped = [character for character in found if json.dumps(character) != f'"{character}"']
        if escaped and (len(escaped) == len(found) or not token.isascii() or re.search(r"\\[xu]", token)):
            return f"quotes, backslashes and control characters cannot be in the class {token}"
    return None


def _in_json(token: str) -> str:
    """A class without what a JSON string has to escape, where xgrammar does not exclude that itself."""
    if not token.startswith("[^"):
        return token.replace("\\s", " ")
    rest = token[2:]
    return f"[^{_ESCAPED_IN_JSON}{chr(92) if rest.startswith('-') else ''}{rest}"


def _unicode(found: re.Match[str]) -> str:
    return re.escape(chr(int(found[1], 16)))


def _literal(token: str) -> str:
    """A character that JSON has to escape as its escape; every other token unchanged."""
    if token.startswith("[") and len(token) > 1:
        return _in_json(token)
    character = token
    if token.startswith("\\") and len(token) > 1:
        digits = token[2:].strip("{}")
        if digits:
            character = chr(int(digits, 16))
        elif token[1] in _CONTROL:
            character = _CONTROL[token[1]]
        elif not token[1].isalnum():
            character = token[1]
    written = json.dumps(character, ensure_ascii=False)[1:-1] if len(character) == 1 else character
    return token if len(character) > 1 or written == character else f"(?:{re.escape(written)})"
