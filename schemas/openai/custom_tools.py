"""OpenAI's custom tools, which take a text instead of JSON. The model sees a function with one string, `input`, and
what it writes for that string is the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import orjson

_begins_input = re.compile(r'\s*\{\s*"input"\s*:\s*"').match
_plain = re.compile(r'[^"\\]+').match
_pair = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}").match  # of two surrogates
_unit = re.compile(r"\\u[0-9a-fA-F]{4}").match
_is_surrogate = re.compile(r"\\u[dD][89a-fA-F]").match
_may_follow = re.compile(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?)?$").match  # whether the rest of a pair may come
_LENGTH_OF_UNIT = len(r"\u0000")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def arguments_of(text: str) -> str:
    """The arguments of the call that a custom tool got `text` by."""
    return orjson.dumps({"input": text}).decode()


def input_of(arguments: str) -> str:
    """The text for a custom tool in a call's arguments: all of them, where they are no object with a string `input`."""
    reader = InputReader()
    return reader.feed(arguments) + reader.end()


def custom_names(tools: object) -> frozenset[str]:
    """The names of the custom tools among those of a request to either API, which need not be valid."""
    found: set[str] = set()
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and tool.get("type") == "custom":
            named = tool.get("custom", tool)
            name = named.get("name") if isinstance(named, Mapping) else None
            found |= {name} if isinstance(name, str) else set()
    return frozenset(found)


class InputReader:
    """Reads the text for a custom tool from the arguments of a call while they come.

    Where these do not begin as they should, nothing comes before the end, and then all of them.
    """

    def __init__(self) -> None:
        self._held = ""  # not read yet
        self._begun = False  # the string
        self._ended = False

    def feed(self, arguments: str) -> str:
        """The text that the next piece of the arguments adds."""
        self._held += arguments
        if not self._begun and (begun := _begins_input(self._held)):
            self._held, self._begun = self._held[begun.end() :], True
        return "".join(self._read()) if self._begun and not self._ended else ""

    def end(self) -> str:
        """What is left of the text once the arguments are complete or cut off."""
        held, self._held = self._held, ""
        return "" if self._begun else held

    def _read(self) -> Iterator[str]:
        """The characters that are complete, up to the end of the string."""
        place, text = 0, self._held
        while place < len(text) and not self._ended:
            if plain := _plain(text, place):
                place = plain.end()
                yield plain[0]
            elif text[place] == '"':
                self._ended = True
            elif pair := _pair(text, place):
                place = pair.end()
                yield orjson.loads(f'"{pair[0]}"')
            elif (unit := _unit(text, place)) and not _is_surrogate(text, place):
                place = unit.end()
                yield chr(int(unit[0][2:], 16))
            elif unit and not _may_follow(text[unit.end() :]):
                place = unit.end()
                yield "\ufffd"  # half of a pair
            elif (escaped := text[place + 1 : place + 2]) and escaped != "u":
                place += 2
                yield _ESCAPES.get(escaped, "\\" + escaped)
            elif len(text) - place >= _LENGTH_OF_UNIT and not unit:
                place += 1
                yield "\\"  # of no escape
            else:
                break
        self._held = text[place:]
