"""Errors that a cluster which has yet to settle answers with: asked again as long as patience lasts, others told."""

from __future__ import annotations

from types import SimpleNamespace

import orjson
import pytest
from nats.aio.msg import Msg

from penstock.schemas.errors import BrokerUnavailable
from penstock.streams.nats import management
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.connection.link import Link
from penstock.streams.nats.management import INSUFFICIENT, ApiError, ask
from penstock.streams.port import ConsumerSpec, StreamSpec

MANY = 1_000_000  # more than any machine asks for within half a second
NO_LEADER = {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}
NO_ROOM = {"code": 503, "err_code": INSUFFICIENT, "description": "insufficient resources"}
MISSING = {"code": 404, "err_code": 10059, "description": "stream not found"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "_RETRY_WAIT", 0.0)


def refuse(monkeypatch: pytest.MonkeyPatch, where: str, *errors: dict[str, object]) -> list[str]:
    """What is asked on subjects with `where`; the first answers are these errors, and then the server's own."""
    asked: list[str] = []
    exchange = Link.exchange

    async def answer(
        link: Link, subject: str, data: bytes, headers: dict[str, str] | None = None, *, at_once: bool = False
    ) -> Msg | SimpleNamespace:
        if where not in subject:
            return await exchange(link, subject, data, headers, at_once=at_once)
        asked.append(subject)
        if len(asked) <= len(errors):
            return SimpleNamespace(data=orjson.dumps({"error": errors[len(asked) - 1]}))
        return await exchange(link, subject, data, headers, at_once=at_once)

    monkeypatch.setattr(Link, "exchange", answer)
    return asked


async def test_a_consumer_is_created_once_there_are_servers_for_its_copies(
    jetstream: JetStreamBroker, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = f"{namespace}.queue.>"
    await jetstream.ensure([StreamSpec("QUEUE", (subject,), "work_queue", "file", discard="new")], [])
    asked = refuse(monkeypatch, "CONSUMER.CREATE", NO_ROOM, NO_LEADER, NO_ROOM)
    consumer = await jetstream.consume(ConsumerSpec("QUEUE", "reader", subject, ack_wait=30.0), prefetch=1)
    assert len(asked) == 4
    await jetstream.publish(f"{namespace}.queue.a", b"heard", message_id="m")
    (delivery,) = await consumer.take(1)
    assert delivery.message.data == b"heard"
    await delivery.ack()
    await consumer.close()


async def test_an_error_that_stays_is_told_at_once(jetstream: JetStreamBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MISSING, NO_ROOM):
        asked = refuse(monkeypatch, "$JS.API.INFO", error)
        with pytest.raises(ApiError, match=str(error["description"])):
            await ask(jetstream._link, "$JS.API.INFO", b"")
        assert len(asked) == 1
        monkeypatch.undo()


@pytest.mark.parametrize("retry_on", [None, INSUFFICIENT])
async def test_patience_ends(jetstream: JetStreamBroker, monkeypatch: pytest.MonkeyPatch, retry_on: int | None) -> None:
    error = NO_LEADER if retry_on is None else NO_ROOM
    asked = refuse(monkeypatch, "$JS.API.INFO", *[error] * MANY)
    monkeypatch.setattr(jetstream._link, "timeout", 0.5)
    with pytest.raises(BrokerUnavailable, match=str(error["description"])):
        await ask(jetstream._link, "$JS.API.INFO", b"", retry_on=retry_on)
    assert len(asked) > 1
