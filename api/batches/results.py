"""Stores the result of each line of a batch under its number, and writes the result files at the end.

Lines that nobody ran, of a batch that was cancelled or whose window has ended, have one entry together: storing and
reading one for each takes minutes where there are tens of thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, NamedTuple

import orjson

from ...schemas.openai.batches import NOT_RUN, Batch, Counts, Ending
from ...streams.stores.files import put_file
from ...streams.stores.objects import ObjectInfo, Objects
from .input import checked_line

_NOT_RUN = "rest"


class NotRun(NamedTuple):
    """The lines from the number `first` on, and how they ended."""

    first: int
    ending: Ending


class Summary(NamedTuple):
    """What a batch that has ended says of its results."""

    output_file_id: str | None
    error_file_id: str | None
    request_counts: Counts


class Results:
    def __init__(self, batch: Batch, kept: Objects, files: Objects) -> None:
        self._batch = batch
        self._results = kept
        self._files = files

    async def keep(self, number: int, custom_id: str, ending: Ending, response: dict[str, Any] | None) -> None:
        """Store the result of a line, unless it has one."""

        async def entry() -> AsyncIterator[bytes]:
            yield self._entry(number, custom_id, ending, response)

        await self._results.put(f"{self._batch.id}.{number}", entry(), {"ending": ending})

    def _entry(self, number: int, custom_id: str, ending: Ending, response: dict[str, Any] | None = None) -> bytes:
        """A line of a result file."""
        id = f"batch_req_{self._batch.id.removeprefix('batch_')}_{number}"
        value = {"id": id, "custom_id": custom_id, "response": response, "error": NOT_RUN.get(ending)}
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)

    async def leave(self, first: int, ending: Ending) -> None:
        """Store that the lines from `first` on are not run, unless another runner has: what is stored holds for all
        runners, also where one has a result of such a line."""
        await self._results.put(f"{self._batch.id}.{_NOT_RUN}", _nothing(), {"first": first, "ending": ending})

    async def kept(self) -> tuple[dict[int, ObjectInfo], NotRun | None]:
        """The results by the numbers of their lines, and the lines that are not run."""
        found: dict[int, ObjectInfo] = {}
        rest = None
        async for infos in self._results.scan(f"{self._batch.id}."):
            for info in infos:
                if (name := info.name.rpartition(".")[2]) == _NOT_RUN:
                    rest = NotRun(**info.about)
                else:
                    found[int(name)] = info
        return found, rest

    async def forget(self) -> None:
        async for infos in self._results.scan(f"{self._batch.id}."):
            for info in infos:
                await self._results.delete(info)

    async def summary(self, total: int, lines: AsyncIterable[tuple[int, bytes]]) -> Summary:
        """Write the result files of a batch of which every line has ended; `lines` are those of its input file.

        Raises `KeyError` for a result that cannot be read yet.
        """
        found, left = await self.kept()
        kept = [found[number] for number in range(left.first if left else total)]
        done = [result for result in kept if result.about["ending"] == "completed"]
        rest = [result for result in kept if result.about["ending"] != "completed"]
        endings = Counter(result.about["ending"] for result in kept)
        if left is not None:
            endings[left.ending] += total - left.first
        return Summary(
            await self._write("output", done),
            await self._write("error", rest, None if left is None else self._not_run(lines, left)),
            Counts(
                total=total,
                completed=len(done),
                failed=total - len(done),
                cancelled=endings["cancelled"],
                expired=endings["expired"],
            ),
        )

    async def _not_run(self, lines: AsyncIterable[tuple[int, bytes]], left: NotRun) -> AsyncIterator[bytes]:
        """The error file's lines of those that are not run."""
        number = 0
        async for _, raw in lines:
            if number >= left.first:
                yield self._entry(number, (await checked_line(raw))["custom_id"], left.ending)
            number += 1

    async def _write(
        self, kind: str, results: list[ObjectInfo], more: AsyncIterable[bytes] | None = None
    ) -> str | None:
        """Write the file of these results, and of `more` lines behind them, unless another runner has, and return its
        id; None where there are none."""
        if not results and more is None:
            return None

        async def lines() -> AsyncIterator[bytes]:
            for result in results:
                async for piece in self._results.read(result):
                    yield piece
            if more is not None:
                async for line in more:
                    yield line

        batch = self._batch
        file = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        name, filename = f"{batch.tenant}.{file}", f"{batch.id}_{kind}.jsonl"
        await put_file(self._files, name, lines(), filename, "batch_output", batch.output_ttl)
        return file


async def _nothing() -> AsyncIterator[bytes]:
    for nothing in tuple[bytes, ...]():
        yield nothing
