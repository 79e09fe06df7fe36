"""Structured logs on standard error: readable on a terminal, JSON elsewhere. They contain no prompts or answers."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

import structlog

from .settings import Settings
from .tracebacks import FirstLine, as_text, write


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
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=write,
        )
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(settings.log_level.upper())),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    final: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not console:
        final.append(structlog.processors.ExceptionRenderer(as_text))
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[*final, renderer], foreign_pre_chain=shared))
    logging.basicConfig(handlers=[handler], level=settings.log_level.upper(), force=True)
    for chatty in ("httpx2", "httpcore2", "nats", "uvicorn", "asyncio", "client"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it quotes servers; results contain the errors
    logging.getLogger("asyncio").addFilter(FirstLine())
    sys.excepthook = _ended
    structlog.contextvars.bind_contextvars(**context)


def _ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception | BaseExceptionGroup):
        logging.getLogger(__name__).critical("process ended with an error", exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)
