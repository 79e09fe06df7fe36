"""Records that one process stored for another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import structlog
from pydantic import BaseModel, ValidationError

from .port import Entry

log = structlog.get_logger(__name__)
Record = TypeVar("Record", bound=BaseModel)


def readable(kind: type[Record], entries: Iterable[Entry]) -> Iterator[tuple[str, Record]]:
    """Keys and records of those entries that can be read: one that cannot, such as another version's, must not stop the
    others."""
    for entry in entries:
        try:
            yield entry.key, kind.model_validate_json(entry.value)
        except ValidationError:
            log.warning("invalid card ignored", key=entry.key)
