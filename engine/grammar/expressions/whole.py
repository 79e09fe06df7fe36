"""What a pattern asks of a whole text, written without the edges and looks that xgrammar does not know."""

from __future__ import annotations

from typing import Literal

from .automata import without_looks
from .nodes import ANYTHING, EMPTY, NOTHING, Alt, Edge, Node, Repeat, Seq, alt, has_looks, seq, walk
from .reading import Fault, read


def whole(pattern: str) -> Node:
    """The texts that a pattern matches as a whole. Raises `Fault`, for a pattern that no text matches as well."""
    return _without_looks(read(pattern), EMPTY)


def containing(pattern: str, *, anywhere: bool) -> Node:
    """The texts in which a pattern is found; if it says neither where a text begins nor where it ends, and may not be
    `anywhere`, those that it matches as a whole. Raises `Fault`, for a pattern that no text matches as well."""
    node = read(pattern)
    is_anchored = any(isinstance(one, Edge) and one.kind in "^$" for one in walk(node))
    return _without_looks(node, ANYTHING if anywhere or is_anchored else EMPTY)


def _without_looks(node: Node, around: Node) -> Node:
    """The texts of an expression, with `around` before and after them, where these may be."""
    if not has_looks(node):
        node = seq(around, node, around)
    else:
        simple = _from_edge("^", _from_edge("$", node, around), around)
        node = without_looks(seq(around, node, around)) if has_looks(simple) else simple
    if node == NOTHING:
        raise Fault("no text matches it")
    return node


def _from_edge(edge: Literal["^", "$"], node: Node, around: Node) -> Node:
    """With what may be between an edge of the text and the expression, where that does not have to stand there."""
    match node:
        case Edge(kind) if kind == edge:
            return EMPTY
        case Alt(options):
            return alt(*(_from_edge(edge, one, around) for one in options))
        case Seq(parts) if parts:
            outer, others = (parts[0], parts[1:]) if edge == "^" else (parts[-1], parts[:-1])
            if outer == Edge(edge) or (isinstance(outer, Alt | Repeat) and has_looks(outer)):
                return _beside(edge, _from_edge(edge, outer, around), *others)
        case Repeat(part, 0, 1) if has_looks(part):
            return alt(_from_edge(edge, part, around), around)
    return _beside(edge, around, node)


def _beside(edge: Literal["^", "$"], outer: Node, *others: Node) -> Node:
    """The parts in their order, of which `outer` is on the side of an edge."""
    return seq(outer, *others) if edge == "^" else seq(*others, outer)
