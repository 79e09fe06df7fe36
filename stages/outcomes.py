"""Counts how requests end."""

from __future__ import annotations

from ..config import metrics
from ..schemas.events import Cancelled, Done, Event, Expired, Failed
from ..schemas.loops import TurnId

_TEMPORARY = (503, 507)  # what the client did not cause, and may try again


def count_outcome(event: Event) -> None:
    """Count a request whose final `event` has been stored. The turns of a response are part of it, and not counted."""
    if TurnId.of(event.request):
        return
    match event:
        case Done():
            outcome = "completed"
        case Cancelled():
            outcome = "cancelled"
        case Expired(error=error):
            outcome = "expired"
            count_refusal(error.code)
        case Failed(error=error):
            outcome = "refused" if error.status < 500 or error.status in _TEMPORARY else "failed"
            count_refusal(error.code)
        case _:
            return
    metrics.REQUESTS.labels(outcome).inc()


def count_refusal(code: str | None) -> None:
    metrics.REFUSALS.labels(code or "unknown").inc()
