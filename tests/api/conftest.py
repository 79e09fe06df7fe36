"""Two bridges over one pipeline in memory, and one with a model that is dictated to, each shared by a file's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from applications import Doors
from desk import Desk


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with asyncio.Runner() as runner:
        doors = Doors.start(runner)
        yield doors
        runner.run(doors.pipeline.stop())


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with asyncio.Runner() as runner:
        desk = Desk(runner)
        yield desk
        runner.run(desk.pipeline.stop())
