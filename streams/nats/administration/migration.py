"""Migration of the streams of earlier releases, without losing waiting messages: from one stream per stage to one per
lane, and from lanes that all models shared to lanes of each model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import structlog

from ....config.settings import Settings
from ....schemas.jobs import ValidatedJob
from ....schemas.wire import codec
from ...lanes import open_lanes
from ...port import DEAD_REASON, MESSAGE_ID, SCHEMA, Message, StreamSpec
from ...topology import BATCH, JOBS, PRIORITIES, TOOLS, Subjects, Topology, lane_of, lane_stream, stage_stream
from ..broker import JetStreamBroker
from ..management import STREAM_MISSING, allowed

log = structlog.get_logger(__name__)


def former_streams(stages: Sequence[str]) -> list[str]:
    """The streams that the functions below move into others, in a pipeline whose work-queue stages are `stages`."""
    return [JOBS, TOOLS, *map(stage_stream, stages), *(lane_stream(BATCH, priority) for priority in PRIORITIES)]


async def move_into_lanes(
    broker: JetStreamBroker, subjects: Subjects, stages: Sequence[str], lanes: Sequence[StreamSpec]
) -> None:
    """Move the messages of the old streams (of `stages`, JOBS and TOOLS) into `lanes`, and delete the old streams.

    Safe to run in several processes at once and to repeat after a crash: a message keeps its id, and leaves the old
    stream only when its lane has stored it.
    """
    names = (JOBS, TOOLS, *map(stage_stream, stages))
    old = [name for name in names if await broker.set_aside(name)]
    if not old:
        return
    await broker.ensure(lanes, [])
    for name in old:
        with allowed(STREAM_MISSING):  # another process was faster
            for message in await broker.replay(name, ">"):
                message_id = message.headers.get(MESSAGE_ID, f"moved-{name}-{message.sequence}")
                headers = {key: value for key, value in message.headers.items() if key != MESSAGE_ID}
                await broker.publish(_lane(subjects, message), message.data, message_id=message_id, headers=headers)
                await broker.delete(name, message.sequence)
            await broker.remove(name)
            log.info("stream of an earlier version moved into lanes", stream=name)


async def move_into_lanes_of_models(
    broker: JetStreamBroker, subjects: Subjects, settings: Settings, layout: Topology
) -> None:
    """Move what waits in the lanes that all models shared into those of each model, and delete the old ones.

    As safe as `move_into_lanes`. What cannot be read goes to the dead letters.
    """
    old = [priority for priority in PRIORITIES if await broker.set_aside(lane_stream(BATCH, priority))]
    if not old:
        return
    await broker.reconfigure(*layout)  # what was theirs of the store goes to the new lanes
    for priority in old:
        name = lane_stream(BATCH, priority)
        with allowed(STREAM_MISSING):  # another process was faster
            for message in await broker.replay(name, ">"):
                message_id = message.headers.get(MESSAGE_ID, f"moved-{name}-{message.sequence}")
                headers = {key: value for key, value in message.headers.items() if key != MESSAGE_ID}
                try:
                    job = codec.decode_model(ValidatedJob, message.data, headers.get(SCHEMA))
                except codec.DecodeError as error:
                    subject, headers = subjects.dead("batch"), headers | {DEAD_REASON: str(error)}
                else:
                    await open_lanes(broker, settings, job.model, job.revision)
                    subject = lane_of(subjects, job)
                await broker.publish(subject, message.data, message_id=message_id, headers=headers)
                await broker.delete(name, message.sequence)
            await broker.remove(name)
            log.info("lane of an earlier version moved into those of its models", stream=name)


def _lane(subjects: Subjects, message: Message) -> str:
    """The current subject of a message. An unknown priority becomes the lowest, behind which nothing waits."""
    kind, *rest = message.subject.removeprefix(f"{subjects.root}.").split(".")
    if kind == "tools":
        body: dict[str, Any] = orjson.loads(message.data)
        return subjects.tools(body.get("priority", "normal"), rest[0])
    if rest[0] not in PRIORITIES:
        rest[0] = PRIORITIES[-1]
    return ".".join([subjects.root, kind, *rest])
