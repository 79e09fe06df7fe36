"""What travels before a request runs: the job as published, the job as validated, the batch for a worker.

A job is an OpenAI request body and the endpoint it is meant for, so that HTTP and NATS clients speak one language.
pydantic checks these types strictly wherever a message is read; per-token types live in `events.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from .base import Record
from .params import GenerationParams

TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"  # what may stand as one token of a subject

SubjectToken = Annotated[str, Field(pattern=TOKEN_PATTERN)]
Priority = Literal["high", "normal", "low"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
JobEndpoint = Endpoint | Literal["/v1/responses"]


class Form(Record):
    """How a model's text is to be read: where its thoughts and its tool calls are. Without either, all is content.

    `tool_format` and `reasoning_format` are names in the engine's tables. `tools` maps the names that may be called to
    the JSON Schema of their parameters. `thinking`: the prompt ends in the middle of a thought. `choice` is how much
    the client left to the model: whether to call ("auto"), what to call ("required"), or nothing ("named"). `echo` is
    the text of each prompt, where the answer is to begin with it; with `prompt_alone` it ends there, too.
    """

    tool_format: str | None = None
    reasoning_format: str | None = None
    tools: dict[str, dict[str, Any]] = Field(default_factory=dict)
    thinking: bool = False
    choice: Literal["auto", "required", "named"] = "auto"
    echo: Annotated[tuple[str, ...], Field(strict=False)] = ()
    prompt_alone: bool = False


class Job(Record):
    """A request as published on `jobs.<priority>.<tenant>`.

    `id` names the request, and its events arrive on `events.<tenant>.<bridge>.<id>`; the same id is the same request,
    so publishing it again is harmless. Without an id one is derived from the message. `timeout` is in seconds from
    the moment of publishing; the header `Penstock-Deadline` (Unix seconds) says the same and wins. An unknown field is
    refused here, since it is a client's mistake; what travels between parts ignores what a newer version has added.
    """

    model_config = ConfigDict(extra="forbid")

    id: SubjectToken | None = None
    endpoint: JobEndpoint = "/v1/chat/completions"
    bridge: SubjectToken = "default"
    timeout: Annotated[float, Field(gt=0)] | None = None
    body: dict[str, Any]


def most_together(capacity: int) -> int:
    """Of a worker's `capacity`, what one request for many answers, or one tenant beside others, takes at once."""
    return capacity - capacity // 4


class ValidatedJob(Record):
    """A job that can be served: checked, its prompt rendered and tokenised. What custom stages see and may change.

    `prompts` holds token ids: one list for chat, one or several for completions; choice `c` belongs to prompt
    `c // params.n`. `deadline` and `created` are Unix seconds. `body` is the client's request as it came; changing it
    has no effect any more. `form` says how the answer's text is read. For `/v1/embeddings` every prompt is one input,
    whose vector has `dimensions` numbers (all that the model gives, if None).
    """

    id: SubjectToken
    endpoint: Endpoint
    bridge: SubjectToken
    tenant: SubjectToken
    priority: Priority
    model: str
    prompts: Annotated[tuple[tuple[int, ...], ...], Field(min_length=1, strict=False)]
    params: GenerationParams
    created: float
    deadline: float
    body: dict[str, Any]
    form: Form | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def seats(self) -> int:
        """Of a worker's `capacity`: one for each choice; inputs to embed take turns, and one for all of them."""
        return 1 if self.endpoint == "/v1/embeddings" else self.choices

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


class InferenceBatch(Record):
    """Jobs that one worker is asked to run together. Each travels in a message of its own, under the batch's `id`, so
    that each is acknowledged when it has ended, whatever becomes of the others.

    `incarnation` is the process that was meant: another of the same name takes over what that one may have begun.
    `epochs` holds for each job the newest epoch that it may have had elsewhere; none for jobs that were nowhere yet.
    `sender` names the copy of the batch stage, which numbers its messages to this process from 1; it still waits for
    the worker's word on some of them from `oldest` on.
    """

    id: SubjectToken
    worker: SubjectToken
    jobs: Annotated[tuple[ValidatedJob, ...], Field(min_length=1, strict=False)]
    incarnation: str = ""
    epochs: Annotated[tuple[int, ...], Field(strict=False)] = ()
    sender: str = ""
    number: int = 0
    oldest: int = 0
