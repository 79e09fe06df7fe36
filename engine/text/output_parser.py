"""Splits a model's text into content, reasoning and tool calls while it is still arriving.

The result never depends on how the text is cut into pieces. Only what may be the beginning of a marker is held back, or
white space that may turn out to stand next to one. No text is an error: a malformed call is content.
"""

from __future__ import annotations

from typing import NamedTuple

from ...schemas.events import ToolCallDelta
from ...schemas.jobs import Form
from .text_cursor import Parsing, TextCursor
from .tool_formats import REASONING_FORMATS, format_of


class Parsed(NamedTuple):
    """What a piece of text adds to each."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]


class OutputParser:
    """The parser of one choice's text. `form.tools` empty means that any name may be called.

    White space around a call or a thought is dropped, and text on both sides of one is set apart by a line break.
    """

    def __init__(self, form: Form, request: str, choice: int) -> None:
        self._form = form
        self._cursor = TextCursor(form, request, choice)
        self._parsing = self._read()

    @property
    def called(self) -> bool:
        """Whether a call was begun."""
        return self._cursor.num_calls > 0

    @property
    def thinking(self) -> bool:
        """Whether the text is in the middle of a thought."""
        return self._cursor.thinking

    def push(self, text: str) -> Parsed:
        self._cursor.feed(text)
        next(self._parsing, None)
        return Parsed(*self._cursor.take())

    def finish(self) -> Parsed:
        """What was held back, once nothing more comes."""
        self._cursor.ended = True
        return self.push("")

    def _read(self) -> Parsing[None]:
        cursor = self._cursor
        tools = format_of(self._form)
        begins, silent = (tools.begins, tools.silent) if tools else ((), ())
        stray = (yield from self._read_thought()) if self._form.reasoning_format else ""
        while word := (yield from cursor.copy_until((*begins, *silent, *filter(None, [stray])), cursor.add_content)):
            if word == stray or word in silent:
                cursor.pass_marker()
                stray = "" if word == stray else stray
            elif tools and (yield from tools.read(cursor, tools.ends)):
                for end in tools.ends:
                    yield from cursor.accept(end)
            else:
                cursor.add_content(cursor.pending)
            cursor.mark = cursor.at

    def _read_thought(self) -> Parsing[str]:
        """A thought at the beginning. Where there is none, the marker that would end one and must not be said."""
        cursor = self._cursor
        begin, end = REASONING_FORMATS[self._form.reasoning_format or ""]
        # A template may have begun the thought, and the model may begin it once more.
        if not (yield from cursor.accept(begin)) and not self._form.thinking:
            cursor.at = cursor.mark
            return end
        cursor.pass_marker()
        cursor.thinking = True
        yield from cursor.copy_until((end,), cursor.add_reasoning)
        cursor.pass_marker()
        cursor.mark = cursor.at
        return ""
