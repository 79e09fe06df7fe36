"""What a service manager is told, by datagrams to a socket of the test's."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

import pytest
import structlog
from notified import notified

from penstock.config.service_manager import ServiceManager
from penstock.schemas.errors import StartupError


@pytest.mark.parametrize("name", ["{folder}/notify", "{folder}/a@b", "@penstock-{unique}"])
def test_each_message_is_one_datagram(name: str, tmp_path: Path) -> None:
    with notified(name.format(folder=tmp_path, unique=uuid.uuid4().hex)) as listening:
        manager = ServiceManager({"NOTIFY_SOCKET": listening.address, "WATCHDOG_USEC": "8000000"})
        assert manager.interval == 2.0
        manager.status("starting")
        manager.status("starting")
        manager.ready("serves")
        manager.status("serves")
        manager.alive()
        manager.stopping(40.5, "ends")
        assert listening.until("STOPPING") == [
            ["STATUS=starting"],
            ["READY=1", "STATUS=serves"],
            ["WATCHDOG=1"],
            ["STOPPING=1", "STATUS=ends", "EXTEND_TIMEOUT_USEC=40500000"],
        ]


@pytest.mark.parametrize("given", [{}, {"WATCHDOG_USEC": "0", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": ""}])
def test_there_are_signs_of_life_only_where_they_are_asked_of_this_process(
    given: dict[str, str], tmp_path: Path
) -> None:
    with notified(str(tmp_path / "notify")) as listening:
        manager = ServiceManager({"NOTIFY_SOCKET": listening.address, **given})
        manager.alive()
        manager.ready("serves")
        assert listening.next() == ["READY=1", "STATUS=serves"]
        ours = ServiceManager(
            {"NOTIFY_SOCKET": listening.address, "WATCHDOG_USEC": "4", "WATCHDOG_PID": f"{os.getpid()}"}
        )
        ours.alive()
        assert listening.next() == ["WATCHDOG=1"]


def test_without_a_service_manager_nothing_is_told() -> None:
    manager = ServiceManager({"WATCHDOG_USEC": "1000000"})
    assert not manager.listens and manager.interval is None
    manager.ready("serves")


async def test_a_service_manager_that_is_gone_or_reads_nothing_stops_nobody(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    with structlog.testing.capture_logs() as logged:
        manager.ready("serves")
        manager.status("still serves")
    assert [(line["event"], line["log_level"]) for line in logged] == [
        ("the service manager cannot be told", "warning")
    ]
    with notified(str(tmp_path / "notify")), structlog.testing.capture_logs() as logged:
        for count in range(1000):  # more than its queue holds
            await asyncio.to_thread(manager.status, str(count))
            if logged:
                break
        assert "timed out" in logged[0]["reason"]


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, "NOTIFY_SOCKET=vsock:2:1234 is neither a path nor the @name of a socket"),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30s"}, "WATCHDOG_USEC=30s is no number of microseconds"),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "0"}, "WATCHDOG_USEC=0 is no number of microseconds"),
    ],
)
def test_what_no_service_manager_sets_is_refused(given: dict[str, str], fault: str) -> None:
    with pytest.raises(StartupError, match=fault):
        ServiceManager(given)
