"""Two bridges over one pipeline in memory, and one with a model that is dictated to, each shared by a file's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from applications import Applications
from desk import Desk


@pytest.fixture(scope="module")
def applications() -> Iterator[Applications]:
    with asyncio.Runner() as runner:
        applications = Applications.start(runner)
        yield applications
        runner.run(applications.pipeline.stop())


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with asyncio.Runner() as runner:
        desk = Desk(runner)
        yield desk
        runner.run(desk.pipeline.stop())
