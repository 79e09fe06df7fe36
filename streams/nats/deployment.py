"""One configuration a deployment: agreed in the broker by whoever comes first, changed by an explicit act alone.

Every part reads it, refuses to start where somebody gave it another value, and works with the agreed ones. Parts make
the streams that are missing and change none: else whoever starts last would rewrite the limits of all, and delete what
they had kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from ...config.deployment import adopt, changes, check, explicit, parse, shared_settings, shown
from ...config.settings import Settings, job_stages
from ...config.sources import Loaded
from ...schemas.deployment import Configuration
from ...schemas.errors import StartupError
from ..port import Bucket
from ..topology import (
    BATCH,
    BATCHES,
    DEAD,
    EVENTS,
    FILES,
    GRACE,
    INFER,
    JOBS,
    PRIORITIES,
    RELAY_GRACE,
    RESPONSES,
    STATE,
    STREAM,
    TOOLS,
    WORKERS,
    Subjects,
    Topology,
    batch_stream,
    lane_stream,
    stage_stream,
    topology,
)
from .broker import JetStreamBroker
from .migration import move_into_lanes

log = structlog.get_logger(__name__)

KEY = "configuration"  # in the bucket `state`
_STOPPED = ("pipeline", "stream_partitions", "heartbeat_interval")  # may change only while no part runs


class Agreed(NamedTuple):
    """`revision` is 0 where nothing is agreed yet: then the configuration is that of the streams there are."""

    configuration: Configuration
    revision: int


class Difference(NamedTuple):
    """A limit of a stream, as the server names both."""

    stream: str
    limit: str
    present: Any
    wanted: Any


def layout(settings: Settings) -> Topology:
    """The streams and buckets of a deployment with these settings."""
    return topology(
        settings.namespace,
        settings.job_stages,
        jobs_limit=settings.jobs_limit,
        queue_limit=settings.queue_limit,
        tenant_limit=settings.tenant_limit,
        infer_limit=settings.infer_limit,
        tools_limit=settings.tools_limit,
        batches_limit=settings.batches_limit,
        dead_limit=settings.dead_limit,
        dead_ttl=settings.dead_ttl,
        workers_ttl=settings.worker_ttl,
        leases_ttl=settings.partition_ttl,
        files_ttl=settings.files_ttl,
        responses_ttl=settings.responses_ttl,
        relay_age=settings.events_ttl + RELAY_GRACE,
        relay_bytes=min(int(settings.events_limit), int(settings.store_limit) // 4),
        store_limit=int(settings.store_limit),
    )


async def joined(broker: JetStreamBroker, loaded: Loaded) -> Settings:
    """A part's settings with those that its deployment has agreed on, whose streams are there then.

    Raises `ConfigurationError` where somebody gave the part another value.
    """
    configuration = await Deployment(broker, loaded).join()
    check(loaded, configuration)
    return adopt(loaded.settings, configuration)


async def owned(broker: JetStreamBroker, loaded: Loaded) -> Settings:
    """The same for whoever owns the broker: what was given explicitly is agreed on, and the streams are changed."""
    deployment = Deployment(broker, loaded)
    before = (await deployment.agreed()).configuration
    wanted = before.model_copy(update=explicit(loaded))
    for name, (old, new) in changes(before, wanted).items():
        log.info("a setting of the deployment changes", setting=name, before=shown(old), after=shown(new))
    await deployment.change(wanted)
    return adopt(loaded.settings, wanted)


class Deployment:
    """That of a namespace, as seen by a process with these settings."""

    def __init__(self, broker: JetStreamBroker, loaded: Loaded) -> None:
        self._broker = broker
        self._loaded = loaded
        self._settings = loaded.settings

    async def agreed(self) -> Agreed:
        """What is agreed; where nothing is, what the streams of 0.1.0 say, and the process's settings say the rest."""
        if (await self._broker.present(self._broker.server_name(STATE))) is not None:
            entry = await (await self._broker.bucket(STATE)).get(KEY)
            if entry is not None:
                return Agreed(parse(entry.value, self._settings), entry.revision)
        return Agreed(shared_settings(self._settings.model_copy(update=await self._found())), 0)

    async def join(self) -> Configuration:
        """The agreed configuration, with its streams there; where nothing is agreed yet, what `agreed` says is."""
        agreed = await self.agreed()
        if not agreed.revision:
            check(self._loaded, agreed.configuration)  # against streams that were there before anything was agreed
            if await self._replace(agreed, agreed.configuration):
                return agreed.configuration
            agreed = await self.agreed()
        self._broker.replicas = agreed.configuration.nats_replicas
        await self._migrate(agreed.configuration)  # whoever began it may have died
        await self._broker.ensure(*self._layout(agreed.configuration))
        return agreed.configuration

    async def change(self, wanted: Configuration) -> None:
        """Agree on `wanted` and change the streams. Raises `StartupError` where that would strand requests."""
        agreed = await self.agreed()
        await self.check_safe(agreed.configuration, wanted)
        if not await self._replace(agreed, wanted):
            raise StartupError("somebody else has changed the deployment's configuration just now; look at it again")

    async def _replace(self, agreed: Agreed, wanted: Configuration) -> bool:
        """Agree on `wanted` and make the streams so, or neither; False where somebody else was faster."""
        before, revision = agreed
        bucket = await self._state(wanted)
        data = wanted.model_dump_json().encode()
        written = await (bucket.update(KEY, data, revision) if revision else bucket.create(KEY, data))
        if written is None:
            return False
        try:
            for stage in self._gone(before, wanted):
                for priority in PRIORITIES:
                    await self._broker.remove(lane_stream(stage_stream(stage), priority))
            await self.shape(wanted)
        except StartupError:  # the next one may have another idea
            if revision:
                await bucket.update(KEY, before.model_dump_json().encode(), written)
            else:
                await bucket.delete(KEY)
            raise
        if not revision:
            log.info("the deployment's configuration is agreed", namespace=self._settings.namespace)
        return True

    async def shape(self, configuration: Configuration) -> None:
        """Make the streams what the configuration says."""
        self._broker.replicas = configuration.nats_replicas
        await self._migrate(configuration)
        await self._broker.reconfigure(*self._layout(configuration))

    async def _migrate(self, configuration: Configuration) -> None:
        subjects, stages = Subjects(self._settings.namespace), job_stages(configuration.pipeline)
        await move_into_lanes(self._broker, subjects, stages, self._layout(configuration).streams)

    async def differences(self, configuration: Configuration) -> list[Difference]:
        """What `shape` would change in streams that are there."""
        self._broker.replicas = configuration.nats_replicas
        found = []
        for wanted in self._broker.configs(*self._layout(configuration)):
            if (present := await self._broker.present(wanted["name"])) is not None:
                found += [
                    Difference(wanted["name"], name, present.get(name), value)
                    for name, value in wanted.items()
                    if present.get(name, value) != value
                ]
        return found

    async def check_safe(self, before: Configuration, after: Configuration) -> None:
        """Raises `StartupError` where `after` would strand requests or confuse parts that run."""
        changed = changes(before, after)
        if await self._broker.present(self._broker.server_name(WORKERS)) is None:
            return
        if structural := [name for name in _STOPPED if name in changed]:
            cards = await (await self._broker.bucket(WORKERS)).entries()
            if cards:
                running = ", ".join(entry.key for entry in cards[:5])
                raise StartupError(
                    f"{' and '.join(structural)} can change only while nothing runs: stop all parts first "
                    f"({running}{', …' if len(cards) > 5 else ''})"
                )
        queues = _lanes([stage_stream(stage) for stage in self._gone(before, after)])
        if "stream_partitions" in changed:
            stages = [stage_stream(stage) for stage in job_stages(before.pipeline)]
            queues = [*_lanes([JOBS, *stages, BATCH, TOOLS]), INFER, STREAM]
        waiting = {queue: await self._broker.unsettled(queue) for queue in dict.fromkeys(queues)}
        if held := ", ".join(f"{queue}: {number}" for queue, number in waiting.items() if number):
            names = " and ".join(name for name in ("pipeline", "stream_partitions") if name in changed)
            raise StartupError(
                f"{names} cannot change while requests have not ended ({held}), which would not be found again: start "
                "all parts with the settings as they were, let the requests end, and change it then"
            )

    async def _state(self, configuration: Configuration) -> Bucket:
        self._broker.replicas = configuration.nats_replicas
        await self._broker.ensure([], [spec for spec in self._layout(configuration).buckets if spec.name == STATE])
        return await self._broker.bucket(STATE)

    def _layout(self, configuration: Configuration) -> Topology:
        return layout(adopt(self._settings, configuration))

    def _gone(self, before: Configuration, after: Configuration) -> list[str]:
        return [stage for stage in job_stages(before.pipeline) if stage not in after.pipeline]

    async def _found(self) -> Mapping[str, Any]:
        """The settings that streams without an agreed configuration were made with: those of 0.1.0, a limit each."""
        sources = {
            "nats_replicas": (JOBS, "num_replicas", 1),
            "jobs_limit": (JOBS, "max_msgs", 1),
            "tenant_limit": (JOBS, "max_msgs_per_subject", 1),
            "queue_limit": (batch_stream("normal"), "max_msgs", 1),
            "tools_limit": (TOOLS, "max_msgs", 1),
            "batches_limit": (BATCHES, "max_msgs", 1),
            "dead_limit": (DEAD, "max_msgs", 1),
            "events_ttl": (EVENTS, "max_age", 1e-9),
            "events_limit": (EVENTS, "max_bytes", 1),
            "heartbeat_interval": (WORKERS, "max_age", 1e-9 / 3),
            "responses_ttl": (RESPONSES, "max_age", 1e-9),
            "files_ttl": (FILES, "max_age", 1e-9),
        }
        found: dict[str, Any] = {}
        for setting, (name, limit, factor) in sources.items():
            config = await self._broker.present(self._broker.server_name(name))
            if config is not None and (value := config[limit] * factor) > 0:
                found[setting] = value if factor == 1 else round(value, 3)
        if "files_ttl" in found:
            found["files_ttl"] -= GRACE
        shares = [int(name) for name in await self._partitions() if name.isdecimal()]
        return found | ({"stream_partitions": max(shares) + 1} if shares else {})

    async def _partitions(self) -> list[str]:
        if await self._broker.present(self._broker.server_name(STREAM)) is None:
            return []
        return [info["name"].removeprefix("stream-") for info in await self._broker.consumers(STREAM)]


def _lanes(streams: Sequence[str]) -> list[str]:
    return [lane_stream(stream, priority) for stream in streams for priority in PRIORITIES]
