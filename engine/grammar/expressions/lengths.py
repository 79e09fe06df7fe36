"""Holds the texts of an expression to a length."""

from __future__ import annotations

from math import isinf

from .automata import without_looks
from .nodes import NOTHING, Chars, Edge, Look, Node, Repeat, Seq, lengths, seq
from .reading import Fault
from .sets import ANY

_MOST_COUNTED = 64  # characters that an automaton counts


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
        if not isinstance(part, Repeat) or not isinstance(part.part, Chars):
            continue
        rest = lengths(seq(*parts[:at], *parts[at + 1 :]))
        fewest, many = max(part.least, least - rest[0]), most - rest[1]
        if isinf(most) or (len(open_ended) == 1 and many >= max(fewest, 1)):
            counted = Repeat(part.part, int(fewest), None if isinf(most) else int(many))
            return seq(*parts[:at], counted, *parts[at + 1 :])
    if max(least, 0 if isinf(most) else most) > _MOST_COUNTED:
        return None
    length = Look(
        seq(Repeat(Chars(ANY), least, None if isinf(most) else int(most)), Edge("$")), is_ahead=True, is_negative=False
    )
    try:
        counted_node = without_looks(seq(length, node))
    except Fault:
        return None
    return None if counted_node == NOTHING else counted_node
