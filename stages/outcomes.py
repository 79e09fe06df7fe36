"""Counts how requests end."""

from __future__ import annotations

from ..config import metrics
from ..schemas.events import Event, Expired, Failed, outcome_of
from ..schemas.loops import TurnId


def count_outcome(event: Event) -> None:
    """Count a request whose final `event` has been stored. The turns of a response are part of it, and not counted."""
    if TurnId.of(event.request):
        return
    if (outcome := outcome_of(event)) is not None:
        metrics.REQUESTS.labels(outcome).inc()
    if isinstance(event, Failed | Expired):
        count_refusal(event.error.code)


def count_refusal(code: str | None) -> None:
    metrics.REFUSALS.labels(code or "unknown").inc()
