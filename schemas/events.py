"""What travels while a request runs: deltas from the engine, events to the client. One message a request and step.

All are frozen and go straight through orjson; `type` tells them apart on the wire. Places in the output are token
indices: `index` is the place of a message's first token within its choice, so whoever reads can tell a repetition from
a gap without a second number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .errors import Refusal
from .jobs import Priority

FinishReason = Literal[
    "stop", "length", "stop_sequence", "tool_calls", "content_filter", "cancelled", "deadline", "error"
]
"""`deadline`: the request's time was over while it ran; what it had said until then stands. `content_filter`: a filter
ended the answer."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` of the prompt's were not computed again, `reasoning_tokens` of the
    completion's were thought and not said."""

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
    """The log-probability of a token under the model's raw distribution, and of its best rivals; None of a prompt's
    first."""

    token: str
    token_id: int
    logprob: float | None
    bytes: tuple[int, ...]
    top: tuple[TopLogprob, ...] = ()


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
    type: Literal["started"] = "started"


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that the engine made for one choice of one request since the last delta.

    `epoch` counts the workers that have held the request, from 1: the newest wins. `text` is what these tokens add to
    the choice's clean text; it may be empty while a character is incomplete or a stop string may have begun.
    The last delta of a choice carries `finish_reason`, perhaps no token, and in `cached_tokens` how much of the prompt
    was not computed again; `error` goes with finish reason "error". Token ids are all that the model chose, the end
    token and those of a stop string included: what the text leaves out is still counted. `stop_reason` is the stop
    string or the id of the stop token that ended the choice, where the request had asked for it. The first `logprobs`
    are the prompt's where these were asked for.
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
    type: Literal["delta"] = "delta"


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request has its place: from here on it ends in exactly one final event. With `return_token_ids`
    it tells the tokens of the `prompts`."""

    request: str
    model: str
    created: int
    prompt_tokens: int
    prompts: tuple[tuple[int, ...], ...] = ()
    type: Literal["accepted"] = "accepted"


@dataclass(frozen=True, slots=True)
class Queued:
    """`position` counts from 1."""

    request: str
    position: int
    type: Literal["queued"] = "queued"


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call at `index` of its choice, from 0: `id` and `name` come once, with its first piece;
    `arguments` are text to be joined, JSON in the end."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """Tokens for the client: see `Delta`, from which it is made one to one. `text` is what the model says, `reasoning`
    what it thinks, `tool_calls` what it asks for; one event may hold some of each, or nothing yet."""

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
    type: Literal["token"] = "token"


@dataclass(frozen=True, slots=True)
class Done:
    """Final: every choice has finished; `finish_reasons` in order of the choices. `at` is when a response did, in Unix
    seconds."""

    request: str
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    at: float | None = None
    type: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Failed:
    """Final: refused, or failed on the way; `error.status` is what HTTP answers if nothing was sent yet."""

    request: str
    error: ErrorBody
    type: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Final: the client left or asked to stop."""

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
    """Something of a response that no model wrote: a list of tools, a tool's result, a question to a person. `item` is
    as in OpenAI's Responses API. Unless `finished`, it has only begun, and comes again; its id stays."""

    request: str
    index: int
    item: dict[str, Any]
    finished: bool = True
    type: Literal["item"] = "item"


@dataclass(frozen=True, slots=True)
class Turn:
    """A response goes on with the chat request `job`, whose events are under its own name. `calls` says of the names
    that the model may call there what is no function of the client's: `label`, `tool`, and whether a person must
    approve (`approval`)."""

    request: str
    index: int
    job: str
    calls: dict[str, dict[str, Any]]
    type: Literal["turn"] = "turn"


Event = Accepted | Queued | ItemEvent | Turn | Token | Done | Failed | Cancelled | Expired
Output = Started | Delta
FINAL = (Done, Failed, Cancelled, Expired)
