"""Limits of one JSON body, and of how much of it an error repeats.

pydantic and orjson hold the GIL while they work, even in a thread, so a body that would take them long is refused
before: a few megabytes can be a million objects, each of them faulty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic_core import CoreSchema

LONG = 20_000  # bytes; parsing more would block the event loop, so a thread does it
DEEPEST = 128  # levels; the codec of jobs stops at 200
MOST_CONTAINERS = 40_000  # objects and arrays
MOST_VALUES = 500_000  # a request for embeddings may hold 300,000 token ids
MOST_KEYS = 100_000
MOST_FAULTS = 20  # that a refusal names
MOST_FAULT = 300  # characters of each
MOST_LISTED = 1_000  # faults; pydantic lists all or none, and so many take milliseconds
_PIECE = 1 << 16  # bytes scanned before other threads get a turn
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd"}  # by their first bytes, with which no JSON begins
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# pydantic's names of faults, and what JSON has in their places.
_KINDS = {"none_required": "null"}
_KINDS |= dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "dataclass_type"), "an object")
_KINDS |= dict.fromkeys(("list_type", "tuple_type"), "an array")
# An escape in a string: of a pair of surrogates, of one alone, or any other.
_ESCAPE = re.compile(rb"\\(?:u(?:d[89ab]..\\ud[c-f]..|(d[89a-f]..))|.)", re.IGNORECASE | re.DOTALL)


def load_json(raw: bytes) -> Any:
    """Parse a JSON document. Raises `ValueError` with a sentence that lacks its subject, as in "is not valid JSON"."""
    check_size(raw)
    value = parse_json(raw)
    if raw.count(b"{") + raw.count(b"[") > DEEPEST:
        _check_depth(value, f"is nested deeper than {DEEPEST} levels.")
    return value


def load_arguments(text: str, no_number: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON that a model wrote, with integers of any length, and half a character as `parse_json` takes it.

    `no_number` is called with NaN, Infinity and -Infinity. Raises `ValueError` for what is no JSON or nested too deep.
    """
    too_deep = f"it is nested deeper than {DEEPEST} levels"
    try:
        value = json.loads(_without_halves(text.encode(errors="replace")).decode(), parse_constant=no_number)
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("{") + text.count("[") > DEEPEST:
        _check_depth(value, too_deep)
    return value


def _check_depth(value: Any, fault: str) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        values = (each for node in level for each in (node.values() if isinstance(node, dict) else node))
        level = [each for each in values if isinstance(each, dict | list)]
    if level:
        raise ValueError(fault)


def parse_json(raw: bytes) -> Any:
    """As `load_json`, whatever the document holds.

    An escape that is half a character, as JavaScript writes of a text cut in the middle of an emoji, stands for
    the replacement character: agents repeat their history, so one such text would end their session.
    """
    raw = utf_8(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            return orjson.loads(_without_halves(raw))
        except orjson.JSONDecodeError:
            if not _is_utf_8(raw):
                raise ValueError("is not in UTF-8; send it in UTF-8.") from None
            raise ValueError(f"is not valid JSON: {error}.") from None


def utf_8(raw: bytes) -> bytes:
    """A JSON document without its byte order mark, which editors and shells on Windows write in front, and .NET's
    streams, and which may be passed over (RFC 8259, 8.1).

    Raises `ValueError` as `load_json` does where its first bytes show UTF-16, UTF-32 or a compressed document.
    """
    if (compression := _COMPRESSED.get(raw[:2])) is not None:
        raise ValueError(f"is compressed with {compression}; send it as it is.")
    encoding = json.detect_encoding(raw[:4])
    if not encoding.startswith("utf-8"):
        raise ValueError(f"is not in UTF-8, but in {encoding[:6].upper()}; send it in UTF-8.")
    return raw.removeprefix(_BYTE_ORDER_MARK)


def _is_utf_8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _without_halves(raw: bytes) -> bytes:
    if b"\\ud" not in raw.lower():
        return raw
    return _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], raw)


def whole(value: Any) -> Any:
    """A text, or JSON's values, in which half a character, of a pair of surrogates, is the replacement character."""
    match value:
        case str() if not value.isascii():
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case Mapping():
            return {whole(name): whole(each) for name, each in value.items()}
        case list():
            return [whole(each) for each in value]
        case tuple():
            return tuple(map(whole, value))
        case _:
            return value


def check_size(raw: bytes) -> None:
    """Raise `ValueError` as `load_json` does for a document that holds too much, valid or not."""
    if len(raw) <= LONG or not _too_much(*_counted(raw)):
        return
    # Most of that may be inside strings, which do not count: skip what lies between unescaped quotation marks.
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    counts, inside = (0, 0, 0), False
    for start in range(0, len(bare), _PIECE):
        parts = bare[start : start + _PIECE].split(b'"')
        found = _counted(b"".join(parts[inside::2]))
        counts = (counts[0] + found[0], counts[1] + found[1], counts[2] + found[2])
        inside ^= len(parts) % 2 == 0
    if fault := _too_much(*counts):
        raise ValueError(f"{fault}; send it in several requests.")


def _counted(text: bytes) -> tuple[int, int, int]:
    """The number of containers, values and keys, at most."""
    return text.count(b"{") + text.count(b"["), text.count(b","), text.count(b":")


def _too_much(containers: int, values: int, keys: int) -> str:
    for count, most, kind in (
        (containers, MOST_CONTAINERS, "objects and arrays"),
        (values, MOST_VALUES, "values"),
        (keys, MOST_KEYS, "keys"),
    ):
        if count > most:
            return f"holds {count:,} {kind}, more than {most:,}"
    return ""


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and end where it has more than `most` characters."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def bounded(schema: CoreSchema) -> CoreSchema:
    """The schema, made to stop at the first faulty element of each list."""

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") in ("list", "tuple", "set", "frozenset"):
                node["fail_fast"] = True
            for each in node.values():
                visit(each)
        elif isinstance(node, list | tuple):
            for each in node:
                visit(each)

    visit(schema)
    return schema


def in_words_of_json(fault: Mapping[str, Any]) -> str:
    """What pydantic says of a fault; most clients are not written in Python and know no dictionary, list or None."""
    kind = _KINDS.get(fault["type"])
    return f"Input should be {kind}" if kind else str(fault["msg"]).removeprefix("Value error, ")


def listed(faults: list[str], count: int) -> list[str]:
    """The first faults, shortened, and the number of the others; `count` is the number of all."""
    named = [shortened(fault, MOST_FAULT) for fault in faults[:MOST_FAULTS]]
    return named if count <= len(named) else [*named, f"And {count - len(named):,} more faults."]
