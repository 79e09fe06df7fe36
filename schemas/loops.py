"""Messages and stored records of a response, in which a model and its tools take turns.

A response is a chain of chat requests, its turns; turn `k` of response `resp_…` is the request `resp_…-k`, and
`resp_…-k-a` when it was retried. The stage that ends such a request notifies the stage `tools`, which continues the
response. Items are those of OpenAI's Responses API, as JSON; none of them holds a secret.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field

from .base import Record
from .events import FinishReason
from .jobs import Priority, SubjectToken

Items = list[dict[str, Any]]

is_response = re.compile(r"resp_[0-9a-f]{32}").fullmatch
_turn = re.compile(r"(resp_[0-9a-f]{32})-([0-9]{1,4})(?:-([0-9]{1,4}))?").fullmatch


class TurnId(NamedTuple):
    """The parts of the id of a turn's request; `attempt` counts from 0."""

    response: str
    turn: int
    attempt: int = 0

    @classmethod
    def of(cls, request: str) -> TurnId | None:
        """Parse an id; None if the request is not a turn."""
        found = _turn(request) if request.startswith("resp_") else None
        return None if found is None else cls(found[1], int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        return f"{self.response}-{self.turn}" + (f"-{self.attempt}" if self.attempt else "")


def root_of(request: str) -> str:
    """The response of a turn, or any other request's own id: a cancel refers to this."""
    turn = TurnId.of(request)
    return request if turn is None else turn.response


class LoopJob(Record):
    """A response to begin, which the stage `validate` sends to the stage `tools`. `body` is the request, `created` and
    `deadline` are Unix seconds. `trace` is the W3C's traceparent of its beginning, or empty."""

    id: SubjectToken
    tenant: SubjectToken
    priority: Priority
    bridge: SubjectToken
    created: float
    deadline: float
    body: dict[str, Any]
    trace: str = ""

    def unsealed(self) -> Self:
        """The job without its encrypted secrets."""
        given = self.body.get("tools") or ()
        tools = [{name: value for name, value in tool.items() if name != "sealed"} for tool in given]
        return self.model_copy(update={"body": {**self.body, "tools": tools}}) if tools else self


class Step(Record):
    """The request `turn` of the response `id` has ended."""

    id: SubjectToken
    turn: SubjectToken
    tenant: SubjectToken
    bridge: SubjectToken


class Source(Record):
    """Where a response's tools come from: an MCP server, by its URL or by the name that the configuration gives it
    (`label`, where `url` is None), or the functions of this installation (label `functions`).

    `sealed` holds the headers to send, encrypted. `allowed` names the tools that the model may call; None allows all.
    `approval` tells which of them a person must approve first, `spared` which never need it.
    """

    label: str
    url: str | None = None
    sealed: str | None = None
    allowed: tuple[str, ...] | None = None
    approval: Literal["always", "never"] | tuple[str, ...] = "never"
    spared: tuple[str, ...] = ()
    tenant: str = "default"

    def needs_approval(self, tool: str) -> bool:
        if isinstance(self.approval, tuple):
            return tool in self.approval
        return self.approval == "always" and tool not in self.spared


class LoopTool(Record):
    """A tool of a source: `name` is its name for the model, `tool` its name in the source. `parameters` is a JSON
    Schema of an object. `repeatable`: calling it twice does no harm."""

    name: str
    label: str
    tool: str
    description: str = ""
    parameters: dict[str, Any]
    approval: bool = False
    repeatable: bool = False


class ToolResult(NamedTuple):
    """The result of a call, as text for the model. `images` are the ids of the files of its images, whose marks are in
    the text."""

    text: str
    is_error: bool = False
    images: tuple[str, ...] = ()


class KeptImage(NamedTuple):
    """What stands for an image in the text of a result, and the id of its file if a model can be shown it."""

    mark: str
    file: str | None = None


KeepImage = Callable[[bytes, str], Awaitable[KeptImage]]  # of its bytes and its media type


class Origin(Record):
    """The items before a response's own input. They begin with `history`, a copy, or with the first `parts` of its
    conversation. If it `follows` other responses, those before the first of these and the items of each come next.
    `since` is the creation of the oldest response that it refers to, in Unix seconds."""

    history: Items = Field(default_factory=list)
    parts: int = 0
    follows: tuple[SubjectToken, ...] = ()
    since: float = 0.0


class Begun(Origin):
    """The beginning of a response, which every later step needs. `items` were made before the first turn; `index` is
    the number of events until then."""

    job: LoopJob
    sources: tuple[Source, ...]
    tools: tuple[LoopTool, ...]
    input: Items
    items: Items
    index: int

    @property
    def callable(self) -> dict[str, dict[str, Any]]:
        """The tools that Penstock runs, by their names for the model, as in the event `Turn`."""
        return {tool.name: tool.model_dump(include={"label", "tool", "approval"}) for tool in self.tools}


class Turned(Record):
    """A turn that has ended, with the results of its tools. `reason`, `usage` and `fallback` are those of its request;
    `index` is the number of events until then."""

    turn: int
    items: Items
    reason: FinishReason
    usage: dict[str, int]
    index: int
    fallback: str | None = None


class Ended(Record):
    """How a response ended; `error` (an `ErrorBody`, as JSON) goes with "failed", `at` is in Unix seconds."""

    status: Literal["completed", "failed", "incomplete", "cancelled"]
    at: float
    error: dict[str, Any] | None = None
