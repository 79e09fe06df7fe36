"""A cursor on a choice's text while it is still arriving, which collects what the parsers find.

Parsers are generators: they `yield` where they need more text, so that the result never depends on how the text is cut
into pieces. Run a `Parsing` with `yield from`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any, TypeVar

from ...schemas.bounds import load_arguments
from ...schemas.events import ToolCallDelta
from ...schemas.jobs import Form
from .literals import Literal

Result = TypeVar("Result")
Parsing = Generator[None, None, Result]
Sink = Callable[[str], None]

_SPACE = " \t\r\n"
_NAME = re.compile(r"[\w.-]*")
_MAX_NAME_LENGTH = 256  # characters; anything longer is no name of a tool


class TextCursor:
    """`at` is where parsing goes on. Everything before `mark` is settled; what lies between the two may still turn out
    to be plain text.

    `accept`, `read_name`, `copy_literal` and `read_string` first skip white space. `begin_call` and `add_arguments`
    settle everything up to `at`.
    """

    def __init__(self, form: Form, request: str, choice: int) -> None:
        self.at = 0
        self.mark = 0
        self.ended = False  # set by the owner, when nothing more will come
        self.num_calls = 0  # set by begin_call
        # set by add_content, add_reasoning and pass_marker
        self.thinking = form.thinking and form.reasoning_format is not None
        self._text = ""
        self._form = form
        self._request = request
        self._choice = choice
        self._content = _TextBuffer(trimmed=form.tool_format is not None)
        self._reasoning = _TextBuffer(trimmed=True)
        self._calls: list[ToolCallDelta] = []  # pieces, at most one of each call

    def feed(self, text: str) -> None:
        self._text = self._text[self.mark :] + text
        self.at -= self.mark
        self.mark = 0

    def take(self) -> tuple[str, str, tuple[ToolCallDelta, ...]]:
        """What was found since the last time: content, reasoning and tool calls."""
        calls, self._calls = tuple(self._calls), []
        return self._content.take(self.ended), self._reasoning.take(self.ended), calls

    @property
    def pending(self) -> str:
        """What was passed and is not settled."""
        return self._text[self.mark : self.at]

    def peek(self) -> Parsing[str]:
        """The next character; none at the end."""
        while self.at == len(self._text) and not self.ended:
            yield
        return self._text[self.at : self.at + 1]

    def skip_space(self) -> Parsing[str]:
        """Skip white space; return the next character, none at the end."""
        while (char := (yield from self.peek())) and char in _SPACE:
            self.at += 1
        return char

    def accept(self, *words: str) -> Parsing[str]:
        """Pass the one of `words` that stands here, and return it; otherwise nothing. None may begin another.

        The beginning of one at the very end of the text is passed as well: it was cut off.
        """
        yield from self.skip_space()
        while True:
            rest = self._text[self.at : self.at + max(map(len, words))]
            found = next((word for word in words if rest.startswith(word)), "")
            begun = any(word.startswith(rest) for word in words)
            if found or self.ended or not begun:
                self.at += len(found or (rest if begun else ""))
                return found
            yield

    def read_name(self) -> Parsing[str]:
        """Pass letters, digits, `_`, `.` and `-`; return them, at most as many as a name may have."""
        yield from self.skip_space()
        while True:
            found = _NAME.match(self._text, self.at, self.at + _MAX_NAME_LENGTH)
            assert found is not None
            if self.ended or found.end() < len(self._text):
                self.at = found.end()
                return found[0]
            yield

    def read_before(self, word: str) -> Parsing[str | None]:
        """Pass `word` and return the text before it; None if `word` does not follow soon, or not at all."""
        while (end := self._text.find(word, self.at, self.at + _MAX_NAME_LENGTH)) < 0:
            if len(self._text) - self.at >= _MAX_NAME_LENGTH:
                return None
            if self.ended:
                self.at = len(self._text)
                return None
            yield
        found = self._text[self.at : end]
        self.at = end + len(word)
        return found

    def copy_until(self, words: tuple[str, ...], sink: Sink) -> Parsing[str]:
        """Copy everything up to the first of `words` to `sink`, pass that word and return it; empty at the end.

        Afterwards `mark` is where the word begins.
        """
        pattern = _search(words)
        while True:
            found = pattern.search(self._text, self.at)
            word = found[0] if found and found[0] in words else ""
            start = found.start() if found and (word or not self.ended) else len(self._text)
            passed = self._text[self.at : start]
            self.mark = start
            self.at = start + len(word)
            if passed:
                sink(passed)
            if word or self.ended:
                return word
            yield

    def copy_literal(self, sink: Sink) -> Parsing[bool]:
        """Copy the literal at the cursor to `sink`, as JSON; return whether it was one, and complete."""
        yield from self.skip_space()
        literal = Literal()
        while True:
            piece, self.at = literal.take(self._text, self.at, self.ended)
            if piece:
                sink(piece)
            if literal.done or literal.broken or self.ended:
                return literal.done
            yield

    def read_string(self) -> Parsing[str | None]:
        """The text of the string at the cursor; None for anything else."""
        parts: list[str] = []
        if (yield from self.skip_space()) not in ("'", '"') or not (yield from self.copy_literal(parts.append)):
            return None
        return str(load_arguments("".join(parts)))

    def parameters_of(self, name: str) -> dict[str, Any] | None:
        """The JSON Schema of a tool's parameters; None if there is no such tool."""
        if self._form.tool_format is None or not name:
            return None
        return self._form.tools.get(name) if self._form.tools else {}

    def begin_call(self, name: str) -> None:
        """A call begins."""
        self.pass_marker()
        identity = id_for(self._form, self._request, self._choice, self.num_calls)
        self._calls.append(ToolCallDelta(self.num_calls, "", identity, name))
        self.num_calls += 1
        self.mark = self.at

    def add_arguments(self, arguments: str) -> None:
        """The next piece of the last call's arguments."""
        index = self.num_calls - 1
        last = self._calls.pop() if self._calls and self._calls[-1].index == index else ToolCallDelta(index, "")
        self._calls.append(replace(last, arguments=last.arguments + arguments))
        self.mark = self.at

    def add_content(self, text: str) -> None:
        self.thinking = False
        self._content.add(text)

    def add_reasoning(self, text: str) -> None:
        self.thinking = True
        self._reasoning.add(text)

    def pass_marker(self) -> None:
        """Drop the white space around the marker at the cursor."""
        self.thinking = False
        self._content.pass_marker()
        self._reasoning.pass_marker()


def id_for(form: Form, request: str, choice: int, index: int) -> str:
    """The id of a call: always the same for the same call, so that it survives a takeover by another worker."""
    digest = hashlib.sha256(f"{request}/{choice}/{index}".encode()).hexdigest()
    # Mistral's templates take ids of nine letters and digits alone.
    return digest[:9] if (form.tool_format or "").startswith("mistral") else f"call_{digest[:24]}"


class _TextBuffer:
    """Text without the white space next to markers; a line break separates what stands on both sides of one."""

    def __init__(self, trimmed: bool) -> None:
        self._trimmed = trimmed  # whether a marker may follow
        self._ready = ""
        self._space = ""  # held back from the end
        self._has_text = False
        self._is_after_marker = False

    def add(self, text: str) -> None:
        if self._trimmed and not text.strip(_SPACE):
            self._space += "" if self._is_after_marker else text  # not put together anew: a model may write it forever
            return
        text = self._space + text
        if self._is_after_marker:
            text = text.lstrip(_SPACE)
        body = text.rstrip(_SPACE) if self._trimmed else text
        self._space = text[len(body) :]
        if body:
            self._ready += "\n" + body if self._is_after_marker and self._has_text else body
            self._has_text, self._is_after_marker = True, False

    def pass_marker(self) -> None:
        self._space = ""
        self._is_after_marker = True

    def take(self, ended: bool) -> str:
        ready, self._ready = self._ready + (self._space if ended else ""), ""
        return ready


@lru_cache(maxsize=256)
def _search(words: tuple[str, ...]) -> re.Pattern[str]:
    """Finds the first of `words`, or the beginning of one at the end of the text."""
    beginnings = [reduce(lambda rest, char: f"{re.escape(char)}(?:{rest})?", word[-2::-1], "") for word in words]
    cut = [rf"{beginning}\Z" for beginning in beginnings if beginning]
    return re.compile("|".join([*map(re.escape, words), *cut]) or "(?!)")
