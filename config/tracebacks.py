"""Exceptions for a log: what kind, and where in the code; never in their own words, which may quote a prompt."""

from __future__ import annotations

import logging
import os
import traceback
from types import TracebackType
from typing import Any, TextIO

from ..schemas.errors import Fatal, Transient

DEEPEST = 8  # exceptions that caused one another


def told(error: BaseException) -> str:
    """An exception with those that caused it. Only errors that are about this installation keep their words."""
    return "\n".join(_lines(error, DEEPEST))


def _lines(error: BaseException, depth: int) -> list[str]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [*_lines(before, depth - 1), "", "and then:", ""] if before is not None and depth else []
    if frames := traceback.format_list(traceback.extract_tb(error.__traceback__)):
        lines += ["Traceback (most recent call last):", *(line.rstrip("\n") for line in frames)]
    words = f": {error}" if isinstance(error, Fatal | Transient) else ""
    if isinstance(error, OSError) and error.errno is not None:
        words = f": {os.strerror(error.errno)}"
    lines.append(f"{type(error).__module__}.{type(error).__qualname__}{words}")
    if isinstance(error, BaseExceptionGroup) and depth:
        for place, each in enumerate(error.exceptions, 1):
            lines += [f"  {place}. {line}" if line else "" for line in _lines(each, depth - 1)]
    return lines


def as_text(exc_info: tuple[type[BaseException], BaseException, TracebackType | None]) -> str:
    """For structlog's renderer of JSON."""
    return told(exc_info[1])


def write(stream: TextIO, exc_info: Any) -> None:
    """For structlog's renderer for terminals."""
    stream.write(f"\n{told(exc_info[1])}")


class FirstLine(logging.Filter):
    """Keeps asyncio from adding an exception's own words to what it says of a task that nobody waited for."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True
