"""The body of `/v1/embeddings`, and what it shares with that of `/v1/rerank`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ..jobs import Priority
from .body import Body, ModelName, Unsupported
from .prompts import Prompt, as_list

MAX_INPUTS = 2048
MAX_TOKENS = 300_000  # of all inputs of a request


class PooledRequest(Body):
    """Asks for one vector, or one score, of each of several inputs."""

    model: ModelName
    priority: Priority | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    user: str | None = None  # accepted without effect

    @property
    def prompts(self) -> list[str | list[int]]:
        """What the client sent: texts, or token ids."""
        raise NotImplementedError


class EmbeddingRequest(PooledRequest):
    """Asks for a vector of each of `prompts`, with `dimensions` numbers if given."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "truncate_prompt_tokens": Unsupported(advice="shorten the input; Penstock never truncates one"),
    }

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_list(self.input)
