"""Two bridges over one pipeline in memory, shared by the tests of a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from applications import Doors


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    with asyncio.Runner() as runner:
        doors = Doors.start(runner)
        yield doors
        runner.run(doors.pipeline.stop())
