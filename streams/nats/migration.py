"""Migration from the streams of 0.1.0, one per stage, to one stream per lane, without losing waiting messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import structlog

from ..port import MESSAGE_ID, Message, StreamSpec
from ..topology import JOBS, PRIORITIES, TOOLS, Subjects, stage_stream
from .broker import JetStreamBroker
from .management import STREAM_MISSING, allowed

log = structlog.get_logger(__name__)


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


def _lane(subjects: Subjects, message: Message) -> str:
    """The current subject of a message. An unknown priority becomes the lowest, behind which nothing waits."""
    kind, *rest = message.subject.removeprefix(f"{subjects.root}.").split(".")
    if kind == "tools":
        body: dict[str, Any] = orjson.loads(message.data)
        return subjects.tools(body.get("priority", "normal"), rest[0])
    if rest[0] not in PRIORITIES:
        rest[0] = PRIORITIES[-1]
    return ".".join([subjects.root, kind, *rest])
