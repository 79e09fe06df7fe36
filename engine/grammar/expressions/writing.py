"""Writes expressions as xgrammar reads them.

It reads `[\\^a]` as `[^a]`, and as many digits behind `\\x` as there are; where an optional group ends in a repetition,
it makes only the beginning of the group optional, unless that is `{0,1}`. So each set is one class of plain ranges, in
an order in which nothing is read together, and each character beyond ASCII is in braces.

xgrammar follows a pattern by an automaton or by rules. Automata forget the numbers of repetitions where a text may be
read in two ways, so they are written out, and repeat what is optional where it begins or ends with a repetition, unless
that is between empty groups. With rules, it allows tokens beyond the pattern where characters beyond
ASCII may be of one part or the next. So they are for what automata do not have: escapes in JSON, large numbers.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Literal

from .nodes import EMPTY, NOTHING, Alt, Chars, Node, Repeat, Seq, alt, repeat, seq, walk
from .reading import Fault
from .sets import ESCAPED_IN_JSON, CharSet, both, members, size, without

# How the strings of a document in JSON are written: in quotes, where sets of characters do without those that JSON
# escapes, or with their escapes; or without quotes and escapes.
Strings = Literal["plain", "escaped", "raw"]
_LONGEST = 500_000
_MOST_WRITTEN_OUT = 6_000  # parts, repetitions written out; a set of many characters counts as _WIDE parts
_MANY, _WIDE = 200, 15
_MOST_COUNTED = 128  # repetitions of one part that xgrammar counts in JSON
_BY_RULES = "(?:é){0}"  # at the end of a pattern of which xgrammar is to make no automaton
_SPECIAL = frozenset("\\^$.*+?()[]{}|/")
_IN_CLASS = frozenset("\\]-[")
_PRINTABLE: CharSet = ((32, 126),)
_CARET: CharSet = ((94, 94),)
_ESCAPABLE = '"\\\b\f\n\r\t'  # what JSON escapes that texts have


def written(node: Node, strings: Strings | None) -> str:
    """A pattern for xgrammar: of whole texts, or of the strings of a document in JSON.

    Raises `Fault` where no text is left, or one is repeated too often.
    """
    fitted = node if strings in (None, "raw") else _in_json(node, has_escapes=strings == "escaped")
    if fitted == NOTHING:
        raise Fault("no text matches it")
    counts = _length(fitted) > _MOST_WRITTEN_OUT
    often = max((max(one.least, one.most or 0) for one in walk(fitted) if isinstance(one, Repeat)), default=0)
    if counts and strings and often > _MOST_COUNTED:
        raise Fault(f"it is too large, and repeats a part more than {_MOST_COUNTED} times")
    text = _written(fitted, counts=counts) or "()"
    if len(text) > _LONGEST:
        raise Fault(f"it is too large: written out, it has {len(text):,} characters, and may have {_LONGEST:,}")
    # The automata of strings in a schema have no escapes.
    by_rules = counts or (strings == "plain" and "\\\\" in text)
    return text + _BY_RULES if by_rules else text


def is_automatic(pattern: str) -> bool:
    """Whether xgrammar may make an automaton of a pattern that was written here."""
    return not pattern.endswith(_BY_RULES)


def by_automaton(pattern: str) -> str:
    """A grammar of the texts of such a pattern."""
    return f"root ::= Regex({json.dumps(pattern)})"


def _length(node: Node) -> int:
    """Of what is written, without numbers, by how long it takes to compile."""
    match node:
        case Chars(known):
            return _WIDE if size(known) > _MANY else 1
        case Seq(parts) | Alt(parts):
            return sum(map(_length, parts)) + 1
        case Repeat(part, least, most):
            return _length(part) * max(least, most or 0, 1)
    return 1


def _in_json(node: Node, *, has_escapes: bool) -> Node:
    """The expression of the texts between the quotes."""
    inner = partial(_in_json, has_escapes=has_escapes)
    match node:
        case Chars(known):
            return _characters(known, has_escapes=has_escapes)
        case Seq(parts):
            return seq(*map(inner, parts))
        case Alt(options):
            return alt(*map(inner, options))
        case Repeat(part, least, most):
            return repeat(inner(part), least, most)
    raise AssertionError("looks are gone by now")


def _characters(known: CharSet, *, has_escapes: bool) -> Node:
    """Those that JSON writes as they are; and those that it escapes, where asked for or where there are no others."""
    kept, escaped = without(known, ESCAPED_IN_JSON), both(known, ESCAPED_IN_JSON)
    named = [one for one in members(escaped) if one in _ESCAPABLE or size(known) == 1]
    texts = [json.dumps(one)[1:-1] for one in named] if has_escapes or not kept else []
    options = [seq(*(Chars(((ord(one), ord(one)),)) for one in text)) for text in texts]
    return alt(*([Chars(kept)] if kept else []), *options)


def _written(node: Node, *, counts: bool) -> str:
    inner = partial(_written, counts=counts)
    match node:
        case Chars(known):
            return _set(known)
        case Seq(parts):
            return "".join(f"(?:{inner(one)})" if isinstance(one, Alt) else inner(one) for one in parts)
        case Alt(options) if EMPTY in options:
            return inner(Repeat(alt(*(one for one in options if one != EMPTY)), 0, 1))
        case Alt(options):
            return "|".join(map(inner, options))
        case Repeat(part, least, most):
            text = inner(part)
            one = text if isinstance(part, Chars) else f"(?:{text})"
            return _counted(one, least, most) if counts else _written_out(one, least, most)
    raise AssertionError("looks are gone by now")


def _counted(one: str, least: int, most: int | None) -> str:
    if most is None:
        return one + ("*" if least == 0 else "+" if least == 1 else f"{{{least},}}")
    return f"{one}{{{least}}}" if least == most else f"{one}{{{least},{most}}}"


def _written_out(one: str, least: int, most: int | None) -> str:
    if most is None:
        return f"{one}*" if least == 0 else one * (least - 1) + one + "+"
    optional = most - least
    if optional == 1 and not one.startswith("("):
        return f"{one * least}{one}?"
    return one * least + f"(?:(){one}" * optional + "())?" * optional


def _set(known: CharSet) -> str:
    if size(known) == 1:
        return _literal(chr(known[0][0]))
    # A "^" in front would exclude the rest, and a digit behind a character beyond ASCII belong to its number.
    plain, beyond = without(both(known, _PRINTABLE), _CARET), without(known, _PRINTABLE)
    caret = "^" if both(known, _CARET) else ""
    return f"[{''.join(map(_range, (*plain, *beyond)))}{caret}]"


def _range(ends: tuple[int, int]) -> str:
    low, high = map(_in_class, map(chr, ends))
    return low if ends[0] == ends[1] else f"{low}{'' if ends[0] + 1 == ends[1] else '-'}{high}"


def _in_class(one: str) -> str:
    if not " " <= one <= "~":
        return f"\\u{{{ord(one):x}}}"
    return f"\\{one}" if one in _IN_CLASS else one


def _literal(one: str) -> str:
    if not " " <= one <= "~":
        return f"\\u{{{ord(one):x}}}"
    return f"\\{one}" if one in _SPECIAL else one


def in_quotes(text: str) -> str:
    """A text as JSON writes it, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
