"""The broker as a small port (`port`), its implementations (`nats`, `memory`), the subjects, streams and buckets of the
pipeline (`topology`), and what is stored in them (`stores`). Names are each imported when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schemas.lazy_names import lazy_names

if TYPE_CHECKING:
    from .memory.broker import MemoryBroker
    from .nats.broker import JetStreamBroker
    from .nats.servers.server import EmbeddedServer
    from .port import Broker
    from .topology import Subjects, Topology, partition

__all__ = ["Broker", "EmbeddedServer", "JetStreamBroker", "MemoryBroker", "Subjects", "Topology", "partition"]

__getattr__ = lazy_names(
    __name__,
    {
        "Broker": ".port",
        "EmbeddedServer": ".nats.servers.server",
        "JetStreamBroker": ".nats.broker",
        "MemoryBroker": ".memory.broker",
        "Subjects": ".topology",
        "Topology": ".topology",
        "partition": ".topology",
    },
)
