"""What a rewritten schema says of a string: its pattern, its format or its length, as xgrammar enforces it."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from .patterns import Strings, schema_pattern
from .schema_keywords import fault

MAX_CHEAP_LENGTH = 128
"""Characters up to which xgrammar counts without a look at most of the vocabulary for each token of an answer."""
MAX_PATTERNS = 512
"""Characters that longer strings of a schema may have together for patterns to count them, each length once."""

_DATE = (
    r"(?:[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
    r"02-(?:0[1-9]|1\d|2[0-8]))|(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6}){0,1}(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]\d|\d)"
_WORD, _LABEL = r"[A-Za-z0-9_+-]{1,20}", r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,1}"
# xgrammar's own dates have a 30 February, its times a 60th second, its addresses leading zeros or no bounds, its names
# of hosts no bounds.
_FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "email": rf"^{_WORD}(?:\.{_WORD}){{0,2}}@(?:{_LABEL}\.){{1,3}}[A-Za-z]{{2,10}}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,4}}$",
}
# zod's, in which 253 characters are counted besides.
_HOSTNAME = (
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$"
)
_NARROWER = {_HOSTNAME: _FORMAT_PATTERNS["hostname"]}
# zod's old and new one, which have too many parts without an end for a length that they share.
_HOSTS = r"[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_EMAILS = (
    rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@({_HOSTS}",
    rf"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:{_HOSTS}",
)
_EASIER = dict.fromkeys(_EMAILS, _FORMAT_PATTERNS["email"])
# Characters of the shortest and of the longest string; of the others there is no longest.
_FORMAT_LENGTHS: dict[str, tuple[int, float]] = {
    "date": (10, 10),
    "time": (9, 21),
    "date-time": (20, 32),
    "ipv4": (7, 15),
    "ipv6": (2, 45),
    "uuid": (36, 36),
    "email": (6, 199),
    "hostname": (1, 209),
    "uri": (2, inf),
}
# Where a URI has a length, it is that of a web page.
_URL = (
    rf"^https{{0,1}}://{_LABEL}(?:\.{_LABEL}){{0,3}}(?::[1-9]\d{{0,3}}){{0,1}}(?:/[A-Za-z0-9._~/?=&-]{{0,90}}){{0,1}}$"
)
_URL_LENGTHS = (8, 271)
_FORMATS = frozenset({"uuid", "ipv6", "uri", "uri-reference", "uri-template", "duration"})
_CHARACTER = r'[^\x00-\x1f"\\]'  # that JSON does not escape
_STEP = 100  # characters in one repetition; xgrammar fails above 128


def string_node(rest: Mapping[str, Any], path: str, strings: Strings) -> dict[str, Any]:
    """The keywords of a node for strings, rewritten but for lengths. Raises `InvalidRequest`."""
    main = next((name for name in ("pattern", "format") if name in rest), None)
    if main is None:
        return dict(rest)
    if main == "pattern":  # which a format annotates
        simpler = _NARROWER | (_EASIER if {"minLength", "maxLength"} & rest.keys() else {})
        pattern = _held(simpler.get(rest[main], rest[main]), rest, f"{path}.{main}", strings)
        if pattern is None:
            name = "maxLength" if "maxLength" in rest else "minLength"
            raise fault(f"{path}.{name}", f"cannot be enforced beside this {main}", "unsupported_schema")
        return {main: pattern}
    name = rest[main]
    if name not in _FORMATS and name not in _FORMAT_PATTERNS:
        known = ", ".join(sorted(_FORMATS | _FORMAT_PATTERNS.keys()))
        raise fault(f"{path}.{main}", f"{name!r} cannot be enforced; these can: {known}", "unsupported_schema")
    written = _URL if name == "uri" and "maxLength" in rest else _FORMAT_PATTERNS.get(name)
    least, most = _URL_LENGTHS if written == _URL else _FORMAT_LENGTHS.get(name, (0, inf))
    for length, is_kept in (
        ("minLength", rest.get("minLength", 0) <= least),
        ("maxLength", rest.get("maxLength", inf) >= most),
    ):
        if not is_kept:
            if written is None or (held := _held(written, rest, f"{path}.{length}", strings)) is None:
                raise fault(f"{path}.{length}", f"cannot be enforced beside {main}", "unsupported_schema")
            return {"pattern": held}
    return {main: name} if written is None else {"pattern": written}


def _held(pattern: str, rest: Mapping[str, Any], path: str, strings: Strings) -> str | None:
    """The pattern together with the lengths of the node; None where these cannot be held to."""
    least, most = rest.get("minLength", 0), rest.get("maxLength", inf)
    is_contained = rest.get("format") == "includes"  # zod's name for it
    return schema_pattern(pattern, path, strings=strings, is_contained=is_contained, least=least, most=most)


def counted_pattern(least: int, most: int | None) -> str:
    """A pattern of the strings of a length, read in one way alone, in which xgrammar finds a state for each character.

    `a{0,9}` in steps would be read in several ways, and takes ten times as long to compile.
    """
    exact = f"{_CHARACTER}{{{_STEP}}}" * (least // _STEP) + f"{_CHARACTER}{{{least % _STEP}}}" * (least % _STEP > 0)
    if most is None:
        return f"^{exact}{_CHARACTER}*$"
    return f"^{exact}{f'(?:{_CHARACTER}' * (most - least)}{'){0,1}' * (most - least)}$"
