"""The messages before a request runs: the job as published, the validated job, the batch for a worker.

A job is an OpenAI request body and the endpoint it is meant for, so that HTTP and NATS clients speak one language.
pydantic checks these types strictly wherever a message is read; per-token types live in `events.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from .base import Record, Sent
from .params import GenerationParams

TOKEN_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"  # one token of a NATS subject

SubjectToken = Annotated[str, Field(pattern=TOKEN_PATTERN)]
Priority = Literal["high", "normal", "low"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"]
JobEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/responses"]
POOLED = ("/v1/embeddings", "/v1/rerank")  # where each prompt becomes a vector or a score, and no token is generated


class Form(Record):
    """How to parse a model's text: where its thoughts and tool calls are. Without either, all is content.

    `tool_format` and `reasoning_format` are names in the engine's tables. `tools` maps the names of the tools to the
    JSON Schema of their parameters. `thinking`: the prompt ends in the middle of a thought. `choice`: the model decides
    whether to call ("auto") or what to call ("required"), or neither ("named"). `echo` is the text of each prompt,
    where the answer is to begin with it; with `prompt_alone` it ends there, too.
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

    `id` names the request, and its events arrive on `events.<tenant>.<bridge>.<id>`; a second
    job with the same id is a duplicate and has no effect. Without an id one is derived from the message. `timeout` is
    in seconds after publishing; the header `Penstock-Deadline` (Unix seconds) takes precedence. A job with an unknown
    field is refused, unlike other messages, since it is a client's mistake.
    """

    model_config = ConfigDict(extra="forbid")

    id: SubjectToken | None = None
    endpoint: JobEndpoint = "/v1/chat/completions"
    bridge: SubjectToken = "default"
    timeout: Annotated[float, Field(gt=0)] | None = None
    body: dict[str, Any]


class ReplayRequest(Sent):
    """A client's question for the stored events of a request: those behind the one of sequence `after` (0 for all). If
    there are none yet, the answer waits `wait` seconds for them."""

    after: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0


def most_together(capacity: int) -> int:
    """How much of a worker's `capacity` one request with many choices, or one of several tenants, may use at once."""
    return capacity - capacity // 4


class AdapterSource(Record):
    """A LoRA adapter, a model name of its own: `path` is a directory in PEFT's format, and `digest` identifies what its
    files held when it was offered, so that every worker applies the same. It is empty if they could not be read."""

    name: Annotated[str, Field(min_length=1)]
    path: Annotated[str, Field(min_length=1)]
    digest: str = ""


class JobImage(Record):
    """An image of a job's prompt: the fields of the engine's `PromptImage` (see `engine/vision/images.py`), and the
    `key` of its bytes in the bucket of images."""

    key: Annotated[str, Field(min_length=1)]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    offset: Annotated[int, Field(ge=0)]
    length: Annotated[int, Field(ge=1)]
    grid: Annotated[tuple[int, ...], Field(strict=False)]
    pixels: Annotated[tuple[int | None, int | None], Field(strict=False)] = (None, None)


class ValidatedJob(Record):
    """A validated job, its prompt rendered and tokenised. Custom stages read and may change it.

    `prompts` holds token ids: one list for chat, one or several for completions; choice `c` belongs to prompt
    `c // params.n`. Only workers of the model's `revision` take the job. They apply its `adapter`, if there is one,
    which they load first unless they have. `keep_alive`: how many seconds the model is to stay loaded after the request
    (negative: for ever; None: as the catalogue says). `deadline` and `created` are Unix seconds.
    `body` is the client's original request, its images replaced by their digests; changing it has no effect. `form`
    tells how to parse the answer. For `/v1/embeddings` every prompt is one input, whose vector has `dimensions` numbers
    (if None, as many as the model gives), for `/v1/rerank` the query with one of the documents. `images` are those of
    the first prompt, in its order.
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
    revision: Annotated[int, Field(ge=1)] = 1
    form: Form | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    adapter: AdapterSource | None = None
    keep_alive: float | None = None
    images: Annotated[tuple[JobImage, ...], Field(strict=False)] = ()

    @property
    def served_name(self) -> str:
        """The name of the model that answers: the adapter's, or that of its base."""
        return self.adapter.name if self.adapter else self.model

    @property
    def shown_prompts(self) -> tuple[tuple[int, ...], ...]:
        """The token ids that the client wants to see."""
        return self.prompts if self.body.get("return_token_ids") is True else ()

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def seats(self) -> int:
        """How much of a worker's `capacity` the job needs: one for each choice; one for all inputs of a pooled one."""
        return 1 if self.is_pooled else self.choices

    @property
    def is_pooled(self) -> bool:
        """Whether no token is generated: its inputs take turns in the engine."""
        return self.endpoint in POOLED

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)


class InferenceBatch(Record):
    """Jobs that one worker runs together. Each has a message of its own, with the batch's `id`, so that the worker can
    acknowledge each when it has ended.

    `incarnation` names the process that the batch is for; a new process with the same name takes over its jobs.
    `epochs` holds the newest epoch that each job may have had at another worker; it is empty if there was none.
    `sender` names the copy of the batch stage, which numbers its messages to this process from 1; from `oldest` on, the
    worker has not confirmed all of them.
    """

    id: SubjectToken
    worker: SubjectToken
    jobs: Annotated[tuple[ValidatedJob, ...], Field(min_length=1, strict=False)]
    incarnation: str = ""
    epochs: Annotated[tuple[int, ...], Field(strict=False)] = ()
    sender: str = ""
    number: int = 0
    oldest: int = 0
