"""Structured logs on standard error: readable on a terminal, JSON elsewhere. They contain no prompts or answers."""

from __future__ import annotations

import json
import logging
import sys
from itertools import chain
from types import TracebackType
from typing import Any

import orjson
import structlog

from ...schemas.errors import StreamFull, Transient
from ..settings import Settings
from .lines import LogLines
from .tracebacks import FirstLine, as_text, write

log = structlog.get_logger(__name__)


def configure_logging(settings: Settings, **context: object) -> None:
    """Set up structlog and route the standard library's logging (uvicorn, nats, transformers) through it.

    `context` is bound to every line of this process, such as `process="worker"`.
    """
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    rendering: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=write)]
        if console
        else [structlog.processors.ExceptionRenderer(as_text), structlog.processors.JSONRenderer(as_json)]
    )
    lines = LogLines(sys.stderr, _dropped)
    # Past the standard library, in which a line takes three times as long.
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(settings.log_level.upper())),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(lines)
    final = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering]
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=final, foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    for chatty in ("httpx2", "httpcore2", "nats", "uvicorn", "asyncio", "client"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it quotes servers; results contain the errors
    logging.getLogger("asyncio").addFilter(FirstLine())
    sys.excepthook = _ended
    structlog.contextvars.bind_contextvars(**context)


def _dropped(number: int) -> None:
    log.warning("log lines dropped, as nobody read them", lines=number)


def as_json(event: object, **options: Any) -> str:
    """JSON in ASCII, by orjson wherever it can write the line so."""
    try:
        line = orjson.dumps(event, options["default"])
    except TypeError:  # half a surrogate pair, or a number of more than 64 bits
        line = b""
    return line.decode() if line and line.isascii() else json.dumps(event, **options)


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if known := _known(error):  # what ended it says what it is; where in the code is of no use to who reads it
        logging.getLogger(__name__).critical("process ended: %s", "; ".join(known))
    elif issubclass(kind, Exception | BaseExceptionGroup):
        logging.getLogger(__name__).critical("process ended with an error", exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)


def _known(error: BaseException) -> list[str]:
    """What is said of an error, or of all in a group, if each passes by itself; else nothing."""
    if isinstance(error, BaseExceptionGroup):
        parts = [_known(one) for one in error.exceptions]
        return list(dict.fromkeys(chain.from_iterable(parts))) if all(parts) else []
    if isinstance(error, StreamFull) and error.storage:
        return [f"the broker has no room: free space on its disk, or raise store_limit ({error})"]
    return [str(error)] if isinstance(error, Transient) else []
