"""Refusals in the form of the API whose client asked."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import orjson
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class ErrorForm:
    """ASGI middleware: gives every error of some paths another form than OpenAI's. Subclasses say of which, and which.

    An error is a JSON body of one message.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.concerns(scope):
            await self.app(scope, receive, send)
            return
        refused: Message | None = None

        async def translated(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                self.complete(headers)
                if message["status"] >= 400 and headers.get("content-type") == "application/json":
                    refused = message
                    return
            elif refused is not None:
                headers, status = MutableHeaders(scope=refused), refused["status"]
                payload = self.payload(scope, status, orjson.loads(message["body"])["error"], headers)
                message = {**message, "body": orjson.dumps(payload)}
                headers["content-length"] = str(len(message["body"]))
                await send({**refused, "status": self.status(status)})
                refused = None
            await send(message)

        await self.app(scope, receive, translated)

    @abstractmethod
    def concerns(self, scope: Scope) -> bool:
        """Whether a request is for one of the paths."""

    @abstractmethod
    def payload(self, scope: Scope, status: int, error: dict[str, Any], headers: MutableHeaders) -> dict[str, Any]:
        """The body for OpenAI's error object."""

    def complete(self, headers: MutableHeaders) -> None:
        """Add what every response of these paths has beside."""

    def status(self, status: int) -> int:
        """The status in place of OpenAI's."""
        return status
