"""Real processes under a service manager: when they say that they are ready, live, and stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from notified import notified
from serving import Served, Start


def test_a_server_tells_when_it_is_ready_lives_and_stops(start: Start, tmp_path: Path) -> None:
    with notified(f"@penstock-{tmp_path.name}-{os.getpid()}") as manager:
        given = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000"}
        state = tmp_path / "state"
        process = start("serve", "--backend", "echo", "--port", "0", "--state-dir", str(state), environment=given)
        before = manager.until("READY=1")
        assert before[0] == ["STATUS=starting"] and not any("WATCHDOG=1" in message for message in before)
        url = Served(process, state).url
        assert before[-1] == ["READY=1", f"STATUS=ready; {url}"]
        manager.until("WATCHDOG=1")
        manager.until(f"STATUS=ready, 1 worker; {url}")

        family = psutil.Process(process.pid).children(recursive=True)
        for child in family:
            assert {"NOTIFY_SOCKET", "WATCHDOG_USEC"}.isdisjoint(child.environ())
        (front,) = (child for child in family if "front" in child.cmdline())
        front.suspend()
        manager.until(f"STATUS=no answer at {url}")
        front.resume()
        told = manager.until("WATCHDOG=1")
        assert not any(line.startswith("STATUS=ready") for message in told[:-1] for line in message)

        process.send(signal.SIGTERM)
        assert manager.until("STOPPING=1")[-1][1:] == [
            "STATUS=stopping once running requests have finished",
            "EXTEND_TIMEOUT_USEC=90000000",
        ]
        assert process.wait() == 0


PARTS = {
    "stage": (("validate", "tools"), "runs validate, tools"),
    "bridge": (("--port", "0"), "runs the bridge"),
    "agent": (("--id", "a1"), "runs a1"),
    "worker": (("--backend", "echo"), "serves echo"),
}


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_is_ready_when_it_runs(part: str, start: Start, nats_url: str, tmp_path: Path) -> None:
    arguments, status = PARTS[part]
    with notified(str(tmp_path / "notify")) as manager:
        given = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "1000000", "PENSTOCK_NATS_URL": nats_url}
        process = start(part, *arguments, environment=given)
        assert manager.next() == ["READY=1", f"STATUS={status}"]
        assert manager.next() == ["WATCHDOG=1"]
        process.send(signal.SIGTERM)
        assert manager.until("STOPPING=1")[-1][1] == "STATUS=finishing what runs"
        assert process.wait() == 0
