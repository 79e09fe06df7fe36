"""Shares of a stage's work, each held by one copy at a time, spread evenly over the copies that live.

A share is a key that its holder rewrites; one that stops doing so loses it when the bucket's time to live has passed,
and whoever sees it free takes it. Copies name themselves in the same bucket, so that each knows its fair number. Of a
holder on this host the operating system says at once that it has died.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from math import ceil

from ..config.process import has_ended, host
from ..streams.beats import until_beat
from ..streams.outages import outage_logged
from ..streams.port import Bucket

Callback = Callable[[int], Awaitable[None]]


class Leases:
    """`interval` is how often leases are renewed and free ones looked for: a fraction of the bucket's time to live."""

    def __init__(self, bucket: Bucket, stage: str, shares: int, *, interval: float) -> None:
        self._bucket = bucket
        self._stage = stage
        self._shares = shares
        self._interval = interval
        self._name = uuid.uuid4().hex
        self._me = f"{self._name} {os.getpid()} {host()}".encode()
        self._held: dict[int, int] = {}  # share → revision of its key

    async def hold(self, gained: Callback, lost: Callback) -> None:
        """Keep a fair number of shares until cancelled, then give all of them back.

        `gained` and `lost` are awaited at each change; a share is given back only after `lost` returned.
        """
        try:
            while True:
                with outage_logged("leases are stale", stage=self._stage):
                    await self._renew(gained, lost)
                await asyncio.sleep(until_beat(self._interval))
        finally:
            for share in list(self._held):
                await self._give_back(share, lost)
            await self._bucket.delete(f"{self._stage}.member.{self._name}")

    async def _renew(self, gained: Callback, lost: Callback) -> None:
        await self._bucket.put(f"{self._stage}.member.{self._name}", self._me)
        renewals = [self._renew_share(share, revision, lost) for share, revision in self._held.items()]
        # All end before another round begins, which would take a renewal on its way for another copy's.
        for failure in await asyncio.gather(*renewals, return_exceptions=True):
            if failure is not None:
                raise failure
        entries = await self._bucket.entries(f"{self._stage}.")
        orphaned = {entry.key: entry.revision for entry in entries if _has_died(entry.value)}
        members = {entry.key for entry in entries if entry.key.startswith(f"{self._stage}.member.")}
        fair = ceil(self._shares / max(1, len(members - orphaned.keys())))
        for share in list(self._held)[fair:]:
            await self._give_back(share, lost)
        for share in range(self._shares):
            if len(self._held) >= fair:
                break
            if share not in self._held and (taken := await self._take(share, orphaned.get(self._key(share)))):
                try:
                    await gained(share)
                except BaseException:
                    await self._bucket.delete(self._key(share))
                    raise
                self._held[share] = taken

    async def _renew_share(self, share: int, revision: int, lost: Callback) -> None:
        renewed = await self._bucket.update(self._key(share), self._me, revision)
        if renewed is None:
            del self._held[share]
            await lost(share)
        else:
            self._held[share] = renewed

    async def _take(self, share: int, orphaned: int | None) -> int | None:
        """Claim a share that is free, or whose key is `orphaned` at that revision; None where somebody else has it."""
        key = self._key(share)
        return await (self._bucket.update(key, self._me, orphaned) if orphaned else self._bucket.create(key, self._me))

    async def _give_back(self, share: int, lost: Callback) -> None:
        await lost(share)
        del self._held[share]
        await self._bucket.delete(self._key(share))

    def _key(self, share: int) -> str:
        return f"{self._stage}.share.{share}"


def _has_died(holder: bytes) -> bool:
    """Whether the process that wrote this is known to be gone; one of an earlier version wrote its name alone."""
    _, pid, where = (*holder.decode().split(" ", 2), "", "")[:3]
    return pid.isdecimal() and has_ended(where, int(pid))
