"""What travels and is kept while a model and its tools take turns: a response, from the request to its last answer.

A response is a chain of chat requests, its turns; turn `k` of response `resp_…` is the request `resp_…-k`, and
`resp_…-k-a` where it had to be asked for again. Whatever ends such a request also tells the stage `tools`, which goes
on. Items are those of OpenAI's Responses API, as JSON; none of them holds a secret.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from pydantic import Field

from .base import Record
from .events import FinishReason
from .jobs import Priority, SubjectToken

Items = list[dict[str, Any]]

is_response = re.compile(r"resp_[0-9a-f]{32}").fullmatch
_turn = re.compile(r"(resp_[0-9a-f]{32})-([0-9]{1,4})(?:-([0-9]{1,4}))?").fullmatch


class TurnId(NamedTuple):
    """What the id of a turn's request says; `attempt` counts from 0."""

    response: str
    turn: int
    attempt: int = 0

    @classmethod
    def of(cls, request: str) -> TurnId | None:
        """None for a request that is no turn."""
        found = _turn(request)
        return None if found is None else cls(found[1], int(found[2]), int(found[3] or 0))

    def __str__(self) -> str:
        return f"{self.response}-{self.turn}" + (f"-{self.attempt}" if self.attempt else "")


def root_of(request: str) -> str:
    """The response that a turn belongs to, and of any other request its own name: what a cancel means."""
    turn = TurnId.of(request)
    return request if turn is None else turn.response


class LoopJob(Record):
    """A response to begin, as validate sends it to the stage `tools`. `body` is the request, `created` and `deadline`
    are Unix seconds."""

    id: SubjectToken
    tenant: SubjectToken
    priority: Priority
    bridge: SubjectToken
    created: float
    deadline: float
    body: dict[str, Any]


class Step(Record):
    """The request `turn` of the response `id` has ended: whoever ended it says so."""

    id: SubjectToken
    turn: SubjectToken
    tenant: SubjectToken
    bridge: SubjectToken


class Source(Record):
    """Where a response's tools come from: an MCP server, by its URL or by the name that the configuration gives it
    (`label`, where `url` is None), or the functions of this installation (label `functions`).

    `sealed` holds the headers to send, readable by Penstock alone. `tenant` is whose request it is. `allowed` names the
    tools that may be called; None allows all. `approval`: which of them a person must approve first; `spared` never
    need it.
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
    """A tool of a source: `name` is what the model calls it, `tool` what the source does. `parameters` is a JSON
    Schema of an object. `repeatable`: to call it twice is as good as once."""

    name: str
    label: str
    tool: str
    description: str = ""
    parameters: dict[str, Any]
    approval: bool = False
    repeatable: bool = False


class ToolResult(NamedTuple):
    """What a call came to, in words for the model."""

    text: str
    is_error: bool = False


class Origin(Record):
    """What came before a response's own input. First `history`, which was copied into it, or what the first `parts` of
    its conversation hold; then, where it `follows` other responses, what came before the first of those, and the items
    of each. `since` is when the oldest response was made that it refers to, in Unix seconds."""

    history: Items = Field(default_factory=list)
    parts: int = 0
    follows: tuple[SubjectToken, ...] = ()
    since: float = 0.0


class Begun(Origin):
    """The beginning of a response: what every later step needs. `items` is what was made before the first turn, `index`
    the number of events told by then."""

    job: LoopJob
    sources: tuple[Source, ...]
    tools: tuple[LoopTool, ...]
    input: Items
    items: Items
    index: int

    @property
    def callable(self) -> dict[str, dict[str, Any]]:
        """What the model may call that is run here, by the names it knows: as in the event `Turn`."""
        return {tool.name: tool.model_dump(include={"label", "tool", "approval"}) for tool in self.tools}


class Turned(Record):
    """A turn that has ended, its tools' results included. `reason` and `usage` are its request's, `index` is the
    number of events told by then."""

    turn: int
    items: Items
    reason: FinishReason
    usage: dict[str, int]
    index: int


class Ended(Record):
    """How a response ended; `error` (an `ErrorBody`, as JSON) goes with "failed", `at` is in Unix seconds."""

    status: Literal["completed", "failed", "incomplete", "cancelled"]
    at: float
    error: dict[str, Any] | None = None
