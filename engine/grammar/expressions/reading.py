"""Reads regular expressions, in what the dialects of ECMAScript and Python have in common, and most of what one has."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Literal

from . import sets
from .nodes import EMPTY, NOTHING, Chars, Edge, Look, Node, alt, repeat, seq
from .sets import CharSet

_LONGEST = 50_000
_MAX_DEPTH = 100  # of groups within each other
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_OPENS = re.compile(r"\((?:\?(?:(?P<flags>[imsu-]+)(?:(?P<whole>\))|:)|P?<[A-Za-z_]\w*>|:|(?P<look><?[=!])))?")
_COUNTS = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_POSIX = re.compile(r"\[:\^?\w+:\]")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\})")
_PROPERTY = re.compile(r"\\([pP])(?:\{(\w+(?:=\w+)?)\}|([A-Z]))")
_EDGES: dict[str, Literal["^", "$", "b", "B"]] = {"b": "b", "B": "B", "A": "^", "Z": "$", "z": "$"}
_SINGLE = {"d": sets.DIGITS, "w": sets.WORD}


class Fault(ValueError):
    """What is wrong with a pattern."""


@dataclass
class _Group:
    """One that is open: what it is, what was read of it, and the flags outside."""

    look: str | None = None
    flags: frozenset[str] = frozenset()
    options: list[Node] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)

    def node(self) -> Node:
        return alt(*self.options, seq(*self.parts))


def read(pattern: str) -> Node:
    """Raises `Fault`."""
    if len(pattern) > _LONGEST:
        raise Fault(f"it has more than {_LONGEST:,} characters")
    return _Reader(pattern).read()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._open = [_Group()]
        self._flags: frozenset[str] = frozenset()
        self._before: Literal["", "atom", "repetition"] = ""  # what a repetition would repeat

    def read(self) -> Node:
        deepest = 0
        while self._at < len(self._text):
            sign = self._text[self._at]
            match sign:
                case "(":
                    self._begin()
                    deepest = max(deepest, len(self._open))
                case ")":
                    self._end()
                case "|":
                    group = self._open[-1]
                    group.options.append(seq(*group.parts))
                    group.parts = []
                    self._at, self._before = self._at + 1, ""
                case "*" | "+" | "?" | "{":
                    self._repeat(sign)
                case "^" | "$":
                    self._add(Edge(sign), 1, "" if sign == "^" else "atom")
                case _:
                    self._atom(sign)
        if len(self._open) > 1:
            raise Fault("a ( has no ) behind it; write \\( for the character")
        if deepest > _MAX_DEPTH:
            raise Fault(f"groups are within each other more than {_MAX_DEPTH} deep")
        return self._open[0].node()

    def _add(self, node: Node, length: int, before: Literal["", "atom"] = "atom") -> None:
        self._open[-1].parts.append(node)
        self._at, self._before = self._at + length, before

    def _begin(self) -> None:
        found = _OPENS.match(self._text, self._at)
        assert found is not None
        flags, look = found["flags"], found["look"]
        self._before = ""
        if self._text.startswith("?", found.end()) and found[0] == "(":
            raise Fault(
                "a group begins with (, (?:, (?<name>, (?=, (?!, (?<=, (?<! or a flag, (?i) or (?s); "
                "other kinds and flags are not supported"
            )
        self._at = found.end()
        outside = self._flags
        if flags:
            on, _, off = flags.partition("-")
            if "m" in on:
                raise Fault("the flag m is not supported; write (?:^|\\n) and (?:$|\\n)")
            self._flags = (outside | {*on}) - {*off}
            if found["whole"]:
                return
        self._open.append(_Group(look, outside))

    def _end(self) -> None:
        if len(self._open) == 1:
            raise Fault("a ) has no ( before it; write \\) for the character")
        group = self._open.pop()
        self._flags = group.flags
        node = group.node()
        if group.look:
            node = Look(node, not group.look.startswith("<"), group.look.endswith("!"))
        self._add(node, 1)

    def _repeat(self, sign: str) -> None:
        token, least, most = sign, 0 if sign != "+" else 1, None if sign != "?" else 1
        if sign == "{":
            counts = _COUNTS.match(self._text, self._at)
            if counts is None:
                raise Fault("a { begins a repetition such as {2}, {2,} or {2,5}; write \\{ for the character")
            token, least = counts[0], int(counts[1])
            most = (int(counts[3]) if counts[3] else None) if counts[2] else least
            if most is not None and least > most:
                raise Fault(f"the first number of {token} is above the second")
        if not self._before:
            raise Fault(f"{token} has nothing before it to repeat; write \\{token} for the character")
        if self._before == "repetition":
            if token != "?":
                raise Fault(f"{token} repeats a repetition; put what it repeats into (?:…)")
            self._at, self._before = self._at + 1, "atom"  # it is lazy, which changes no text
            return
        parts = self._open[-1].parts
        # To look once is to look any number of times.
        inner = parts.pop()
        parts.append((inner if least else EMPTY) if isinstance(inner, Edge | Look) else repeat(inner, least, most))
        self._at, self._before = self._at + len(token), "repetition"

    def _atom(self, sign: str) -> None:
        if sign == "[":
            known, length = self._class()
            return self._add(Chars(known) if known else NOTHING, length)
        if sign == ".":
            return self._add(Chars(sets.ANY if "s" in self._flags else sets.LINE), 1)
        if sign == "\\" and (edge := _EDGES.get(self._text[self._at + 1 : self._at + 2])) is not None:
            return self._add(Edge(edge), 2)
        known, length, _ = self._one(self._at, is_negated=False)
        self._add(Chars(self._cased(known)), length)

    def _cased(self, known: CharSet) -> CharSet:
        return sets.any_case(known) if "i" in self._flags else known

    def _one(self, at: int, *, is_negated: bool) -> tuple[CharSet, int, bool]:
        """The characters that the text stands for at a place, its length, and whether it is a set by itself.

        What is a space depends on the dialect: a text matches in all of them.
        """
        sign, following = self._text[at], self._text[at + 1 : at + 2]
        if sign != "\\":
            return sets.chars(sign), 1, False
        if not following:
            raise Fault("it ends with a single \\; write \\\\ for the character")
        if (code := _CODE.match(self._text, at)) is not None:
            number = int(code[1] or code[2] or code[3], 16)
            length = len(code[0])
            if 0xD800 <= number < 0xDC00 and (low := _CODE.match(self._text, at + length)) and low[2]:
                # half of a pair, as JSON and ECMAScript write a character
                number = 0x10000 + ((number - 0xD800) << 10) + (int(low[2], 16) - 0xDC00)
                length += len(low[0])
            if not 0 <= number <= sys.maxunicode or 0xD800 <= number < 0xE000:
                raise Fault(f"{code[0]} is no character; the last one is \\u{{10ffff}}")
            return ((number, number),), length, False
        if following in "xu":
            raise Fault(f"\\{following} needs digits of a character: \\x41, \\u0041 or \\u{{41}}")
        if following in "sS":
            inverse = (following == "S") != is_negated
            for group in self._open:
                inverse ^= bool(group.look and group.look.endswith("!"))
            spaces = sets.SPACES if inverse else sets.BLANKS
            return (sets.others(spaces) if following == "S" else spaces), 2, True
        if following.lower() in _SINGLE:
            known = _SINGLE[following.lower()]
            return (known if following.islower() else sets.others(known)), 2, True
        if following in "pP":
            return (*self._property(at, is_negated=is_negated), True)
        if following in _CONTROL and not (following == "0" and self._text[at + 2 : at + 3].isdigit()):
            return sets.chars(_CONTROL[following]), 2, False
        if following.isascii() and following.isalnum():
            digits = re.match(r"\d+", self._text[at + 1 :])
            hint = "; no grammar can refer back to a group" if digits and following != "0" else ""
            raise Fault(f"\\{digits[0] if digits else following} is not supported{hint}")
        return sets.chars(following), 2, False

    def _property(self, at: int, *, is_negated: bool) -> tuple[CharSet, int]:
        found = _PROPERTY.match(self._text, at)
        name = (found[2] or found[3]) if found else ""
        known = sets.property_set(name)
        if found is None or known is None:
            raise Fault(
                f"\\{self._text[at + 1]} is supported with categories of Unicode alone, as in \\p{{L}} and \\p{{Lu}}"
            )
        inverse = (found[1] == "P") != is_negated
        for group in self._open:
            inverse ^= bool(group.look and group.look.endswith("!"))
        if inverse and name in sets.NARROW:
            raise Fault(f"what is not {found[0]} is not supported")
        return (known if found[1] == "p" else sets.others(known)), len(found[0])

    def _class(self) -> tuple[CharSet, int]:
        begin = self._at
        is_negated = self._text.startswith("[^", begin)
        at = begin + 1 + is_negated
        ranges: list[tuple[int, int]] = []
        spaces: set[str] = set()
        while not self._text.startswith("]", at):
            low, length, is_set = self._within(at, is_negated)
            piece = self._text[at : at + length]
            at += length
            if piece in ("\\s", "\\S"):
                spaces.add(piece)
            if not is_set and self._text.startswith("-", at) and self._text[at + 1 : at + 2] not in ("", "]"):
                high, length, is_set = self._within(at + 1, is_negated)
                last = self._text[at + 1 : at + 1 + length]
                if is_set:
                    raise Fault(f"{piece}-{last} is no range of characters; write \\- for the character -")
                if low[0][0] > high[0][1]:
                    raise Fault(f"the range {piece}-{last} is upside down")
                low = sets.made([*sets.both(((low[0][0], high[0][1]),), sets.ANY)])
                at += 1 + length
            ranges += low
        if at == begin + 1 + is_negated:
            raise Fault("an empty class is not supported")
        known = self._cased(sets.ANY if len(spaces) > 1 else sets.made(ranges))
        return (sets.others(known) if is_negated else known), at + 1 - begin

    def _within(self, at: int, is_negated: bool) -> tuple[CharSet, int, bool]:
        if at >= len(self._text):
            raise Fault("a class is not closed")
        if (posix := _POSIX.match(self._text, at)) is not None:
            raise Fault(f"{posix[0]} is not supported; write ranges, \\w, \\d, \\s or \\p{{L}}")
        if self._text.startswith("\\b", at):
            return sets.chars("\b"), 2, False
        if self._text.startswith("\\", at) and at + 1 == len(self._text):
            raise Fault("a class is not closed")
        return self._one(at, is_negated=is_negated)
