"""The cards and load figures that workers and stages publish about themselves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Record
from .errors import Overloaded
from .jobs import AdapterSource, Endpoint, Priority, SubjectToken, ValidatedJob, most_together


class ModelCard(Record):
    """A model that is served. Its tokenizer is loaded from `source`; `created` is in Unix seconds. The formats of its
    tool calls and thoughts are names, or "auto" for what its chat template suggests. A model that is swapped for
    another gets the next `revision`. `aliases` are its further names, `defaults` the sampling parameters of requests
    that leave them out. While it has no worker, at most `queue_limit` requests wait for it, and those that do not
    stream wait at most `wait_limit` seconds (None: no limit of its own). A `catalogued` model is announced by the agent
    of its host, and not by its workers. `adapters` are asked for by their own names, and run on this model.
    `modalities` are what prompts may hold. A model that `ranks` scores pairs of texts, and does nothing else."""

    name: Annotated[str, Field(min_length=1)]
    source: str
    backend: str
    context_length: int
    created: int
    revision: Annotated[int, Field(ge=1)] = 1
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    aliases: Annotated[tuple[str, ...], Field(strict=False)] = ()
    defaults: dict[str, Any] = Field(default_factory=dict)
    queue_limit: int | None = None
    wait_limit: float | None = None
    catalogued: bool = False
    adapters: Annotated[tuple[AdapterSource, ...], Field(strict=False)] = ()
    modalities: Annotated[tuple[str, ...], Field(strict=False)] = ("text",)
    ranks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use."""
        return (self.name, *self.aliases, *(adapter.name for adapter in self.adapters))

    @property
    def endpoint(self) -> Endpoint:
        """Where the model answers."""
        if self.ranks:
            return "/v1/rerank"
        return "/v1/embeddings" if self.backend == "sentence_transformers" else "/v1/completions"

    def adapter(self, name: str) -> AdapterSource | None:
        """The adapter that a request for `name` gets; None if that is the model itself."""
        return next((each for each in self.adapters if each.name == name), None)


class AddedAdapter(AdapterSource):
    """An adapter that an operator has added to the model `model` at run time, at `created` (Unix seconds)."""

    model: Annotated[str, Field(min_length=1)]
    created: int

    @property
    def source(self) -> AdapterSource:
        return AdapterSource(name=self.name, path=self.path, digest=self.digest)


RETURNED = "returned"  # no worker, but the name under which batches lie whose worker serves another model now
OUTPUT_WEIGHT = 2  # of a generated token, in tokens of prompts


def reserve_of(capacity: int) -> int:
    """The number of high-priority choices that a worker runs beyond its capacity."""
    return max(1, capacity // 4)


class WorkerCard(Record):
    """A worker process that takes batches for its model now; it runs at most `capacity` requests together.

    `incarnation` is a name that no other process has, `host` where `pid` counts. `slow_paths` says of each
    fast path that the model does not take why. `keep_alive` is that of the last request, as in `ValidatedJob`.
    """

    id: SubjectToken
    model: ModelCard
    capacity: Annotated[int, Field(ge=1)]
    pid: int
    incarnation: str = ""
    host: str = ""
    slow_paths: tuple[str, ...] = ()
    keep_alive: float | None = None

    def seats_of(self, job: ValidatedJob) -> int:
        """What the job takes of `capacity`; of many answers some take turns."""
        return min(job.seats, most_together(self.capacity))


class Room(Record):
    """How much more a worker takes, told whenever it changes, in seats: a request for n answers has n.

    `free_high` is for requests of high priority, `free` for the others. `received` holds the numbers of the messages
    that have arrived from each copy of the batch stage, of those that it may still wait for; what is on its way is not
    in the other fields. `active` run or wait at the worker, `tenants` tells whose; `free_tokens` fit into its KV cache
    beside them.
    `served` counts what each tenant has had since the process began, in weighted tokens: those of prompts, and
    `OUTPUT_WEIGHT` for each generated one; tenants that had nothing lately may be missing.
    `total_tokens` is what that holds when it is empty; 0 if the worker does not say.
    `incarnation` names the process.
    """

    worker: SubjectToken
    incarnation: str
    free: int
    free_high: int
    received: dict[str, list[int]]
    active: int
    free_tokens: int
    total_tokens: int = 0
    tenants: dict[str, int] = Field(default_factory=dict)
    served: dict[str, int] = Field(default_factory=dict)


class AgentCard(Record):
    """The agent of a host, which lives. `unfit` are the `lanes_of` of the revisions that it has found it cannot load
    there; None: it is of a release that does not say."""

    unfit: Annotated[tuple[str, ...], Field(strict=False)] | None = None


class InFlight(Record):
    """The seats, by worker, that a copy of the batch stage has given to requests of which the worker has not told that
    they arrived: 0 for each when all is idle."""

    sender: SubjectToken
    seats: dict[str, int]


class LoadProgress(Record):
    """How far a worker has come with loading its model, in per cent of the weights, after `elapsed` seconds: published
    at least once a second until it is done."""

    worker: SubjectToken | Literal[""]
    model: str
    revision: Annotated[int, Field(ge=1)] = 1
    percent: Annotated[int, Field(ge=0, le=100)]
    elapsed: Annotated[float, Field(ge=0)]

    @property
    def remaining(self) -> float | None:
        """Seconds until it is done, if it goes on at the same rate; None: nothing says yet."""
        return self.elapsed * (100 - self.percent) / self.percent if self.percent else None


class ModelLanes(Record):
    """A revision of a model that has lanes, one of each priority, in which its requests wait."""

    model: str
    revision: Annotated[int, Field(ge=1)] = 1


_POINTLESS = 10.0  # seconds for which new requests are refused without another look


class ModelRefusal(Record):
    """Why a model's requests are refused: those that came until `at` (Unix seconds), and those that come within
    `retry_after` seconds of it, or a few if it is None: then it is pointless to try again. Kept under the key
    `refused.<lanes>`."""

    reason: str
    at: float
    retry_after: float | None = None

    def left(self, now: float) -> float:
        """Seconds for which new requests are still refused."""
        return max(0.0, self.at + (_POINTLESS if self.retry_after is None else self.retry_after) - now)

    def error(self, now: float) -> Overloaded:
        wait = None if self.retry_after is None else max(1.0, self.left(now))
        return Overloaded(self.reason, code="model_unavailable", retry_after=wait)


class Admission(Record):
    """What the queue takes now for a model, by priority: published several times a second while anything waits, and
    kept under the key `admission.<lanes>`.

    `retry_after` is in seconds, from the measured rate at which the queue drains; `depth` in requests that wait.
    Where a priority is closed, it still accepts requests of tenants that are not `crowding` it, if these are listed.
    """

    model: str = ""
    revision: int = 1
    accepting: dict[Priority, bool]
    retry_after: dict[Priority, float]
    depth: dict[Priority, int]
    crowding: dict[Priority, list[str]] = Field(default_factory=dict)

    def accepts(self, priority: Priority, tenant: str) -> bool:
        if self.accepting.get(priority, True):
            return True
        crowding = self.crowding.get(priority)
        return crowding is not None and tenant not in crowding


class StageCard(Record):
    """A live copy of a stage."""

    stage: SubjectToken
    id: SubjectToken
    pid: int
