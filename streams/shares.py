"""How the store is divided: each stream and bucket on disk has a fixed share of it, of which no tenant has all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .port import BucketSpec, StreamSpec

# Shares of the store, in parts. Streams not named here are lanes of work queues, with `_LANE` parts each.
_LANE = 2
_SHARES = {
    "INFER": 4,
    "BATCHES": 1,
    "DEAD": 2,
    "dead-data": 4,
    "models": 1,
    "catalogue": 1,
    "state": 1,
    "idempotency": 2,
    "responses": 24,
    "object-data": 36,
    "images": 6,
    "files": 1,
    "batches": 1,
    "batch-results": 4,
}
_IN_MEMORY = 16 << 20  # bytes of each bucket in memory


_CROWD = 8  # times what is free may be one tenant's: 8/9 if it is alone, 8/17 if there are two such


def crowds(own: int, free: int) -> bool:
    """Whether a tenant has so much of something limited that the rest is left to others."""
    return own > _CROWD * max(0, free)


def bounded(
    streams: Sequence[StreamSpec], buckets: Sequence[BucketSpec], room: int
) -> tuple[tuple[StreamSpec, ...], tuple[BucketSpec, ...]]:
    """Set every `max_bytes`: streams and buckets on disk without one share `room` bytes."""
    specs: list[StreamSpec | BucketSpec] = [*streams, *buckets]
    unbounded = [spec for spec in specs if spec.storage == "file" and not spec.max_bytes]
    parts = sum(_SHARES.get(spec.name, _LANE) for spec in unbounded)

    def most(spec: StreamSpec | BucketSpec) -> int:
        if spec.max_bytes:
            return spec.max_bytes
        return room * _SHARES.get(spec.name, _LANE) // parts if spec.storage == "file" else _IN_MEMORY

    return (
        tuple(replace(spec, max_bytes=most(spec)) for spec in streams),
        tuple(replace(spec, max_bytes=most(spec)) for spec in buckets),
    )
