"""OpenAI's batches: the request for one, and its state as stored and as clients see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ..base import Record, Sent
from ..jobs import JobEndpoint, SubjectToken
from .body import Body

WINDOW = 86400  # seconds that a batch may take
MESSAGES: Literal["/v1/messages"] = "/v1/messages"
RESPONSES: Literal["/v1/responses"] = "/v1/responses"
FINAL = ("completed", "failed", "expired", "cancelled")

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "failed", "expired", "cancelled"]  # of one line
BatchEndpoint = JobEndpoint | Literal["/v1/messages"]  # lines of the last one are in Anthropic's form
NOT_RUN: dict[Ending, dict[str, str]] = {
    "expired": {"code": "batch_expired", "message": "The completion window ended before this request was answered."},
    "cancelled": {"code": "batch_cancelled", "message": "This request was cancelled before it was answered."},
}
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ExpiresAfter(Sent):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


class BatchRequest(Body):
    input_file_id: str
    endpoint: JobEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class Counts(Record):
    """`failed` counts all lines of the error file, including those that are `cancelled` or `expired`; these two are
    counted when the batch ends, and only Anthropic's clients see them."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0


class Fault(Record):
    """A fault of the input file; `line` counts from 1."""

    code: str | None
    message: str
    param: str | None = None
    line: int | None = None


class Faults(Record):
    object: Literal["list"] = "list"
    data: list[Fault]


class Batch(Record):
    """Times are Unix seconds. `tenant` and `output_ttl` (seconds that its files live) are hidden from clients."""

    id: SubjectToken
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Faults | None = None
    request_counts: Counts = Counts()
    metadata: Metadata | None = None
    tenant: SubjectToken
    output_ttl: float

    @property
    def job_endpoint(self) -> JobEndpoint:
        """The endpoint of its lines in the pipeline."""
        return "/v1/chat/completions" if self.endpoint == MESSAGES else self.endpoint

    @property
    def key(self) -> str:
        """The key of its stored state."""
        return f"{self.tenant}.{self.id}"

    def after(self, steps: Mapping[Status, Status], now: float, **values: Any) -> Batch:
        """The batch with these values and with the status that `steps` maps its own to; unchanged if it has ended."""
        if self.status in FINAL:
            return self
        if (step := steps.get(self.status)) is not None:
            values |= {"status": step, f"{step}_at": int(now)}
        return self.model_copy(update=values)

    def shown(self) -> dict[str, Any]:
        inner: dict[str, Any] = {"tenant": True, "output_ttl": True, "request_counts": {"cancelled", "expired"}}
        return self.model_dump(exclude=inner)
