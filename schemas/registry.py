"""What workers and stages say of themselves, and everybody else reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .jobs import SubjectToken


class _Card(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class ModelCard(_Card):
    """A model that can be asked for: `source` is where its tokenizer loads from, `created` Unix seconds."""

    name: Annotated[str, Field(min_length=1)]
    source: str
    backend: str
    context_length: int
    created: int


class WorkerCard(_Card):
    """A worker process that takes batches for its model now; it runs at most `capacity` requests together."""

    id: SubjectToken
    model: ModelCard
    capacity: Annotated[int, Field(ge=1)]
    pid: int


class StageCard(_Card):
    """A live copy of a stage."""

    stage: SubjectToken
    id: SubjectToken
    pid: int
