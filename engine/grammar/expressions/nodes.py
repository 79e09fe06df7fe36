"""The parts of a regular expression, made in the form in which xgrammar finds the fewest ways to read a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Literal

from .sets import ANY, CharSet, made, without


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    known: CharSet


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """The beginning, the end, the edge of a word, or any place but that."""

    kind: Literal["^", "$", "b", "B"]


@dataclass(frozen=True, slots=True)
class Look:
    """Whether the text that follows begins with a part, or the text before ends with one."""

    part: Node
    is_ahead: bool
    is_negative: bool


Node = Chars | Seq | Alt | Repeat | Edge | Look

EMPTY = Seq(())
NOTHING = Alt(())


def seq(*parts: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        for one in part.parts if isinstance(part, Seq) else (part,):
            if one == NOTHING:
                return NOTHING
            if flat and _absorbs(one, flat[-1]):
                flat.pop()
            if not (flat and _absorbs(flat[-1], one)):
                flat.append(one)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _absorbs(one: Node, other: Node) -> bool:
    """Whether `one` repeats whatever `other` repeats, both from none on."""
    match one, other:
        case Repeat(Chars(more), 0, None), Repeat(Chars(fewer), 0, _):
            return not without(fewer, more)
    return False


def alt(*options: Node) -> Node:
    """Single characters among the options become one set, where the first of them is."""
    flat: dict[Node | None, None] = {}  # None: the characters
    ranges: list[tuple[int, int]] = []
    for option in options:
        for one in option.options if isinstance(option, Alt) else (option,):
            if isinstance(one, Chars):
                ranges += one.known
            flat[None if isinstance(one, Chars) else one] = None
    if EMPTY in flat and any(one not in (None, EMPTY) and is_nullable(one) for one in flat if one is not None):
        del flat[EMPTY]
    made_of = tuple(Chars(made(ranges)) if one is None else one for one in flat)
    return made_of[0] if len(made_of) == 1 else Alt(made_of)


def repeat(part: Node, least: int, most: int | None) -> Node:
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return EMPTY if least == 0 else NOTHING
    if (least, most) == (1, 1):
        return part
    if is_nullable(part):
        least = 0
        if (inner := _filled(part)) is not None:
            return repeat(inner, 0, most)
    if most is None and least == 0:
        part = _starred(part)
    if isinstance(part, Repeat):
        inside = part
        if inside.least <= 1 and inside.most is None:
            return repeat(inside.part, inside.least * least, None)
        if inside.least == 0 and least <= 1:
            return repeat(inside.part, 0, None if None in (inside.most, most) else (inside.most or 0) * (most or 0))
    return Repeat(part, least, most)


def _filled(part: Node) -> Node | None:
    """The part without the empty text, where it is easy to see; its repetitions from none on stay the same."""
    match part:
        case Repeat(inner, 0, 1) if not is_nullable(inner):
            return inner
        case Alt(options) if EMPTY in options:
            return alt(*(one for one in options if one != EMPTY))
    return None


def _starred(part: Node) -> Node:
    """What may be repeated without end instead of a part, for fewer ways to read a text."""
    match part:
        case Repeat(inner, 0 | 1, _) if not has_looks(inner):
            return _starred(inner)
        case Alt(options) if not has_looks(part):
            return alt(*(_starred(one) for one in options if one != EMPTY))
        case Seq(parts) if parts and all(map(is_nullable, parts)):
            return alt(*map(_starred, parts))
    return part


def is_nullable(node: Node) -> bool:
    """Whether it matches the empty text wherever it stands; False in doubt."""
    return lengths(node)[0] == 0 and not has_looks(node)


def lengths(node: Node) -> tuple[int, float]:
    """The number of characters of the shortest text and of the longest, whatever is looked at."""
    match node:
        case Chars():
            return 1, 1
        case Seq(parts):
            both = [lengths(one) for one in parts]
            return sum(least for least, _ in both), sum(most for _, most in both)
        case Alt(options):
            both = [lengths(one) for one in options]
            return min((least for least, _ in both), default=0), max((most for _, most in both), default=0)
        case Repeat(part, least, most):
            shortest, longest = lengths(part)
            return shortest * least, longest * (inf if most is None else most) if longest else 0
    return 0, 0


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Seq(parts) | Alt(parts):
            return parts
        case Repeat(part) | Look(part):
            return (part,)
    return ()


def walk(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += children(one)


def has_looks(node: Node) -> bool:
    """Whether anything in it asks for what comes before or after."""
    return any(isinstance(one, Edge | Look) for one in walk(node))


ANYTHING = Repeat(Chars(ANY), 0, None)
