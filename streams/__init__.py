"""The broker as a small port (`port`), its two implementations, and what the pipeline keeps in it (`topology`).

`jetstream` and `memory` are imported by the composition root alone.
"""

from .memory.broker import MemoryBroker
from .nats.broker import JetStreamBroker
from .nats.server import EmbeddedServer
from .port import Broker
from .topology import Subjects, Topology, partition, topology

__all__ = [
    "Broker",
    "EmbeddedServer",
    "JetStreamBroker",
    "MemoryBroker",
    "Subjects",
    "Topology",
    "partition",
    "topology",
]
