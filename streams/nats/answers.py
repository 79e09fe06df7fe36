"""Answers to what clients ask of a part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg

from ..port import Message, Reply
from .connection.client import Callback
from .connection.link import Link

Respond = Callable[[Message, Reply], Awaitable[None] | None]


def answering(link: Link, namespace: str, respond: Respond) -> Callback:
    """A callback for a subscription of `link` that has `respond` answer each message.

    The answer goes by the same connection, as the server lets no other one answer. None goes where Penstock, JetStream
    or a bucket would take it for a message of ours: whoever asks names the subject of the answer, and may name one on
    which it may not publish itself.
    """

    def arrived(message: Msg) -> Awaitable[None] | None:
        async def reply(answer: bytes) -> None:
            if message.reply and not message.reply.startswith((f"{namespace}.", "$")):
                await link.send(message.reply, answer)

        return respond(Message(message.subject, message.data, message.headers or {}), reply)

    return arrived
