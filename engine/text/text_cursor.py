"""A choice's text while it is still arriving: a place on it, and what its readers have found so far.

Whoever reads is a generator: it waits with `yield` where it needs more, so that how the text is cut never changes what
is read. A `Reading` is to be run with `yield from`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any, TypeVar

from ...schemas.events import ToolCallDelta
from ...schemas.jobs import Form
from .literals import Literal

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
Say = Callable[[str], None]

_SPACE = " \t\r\n"
_NAME = re.compile(r"[\w.-]*")
_LONGEST_HEADER = 256  # characters; what is longer is no name of a tool


class Page:
    """`at` is where reading goes on. Everything before `mark` is accounted for; what lies between the two may still
    turn out to be nothing but text.

    `accept`, `name`, `value` and `string` pass the white space in front. `begin` and `add` account for everything that
    was passed.
    """

    def __init__(self, form: Form, request: str, choice: int) -> None:
        self.at = 0
        self.mark = 0
        self.ended = False  # set by the owner, when nothing more will come
        self.num_calls = 0  # set by begin
        self.thinking = form.thinking and form.reasoning_format is not None  # set by say, think and pause
        self._written = ""
        self._form = form
        self._request = request
        self._choice = choice
        self._said = _Prose(trimmed=form.tool_format is not None)
        self._thought = _Prose(trimmed=True)
        self._calls: list[ToolCallDelta] = []  # pieces, at most one of each call

    def feed(self, text: str) -> None:
        self._written = self._written[self.mark :] + text
        self.at -= self.mark
        self.mark = 0

    def take(self) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """What was found since the last time: said, thought and called."""
        calls, self._calls = tuple(self._calls), []
        return self._said.take(self.ended), self._thought.take(self.ended), calls

    @property
    def pending(self) -> str:
        """What was read and is not accounted for."""
        return self._written[self.mark : self.at]

    def peek(self) -> Reading[str]:
        """The next character; none at the end."""
        while self.at == len(self._written) and not self.ended:
            yield
        return self._written[self.at : self.at + 1]

    def space(self) -> Reading[str]:
        """Pass white space; the character behind it, none at the end."""
        while (char := (yield from self.peek())) and char in _SPACE:
            self.at += 1
        return char

    def accept(self, *words: str) -> Reading[str]:
        """Pass the one of `words` that stands here, and return it; otherwise nothing. None may begin another.

        The beginning of one at the very end of the text is passed as well: it was cut off.
        """
        yield from self.space()
        while True:
            rest = self._written[self.at : self.at + max(map(len, words))]
            found = next((word for word in words if rest.startswith(word)), "")
            begun = any(word.startswith(rest) for word in words)
            if found or self.ended or not begun:
                self.at += len(found or (rest if begun else ""))
                return found
            yield

    def name(self) -> Reading[str]:
        """Pass letters, digits, `_`, `.` and `-`; empty if there are none, or more than any name has."""
        yield from self.space()
        while True:
            found = _NAME.match(self._written, self.at, self.at + _LONGEST_HEADER)
            assert found is not None
            if self.ended or found.end() < len(self._written):
                self.at = found.end()
                return found[0]
            yield

    def before(self, word: str) -> Reading[str | None]:
        """Pass `word` and return what stands in front of it; None if it is not near, or cut off."""
        while (end := self._written.find(word, self.at, self.at + _LONGEST_HEADER)) < 0:
            if len(self._written) - self.at >= _LONGEST_HEADER:
                return None
            if self.ended:
                self.at = len(self._written)
                return None
            yield
        found = self._written[self.at : end]
        self.at = end + len(word)
        return found

    def until(self, words: tuple[str, ...], say: Say) -> Reading[str]:
        """Say everything up to the first of `words`, and pass that; nothing is returned if the text ends before.

        Afterwards `mark` is where the word begins.
        """
        pattern = _search(words)
        while True:
            found = pattern.search(self._written, self.at)
            word = found[0] if found and found[0] in words else ""
            start = found.start() if found and (word or not self.ended) else len(self._written)
            said = self._written[self.at : start]
            self.mark = start
            self.at = start + len(word)
            if said:
                say(said)
            if word or self.ended:
                return word
            yield

    def value(self, say: Say) -> Reading[bool]:
        """Say the literal that stands here, as JSON; whether it was one, and complete."""
        yield from self.space()
        literal = Literal()
        while True:
            piece, self.at = literal.take(self._written, self.at, self.ended)
            if piece:
                say(piece)
            if literal.done or literal.broken or self.ended:
                return literal.done
            yield

    def string(self) -> Reading[str | None]:
        """The text of the string that stands here; None for anything else."""
        parts: list[str] = []
        if (yield from self.space()) not in ("'", '"') or not (yield from self.value(parts.append)):
            return None
        return str(json.loads("".join(parts)))

    def schema(self, name: str) -> dict[str, Any] | None:
        """The JSON Schema of a tool's parameters; None if there is no such tool."""
        if self._form.tool_format is None or not name:
            return None
        return self._form.tools.get(name) if self._form.tools else {}

    def begin(self, name: str) -> None:
        """A call begins."""
        self.pause()
        identity = id_for(self._form, self._request, self._choice, self.num_calls)
        self._calls.append(ToolCallDelta(self.num_calls, "", identity, name))
        self.num_calls += 1
        self.mark = self.at

    def add(self, arguments: str) -> None:
        """The next piece of the last call's arguments."""
        index = self.num_calls - 1
        last = self._calls.pop() if self._calls and self._calls[-1].index == index else ToolCallDelta(index, "")
        self._calls.append(replace(last, arguments=last.arguments + arguments))
        self.mark = self.at

    def say(self, text: str) -> None:
        self.thinking = False
        self._said.add(text)

    def think(self, text: str) -> None:
        self.thinking = True
        self._thought.add(text)

    def pause(self) -> None:
        """A marker: the white space around it belongs to nobody."""
        self.thinking = False
        self._said.pause()
        self._thought.pause()


def id_for(form: Form, request: str, choice: int, index: int) -> str:
    """The id of a call: always the same for the same call, so that whoever takes the request over says the same."""
    digest = hashlib.sha256(f"{request}/{choice}/{index}".encode()).hexdigest()
    # Mistral's templates take ids of nine letters and digits alone.
    return digest[:9] if (form.tool_format or "").startswith("mistral") else f"call_{digest[:24]}"


class _Prose:
    """Text without the white space that touches a marker; what was said on both sides of one, on two lines."""

    def __init__(self, trimmed: bool) -> None:
        self._trimmed = trimmed  # a marker may come that nobody has seen yet
        self._ready = ""
        self._space = ""  # held back from the end
        self._said = False
        self._paused = False

    def add(self, text: str) -> None:
        if self._trimmed and not text.strip(_SPACE):
            self._space += "" if self._paused else text  # kept as it is: a model can go on with it for ever
            return
        text = self._space + text
        if self._paused:
            text = text.lstrip(_SPACE)
        body = text.rstrip(_SPACE) if self._trimmed else text
        self._space = text[len(body) :]
        if body:
            self._ready += "\n" + body if self._paused and self._said else body
            self._said, self._paused = True, False

    def pause(self) -> None:
        self._space = ""
        self._paused = True

    def take(self, ended: bool) -> str:
        ready, self._ready = self._ready + (self._space if ended else ""), ""
        return ready


@lru_cache(maxsize=256)
def _search(words: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of `words`, or the beginning of one at the end of the text."""
    beginnings = [reduce(lambda rest, char: f"{re.escape(char)}(?:{rest})?", word[-2::-1], "") for word in words]
    cut = [rf"{beginning}\Z" for beginning in beginnings if beginning]
    return re.compile("|".join([*map(re.escape, words), *cut]) or "(?!)")
