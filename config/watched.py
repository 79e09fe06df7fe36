"""Hears from the operating system that processes have ended, where it tells."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Iterable, Iterator

_POLL = 0.1  # seconds between two looks at processes of which the system does not tell


async def until_one_ends(pids: Iterable[int], limit: float) -> None:
    """Return as soon as one of these processes has ended; after `limit` seconds at the latest, or sooner where the
    system does not tell of one of them, so that the caller looks itself."""
    ended = asyncio.Event()
    with contextlib.ExitStack() as watched:
        is_told = all([watched.enter_context(_told(pid, ended)) for pid in pids])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit if is_told else min(limit, _POLL)):
                await ended.wait()


@contextlib.contextmanager
def _told(pid: int, ended: asyncio.Event) -> Iterator[bool]:
    """Have `ended` set when the process ends; false where the system does not tell of it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ended.set()
        yield True
        return
    except (AttributeError, OSError):  # no Linux, a sandbox, or no room for one more file
        yield False
        return
    loop, now = asyncio.get_running_loop(), select.poll()
    now.register(descriptor, select.POLLIN)
    try:
        if now.poll(0):  # it has, but its parent has yet to take note
            yield False
        else:
            loop.add_reader(descriptor, ended.set)
            yield True
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
