"""Writes grammars in Lark, in which OpenAI's custom tools may say what they take, as regular expressions.

That is possible where no rule refers to itself. The names of rules, priorities and what a parser does with its tree
have no effect on the texts that a grammar allows.
"""

from __future__ import annotations

import re
from ast import literal_eval
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lark import Token, Tree
    from lark.load_grammar import Grammar

_LONGEST = 20_000  # characters of a pattern
_is_foreign_import = re.compile(r"^\s*%import\s+(?!common\b)", re.MULTILINE).search
# What common.ESCAPED_STRING has between its quotes: a parser takes the shortest text, which ends at the first quote.
_ESCAPED_STRING, _SHORTEST_STRING = r"(?:.*?)(?:(?<!\\)(\\\\)*?)", r'(?:[^"\\\n]|\\.)*'
_special = re.compile(r"[\\^$.*+?()\[\]{}|/]")
_ESCAPES = str.maketrans({"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v", "\0": r"\x00"})


@lru_cache(32)
def lark_pattern(definition: str) -> str:
    """The regular expression of the texts that a grammar allows; it has to match the whole text.

    Raises `ValueError` for what is no grammar, has no rule `start`, imports others than Lark's `common`, or cannot be
    written as a regular expression.
    """
    from lark.exceptions import LarkError  # nothing else needs the package
    from lark.load_grammar import GrammarBuilder

    if _is_foreign_import(definition):
        raise ValueError("it can import from common alone")
    try:
        builder = GrammarBuilder()
        builder.load_grammar(definition, "<grammar>")
        return _Writer(builder.build()).write()
    except LarkError as error:
        raise ValueError(f"it is no grammar in Lark: {str(error).strip().splitlines()[0]}") from None
    except RecursionError:
        raise ValueError("its parts are nested too deeply") from None


class _Writer:
    def __init__(self, grammar: Grammar) -> None:
        self._rules = {str(name): tree for name, parameters, tree, _ in grammar.rule_defs if not parameters}
        self._terminals = {str(name): tree for name, (tree, _) in grammar.term_defs}
        self._ignored = [str(name) for name in grammar.ignore]
        self._gap = ""  # what may stand between two terminals; set by write
        self._open: list[str] = []  # the rules and terminals that are being written
        self._written: dict[str, str] = {}

    def write(self) -> str:
        if self._ignored:
            self._gap = f"(?:{'|'.join(self._named(name, self._terminals) for name in self._ignored)})*"
        if "start" not in self._rules:
            raise ValueError("it has no rule with the name start")
        return self._gap + self._named("start", self._rules)

    def _named(self, name: str, known: dict[str, Tree[Token]]) -> str:
        if name in self._open:
            raise ValueError(f"{name} refers to itself, which no regular expression can do; use a schema or text")
        if known.get(name) is None:
            raise ValueError(f"{name} has no definition, or takes parameters, which is not supported")
        if name not in self._written:
            self._open.append(name)
            text = self._expansion(known[name], in_terminal=known is self._terminals)
            self._open.pop()
            self._written[name] = text.replace(_ESCAPED_STRING, _SHORTEST_STRING)
        return self._written[name]

    def _expansion(self, node: Any, *, in_terminal: bool) -> str:
        """A part of a rule or a terminal. Between terminals, but not within them, may be what the grammar ignores."""

        def inner(part: Any) -> str:
            return self._expansion(part, in_terminal=in_terminal)

        match node.data, node.children:
            case "expansions", [alternative]:
                text = inner(alternative)
            case "expansions", alternatives:
                texts = [inner(alternative) for alternative in alternatives]
                text = f"(?:{'|'.join(filter(None, texts))}){'' if all(texts) else '?'}"
            case "expansion", parts:
                text = "".join(map(inner, parts))
            case "alias", [part, _]:
                text = inner(part)
            case "maybe", [part]:
                text = f"(?:{inner(part)})?"
            case "expr", [part, *operator]:
                text = f"(?:{inner(part)}){_repeated(operator)}"
            case "value", [value]:
                text = self._value(value, in_terminal=in_terminal)
            case kind, _:
                raise ValueError(f"it has a {kind}, which is not supported")
        if len(text) > _LONGEST:
            raise ValueError(f"as a regular expression it has more than {_LONGEST:,} characters; write it shorter")
        return text

    def _value(self, value: Any, *, in_terminal: bool) -> str:
        from lark.grammar import NonTerminal, Terminal

        match value:
            case NonTerminal():
                return self._named(value.name, self._rules)
            case Terminal():
                text = self._named(value.name, self._terminals)
            case _ if value.data == "literal":
                text = _literal(str(value.children[0]))
            case _ if value.data == "range":
                first, last = (_string(str(bound)) for bound in value.children)
                text = f"[{_within_class(first)}-{_within_class(last)}]"
            case _:
                return self._expansion(value, in_terminal=in_terminal)
        return text if in_terminal else text + self._gap


def _repeated(operator: list[Token]) -> str:
    match list(map(str, operator)):
        case [sign]:
            return sign
        case [_, times]:
            return f"{{{times}}}"
        case [_, least, most]:
            return f"{{{least},{most}}}"
    raise ValueError("it has a repetition of an unknown form")


def _literal(text: str) -> str:
    if not text.startswith("/"):
        insensitive = text.endswith("i")
        return "".join(_any_case(char) if insensitive else _escaped(char) for char in _string(text.removesuffix("i")))
    body, _, flags = text[1:].rpartition("/")
    if not {*flags} <= {*"isu"}:
        raise ValueError(f"of flags i, s and u are supported, and others are in {text}")
    return f"(?{flags}:{body.replace(chr(92) + '/', '/')})"


def _string(text: str) -> str:
    try:
        return str(literal_eval(text))
    except (SyntaxError, ValueError):
        raise ValueError(f"{text} is no string") from None


def _escaped(char: str) -> str:
    return _special.sub(r"\\\g<0>", char).translate(_ESCAPES)


def _any_case(char: str) -> str:
    cases = sorted({char, *(case for case in (char.lower(), char.upper()) if len(case) == 1)})  # "ß" has no other
    return f"[{''.join(map(_within_class, cases))}]" if len(cases) > 1 else _escaped(char)


def _within_class(char: str) -> str:
    return f"\\{char}" if char in r"\]^-[" else char.translate(_ESCAPES)
