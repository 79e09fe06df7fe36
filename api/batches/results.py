"""Stores the result of each line of a batch under its number, and writes the result files at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson

from ...schemas.openai.batches import NOT_RUN, Batch, Ending
from ...streams.stores.files import put_file
from ...streams.stores.objects import ObjectInfo, Objects


class Results:
    def __init__(self, batch: Batch, kept: Objects, files: Objects) -> None:
        self._batch = batch
        self._results = kept
        self._files = files

    async def keep(self, number: int, custom_id: str, ending: Ending, response: dict[str, Any] | None) -> None:
        """Store the result of a line, unless it has one."""

        async def entry() -> AsyncIterator[bytes]:
            id = f"batch_req_{self._batch.id.removeprefix('batch_')}_{number}"
            value = {"id": id, "custom_id": custom_id, "response": response, "error": NOT_RUN.get(ending)}
            yield orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)

        await self._results.put(self._key(number), entry(), {"ending": ending})

    async def ending(self, number: int) -> Ending | None:
        """How a line ended; None for one that has no result."""
        found = await self._results.info(self._key(number))
        return None if found is None else found.about["ending"]

    async def first(self, total: int) -> list[ObjectInfo]:
        """The results of the first `total` lines that have one, in order."""
        found = [await self._results.info(self._key(number)) for number in range(total)]
        return [result for result in found if result is not None]

    async def forget(self, total: int) -> None:
        for result in await self.first(total):
            await self._results.delete(result)

    async def write(self, kind: str, results: list[ObjectInfo]) -> str | None:
        """Write the file of these results, unless another runner has, and return its id; None without results."""
        if not results:
            return None

        async def lines() -> AsyncIterator[bytes]:
            for result in results:
                async for piece in self._results.read(result):
                    yield piece

        batch = self._batch
        file = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        name, filename = f"{batch.tenant}.{file}", f"{batch.id}_{kind}.jsonl"
        await put_file(self._files, name, lines(), filename, "batch_output", batch.output_ttl)
        return file

    def _key(self, number: int) -> str:
        return f"{self._batch.id}.{number}"
