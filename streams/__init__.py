"""The broker as a small port (`port`), its implementations (`nats`, `memory`), the subjects, streams and buckets of the
pipeline (`topology`), and what is stored in them (`stores`)."""

from .memory.broker import MemoryBroker
from .nats.broker import JetStreamBroker
from .nats.servers.server import EmbeddedServer
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
