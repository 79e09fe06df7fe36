"""Whether a grammar compiles, found out in a child process that may be killed: some take for ever, or all memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextvars import Context
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO

from ...config.process import python
from ...schemas.errors import InvalidRequest, ModelLoadError, Overloaded, PenstockError
from ...schemas.params import Grammar
from ..text.tokenizer import load_tokenizer
from .importing import import_alone
from .matcher import GrammarCompiler

_MEMORY = 2 << 30  # bytes that compiling may take in addition to what the child has loaded
_START_LIMIT = 300.0  # seconds for the child to import its libraries and load a tokenizer
_MAX_WAITING = 16  # grammars, checked one after another
_MAX_VERDICTS = 4096
_MAX_LINE_BYTES = 64 << 20

SIMPLE = Grammar(kind="regex", text="a")
"""Compiled ahead of any request, so that what every grammar needs is loaded."""

_WHOLE = "--with-torch"  # an argument of the child, which imports what xgrammar does
_Job = tuple[str, str, int, str, str]
"""A model's source, backend and revision, and a grammar's kind and text."""


class GrammarChecker:
    """Compiles grammars one after another in a child, which starts at the first and is replaced when it dies.

    Belongs to one event loop; `close` it there.
    """

    def __init__(self, *, time_limit: float = 5.0) -> None:
        """`time_limit` in seconds is what one compilation may take, counted from where it begins."""
        self._time_limit = time_limit
        # What is wrong with each grammar, by its digest, the least recently used first; empty where it compiles.
        self._verdicts: OrderedDict[bytes, asyncio.Task[str]] = OrderedDict()
        self._ahead: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        self._num_waiting = 0
        self._turn = asyncio.Lock()
        self._child: Process | None = None  # guarded by `_turn`

    def knows(self, grammar: Grammar, source: str, backend: str, revision: int = 1, *, param: str) -> bool:
        """Whether `check` would return at once. Raises `InvalidRequest` where it would at once."""
        key = _digest((source, backend, revision, grammar.kind, grammar.text))
        verdict = self._verdicts.get(key)
        if verdict is None or not verdict.done() or verdict.cancelled() or verdict.exception():
            return False
        self._verdicts.move_to_end(key)
        _refuse(verdict.result(), param)
        return True

    async def check(self, grammar: Grammar, source: str, backend: str, revision: int = 1, *, param: str) -> None:
        """Return if the model at `source` can follow `grammar`; a newer `revision` may have other files there.

        Raises `InvalidRequest` with `param` where the grammar does not compile, or not in time; `Overloaded` where too
        many grammars wait already; `ModelLoadError`.
        """
        job = (source, backend, revision, grammar.kind, grammar.text)
        key = _digest(job)
        if key not in self._verdicts:
            if self._num_waiting >= _MAX_WAITING:
                raise Overloaded("Too many grammars wait to be checked.", retry_after=self._time_limit)
            self._num_waiting += 1
            # A task keeps its context: that of the caller would keep the request, too, as long as the verdict.
            self._verdicts[key] = asyncio.create_task(self._judge(job), context=Context())
            self._verdicts[key].add_done_callback(lambda task: self._settle(key, task))
        self._verdicts.move_to_end(key)
        # The caller may be cancelled; the child's answer has to be read all the same.
        _refuse(await asyncio.shield(self._verdicts[key]), param)

    def prepare(self, source: str, backend: str, revision: int = 1, *, after: float = 0.0) -> None:
        """Start the child and load the model's tokenizer there, once, `after` seconds from now."""
        key = (source, backend, revision)
        if key not in self._ahead:
            self._ahead[key] = asyncio.create_task(self._prepare(*key, after))

    async def _prepare(self, source: str, backend: str, revision: int, after: float) -> None:
        await asyncio.sleep(after)
        with contextlib.suppress(PenstockError):  # which the first request with a grammar is told
            await self.check(SIMPLE, source, backend, revision, param="grammar")

    async def close(self) -> None:
        """End the child, and with it what it compiles."""
        tasks = [*self._ahead.values(), *self._verdicts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end()

    def _settle(self, key: bytes, task: asyncio.Task[str]) -> None:
        """Forget a check that failed itself, and the oldest verdict where there are too many."""
        self._num_waiting -= 1
        if task.cancelled() or task.exception():
            del self._verdicts[key]
        elif len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _judge(self, job: _Job) -> str:
        async with self._turn:
            for attempt in (1, 2):
                child = self._child = self._child or await self._start()
                begun = False
                try:
                    await self._exchange(child, job)
                    begun = True
                    async with asyncio.timeout(self._time_limit):
                        return str((await self._read(child))["fault"])
                except TimeoutError:
                    await self._end()
                    return f"the grammar takes longer than {self._time_limit:g} s to compile"
                except (EOFError, ConnectionError):
                    await self._end()
                    if begun:
                        return "the grammar cannot be compiled: it takes too much memory, or the compiler gives up"
                    if attempt == 2:
                        raise ModelLoadError("the process that checks grammars does not start") from None
                except ModelLoadError:
                    raise
                except BaseException:
                    await self._end()
                    raise
        raise AssertionError("unreachable")

    async def _exchange(self, child: Process, job: _Job) -> None:
        """Hand the job over, and wait until the child has loaded what it needs for it."""
        assert child.stdin is not None
        child.stdin.write(json.dumps(job).encode() + b"\n")
        await child.stdin.drain()
        try:
            async with asyncio.timeout(_START_LIMIT):
                loaded = await self._read(child)
        except TimeoutError:
            await self._end()
            raise ModelLoadError("the process that checks grammars takes too long to start") from None
        if "error" in loaded:
            raise ModelLoadError(loaded["error"])

    async def _read(self, child: Process) -> dict[str, str]:
        assert child.stdout is not None
        line = await child.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer: dict[str, str] = json.loads(line)
        return answer

    async def _start(self) -> Process:
        # What the compiler writes to stderr may quote a client's grammar, which no log is to have.
        return await asyncio.create_subprocess_exec(
            *python(__spec__.name), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=_MAX_LINE_BYTES
        )

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _refuse(fault: str, param: str) -> None:
    if fault:
        raise InvalidRequest(fault, code="invalid_grammar", param=param)


def _digest(job: _Job) -> bytes:
    """What stands for a grammar, which may have megabytes."""
    return sha256(json.dumps(job).encode()).digest()


def main(jobs: IO[str], answers: IO[str]) -> None:
    """The child: answers each job with a line once the model's tokenizer is loaded, and one with the verdict."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def receive() -> None:
        for line in jobs:
            waiting.put(line)
        os._exit(0)  # the parent is gone, whatever is being compiled

    def reply(answer: dict[str, str]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    threading.Thread(target=receive, daemon=True).start()
    compilers = lru_cache(maxsize=8)(_load)
    while True:
        source, backend, revision, kind, text = json.loads(waiting.get())
        try:
            compiler = compilers(source, backend, revision)
        except PenstockError as error:
            reply({"error": str(error)})
            continue
        reply({})
        fault = ""
        try:
            compiler.compile(Grammar(kind=kind, text=text))
        except InvalidRequest as error:
            fault = str(error)
        reply({"fault": fault})


def _load(source: str, backend: str, revision: int) -> GrammarCompiler:
    """The compiler of a model; what is cached of a former `revision` may be of other files."""
    _limit_memory(None)
    compiler = GrammarCompiler(load_tokenizer(source, backend), cache_bytes=0)
    compiler.load()
    _limit_memory(_MEMORY)
    return compiler


def _limit_memory(more: int | None) -> None:
    """Allow this process `more` bytes than it has now; with None, as many as it was allowed at first."""
    if sys.platform != "linux":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most if more is None else size + more, most))


if __name__ == "__main__":
    # Libraries may print to stdout, which must not mix with the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as own:
        os.dup2(2, 1)
        if _WHOLE not in sys.argv:
            try:
                import_alone()
            except Exception:  # another release of xgrammar needs more of torch than names: begin anew, with it
                os.dup2(own.fileno(), 1)
                os.execv(sys.executable, python(__spec__.name, _WHOLE))
        main(sys.stdin, own)
