"""A machine whose clock is wrong keeps the deadlines that others have set."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from setting_up import set_up

from penstock.api.serve.connecting import connected
from penstock.config.settings import Settings
from penstock.schemas.errors import BrokerUnavailable
from penstock.streams.nats.clock import BrokerClock, own_clock
from penstock.streams.nats.management import Json
from penstock.streams.nats.servers.server import EmbeddedServer


class Machine:
    """Its clock, that of a server, and how long a message takes."""

    def __init__(self, own: float, server: float, delay: float = 0.0) -> None:
        self.own, self.server, self.delay = own, server, delay
        self.is_away = False
        self.clock = BrokerClock(self._ask, lambda: self.own)

    def pass_time(self, seconds: float) -> None:
        self.own += seconds
        self.server += seconds

    async def _ask(self) -> Json:
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
    assert machine.clock.now() == machine.own


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


def is_kept(address: str) -> bool:
    """Whether the time goes on where the machine's clock is set."""
    machine = Machine(time.time(), 0.0)
    own = own_clock(address, lambda: machine.own)
    before = own()
    assert before == pytest.approx(machine.own)
    machine.own += 3600
    return own() == pytest.approx(before, abs=60)


@pytest.mark.parametrize("address", ["nats://n1.example.org:4222", "nats://127.0.0.1:4222,tls://192.0.2.7"])
def test_deadlines_stay_where_a_machines_clock_is_set(address: str) -> None:
    assert is_kept(address)


@pytest.mark.parametrize("address", ["nats://127.0.0.1:4222", "nats://localhost:4222,nats://[::1]:4223"])
def test_a_broker_of_this_machine_has_its_clock(address: str) -> None:
    """Whoever sets it sets it for both, and they must not differ until the next comparison."""
    assert not is_kept(address)


async def test_whoever_connects_goes_by_the_brokers_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats")
    await set_up({"PENSTOCK_NATS_URL": server.url})
    made = BrokerClock.__init__
    monkeypatch.setattr(BrokerClock, "__init__", lambda self, ask, _: made(self, ask, lambda: time.time() + 7200))
    async with connected(Settings(nats_url=server.url), "test") as broker:
        assert broker.now() == pytest.approx(time.time(), abs=60)
    await server.stop()
