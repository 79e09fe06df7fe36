"""Two real workers, and requests that share beginnings: they go where these are cached, also after a kill."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from serving import Served, serving, until

LENGTH = 1024  # tokens of a beginning, 16 times what the strategy distinguishes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("prefixes") / "state"
    with serving(state, str(tiny_model), "--workers", "2", "--scheduling", "prefix_aware") as served:
        yield served


def child(served: Served, word: str) -> psutil.Process | None:
    """The first of the server's processes with this word in its command."""
    if not served.supervised:
        pytest.skip("nothing starts these parts again")
    for process in psutil.Process(served.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it may have ended just now
            if word in process.cmdline():
                return process
    return None


def num_ready(served: Served) -> int:
    """The workers of a server that is ready."""
    try:
        answer = httpx2.get(f"{served.url}/health/ready", timeout=5)
    except httpx2.TransportError:
        return 0
    return int(answer.json()["workers"]) if answer.status_code == 200 else 0


def cached(served: Served, beginning: int, end: int) -> int:
    """How many tokens of the prompt the worker found in its cache."""
    chance = random.Random(beginning)
    prompt = [*(chance.randrange(3, 500) for _ in range(LENGTH)), *[3 + end] * 8]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    answer = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == LENGTH + 8
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ask_in_rounds(served: Served, first: int, rounds: int = 3) -> list[int]:
    """Ask with eight new beginnings, all of them once in each round, in other orders; returns what was cached."""
    chance, beginnings = random.Random(0), range(first, first + 8)
    return [cached(served, each, end) for end in range(rounds) for each in chance.sample(beginnings, 8)]


def check_sharing(served: Served, first: int) -> None:
    """Few of eight beginnings are computed twice: at most half, where turns would compute nearly all of them twice."""
    found = ask_in_rounds(served, first)
    assert set(found) == {0, LENGTH}
    assert 8 <= found.count(0) <= 12, found


def test_a_beginning_is_computed_by_one_worker_however_requests_alternate(served: Served) -> None:
    check_sharing(served, 1)


def test_a_worker_that_was_killed_is_not_believed_to_have_anything(served: Served) -> None:
    check_sharing(served, 31)
    victim = child(served, "worker")
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: num_ready(served) == 1)
    until(lambda: num_ready(served) == 2)
    ask_in_rounds(served, 61)
    check_sharing(served, 41)
    found = [cached(served, 31 + number, 9) for number in range(8)]
    assert set(found) == {0, LENGTH}, "those of the worker that lives, and those of the one that was killed"


def test_a_stage_that_was_killed_starts_with_nothing_and_learns_again(served: Served) -> None:
    front = child(served, "front")
    assert front is not None
    os.kill(front.pid, signal.SIGKILL)
    until(lambda: (found := child(served, "front")) is not None and found.pid != front.pid)
    until(lambda: num_ready(served) == 2)
    ask_in_rounds(served, 51)  # which may be shared unevenly: one worker is known before the other
    check_sharing(served, 11)
