"""Answers what nobody foresaw. An error that passed all middleware would reach the client without their headers: a web
page could not read it, Anthropic's clients would not know its form, and the log would say that the client had left."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....schemas.events import ErrorBody
from ..answers import error_response
from .access import note


class Failures:
    """ASGI middleware, inside of those that change or count responses: answers 500 for an exception, and passes it on
    to the server, which logs it."""

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
        except BaseException:  # a panic of a library in Rust, such as tokenizers, is no Exception
            if scope["type"] == "http" and not begun:
                text = "Penstock could not answer because of an internal error; see its log."
                error = ErrorBody(500, text, "server_error", "internal_error")
                note(scope, error=error.code)
                await error_response(error)(scope, receive, send)
            raise
