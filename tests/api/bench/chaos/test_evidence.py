"""What `penstock bench chaos` finds in a broker: requests that nobody asked for, but not the server's own."""

from __future__ import annotations

import uuid

from penstock.api.bench.chaos.evidence import Evidence
from penstock.config.settings import Settings
from penstock.schemas.canaries import CANARY
from penstock.schemas.events import Accepted, Done, Event, Usage
from penstock.schemas.wire import codec
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.topology import Subjects, topology


async def test_a_request_without_a_client_is_found_unless_it_is_a_canary() -> None:
    settings = Settings(namespace="e")
    streams, buckets = topology("e", settings.job_stages)
    broker = MemoryBroker()
    await broker.ensure(streams, buckets)
    for tenant in ("default", CANARY):
        name = f"of-{tenant}"
        told: tuple[Event, ...] = (Accepted(name, "echo", 0, 7), Done(name, ("stop",), Usage(7, 1, 8)))
        for event in told:
            subject = Subjects("e").events(tenant, "b", name)
            await broker.publish(subject, codec.encode(event), message_id=uuid.uuid4().hex)
    found = await Evidence(broker, settings).verdict({})
    assert list(found) == ["of-default"]
    assert "every request has a client" in [broken.law for broken in found["of-default"]]
