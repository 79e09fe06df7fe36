"""A process hears from the system that another has ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.config.watched import until_one_ends

FAR = 1e6  # seconds; a test that waits for them fails by its own limit


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


async def test_an_end_is_heard_of(sleeper: subprocess.Popen[bytes]) -> None:
    waiting = asyncio.create_task(until_one_ends([os.getpid(), sleeper.pid], FAR))
    await asyncio.sleep(0)
    assert not waiting.done()
    sleeper.kill()
    async with asyncio.timeout(30.0):
        await waiting


async def test_what_has_ended_is_not_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    async with asyncio.timeout(30.0):
        await until_one_ends([os.getpid(), sleeper.pid], FAR)


async def test_one_whose_parent_takes_no_note_is_looked_at_now_and_then(sleeper: subprocess.Popen[bytes]) -> None:
    """Otherwise who waits for it would look all the time, or never."""
    sleeper.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    before = asyncio.get_running_loop().time()
    async with asyncio.timeout(30.0):
        await until_one_ends([sleeper.pid], FAR)
    assert asyncio.get_running_loop().time() - before >= 0.05


@pytest.mark.parametrize("error", [AttributeError, PermissionError])
async def test_where_the_system_does_not_tell_the_caller_looks(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", refused)
    async with asyncio.timeout(30.0):
        await until_one_ends([os.getpid()], FAR)


async def test_no_file_stays_open(sleeper: subprocess.Popen[bytes]) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        await until_one_ends([os.getpid(), sleeper.pid], 0.0)
    assert len(os.listdir("/proc/self/fd")) == len(before)
