"""A request's life, as `GET /v1/streams/{id}/trace` answers it: read from its stored messages.

Times are in Unix seconds. A stage measures by the clock of its host, and the broker by its own: where these differ, so
do the times.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import Record
from .events import FinishReason, Outcome

Status = Literal["waiting", "running"] | Outcome
MarkKind = Literal["accepted", "position", "first_token", "preempted", "resumed", "takeover", "turn", "end"]


class StageVisit(Record):
    """A stage had the request. `entered`: the message was stored for it; `began`: the stage took it; `left`: it had
    published what follows. What is not known, or has not happened, is None.

    `attempt` counts the deliveries of the message. Of the stages `batch` and `infer`: the `worker`, and how many
    requests the batch stage sent to it together (`batch_size`). Of `infer`: when the first and the newest tokens were
    stored, the index of the first one, over all choices together (`from_token`), and how many there are; `epoch` counts
    the workers that had the request. `preemptions`: how often the engine preempted it. `ending`: the worker finished
    the request, was lost, or gave it back to stop.
    """

    stage: str
    entered: float | None = None
    began: float | None = None
    left: float | None = None
    attempt: int = 1
    worker: str | None = None
    batch_size: int | None = None
    epoch: int | None = None
    first_token: float | None = None
    last_token: float | None = None
    from_token: int = 0
    tokens: int = 0
    preemptions: int = 0
    ending: Literal["finished", "lost", "returned"] | None = None


class Mark(Record):
    """Something that happened to the request at one moment; `text` says it to a person."""

    at: float
    kind: MarkKind
    text: str
    position: int | None = None
    token: int | None = None
    choice: int | None = None
    worker: str | None = None


class ToolCall(Record):
    """A call of a tool, or the listing of a server's tools (`name` is None). `began` is None where it is not known."""

    label: str
    name: str | None = None
    began: float | None = None
    ended: float | None = None
    status: Literal["in_progress", "completed", "failed"] = "in_progress"


class RequestTrace(Record):
    """The stages that a request has been to, in order, and what happened on its way.

    A response with tools has its `turns`, each a request of its own, and its tool `calls`. `began` is when the request
    was published, `now` when this was read. `usage` and `error` are those of the final event.
    """

    id: str
    object: Literal["trace"] = "trace"
    status: Status
    model: str | None = None
    endpoint: str | None = None
    priority: str | None = None
    began: float
    now: float
    accepted: float | None = None
    first_token: float | None = None
    ended: float | None = None
    prompt_tokens: int | None = None
    finish_reasons: tuple[FinishReason, ...] = ()
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None
    stages: tuple[StageVisit, ...] = ()
    marks: tuple[Mark, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    turns: tuple[RequestTrace, ...] = Field(default_factory=tuple)
