"""Rewrites regular expressions for xgrammar, or refuses what it would silently ignore."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

from ...schemas.errors import InvalidRequest

# How the strings of a document in JSON are written: in quotes, where sets of characters do without those that JSON
# escapes, or with their escapes; or without quotes and escapes.
Strings = Literal["plain", "escaped", "raw"]
_MAX_REPEATS = 128  # of one part of a pattern within JSON; xgrammar fails above
_ESCAPED = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)"
_TOKENS = re.compile(
    _ESCAPED + r"|\[\^?(?:\\.|[^\]\\])*\]|\[.*|\(\?<?[=!]|\{[\d,]*\}|.",
    re.DOTALL,
)
_SETS = frozenset(map("\\{}".format, "dDwWsS"))
_CLASS = re.compile(r"\[\^?(?:\\.|[^\]\\])*\]", re.DOTALL)
_MAX_NAMES = 250_000  # sum of the squares of their lengths, to which the length of `key_pattern` is proportional
_ESCAPED_IN_JSON = r'\x00-\x1f"\\'  # in a class: what a JSON string has to escape
# What JSON escapes that texts have, as patterns of its escapes.
_ESCAPABLE = {character: re.escape(json.dumps(character)[1:-1]) for character in '"\\\b\f\n\r\t'}
_SPACES = "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # in a class: white space beyond ASCII
_BEYOND_ASCII = "\x80-\U0010ffff"  # in a class
_ASCII = "".join(map(chr, range(128)))
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_ESCAPES = frozenset("dDwWsSxu") | _CONTROL.keys()  # of letters and digits; any other character stands for itself


def check_pattern(pattern: str, path: str, *, strings: Strings | None = None) -> str:
    """The pattern as xgrammar needs it, of a whole text, or of the `strings` in a document in JSON.

    Raises `InvalidRequest` with `path` as its `param`.
    """
    try:
        return _checked(pattern, path, strings)
    except (ValueError, OverflowError):
        message = f"{path}: a number in it is too large."
        raise InvalidRequest(message, code="invalid_grammar", param=path) from None
    except re.error as error:
        raise InvalidRequest(f"{path}: {error}.", code="invalid_grammar", param=path) from None


def _checked(pattern: str, path: str, strings: Strings | None) -> str:
    tokens = list(map(_without_spaces, _TOKENS.findall(pattern)))
    parts = []
    for index, token in enumerate(tokens):
        fault = None
        if token in ("^", "$") and index != (0 if token == "^" else len(tokens) - 1):
            fault = "^ and $ can only stand at the beginning and the end"
        elif token.startswith("(?") and len(token) > 2:
            fault = "a pattern cannot look ahead or behind"
        elif re.match(r"\\[A-Za-z0-9]", token) and token[1] not in _ESCAPES:
            fault = f"{token} is not supported"
        elif token in ("\\x", "\\u"):
            fault = f"{token} needs digits of a character: \\x41, \\u0041 or \\u{{41}}"
        elif token.startswith("\\u{") and int(token[3:-1], 16) > sys.maxunicode:
            fault = f"{token} is no character; the last one is \\u{{10ffff}}"
        elif token.startswith("["):
            fault = _class_fault(token, strings) if _CLASS.fullmatch(token) else "a class is not closed"
        elif strings and re.match(r"\{\d", token) and max(map(int, re.findall(r"\d+", token))) > _MAX_REPEATS:
            fault = f"nothing can be repeated more than {_MAX_REPEATS} times"
        if fault:
            raise InvalidRequest(f"{path}: {fault}.", code="invalid_grammar", param=path)
        if strings and token == "?" and index and tokens[index - 1] != "(":
            # Where an optional group ends in a repetition, xgrammar makes only the beginning of the group optional.
            parts.append("" if re.match(r"[*+?]|\{\d", tokens[index - 1]) else "{0,1}")
        else:
            parts.append(_written(token, strings) if strings else token)
    if fault := _structure_fault(tokens):
        raise InvalidRequest(f"{path}: {fault}.", code="invalid_grammar", param=path)
    return "".join(parts)


def _without_spaces(token: str) -> str:
    """What has no white space, without that beyond ASCII, which xgrammar does not know."""
    if token == "\\S":
        return f"[^{_SPACES}\\s]"
    if not token.startswith("[^"):
        return token
    parts = re.findall(rf"{_ESCAPED}|.", token, re.DOTALL)
    return "".join(_SPACES + one if one == "\\s" and before != "-" else one for before, one in pairwise(["", *parts]))


def _structure_fault(tokens: list[str]) -> str | None:
    """What is wrong with groups and repetitions. xgrammar's messages give places in a text that no client has seen."""
    opened = skipped = 0
    before = ""  # what a repetition would repeat: nothing, an "atom", or a "repetition" already
    for index, token in enumerate(tokens):
        if skipped:
            skipped -= 1
        elif token == "(":
            opened, before = opened + 1, ""
            start = "".join(tokens[index + 1 : index + 81])[:80]
            if (group := re.match(r"\?(?::|<[A-Za-z_]\w*>)", start)) is not None:
                skipped = len(group[0])
            elif start.startswith("?") and not start.startswith(("?=", "?!")):
                return "a group begins with (, (?: or (?<name>; flags such as (?i) and other kinds are not supported"
        elif token == ")":
            if not opened:
                return "a ) has no ( before it; write \\) for the character"
            opened, before = opened - 1, "atom"
        elif token in ("|", "^"):
            before = ""
        elif token in ("*", "+", "?") or token.startswith("{"):
            counts = re.fullmatch(r"\{(\d+)(?:,(\d*))?\}", token)
            if token.startswith("{") and not counts:
                return "a { begins a repetition such as {2}, {2,} or {2,5}; write \\{ for the character"
            if counts and counts[2] and int(counts[1]) > int(counts[2]):
                return f"the first number of {token} is above the second"
            if not before:
                return f"{token} has nothing before it to repeat; write \\{token} for the character"
            if before == "repetition" and token != "?":
                return f"{token} repeats a repetition; put what it repeats into (?:…)"
            before = "atom" if before == "repetition" else "repetition"
        elif token == "\\":
            return "it ends with a single \\; write \\\\ for the character"
        else:
            before = "atom"
    return "a ( has no ) behind it; write \\( for the character" if opened else None


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


def _class_fault(token: str, strings: Strings | None) -> str | None:
    inside = token[1:-1].removeprefix("^")
    if not inside:
        return "an empty class is not supported"
    escapes = re.findall(r"\\(.)", inside)
    if unknown := [one for one in escapes if one.isalnum() and one.isascii() and one not in _ESCAPES]:
        return f"\\{unknown[0]} is not supported"
    if fault := _range_fault(inside):
        return fault
    if strings in ("plain", "escaped") and not token.startswith("[^"):
        # xgrammar excludes what JSON has to escape only from classes that have other characters, all ASCII.
        try:
            found = re.findall(re.sub(r"\\u\{0*(\w+)\}", _unicode, _in_json(token)), _ASCII, re.ASCII)
        except re.error as error:
            return f"{token}: {error}"
        escaped = [character for character in found if json.dumps(character) != f'"{character}"']
        only = len(escaped) == len(found) and not (strings == "escaped" and _ESCAPABLE.keys() >= {*escaped})
        if escaped and (only or not token.isascii() or re.search(r"\\[xu]", token)):
            return f"quotes, backslashes and control characters cannot be in the class {token}"
    return None


def _range_fault(inside: str) -> str | None:
    parts = re.findall(rf"{_ESCAPED}|.", inside, re.DOTALL)
    index = 0
    while index + 2 < len(parts):
        low, dash, high = parts[index : index + 3]
        if dash != "-" or low in _SETS:
            index += 1
            continue
        if high in _SETS:
            return f"{low}-{high} is no range of characters; write \\- for the character -"
        if _character(low) > _character(high):
            return f"the range {low}-{high} is upside down"
        index += 3
    return None


def _character(part: str) -> str:
    """What stands for one character, as that."""
    if not part.startswith("\\") or len(part) < 2:
        return part
    digits = part[2:].strip("{}")
    return chr(int(digits, 16)) if digits else _CONTROL.get(part[1], part[1])


def _in_json(token: str) -> str:
    """A class without what a JSON string has to escape, where xgrammar does not exclude that itself."""
    if not token.startswith("[^"):
        return token.replace("\\s", " ")
    rest = token[2:]
    return f"[^{_ESCAPED_IN_JSON}{chr(92) if rest.startswith('-') else ''}{rest}"


def _written(token: str, strings: Strings) -> str:
    """What a part of a pattern matches, as a string of that kind has it."""
    if strings == "raw":
        return r"[^\n]" if token == "." else token
    if strings == "plain" or not (token == "." or token in _SETS or (token.startswith("[") and len(token) > 1)):
        return _literal(token)
    matches = re.compile(re.sub(r"\\u\{0*(\w+)\}", _unicode, token), re.ASCII).fullmatch
    choices = [written for character, written in _ESCAPABLE.items() if matches(character)]
    if not choices:
        return _literal(token)
    if token.startswith("[^"):
        return f"(?:{'|'.join([_in_json(token), *choices])})"
    found = [one for one in _ASCII[32:] if one not in _ESCAPABLE and matches(one)]
    others = "".join(f"\\{one}" if one in "[]^-" else one for one in found)
    others += _BEYOND_ASCII if matches(_BEYOND_ASCII[0]) else ""
    return f"(?:{'|'.join([*([f'[{others}]'] if others else []), *choices])})"


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
