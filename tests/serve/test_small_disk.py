"""A state directory on a disk of its own that is small: a tmpfs in a mount namespace, where a user may make one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import START_TIMEOUT

SERVE = f"{sys.executable} -m penstock serve --backend echo --port 0 --state-dir disk/state"
TWICE = f"""
for start in first second; do
    {SERVE} > $start 2>&1 & server=$!
    until grep -q 'penstock ready' $start; do kill -0 $server || exit 1; sleep 0.05; done
    kill $server; wait $server || exit 1
done
"""


def on_disk(size: str, script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the shell where `disk` has this size."""
    (directory / "disk").mkdir(exist_ok=True)
    mounting = f"mount -t tmpfs -o size={size} tmpfs disk || exit 77"
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", f"{mounting}\n{script}"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
    )


@pytest.fixture(autouse=True)
def mounts(tmp_path: Path) -> None:
    try:
        can = on_disk("1m", "true", tmp_path).returncode == 0
    except FileNotFoundError:
        can = False
    if not can:
        pytest.skip("this user may not mount a tmpfs in a namespace")


def test_a_disk_without_room_for_the_least_store_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    ended = on_disk("48m", SERVE, tmp_path)
    assert ended.returncode == 2
    said = r"state has 4[0-9.]+ MiB free, and the broker's store needs 64.0 MiB at least; make room, or choose another "
    assert re.search(said + "--state-dir$", ended.stderr)


def test_the_limit_of_a_store_is_lowered_once(tmp_path: Path) -> None:
    """What is stored takes from what is free at the next start, which is no reason to say so again."""
    assert on_disk("120m", TWICE, tmp_path).returncode == 0
    lowered = ["store_limit lowered" in (tmp_path / start).read_text() for start in ("first", "second")]
    assert lowered == [True, False]
