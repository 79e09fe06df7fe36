"""One configuration per deployment, stored in the broker: `penstock nats setup` writes it, and creates and changes the
streams; a `penstock serve` does the same for a broker of its own.

Every part reads it, refuses to start if it was given another value or streams are missing, and runs with the agreed
values. Parts create and change no stream: otherwise the last part to start would impose its limits on all, and delete
messages that the others want kept. What a server had in memory alone they create again (see `verification`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import structlog

from ....config.deployment import adopt, changes, check, check_layout, explicit, parse, shared_settings, shown
from ....config.settings import Settings, job_stages
from ....config.sources import Loaded
from ....schemas.deployment import LAYOUT, Configuration
from ....schemas.errors import StartupError
from ...lanes import present_lanes, relay_bytes, streams_of
from ...port import Bucket
from ...topology import (
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
    lane_stream,
    stage_stream,
    topology,
)
from ..broker import JetStreamBroker
from .migration import former_streams, move_into_lanes, move_into_lanes_of_models
from .verification import Differences, NotSetUp, differences, not_set_up, verify

log = structlog.get_logger(__name__)

KEY = "configuration"  # in the bucket `state`
_LOOK = 0.25  # seconds between two looks at streams that a server of a cluster does not know yet
_RUNNING = ("worker.", "stage.", "agent.")  # begin the keys of parts that run, in the bucket `workers`
_STOPPED = ("pipeline", "stream_partitions", "heartbeat_interval")  # may change only while no part runs


class Agreed(NamedTuple):
    """`revision` is 0 if nothing is agreed yet: then the configuration describes the existing streams."""

    configuration: Configuration
    revision: int


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
        relay_bytes=relay_bytes(settings),
        store_limit=int(settings.store_limit),
    )


async def joined(broker: JetStreamBroker, loaded: Loaded) -> Settings:
    """Join the deployment, and return the part's settings with the agreed ones.

    Raises `ConfigurationError` if the part was given another value, and `StartupError` if streams are missing or
    cannot be used as they are, with the command that mends it.
    """
    configuration = await Deployment(broker, loaded).join()
    return adopt(loaded.settings, configuration)


async def owned(broker: JetStreamBroker, loaded: Loaded) -> Settings:
    """Like `joined`, for the broker's owner: its explicit settings become the agreed ones and change the streams."""
    deployment = Deployment(broker, loaded)
    agreed = await deployment.agreed()
    before, wanted = agreed.configuration, agreed.configuration.model_copy(update=explicit(loaded))
    await deployment.change(wanted, agreed)
    for name, (old, new) in changes(before, wanted).items():
        log.info("deployment setting changed", setting=name, before=shown(old), after=shown(new))
    return adopt(loaded.settings, wanted)


async def is_agreed(broker: JetStreamBroker, loaded: Loaded) -> bool:
    """Whether a deployment has been set up there before."""
    return (await Deployment(broker, loaded).agreed()).revision > 0


class Deployment:
    """The deployment in a namespace, as seen by a process with these settings."""

    def __init__(self, broker: JetStreamBroker, loaded: Loaded) -> None:
        self._broker = broker
        self._loaded = loaded
        self._settings = loaded.settings

    async def agreed(self) -> Agreed:
        """The agreed configuration; if there is none, that of the streams of 0.1.0, completed by our own settings."""
        if (await self._broker.present(self._broker.server_name(STATE))) is not None:
            entry = await (await self._broker.bucket(STATE)).get(KEY)
            if entry is not None:
                return Agreed(parse(entry.value, self._settings), entry.revision)
        return Agreed(shared_settings(self._settings.model_copy(update=await self._found())), 0)

    async def join(self) -> Configuration:
        """The agreed configuration, with whose streams a part can run. Raises as `joined` does."""
        clock = asyncio.get_running_loop().time
        end = clock() + (self._settings.nats_timeout if self._broker.in_cluster else 0.0)
        while True:
            try:
                return await self._joined()
            except NotSetUp:  # or a server of a cluster that has yet to catch up says so
                if clock() >= end:
                    raise
            await asyncio.sleep(_LOOK)

    async def _joined(self) -> Configuration:
        configuration, revision = await self.agreed()
        if not revision:
            raise not_set_up(self._broker.address, self._loaded)
        check_layout(configuration.layout)
        check(self._loaded, configuration)
        self._broker.replicas = configuration.nats_replicas
        former = [self._broker.server_name(name) for name in former_streams(job_stages(configuration.pipeline))]
        await verify(self._broker, self._layout(configuration), former, self._loaded)
        return configuration

    async def change(self, wanted: Configuration, agreed: Agreed | None = None) -> None:
        """Agree on `wanted`, in the layout of this release, and change the streams; `agreed` is what it was made from.

        Raises `StartupError` if that would strand requests, or another process has agreed on something else meanwhile.
        """
        agreed, wanted = agreed or await self.agreed(), wanted.model_copy(update={"layout": LAYOUT})
        await self.check_safe(agreed.configuration, wanted)
        if not await self._replace(agreed, wanted):
            raise StartupError(
                "another process has just changed the deployment's configuration; check it and try again"
            )

    async def _replace(self, agreed: Agreed, wanted: Configuration) -> bool:
        """Agree on `wanted` and shape the streams, or do neither; False if another process was faster."""
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
        except StartupError:  # so that another configuration can be tried
            if revision:
                await bucket.update(KEY, before.model_dump_json().encode(), written)
            else:
                await bucket.delete(KEY)
            raise
        if not revision:
            log.info("deployment configuration agreed", namespace=self._settings.namespace)
        return True

    async def shape(self, configuration: Configuration) -> None:
        """Create and change the streams to match the configuration."""
        self._broker.replicas = configuration.nats_replicas
        await self._migrate(configuration)
        await self._broker.reconfigure(*await self._with_lanes(configuration))

    async def _migrate(self, configuration: Configuration) -> None:
        subjects, stages = Subjects(self._settings.namespace), job_stages(configuration.pipeline)
        layout = self._layout(configuration)
        await move_into_lanes(self._broker, subjects, stages, layout.streams)
        await move_into_lanes_of_models(self._broker, subjects, adopt(self._settings, configuration), layout)

    async def differences(self, configuration: Configuration) -> Differences:
        """What `shape` would create, and change in existing streams."""
        self._broker.replicas = configuration.nats_replicas
        return await differences(self._broker, await self._with_lanes(configuration))

    async def check_safe(self, before: Configuration, after: Configuration) -> None:
        """Raises `StartupError` if `after` would strand requests or confuse running parts."""
        changed = changes(before, after)
        structural = [name for name in _STOPPED if name in changed]
        if before.layout != LAYOUT:
            structural.append("the layout of the streams")
        if structural:
            await check_stopped(self._broker, f"{' and '.join(structural)} can change")
        queues = _lanes([stage_stream(stage) for stage in self._gone(before, after)])
        if "stream_partitions" in changed:
            stages = [stage_stream(stage) for stage in job_stages(before.pipeline)]
            waiting_for_models = [f"{BATCH}_{lanes.upper()}" for lanes in await present_lanes(self._broker)]
            queues = [*_lanes([JOBS, *stages, *waiting_for_models, TOOLS]), INFER, STREAM]
        waiting = {queue: await self._broker.unsettled(queue) for queue in dict.fromkeys(queues)}
        if held := ", ".join(f"{queue}: {number}" for queue, number in waiting.items() if number):
            names = " and ".join(name for name in ("pipeline", "stream_partitions") if name in changed)
            raise StartupError(
                f"{names} cannot change while requests are unfinished ({held}), which the change would strand: start "
                "all parts with the old settings, let the requests end, and then change it"
            )

    async def _state(self, configuration: Configuration) -> Bucket:
        self._broker.replicas = configuration.nats_replicas
        await self._broker.ensure([], [spec for spec in self._layout(configuration).buckets if spec.name == STATE])
        return await self._broker.bucket(STATE)

    async def _with_lanes(self, configuration: Configuration) -> Topology:
        """All streams and buckets, the lanes of the models that have some among them."""
        whole, settings = self._layout(configuration), adopt(self._settings, configuration)
        if await self._broker.present(self._broker.server_name(STATE)) is None:
            return whole
        lanes = [spec for lanes in await present_lanes(self._broker) for spec in streams_of(settings, lanes)]
        return Topology((*whole.streams, *lanes), whole.buckets)

    def _layout(self, configuration: Configuration) -> Topology:
        return layout(adopt(self._settings, configuration))

    def _gone(self, before: Configuration, after: Configuration) -> list[str]:
        return [stage for stage in job_stages(before.pipeline) if stage not in after.pipeline]

    async def _found(self) -> Mapping[str, Any]:
        """The settings that explain the limits of existing streams without an agreed configuration: those of 0.1.0, and
        those of a deployment whose bucket `state` was deleted."""
        is_former = await self._broker.present(self._broker.server_name(JOBS)) is not None
        jobs, tools = (JOBS, TOOLS) if is_former else (lane_stream(JOBS, "normal"), lane_stream(TOOLS, "normal"))
        sources = {
            "nats_replicas": (jobs, "num_replicas", 1),
            "jobs_limit": (jobs, "max_msgs", 1),
            "tenant_limit": (jobs, "max_msgs_per_subject", 1),
            "queue_limit": (lane_stream(BATCH if is_former else stage_stream("queue"), "normal"), "max_msgs", 1),
            "infer_limit": (INFER, "max_msgs", 1),
            "tools_limit": (tools, "max_msgs", 1),
            "batches_limit": (BATCHES, "max_msgs", 1),
            "dead_limit": (DEAD, "max_msgs", 1),
            "dead_ttl": (DEAD, "max_age", 1e-9),
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
        if "events_ttl" in found and not is_former:
            found["events_ttl"] -= RELAY_GRACE
        if found.get("nats_replicas", 1) > 1:  # workers then count as dead after a failover, whatever their heartbeat
            found.pop("heartbeat_interval", None)
        shares = [int(name) for name in await self._partitions() if name.isdecimal()]
        return found | ({"stream_partitions": max(shares) + 1} if shares else {})

    async def _partitions(self) -> list[str]:
        if await self._broker.present(self._broker.server_name(STREAM)) is None:
            return []
        return [info["name"].removeprefix("stream-") for info in await self._broker.consumers(STREAM)]


async def check_stopped(broker: JetStreamBroker, what: str) -> None:
    """Raise `StartupError` if a part runs: `what` is possible only while none does."""
    if await broker.present(broker.server_name(WORKERS)) is None:
        return
    entries = await (await broker.bucket(WORKERS)).entries()
    if cards := [entry.key for entry in entries if entry.key.startswith(_RUNNING)]:
        running = ", ".join(cards[:5])
        raise StartupError(
            f"{what} only while no part runs: stop all parts first ({running}{', …' if len(cards) > 5 else ''})"
        )


def _lanes(streams: Sequence[str]) -> list[str]:
    return [lane_stream(stream, priority) for stream in streams for priority in PRIORITIES]
