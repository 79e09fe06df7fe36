"""What a model says, what it thinks and what it calls, told apart while its text is still arriving.

How the text is cut into pieces never changes the result, and only what may be the beginning of a marker is held back,
or white space that may turn out to stand next to one. No text is an error: what is no call after all is said.
"""

from __future__ import annotations

from typing import NamedTuple

from ...schemas.events import ToolCallDelta
from ...schemas.jobs import Form
from .text_cursor import Page, Reading
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
        self._page = Page(form, request, choice)
        self._reading = self._read()

    @property
    def called(self) -> bool:
        """Whether a call was begun."""
        return self._page.num_calls > 0

    @property
    def thinking(self) -> bool:
        """Whether the text is in the middle of a thought."""
        return self._page.thinking

    def push(self, text: str) -> Parsed:
        self._page.feed(text)
        next(self._reading, None)
        return Parsed(*self._page.take())

    def finish(self) -> Parsed:
        """What was held back, once nothing more comes."""
        self._page.ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        page = self._page
        tools = format_of(self._form)
        begins, silent = (tools.begins, tools.silent) if tools else ((), ())
        stray = (yield from self._read_thought()) if self._form.reasoning_format else ""
        while word := (yield from page.until((*begins, *silent, *filter(None, [stray])), page.say)):
            if word == stray or word in silent:
                page.pause()
                stray = "" if word == stray else stray
            elif tools and (yield from tools.read(page, tools.ends)):
                for end in tools.ends:
                    yield from page.accept(end)
            else:
                page.say(page.pending)
            page.mark = page.at

    def _read_thought(self) -> Reading[str]:
        """A thought at the beginning. Where there is none, the marker that would end one and must not be said."""
        page = self._page
        begin, end = REASONING_FORMATS[self._form.reasoning_format or ""]
        # A template may have begun the thought, and the model may begin it once more.
        if not (yield from page.accept(begin)) and not self._form.thinking:
            page.at = page.mark
            return end
        page.pause()
        page.thinking = True
        yield from page.until((end,), page.think)
        page.pause()
        page.mark = page.at
        return ""
