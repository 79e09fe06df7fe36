"""A machine whose clock is wrong keeps the deadlines that others have set."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from setting_up import set_up

from penstock.api.serve.connecting import connected
from penstock.config.settings import Settings
from penstock.schemas.errors import BrokerUnavailable
from penstock.streams.nats.clock import BrokerClock
from penstock.streams.nats.management import Json
from penstock.streams.nats.servers.server import EmbeddedServer


class Machine:
    """Its clock, that of a server, and how long a message takes."""

    def __init__(self, own: float, server: float, delay: float = 0.0) -> None:
        self.own, self.server, self.delay = own, server, delay
        self.is_away = False
        self.passed = 0.0
        self.asked = asyncio.Event()
        self.clock = BrokerClock(self._ask, lambda: self.own, lambda: self.passed)

    def pass_time(self, seconds: float) -> None:
        self.own += seconds
        self.passed += seconds
        self.server += seconds

    async def _ask(self) -> Json:
        self.asked.set()
        if self.is_away:
            raise BrokerUnavailable("away")
        self.pass_time(self.delay)
        stamp = datetime.fromtimestamp(self.server, UTC).isoformat()
        self.pass_time(self.delay)
        return {"ts": stamp}


@pytest.mark.parametrize("ahead", [7200.0, -7200.0, 0.5])
async def test_the_brokers_clock_counts(ahead: float) -> None:
    machine = Machine(10_000.0 + ahead, 10_000.0, 0.02)
    await machine.clock.look()
    assert machine.clock.now() == pytest.approx(machine.server, abs=0.021)
    machine.pass_time(500)
    assert machine.clock.now() == pytest.approx(machine.server, abs=0.021)


async def test_a_clock_that_may_be_right_is_left_alone() -> None:
    """However long messages take: processes of one machine have the very same time."""
    machine = Machine(10_000.0, 10_000.0, 0.3)
    await machine.clock.look()
    assert machine.clock.now() == pytest.approx(machine.own, abs=1e-6)


async def test_a_clock_that_is_set_is_found_out_and_told_once() -> None:
    machine = Machine(10_000.0, 10_000.0)
    with structlog.testing.capture_logs() as logs:
        await machine.clock.look()
        machine.own -= 3600
        await machine.clock.look()
        machine.is_away = True
        await machine.clock.look()
        assert machine.clock.now() == machine.server
        machine.is_away = False
        await machine.clock.look()
    assert [(entry["event"], entry["seconds"]) for entry in logs] == [
        ("this clock is behind the broker's, which counts", 3600.0)
    ]


@pytest.mark.parametrize("brokers", [3600.0, -3600.0, 0.0], ids=["both-forwards", "both-backwards", "ours-alone"])
async def test_a_machines_clock_that_is_set_counts_once_the_broker_says_so(brokers: float) -> None:
    """What has an address of this machine may be a proxy, to a broker of another one."""
    machine = Machine(10_000.0, 10_000.0)
    following = asyncio.create_task(machine.clock.follow())
    await asyncio.sleep(0)
    machine.own += brokers or 3600
    machine.server += brokers
    assert machine.clock.now() == 10_000, "nobody has asked the broker"
    async with asyncio.timeout(8):  # which is less than between two comparisons
        await machine.asked.wait()
    await asyncio.sleep(0)
    assert machine.clock.now() == machine.server
    following.cancel()


async def test_whoever_connects_goes_by_the_brokers_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    await set_up({"PENSTOCK_NATS_URL": server.url})
    made = BrokerClock.__init__
    monkeypatch.setattr(BrokerClock, "__init__", lambda self, ask: made(self, ask, lambda: time.time() + 7200))
    async with connected(Settings(nats_url=server.url), "test") as broker:
        assert broker.now() == pytest.approx(time.time(), abs=60)
    await server.stop()
