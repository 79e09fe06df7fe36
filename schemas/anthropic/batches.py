"""Anthropic's batches of messages: the request for one, and its form for clients. They are stored like other
batches."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from pydantic import Field

from ..openai.batches import FINAL, MESSAGES, Batch
from ..openai.body import Body

ENDINGS = {"completed": "succeeded", "failed": "errored", "cancelled": "canceled", "expired": "expired"}


class BatchedMessage(Body):
    """`params` are a body of `/v1/messages`, which is validated when it runs."""

    custom_id: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    params: dict[str, Any]

    @property
    def line(self) -> bytes:
        """The request as a line of a batch's input file."""
        value = {"custom_id": self.custom_id, "method": "POST", "url": MESSAGES, "body": self.params}
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


class MessageBatchRequest(Body):
    """Body of `/v1/messages/batches`."""

    requests: Annotated[list[BatchedMessage], Field(min_length=1)]


def shown(batch: Batch, url: str) -> dict[str, Any]:
    """A batch as clients see it; `url` is that of its results."""
    ended = batch.status in FINAL
    counts = batch.request_counts
    shown_counts = {"processing": counts.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if ended:
        missed = counts.cancelled + counts.expired
        shown_counts |= {"canceled": counts.cancelled, "expired": counts.expired, "succeeded": counts.completed}
        shown_counts |= {"processing": 0, "errored": counts.total - counts.completed - missed}
    ends = (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.failed_at)
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": shown_counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": next((_time(at) for at in ends if at is not None), None),
        "cancel_initiated_at": _time(batch.cancelling_at) if batch.cancelling_at else None,
        "archived_at": None,
        "results_url": url if ended else None,
    }


def _time(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
