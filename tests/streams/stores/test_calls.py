"""The calls of a response, as one copy of the stage stores them and another reads them."""

from __future__ import annotations

import orjson
import pytest

from penstock.schemas.loops import ToolResult
from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.stores.responses import CallKey, ResponseLog
from penstock.streams.topology import RESPONSES, topology

KEY = CallKey("acme", f"resp_{'a' * 32}", 1, 0)


@pytest.mark.parametrize(
    ("result", "read_before_images"),
    [
        (ToolResult("4"), True),
        (ToolResult("no", True), True),
        (ToolResult("[image file-1]", images=("file-1", "file-2")), False),
    ],
)
async def test_another_copy_reads_the_same_result(result: ToolResult, read_before_images: bool) -> None:
    """Releases before images read an owner, a text and whether it is an error, and nothing else."""
    broker = MemoryBroker()
    await broker.ensure(*topology("p", ()))
    log = await ResponseLog.of(broker)
    claim = await log.claim(KEY, "one")
    assert await log.settle(KEY, claim, result) == result
    assert (await log.claim(KEY, "other")).result == result
    entry = await (await broker.bucket(RESPONSES)).get(str(KEY))
    assert entry is not None and (len(orjson.loads(entry.value)) == 3) is read_before_images
