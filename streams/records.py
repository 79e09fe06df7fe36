"""Records that one process stored for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from .port import Entry

log = structlog.get_logger(__name__)
Record = TypeVar("Record", bound=BaseModel)


@lru_cache(4096)
def _record(kind: type[Record], value: bytes) -> Record:
    """Heartbeats write the same cards each second. Raises `ValidationError`."""
    return kind.model_validate_json(value)


def readable(kind: type[Record], entries: Iterable[Entry]) -> Iterator[tuple[str, Record]]:
    """Keys and records of those entries that can be read: one that cannot, such as another version's, must not stop the
    others."""
    for entry in entries:
        try:
            yield entry.key, _record(kind, entry.value)
        except ValidationError:
            log.warning("invalid card ignored", key=entry.key)
