"""Exceptions for the log: their type and traceback, without their message, which may quote a prompt."""

from __future__ import annotations

import logging
import os
import traceback
from types import TracebackType
from typing import Any, TextIO

from ...schemas.errors import Fatal, Transient

DEEPEST = 8  # length of a chain of causes


def told(error: BaseException) -> str:
    """An exception with its causes. Only errors about this installation keep their message."""
    return "\n".join(_lines(error, DEEPEST))


def _lines(error: BaseException, depth: int) -> list[str]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [*_lines(before, depth - 1), "", "which caused:", ""] if before is not None and depth else []
    if frames := traceback.format_list(traceback.extract_tb(error.__traceback__)):
        lines += ["Traceback (most recent call last):", *(line.rstrip("\n") for line in frames)]
    words = f": {error}" if isinstance(error, Fatal | Transient) else ""
    if isinstance(error, OSError) and error.errno is not None:
        words = f": {os.strerror(error.errno)}"
    lines.append(f"{type(error).__module__}.{type(error).__qualname__}{words}")
    if isinstance(error, BaseExceptionGroup) and depth:
        for number, each in enumerate(error.exceptions, 1):
            lines += [f"  {number}. {line}" if line else "" for line in _lines(each, depth - 1)]
    return lines


def as_text(exc_info: tuple[type[BaseException], BaseException, TracebackType | None]) -> str:
    """For structlog's JSON renderer."""
    return told(exc_info[1])


def write(stream: TextIO, exc_info: Any) -> None:
    """For structlog's console renderer."""
    stream.write(f"\n{told(exc_info[1])}")


class FirstLine(logging.Filter):
    """Drops the exception's message from asyncio's report of a task whose result was never retrieved."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().partition("\n")[0], ()
        return True
