"""The broker as a small port (`port`), its two implementations, and what the pipeline keeps in it (`topology`).

`jetstream` and `memory` are imported by the composition root alone.
"""

from .jetstream import JetStreamBroker
from .memory import MemoryBroker
from .port import Broker
from .server import EmbeddedServer
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
