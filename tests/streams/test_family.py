"""What the children of one server have counted is there for whoever asks, in whichever thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from penstock.streams.family import STALE, FamilyMetrics
from penstock.streams.port import Message


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_child_that_falls_silent_is_gone() -> None:
    now = 0.0
    family = FamilyMetrics(lambda: now)
    family.hear(Message("metrics.a", b"a 1", {}))
    now = STALE
    family.hear(Message("metrics.b", b"b 1", {}))
    assert family.texts() == [b"a 1", b"b 1"]
    now += 1
    assert family.texts() == [b"b 1"]
    now += STALE
    assert family.texts() == []


@pytest.mark.usefixtures("hurried")
def test_a_thread_may_ask_while_children_come() -> None:
    family = FamilyMetrics(lambda: 0.0)

    def hear() -> None:
        for number in range(1_000):
            family.hear(Message(f"metrics.{number}", b"a 1", {}))

    thread = threading.Thread(target=hear)
    thread.start()
    while thread.is_alive():
        family.texts()
    assert len(family.texts()) == 1_000
