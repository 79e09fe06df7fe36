"""Answers what nobody foresaw. An error that passed all middleware would reach the client without their headers: a web
page could not read it, Anthropic's clients would not know its form, and the log would say that the client had left."""

from __future__ import annotations

import asyncio

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....schemas.events import ErrorBody
from ....schemas.threads import ADVICE, lacks_threads, threads_exhausted
from ..answers import error_response
from .access import note

log = structlog.get_logger(__name__)


class Failures:
    """ASGI middleware, inside of those that change or count responses: answers 500 for an exception, or 503 where
    the system allows no more threads, and passes it on to the server, which logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def seen(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, seen if scope["type"] == "http" else send)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failure:  # a panic of a library in Rust, such as tokenizers, is no Exception
            text = "Penstock could not answer because of an internal error; see its log."
            error = ErrorBody(500, text, "server_error", "internal_error")
            if lacks_threads(failure):
                log.error("request failed", reason=ADVICE)
                error = ErrorBody.of(threads_exhausted())
            if scope["type"] == "http" and not begun:
                note(scope, error=error.code)
                await error_response(error)(scope, receive, send)
            raise
