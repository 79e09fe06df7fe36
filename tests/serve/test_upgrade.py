"""An upgrade under load: parts of this version beside parts of the commit before, on one broker, in both directions.

The commit before is built as a wheel. Where the history is missing, in a shallow clone or an unpacked archive, this
version is built instead, and the test says so: then it shows that two installations work together, and no more.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import Process, Start, answers

ROOT = Path(__file__).parents[2]
STAGES = ("validate", "queue", "batch", "stream")
REQUESTS = 50
TOKENS = 100
PROBE = """
import penstock
print(penstock.__file__)
try:
    from penstock.schemas.deployment import LAYOUT
except ImportError:
    LAYOUT = 1  # 0.1.0 had the first and named none
print(LAYOUT)
"""


class Release(NamedTuple):
    """An installation of Penstock: the environment in which it is the one that runs, and the layout of its streams."""

    environment: dict[str, str]
    layout: int

    @classmethod
    def of(cls, environment: dict[str, str], place: Path) -> Release:
        """The one that runs in this environment and lies in `place`."""
        probe = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=os.environ | environment,
            cwd=place,
            capture_output=True,
            text=True,
            check=True,
        )
        file, layout = probe.stdout.split()
        assert Path(file).resolve().is_relative_to(place)
        return cls(environment, int(layout))


def _unpacked(directory: Path) -> str:
    """Put the source of the commit before into `directory`; returns what it is."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD~1"], capture_output=True, check=False)
    if archive.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(directory, filter="data")
        return "the commit before"
    shutil.copytree(
        ROOT, directory, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "node_modules", "__pycache__")
    )
    return "this version, since the commit before is not here: " + archive.stderr.decode().strip()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The commit before, installed from its wheel, without a network."""
    place = tmp_path_factory.mktemp("before")
    name = _unpacked(place / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(place / "source")]
    subprocess.run(build, check=True)
    (wheel,) = place.glob("penstock-*.whl")
    installed = place / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], check=True)
    print(f"\nbeside this version runs {name}")
    return Release.of({"PYTHONPATH": str(installed)}, installed)


@pytest.fixture(scope="module")
def now() -> Release:
    return Release.of({}, ROOT)


class Mixed:
    """The bridge and the light stages of one release, and workers of any, against one broker."""

    def __init__(self, start: Start, nats_url: str) -> None:
        self._start = start
        self._settings = {"PENSTOCK_NATS_URL": nats_url, "PENSTOCK_LEASE": "1", "PENSTOCK_HEARTBEAT_INTERVAL": "0.5"}

    def part(self, release: Release, *arguments: str) -> Process:
        return self._start(*arguments, environment=self._settings | release.environment)

    def worker(self, release: Release, id: str) -> Process:
        return self.part(release, "worker", "--backend", "echo", "--echo-rate", "100", "--id", id)

    def front(self, release: Release) -> str:
        """Start the stages and the bridge; returns the bridge's URL when they run."""
        self.part(release, "stage", *STAGES).wait_for("running")
        return self.part(release, "bridge", "--port", "0").wait_for(r"listening.*(http://[\d.:]+)")[1]


@pytest.mark.parametrize("which", ["newer worker", "older worker"])
def test_upgrade_under_load_loses_nothing(
    start: Start, nats_url: str, before: Release, now: Release, which: str
) -> None:
    """The worker of one release dies under load; that of the other, which has run beside it, goes on."""
    first, second = (before, now) if which == "newer worker" else (now, before)
    mixed = Mixed(start, nats_url)
    url = mixed.front(first)
    if before.layout != now.layout:
        worker = mixed.worker(second, "w1")
        assert worker.wait() == 2
        assert f"has layout {first.layout}, but this Penstock uses layout {second.layout}" in worker.output
        return
    leaving, staying = mixed.worker(first, "w0"), mixed.worker(second, "w1")
    for worker in (leaving, staying):
        worker.wait_for("worker ready")
    prompts = [f"request {place} " + "abc " * 30 for place in range(REQUESTS)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answers, url, "echo", prompts, TOKENS)
        assert answers(url, "echo", ["early"], TOKENS) == ["early"]  # so the others are under way
        leaving.send(signal.SIGKILL)
        leaving.wait()
        assert asked.result() == [prompt[:TOKENS] for prompt in prompts]
