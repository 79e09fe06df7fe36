"""Creates streams and changes them, also where a cluster has yet to agree on what it said a moment ago."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from ...schemas.errors import StartupError
from .checks import check_fixed, refused
from .connection.link import Link
from .direct import held_subjects
from .management import (
    NO_PEERS,
    STREAM_EXISTS,
    STREAM_FULL,
    STREAM_MISSING,
    TOO_MANY_CONSUMERS,
    ApiError,
    Json,
    account,
    allowed,
    call,
)

COPYING = 120.0  # seconds that further copies of a stream may take until consumers can be created on it
_LOOK = 0.2  # seconds between two looks

log = structlog.get_logger(__name__)


async def present(link: Link, name: str) -> Json | None:
    """The configuration of the stream with the server's name `name`; None if there is none."""
    with allowed(STREAM_MISSING):
        config: Json = (await call(link, f"STREAM.INFO.{name}"))["config"]
        return config
    return None


async def create(link: Link, config: Json) -> Json | None:
    """Create a stream; returns the configuration of one that is there already. Raises `StartupError`.

    How many consumers it may have is decided then for good: `config` gets the number of the one that is there, or what
    the account allows.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + link.timeout
    while True:
        try:
            await call(link, f"STREAM.CREATE.{config['name']}", config)
        except ApiError as error:
            # A server without free space reports that before it checks whether the stream exists.
            is_there = error.code in (STREAM_EXISTS, TOO_MANY_CONSUMERS, *STREAM_FULL)
            found = await present(link, config["name"]) if is_there else None
            if found is not None:
                check_fixed(config, found)
                config["max_consumers"] = found["max_consumers"]
                return found
            if error.code == TOO_MANY_CONSUMERS:
                most = (await account(link, config["num_replicas"]))["limits"]["max_consumers"]
                if 0 < most < config["max_consumers"]:
                    config["max_consumers"] = most
                    continue
            # The leader of a cluster knows a stream that has just been restored before the server that holds it does,
            # and that a server belongs to it before it takes that one for present.
            is_early = error.code == STREAM_EXISTS or (error.code in NO_PEERS and "offline" in str(error))
            if not is_early or clock() >= end:
                raise refused(config, error) from error
            await asyncio.sleep(_LOOK)
        else:
            return None


async def shape(link: Link, configs: Sequence[Json]) -> None:
    """Create what is missing, and change the rest; returns when the servers hold as many copies as they are to.

    Raises `StartupError`.
    """
    pairs = [(config, await present(link, config["name"])) for config in configs]
    if missing := [config for config, found in pairs if found is None]:
        await _check_room(link, missing)

    def growth(pair: tuple[Json, Json | None]) -> int:
        wanted, found = (max(0, config["max_bytes"]) if config else 0 for config in pair)
        return wanted - found

    # Shrinking streams go first: the server reserves the sum of all limits.
    for config, found in sorted(pairs, key=growth):
        old = found or await create(link, config)
        if old is None:
            continue
        check_fixed(config, old)
        config["max_consumers"] = old["max_consumers"]
        try:
            # An operator's additions, such as a placement, stay.
            new = old | config
            if config["discard"] == "new" and _lowers(config, old, "max_msgs_per_subject"):
                new = await _keeping_what_waits(link, old, new)
            await call(link, f"STREAM.UPDATE.{config['name']}", new)
        except ApiError as error:
            raise refused(config, error) from error
    if link.has("cluster"):
        await _copied(link, configs)


def _lowers(wanted: Json, present: Json, limit: str) -> bool:
    """Whether a limit becomes lower; no limit is -1."""
    return wanted[limit] > 0 and not 0 < present[limit] <= wanted[limit]


async def _keeping_what_waits(link: Link, old: Json, new: Json) -> Json:
    """`new` with room for all that the stream holds on any subject: the server deletes what is beyond that limit, and
    no other, of a stream that discards new messages. Until it is changed the stream takes no more."""
    name, limit = new["name"], new["max_msgs_per_subject"]
    await call(link, f"STREAM.UPDATE.{name}", old | {"max_msgs": 1})
    fullest = max((await held_subjects(link, name, ">")).by_subject.values(), default=0)
    if fullest > limit:
        log.warning("more waits on a subject than its new limit", stream=name, waiting=fullest, limit=limit)
    return new | {"max_msgs_per_subject": max(limit, fullest)}


async def _check_room(link: Link, missing: Sequence[Json]) -> None:
    """Raise `StartupError` where the account may not have so many more streams, before any is made."""
    has = await account(link, missing[0]["num_replicas"])
    if 0 <= (most := has["limits"]["max_streams"]) < has["streams"] + len(missing):
        raise StartupError(
            f"the account on NATS at {link.address} may have {most} streams and has {has['streams']}: Penstock needs "
            f"{len(missing)} more, so raise its limit"
        )


async def _copied(link: Link, configs: Sequence[Json]) -> None:
    """Return when consumers can be created on the streams: not before all servers that are to hold one belong to it."""
    waiting = [config for config in configs if not await _is_copied(link, config)]
    if waiting:
        log.info("waiting for copies of streams", streams=len(waiting), copies=waiting[0]["num_replicas"])
    try:
        async with asyncio.timeout(COPYING):
            while waiting:
                await asyncio.sleep(_LOOK)
                waiting = [config for config in waiting if not await _is_copied(link, config)]
    except TimeoutError:
        raise StartupError(
            f"stream {waiting[0]['name']} does not have its {waiting[0]['num_replicas']} copies after {COPYING:g} s; "
            "see that all servers of the cluster run, and try again"
        ) from None


async def _is_copied(link: Link, config: Json) -> bool:
    about = (await call(link, f"STREAM.INFO.{config['name']}")).get("cluster") or {}
    # nats-server since 2.14 lets a server join a stream when it has caught up, and names what is left to do here.
    return "desired" not in about and len(about.get("replicas") or ()) + 1 >= config["num_replicas"]
