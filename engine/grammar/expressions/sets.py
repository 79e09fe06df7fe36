"""Sets of characters, as sorted ranges that do not touch."""

from __future__ import annotations

import sys
import unicodedata
from bisect import bisect
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby

CharSet = tuple[tuple[int, int], ...]
"""The first and the last character of each range."""

_SURROGATES = (0xD800, 0xDFFF)  # which no text has


def made(ranges: Iterable[tuple[int, int]]) -> CharSet:
    """The set of the characters of some ranges, in any order."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def chars(text: str) -> CharSet:
    return made((ord(one), ord(one)) for one in text)


def others(known: CharSet) -> CharSet:
    """All characters but those."""
    bounds = [-1, *(bound for one in made([*known, _SURROGATES]) for bound in one), sys.maxunicode + 1]
    return tuple((low + 1, high - 1) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if high - low > 1)


def both(one: CharSet, two: CharSet) -> CharSet:
    return others(made([*others(one), *others(two)]))


def without(one: CharSet, two: CharSet) -> CharSet:
    return both(one, others(two))


def size(known: CharSet) -> int:
    return sum(high - low + 1 for low, high in known)


def members(known: CharSet) -> list[str]:
    return [chr(code) for low, high in known for code in range(low, high + 1)]


def any_case(known: CharSet) -> CharSet:
    """The set with the other cases of its letters, where they are single characters."""
    begins = [low for low, _ in known]
    found = [(low, high) for low, high in known if high - low < _MANY]
    letters = members(tuple(found)) if len(found) == len(known) else []
    if not letters:
        codes = (code for low, high in (*_categories()["Lu"], *_categories()["Ll"]) for code in range(low, high + 1))
        letters = [chr(code) for code in codes if (at := bisect(begins, code)) and code <= known[at - 1][1]]
    cases = {case for one in letters for case in (one.lower(), one.upper()) if len(case) == 1}
    return made([*known, *chars("".join(cases))])


ANY = others(())
DIGITS = made([(48, 57)])
WORD = made([*DIGITS, (65, 90), (95, 95), (97, 122)])
BLANKS = chars(" \t\n\v\f\r")
SPACES = made(  # in ECMAScript, or in Python
    [
        *BLANKS,
        *((0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ]
)
LINE = others(chars("\n\r\u2028\u2029"))
ESCAPED_IN_JSON = made([(0, 31), *chars('"\\')])

_MANY = 4096  # characters of a set, above which letters have both cases in it
_EMOJI: CharSet = (
    *((0x231A, 0x231B), (0x23E9, 0x23F3), (0x2600, 0x2604), (0x26BD, 0x26BE), (0x2705, 0x2705), (0x270A, 0x270C)),
    *((0x2728, 0x2728), (0x2753, 0x2755), (0x2764, 0x2764), (0x1F300, 0x1F3FA), (0x1F400, 0x1F53D)),
    *((0x1F5FB, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F910, 0x1F93A), (0x1F940, 0x1F945), (0x1F947, 0x1F9FF)),
)
_BINARY = {  # properties, the first of which has more characters: what is matched may be narrower, never wider
    "Extended_Pictographic": _EMOJI,
    "Emoji_Component": made([*chars("#*\u200d\u20e3\ufe0f"), *DIGITS, (0x1F1E6, 0x1F1FF), (0x1F3FB, 0x1F3FF)]),
    "Regional_Indicator": made([(0x1F1E6, 0x1F1FF)]),
    "ASCII": made([(0, 127)]),
    "Any": ANY,
}
NARROW = frozenset({"Extended_Pictographic"})
_LONG = {  # the names of categories that have others
    "Letter": "L", "Alphabetic": "L", "Lowercase_Letter": "Ll", "Lowercase": "Ll", "Uppercase_Letter": "Lu",
    "Uppercase": "Lu", "Titlecase_Letter": "Lt", "Modifier_Letter": "Lm", "Other_Letter": "Lo", "Mark": "M",
    "Number": "N", "Decimal_Number": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
    "Space_Separator": "Zs", "Other": "C", "Control": "Cc",
}  # fmt: skip


def property_set(name: str) -> CharSet | None:
    r"""What `\p{name}` matches: one of the categories of Unicode, or one of a few other properties; None for others."""
    name = name.removeprefix("General_Category=").removeprefix("gc=")
    if name in _BINARY:
        return _BINARY[name]
    name = _LONG.get(name, name)
    found = made(one for category, ones in _categories().items() if category.startswith(name) for one in ones)
    return both(found, ANY) if name and found else None


@lru_cache(1)
def _categories() -> dict[str, list[tuple[int, int]]]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    begin = 0
    for category, run in groupby(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        end = begin + sum(1 for _ in run)
        ranges.setdefault(category, []).append((begin, end - 1))
        begin = end
    return ranges
