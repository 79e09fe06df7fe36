"""What a pattern asks of a whole text, written without the edges and looks that xgrammar does not know."""

from __future__ import annotations

from .automata import without_looks
from .nodes import ANYTHING, EMPTY, NOTHING, Alt, Edge, Node, Repeat, Seq, alt, has_looks, seq, walk
from .reading import Fault, read


def whole(pattern: str, *, searches: bool = False) -> Node:
    """The texts that a pattern matches as a whole; or, with `searches`, in which it is found.

    Raises `Fault`, for a pattern that no text matches as well.
    """
    node = read(pattern)
    around = ANYTHING if searches else EMPTY
    if not has_looks(node):
        node = seq(around, node, around)
    else:
        simple = _from_begin(_to_end(node, around), around)
        node = without_looks(seq(around, node, around)) if has_looks(simple) else simple
    if node == NOTHING:
        raise Fault("no text matches it")
    return node


def is_anchored(pattern: str) -> bool:
    """Whether a pattern says where a text begins or ends. Raises `Fault`."""
    return any(isinstance(one, Edge) and one.kind in "^$" for one in walk(read(pattern)))


def _from_begin(node: Node, around: Node) -> Node:
    """With what may come before it, where it does not have to stand at the beginning."""
    match node:
        case Edge("^"):
            return EMPTY
        case Alt(options):
            return alt(*(_from_begin(one, around) for one in options))
        case Seq((first, *others)) if first == Edge("^") or (isinstance(first, Alt | Repeat) and has_looks(first)):
            return seq(_from_begin(first, around), *others)
        case Repeat(part, 0, 1) if has_looks(part):
            return alt(_from_begin(part, around), around)
    return seq(around, node)


def _to_end(node: Node, around: Node) -> Node:
    match node:
        case Edge("$"):
            return EMPTY
        case Alt(options):
            return alt(*(_to_end(one, around) for one in options))
        case Seq((*others, last)) if last == Edge("$") or (isinstance(last, Alt | Repeat) and has_looks(last)):
            return seq(*others, _to_end(last, around))
        case Repeat(part, 0, 1) if has_looks(part):
            return alt(_to_end(part, around), around)
    return seq(node, around)
