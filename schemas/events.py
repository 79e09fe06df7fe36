"""The messages of a running request: deltas from the engine and events for the client, one for each request and step.

All are frozen dataclasses that orjson serialises directly; `type` tells them apart. `index` is the index of a message's
first token within its choice, so that a reader can tell a duplicate from a gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .errors import Refusal
from .jobs import Priority, ValidatedJob

FinishReason = Literal[
    "stop", "length", "stop_sequence", "tool_calls", "content_filter", "cancelled", "deadline", "error"
]
"""`deadline`: the request ran out of time; its output until then stands. `content_filter`: a filter ended the
answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens` of the prompt came from the cache; `reasoning_tokens` of the
    completion are thoughts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token: str
    token_id: int
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a token under the model's raw distribution, and those of the most likely tokens; None for
    the first token of a prompt. `rank` counts from 1, and only prompts' tokens have one."""

    token: str
    token_id: int
    logprob: float | None
    bytes: tuple[int, ...]
    top: tuple[TopLogprob, ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """OpenAI's error object plus the HTTP status; `retry_after` in seconds."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, refusal: Refusal) -> ErrorBody:
        return cls(refusal.status, str(refusal), refusal.type, refusal.code, refusal.param, refusal.retry_after)


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has taken the request: the first output of its epoch, and all that a reader of deltas must know.

    `holder` is a name that no other announcement has, by which a worker knows its own. `form` is the job's, as JSON.
    `fallback` is the backend that runs the request instead of the worker's first. `created` and `prompts` are those of
    the event that accepts the request; a worker of an earlier release says neither.
    """

    request: str
    epoch: int
    holder: str
    tenant: str
    bridge: str
    choices: int
    prompt_tokens: int
    form: dict[str, Any] | None = None
    priority: Priority = "normal"
    endpoint: str = ""
    model: str = ""
    fallback: str | None = None
    created: int = 0
    prompts: tuple[tuple[int, ...], ...] = ()
    type: Literal["started"] = "started"


@dataclass(slots=True)  # not frozen, which would take twice as long, for every token
class Delta:
    """Tokens that the engine made for one choice of one request since the last delta.

    `epoch` counts the workers that have held the request, from 1: the newest wins. `text` is what these tokens add to
    the choice's clean text; it may be empty while a character is incomplete or a stop string may have begun.
    The last delta of a choice carries `finish_reason`, perhaps no token, and in `cached_tokens` how much of the prompt
    was not computed again; `error` goes with finish reason "error". Token ids are all that the model chose, the end
    token and those of a stop string included: what the text leaves out is still counted. `stop_reason` is the stop
    string or the id of the stop token that ended the choice, where the request had asked for it. The first delta of a
    choice has `prompt_logprobs` where these were asked for.
    """

    request: str
    epoch: int
    choice: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: ErrorBody | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    type: Literal["delta"] = "delta"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was accepted: it will end in exactly one final event. `prompts` holds token ids, with
    `return_token_ids`."""

    request: str
    model: str
    created: int
    prompt_tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()
    type: Literal["accepted"] = "accepted"

    @classmethod
    def of(cls, job: ValidatedJob) -> Accepted:
        return cls(job.id, job.served_name, int(job.created), job.prompt_tokens, job.shown_prompts)


@dataclass(frozen=True, slots=True)
class Queued:
    """`position` counts from 1, and `wait` estimates the seconds until the request's turn. A request whose model has no
    worker waits for one (`model` is "waiting"), or for one that loads ("loading"), of whose weights `progress` per cent
    are there."""

    request: str
    position: int
    model: Literal["waiting", "loading"] | None = None
    progress: int | None = None
    wait: float | None = None
    type: Literal["queued"] = "queued"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call with this `index` in its choice, from 0. The first piece has `id` and `name`; the `arguments`
    of all pieces, joined, are JSON."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)  # as Delta
class Token:
    """Tokens for the client, made from one `Delta`. `text` is the answer, `reasoning` a thought; an event may have
    text, reasoning and `tool_calls` together, or none of them."""

    request: str
    choice: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    type: Literal["token"] = "token"

    @property
    def num_thought_tokens(self) -> int:
        """How many of the tokens are a thought's: a share by characters where there is more than a thought."""
        if not (thought := len(self.reasoning)):
            return 0
        said = len(self.text) + sum(len(call.arguments) for call in self.tool_calls)
        return round(len(self.token_ids) * thought / (thought + said))


@dataclass(frozen=True, slots=True)
class Done:
    """Final: every choice has finished. `finish_reasons` are in the order of the choices; `at` is the end of a
    response, in Unix seconds. `fallback` is the backend that made the answer, if it was not the worker's first."""

    request: str
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    at: float | None = None
    fallback: str | None = None
    type: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Failed:
    """Final: the request was refused or failed. `error.status` is the HTTP status if no output was sent before."""

    request: str
    error: ErrorBody
    type: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Final: the client disconnected or cancelled the request."""

    request: str
    usage: Usage
    type: Literal["cancelled"] = "cancelled"


@dataclass(frozen=True, slots=True)
class Expired:
    """Final: the deadline passed, in a queue or while running."""

    request: str
    error: ErrorBody
    type: Literal["expired"] = "expired"


@dataclass(frozen=True, slots=True)
class ItemEvent:
    """An item of a response that the model did not write: a list of tools, a tool's result, an approval request. `item`
    is as in OpenAI's Responses API. One that is not `finished` comes again, finished, with the same id."""

    request: str
    index: int
    item: dict[str, Any]
    finished: bool = True
    type: Literal["item"] = "item"


@dataclass(frozen=True, slots=True)
class Turn:
    """A response continues with the chat request `job`, which has its own events. `calls` maps the names of Penstock's
    own tools to their `label`, `tool` and `approval` (whether a person must approve); all other names are functions of
    the client."""

    request: str
    index: int
    job: str
    calls: dict[str, dict[str, Any]]
    type: Literal["turn"] = "turn"


Event = Accepted | Queued | ItemEvent | Turn | Token | Done | Failed | Cancelled | Expired
Output = Started | Delta
FINAL = (Done, Failed, Cancelled, Expired)

Outcome = Literal["completed", "refused", "failed", "cancelled", "expired"]
_TEMPORARY = (503, 507)  # statuses of what the client did not cause, and may try again


def outcome_of(event: Event) -> Outcome | None:
    """How a request with this final event ended; None for any other event."""
    match event:
        case Done():
            return "completed"
        case Cancelled():
            return "cancelled"
        case Expired():
            return "expired"
        case Failed(error=error):
            return "refused" if error.status < 500 or error.status in _TEMPORARY else "failed"
        case _:
            return None
