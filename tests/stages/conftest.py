"""The whole pipeline in one process, over the in-memory broker and the echo engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest
from memory_pipeline import Pipeline


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with asyncio.Runner() as runner:
        pipeline = runner.run(Pipeline.start())
        pipeline.runner = runner
        yield pipeline
        runner.run(pipeline.stop())


@pytest.fixture
def dead() -> int:
    """A process that has been, and is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
