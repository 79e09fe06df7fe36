"""Holds the texts of an expression to a length."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import inf, isinf
from typing import TypeGuard

from .automata import without_looks
from .nodes import NOTHING, Alt, Chars, Edge, Look, Node, Repeat, Seq, alt, lengths, repeat, seq
from .reading import Fault
from .sets import ANY

_MOST_COUNTED = 64  # characters that an automaton counts
_WORD, _GROUPS = 12, 2  # characters beyond the fewest that a word may have at least, and groups beyond the fewest
_MOST_REPEATED = 100  # repetitions beyond the fewest, of what is given less room than it may take


class _TooNarrow(Exception):
    pass


def held_to(node: Node, least: int, most: float) -> Node | None:
    """The texts of an expression without looks that have `least` to `most` characters, or some of them; None where
    that takes too much."""
    shortest, longest = lengths(node)
    if least <= shortest and longest <= most:
        return node
    if shortest > most or longest < least:
        raise Fault(f"its texts have {shortest} to {longest} characters, which minLength and maxLength do not allow")
    parts = node.parts if isinstance(node, Seq) else (node,)
    open_ended = [at for at, part in enumerate(parts) if isinf(lengths(part)[1])]
    for at in reversed(open_ended):
        part = parts[at]
        if not _is_word(part):
            continue
        rest = lengths(seq(*parts[:at], *parts[at + 1 :]))
        fewest, many = max(part.least, least - rest[0]), most - rest[1]
        if isinf(most) or (len(open_ended) == 1 and many >= max(fewest, 1)):
            counted = Repeat(part.part, int(fewest), None if isinf(most) else int(many))
            return seq(*parts[:at], counted, *parts[at + 1 :])
    if max(least, 0 if isinf(most) else most) <= _MOST_COUNTED:
        end = seq(Repeat(Chars(ANY), least, None if isinf(most) else int(most)), Edge("$"))
        with contextlib.suppress(Fault):
            counted_node = without_looks(seq(Look(end, is_ahead=True, is_negative=False), node))
            return None if counted_node == NOTHING else counted_node
    longer = node if least <= shortest else _lengthened(parts, least - shortest)
    if longer is None or isinf(most):
        return None
    with contextlib.suppress(_TooNarrow):
        return _narrowed(longer, int(most))
    return None


def _lengthened(parts: Sequence[Node], by: int) -> Node | None:
    """The texts with more characters of the set that may be repeated most often; None where that is not enough."""
    words = {at: part for at, part in enumerate(parts) if _is_word(part)}
    room = {at: inf if word.most is None else word.most - word.least for at, word in words.items()}
    at = max(room, key=lambda at: room[at], default=None)
    if at is None or room[at] < by:
        return None
    word = words[at]
    return seq(*parts[:at], Repeat(word.part, word.least + by, word.most), *parts[at + 1 :])


def _narrowed(node: Node, most: int) -> Node:
    """Some texts of an expression, of at most `most` characters, which its shortest text does not exceed.

    What may be long shares the room: words, as a set of characters that is repeated, and groups, as the labels of a
    host. Raises `_TooNarrow` where that would leave out texts as they usually are.
    """
    shortest, longest = lengths(node)
    if longest <= most:
        return node
    match node:
        case Alt(options):
            return alt(*(_narrowed(one, most) for one in options if lengths(one)[0] <= most))
        case Seq(parts):
            held = list(parts)
            spare = most - shortest
            for left, at in zip(range(len(parts), 0, -1), _by_growth(parts), strict=True):
                fewest = lengths(parts[at])[0]
                held[at] = _narrowed(parts[at], fewest + spare // left)
                spare -= int(lengths(held[at])[1]) - fewest
            return seq(*held)
        case Repeat(part, least, many):
            short, long = lengths(part)
            usual = max(short, min(long, _WORD + 2))  # of a group, with what stands before and after a word
            count = int(min(most // usual, least + _MOST_REPEATED, inf if many is None else many))
            if count < min(least + (_WORD if isinstance(part, Chars) else _GROUPS), inf if many is None else many):
                raise _TooNarrow
            return repeat(_narrowed(part, most // count), least, count)
    raise AssertionError("one character is never too long, and looks are gone by now")


def _is_word(part: Node) -> TypeGuard[Repeat]:
    return isinstance(part, Repeat) and isinstance(part.part, Chars)


def _by_growth(parts: Sequence[Node]) -> list[int]:
    """Where the parts are, those first whose longest text is hardly longer than their shortest."""

    def growth(at: int) -> float:
        shortest, longest = lengths(parts[at])
        return longest - shortest

    return sorted(range(len(parts)), key=growth)
