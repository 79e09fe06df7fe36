"""The subjects of all messages, and the streams and buckets of a deployment, which `Broker.ensure` creates.

A stage consumes the subjects of its own name: stage `queue` consumes `<root>.queue.>`. Names in subjects are single
tokens (`schemas.jobs.TOKEN_PATTERN`), as the bridges check; for others the methods here raise `ValueError`, because a
tenant called `>` would reach the messages of every tenant.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

from ..schemas.jobs import Priority, ValidatedJob
from .port import BucketSpec, StreamSpec
from .shares import bounded

PRIORITIES: tuple[Priority, ...] = ("high", "normal", "low")

JOBS = "JOBS"
INFER = "INFER"
STREAM = "STREAM"
EVENTS = "EVENTS"
TOOLS = "TOOLS"
DEAD = "DEAD"
BATCH = "BATCH"
BATCHES = "BATCHES"

WORKERS = "workers"
MODELS = "models"
CATALOGUE = "catalogue"
OFFERED = "models"  # the key of all models on offer there
DECLARED = "declared."  # begins the keys there of models that are known though nobody announces them
RESPONSES = "responses"
STATE = "state"
IDEMPOTENCY = "idempotency"
LEASES = "leases"
FAILURES = "failures"
RATES = "rates"
FILES = "files"
BATCH_STATES = "batches"
BATCH_RESULTS = "batch-results"
DEAD_DATA = "dead-data"  # large bodies of dead letters
IMAGES = "images"  # of prompts, and their bytes
OBJECT_DATA = "object-data"  # the bytes of objects that other buckets describe

RELAY_GRACE = 180.0  # seconds that outputs and events outlive the longest request, until its last worker counts as dead
IMAGE_WINDOW = 3600.0  # seconds in which an image that a tenant sends again is stored once
GRACE = 2 * 86400.0  # seconds: two of a batch's windows
RATES_TTL = 86400.0  # seconds after which the account of a tenant that sent nothing is full again
CONSUMER_IDLE = 3600.0  # seconds after which the server deletes the consumer of a process that is gone


def stage_stream(name: str) -> str:
    """The name, without the lane, of the streams that feed the work-queue stage `name`."""
    return f"STAGE_{_token(name).upper()}"


def lane_stream(name: str, priority: str) -> str:
    """The stream of one lane. Each lane has its own limits, so that no priority can fill another one's."""
    return f"{name}_{_token(priority).upper()}"


@lru_cache(1024)
def lanes_of(model: str, revision: int = 1) -> str:
    """The token that names the lanes of a revision of a model, whose own name may hold any character."""
    return hashlib.sha256(f"{model}\0{revision}".encode()).hexdigest()[:16]


def batch_stream(lanes: str, priority: str) -> str:
    """The stream of one of the `lanes_of` a model."""
    return lane_stream(f"{BATCH}_{_token(lanes).upper()}", priority)


def consumed_by(stream: str) -> tuple[str, str]:
    """The stage that consumes a stream of the pipeline, and the priority of its messages; "" if it has all."""
    name, _, last = stream.rpartition("_")
    priority = last.lower() if last.lower() in PRIORITIES else ""
    kind, _, stage = (name if priority else stream).partition("_")
    if kind == "STAGE":
        return stage.lower(), priority
    return {JOBS: "validate", BATCHES: "batches"}.get(kind, kind.lower()), priority


def partition(tenant: str, request: str, partitions: int) -> int:
    """The partition, from 0, of a tenant's request: the same in every process and release."""
    return zlib.crc32(f"{tenant}.{request}".encode()) % partitions


class Topology(NamedTuple):
    streams: tuple[StreamSpec, ...]
    buckets: tuple[BucketSpec, ...]


@dataclass(frozen=True, slots=True)
class Subjects:
    """Every subject below `root`. Methods ending in `_all`, `_of` and `_at` return wildcards."""

    root: str

    def jobs(self, priority: str, tenant: str) -> str:
        return f"{self.root}.jobs.{_token(priority)}.{_token(tenant)}"

    def jobs_all(self) -> str:
        return f"{self.root}.jobs.>"

    def jobs_of(self, priority: str) -> str:
        return f"{self.root}.jobs.{_token(priority)}.>"

    def stage(self, name: str, priority: str, tenant: str) -> str:
        return f"{self.root}.{_token(name)}.{_token(priority)}.{_token(tenant)}"

    def stage_of(self, name: str, priority: str) -> str:
        return f"{self.root}.{_token(name)}.{_token(priority)}.>"

    def batch(self, lanes: str, priority: str, tenant: str) -> str:
        """Where requests wait for a model, whose `lanes_of` these are."""
        return f"{self.root}.batch.{_token(lanes)}.{_token(priority)}.{_token(tenant)}"

    def batch_of(self, lanes: str, priority: str) -> str:
        return f"{self.root}.batch.{_token(lanes)}.{_token(priority)}.>"

    def infer(self, worker: str) -> str:
        return f"{self.root}.infer.{_token(worker)}"

    def stream(self, share: int, tenant: str, request: str) -> str:
        """The outputs of a request, whose `partition()` is `share`."""
        return f"{self.root}.stream.{share}.{_token(tenant)}.{_token(request)}"

    def stream_all(self, share: int) -> str:
        return f"{self.root}.stream.{share}.>"

    def events(self, tenant: str, bridge: str, request: str) -> str:
        return f"{self.root}.events.{_token(tenant)}.{_token(bridge)}.{_token(request)}"

    def events_at(self, tenant: str, request: str) -> str:
        """The events of a request of any bridge."""
        return f"{self.root}.events.{_token(tenant)}.*.{_token(request)}"

    def events_to(self, tenant: str) -> str:
        return f"{self.root}.events.{_token(tenant)}.>"

    def events_of(self, bridge: str) -> str:
        """All events, of every tenant, that `bridge` asked for."""
        return f"{self.root}.events.*.{_token(bridge)}.*"

    def tools(self, priority: str, tenant: str) -> str:
        return f"{self.root}.tools.{_token(priority)}.{_token(tenant)}"

    def tools_of(self, priority: str) -> str:
        return f"{self.root}.tools.{_token(priority)}.>"

    def batches(self, tenant: str) -> str:
        """Where a tenant's batches of requests wait for a bridge to run them."""
        return f"{self.root}.batches.{_token(tenant)}"

    def batches_all(self) -> str:
        return f"{self.root}.batches.>"

    def dead(self, stage: str) -> str:
        """Where dead letters lie: the messages that a stage has given up."""
        return f"{self.root}.dead.{_token(stage)}"

    def dead_all(self) -> str:
        return f"{self.root}.dead.>"

    def cancel(self, tenant: str, request: str) -> str:
        """Publish anything here to cancel a request."""
        return f"{self.root}.control.cancel.{_token(tenant)}.{_token(request)}"

    def cancel_of(self, tenant: str) -> str:
        return f"{self.root}.control.cancel.{_token(tenant)}.*"

    def cancel_all(self) -> str:
        return f"{self.root}.control.cancel.*.*"

    def replay_of(self, tenant: str) -> str:
        return f"{self.root}.control.replay.{_token(tenant)}.*.*"

    def replay_all(self) -> str:
        return f"{self.root}.control.replay.*.*.*"

    def room(self, worker: str) -> str:
        """Where a worker publishes how many more requests it accepts."""
        return f"{self.root}.control.room.{_token(worker)}"

    def room_all(self) -> str:
        return f"{self.root}.control.room.*"

    def in_flight(self, sender: str) -> str:
        """Where a copy of the batch stage publishes the seats in flight that no worker has counted yet."""
        return f"{self.root}.control.in-flight.{_token(sender)}"

    def in_flight_all(self) -> str:
        return f"{self.root}.control.in-flight.*"

    def loading(self) -> str:
        """Where workers that load a model publish their `LoadProgress`."""
        return f"{self.root}.control.loading"

    def metrics(self, family: str, process: str) -> str:
        """Where a child of a `penstock serve` or `penstock agent` publishes what it has counted."""
        return f"{self.root}.control.metrics.{_token(family)}.{_token(process)}"

    def metrics_of(self, family: str) -> str:
        return f"{self.root}.control.metrics.{_token(family)}.*"

    def rates(self, tenant: str) -> str:
        """Where the pipeline publishes what a tenant has left of its requests and tokens a minute."""
        return f"{self.root}.control.rates.{_token(tenant)}"

    def rates_all(self) -> str:
        return f"{self.root}.control.rates.*"

    def admission(self) -> str:
        """Where the queue publishes which priorities it accepts."""
        return f"{self.root}.control.admission"


def lane_of(subjects: Subjects, job: ValidatedJob) -> str:
    """The subject on which a job waits for its model."""
    return subjects.batch(lanes_of(job.model, job.revision), job.priority, job.tenant)


def topology(
    root: str,
    stages: Sequence[str],
    *,
    jobs_limit: int = 1_000,
    queue_limit: int = 10_000,
    tenant_limit: int | None = None,
    infer_limit: int = 10_000,
    tools_limit: int = 10_000,
    dead_limit: int = 10_000,
    dead_ttl: float = 30 * 86400.0,
    relay_bytes: int = 256 << 20,
    relay_age: float = 600.0,
    workers_ttl: float = 15.0,
    leases_ttl: float = 4.0,
    models_ttl: float = 600.0,
    responses_ttl: float = 30 * 86400.0,
    batches_limit: int = 10_000,
    files_ttl: float = 30 * 86400.0,
    store_limit: int = 1 << 30,
) -> Topology:
    """All streams and buckets for a pipeline whose work-queue stages are `stages` (`queue` and custom ones), but the
    lanes of its models: `model_lanes`.

    Limits are in messages and apply to each priority: `jobs_limit` to incoming jobs, `tenant_limit` to those of one
    tenant, `queue_limit` to each such stage. `relay_bytes` and `relay_age` (seconds) bound what STREAM and EVENTS keep
    for resuming and takeover; on disk they are as fast as in memory and survive a killed broker. The `_ttl`s are the
    seconds after which these expire: a worker without a heartbeat, a partition's lease without a renewal, a model
    without a worker, a stored response, a dead letter, a file and the state of a batch.
    `store_limit` is in bytes: each stream and bucket has a fixed share, so that stored data never displaces jobs.
    """
    subjects = Subjects(root)
    work = [
        # In JOBS, publishers choose the message ids, and one tenant's must not count as another's duplicate.
        *_lanes(JOBS, subjects.jobs_of, jobs_limit, per_subject=tenant_limit or 0, dedup_window=0.1),
        *(
            spec
            for name in stages
            for spec in _lanes(stage_stream(name), partial(subjects.stage_of, name), queue_limit)
        ),
        # When it is full, the batch stage waits; the limits of the lanes refuse requests.
        _work_queue(INFER, f"{root}.infer.*", infer_limit),
        *_lanes(TOOLS, subjects.tools_of, tools_limit),
        _work_queue(BATCHES, subjects.batches_all(), batches_limit),
    ]
    relays = [
        StreamSpec(name, (subject,), "limits", "file", max_bytes=relay_bytes, max_age=relay_age)
        for name, subject in ((STREAM, f"{root}.stream.>"), (EVENTS, f"{root}.events.>"))
    ]
    dead = StreamSpec(DEAD, (subjects.dead_all(),), "limits", "file", max_messages=dead_limit, max_age=dead_ttl)
    buckets = (
        BucketSpec(WORKERS, ttl=workers_ttl),
        BucketSpec(MODELS, ttl=models_ttl, storage="file"),  # known as soon as the broker restarts
        BucketSpec(CATALOGUE, storage="file"),
        BucketSpec(RESPONSES, ttl=responses_ttl, storage="file"),
        BucketSpec(STATE, storage="file"),
        BucketSpec(OBJECT_DATA, ttl=max(files_ttl, responses_ttl) + GRACE, storage="file"),
        BucketSpec(DEAD_DATA, ttl=dead_ttl, storage="file", discard="old"),
        BucketSpec(IMAGES, ttl=IMAGE_WINDOW + relay_age, storage="file"),
        BucketSpec(IDEMPOTENCY, ttl=86400.0, storage="file", discard="old"),
        BucketSpec(LEASES, ttl=leases_ttl),
        BucketSpec(FAILURES, ttl=3600.0),
        BucketSpec(RATES, ttl=RATES_TTL, discard="old"),
        # Longer than the life of a file, because a batch may still need an expired one.
        *(BucketSpec(name, ttl=files_ttl + GRACE, storage="file") for name in (FILES, BATCH_STATES, BATCH_RESULTS)),
    )
    return Topology(*bounded((*work, *relays, dead), buckets, store_limit - _for_models(store_limit) - 2 * relay_bytes))


def model_lanes(
    root: str,
    lanes: str,
    *,
    queue_limit: int = 10_000,
    tenant_limit: int | None = None,
    max_models: int = 16,
    store_limit: int = 1 << 30,
) -> list[StreamSpec]:
    """The streams in which requests wait for one model, whose `lanes_of` these are: one of each priority. In each may
    wait `queue_limit` messages, `tenant_limit` of one tenant; `max_models` share a quarter of the store."""
    size = _for_models(store_limit) // max_models // len(PRIORITIES)
    specs = _lanes(
        f"{BATCH}_{_token(lanes).upper()}",
        partial(Subjects(root).batch_of, lanes),
        queue_limit,
        per_subject=tenant_limit or 0,
    )
    return [replace(spec, max_bytes=size) for spec in specs]


def _for_models(store_limit: int) -> int:
    """The part of the store that all lanes of models share, in bytes."""
    return store_limit // 4


def _lanes(
    name: str, subjects: Callable[[Priority], str], limit: int, *, per_subject: int = 0, dedup_window: float = 120.0
) -> list[StreamSpec]:
    return [
        _work_queue(lane_stream(name, each), subjects(each), limit, per_subject, dedup_window) for each in PRIORITIES
    ]


def _work_queue(name: str, subject: str, limit: int, per_subject: int = 0, dedup_window: float = 120.0) -> StreamSpec:
    return StreamSpec(
        name,
        (subject,),
        "work_queue",
        "file",
        discard="new",
        max_messages=limit,
        max_messages_per_subject=per_subject,
        dedup_window=dedup_window,
    )


@lru_cache(4096)
def _token(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name) is None:
        raise ValueError(f"{name!r} cannot be a token of a subject: use only letters, digits, '_' and '-'")
    return name
