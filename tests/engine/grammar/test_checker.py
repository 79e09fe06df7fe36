"""Grammars are compiled in a child process, which may take its time, die, and be replaced."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import weakref
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from penstock.engine.grammar import checker as checking
from penstock.engine.grammar.checker import GrammarChecker
from penstock.schemas.errors import InvalidRequest, ModelLoadError
from penstock.schemas.params import Grammar

GOOD = Grammar(kind="regex", text="[a-z]{3}")
BAD = Grammar(kind="regex", text="(a")
ENDLESS = Grammar(kind="json_schema", text='{"type": "string", "pattern": ".{0,9000}x.{0,9000}"}')

# Runs at the start of the child: its xgrammar cannot be imported where another module stands for torch.
NEEDS_TORCH = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "xgrammar" and "torch" in sys.modules and not hasattr(sys.modules["torch"], "__file__"):
            raise ImportError("no torch")

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def model(model_directory: Callable[[str], Path]) -> str:
    return str(model_directory("llama"))


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(time_limit=0.5)
    yield checker
    await checker.close()
    assert children() == []


def children() -> list[int]:
    """Processes that check grammars for this one."""
    return [one.pid for one in psutil.Process().children() if "penstock.engine.grammar.checker" in one.cmdline()]


async def fault_of(checker: GrammarChecker, grammar: Grammar, model: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(grammar, model, "paged", param="guided_regex")
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "guided_regex")
    return str(caught.value)


async def test_it_says_what_compiles_and_why_not(checker: GrammarChecker, model: str) -> None:
    assert children() == []
    await asyncio.gather(
        checker.check(GOOD, model, "paged", param="p"),
        fault_of(checker, BAD, model),
        checker.check(GOOD, model, "hf", param="p"),
    )
    assert "parenthesis is not closed" in await fault_of(checker, BAD, model)
    with pytest.raises(ModelLoadError, match="no such directory"):
        await checker.check(GOOD, "/nowhere/at/all", "paged", param="p")
    await checker.check(Grammar(kind="ebnf", text='root ::= "a"'), model, "paged", param="p")
    assert len(children()) == 1


async def test_another_revision_is_read_anew(checker: GrammarChecker, model: str, tmp_path: Path) -> None:
    """A swap may lead to the same directory, where other files lie by then: here none."""
    source = shutil.copytree(model, tmp_path / "model")
    await checker.check(GOOD, str(source), "paged", 1, param="p")
    shutil.rmtree(source)
    assert "parenthesis" in await fault_of(checker, BAD, str(source))  # of the first, which is loaded
    with pytest.raises(ModelLoadError, match="no such directory"):
        await checker.check(GOOD, str(source), "paged", 2, param="p")


async def test_what_takes_too_long_is_refused_and_the_next_is_not(checker: GrammarChecker, model: str) -> None:
    endless, good = await asyncio.gather(
        fault_of(checker, ENDLESS, model), checker.check(GOOD, model, "paged", param="p")
    )
    assert endless == "the grammar takes longer than 0.5 s to compile"
    assert good is None
    running = children()
    assert await fault_of(checker, ENDLESS, model) == endless
    assert children() == running  # the verdict is remembered: nothing was killed


async def test_a_dead_child_is_replaced(checker: GrammarChecker, model: str) -> None:
    await checker.check(GOOD, model, "paged", param="p")
    (first,) = children()
    os.kill(first, signal.SIGKILL)
    assert "parenthesis" in await fault_of(checker, BAD, model)
    assert children() != [first]


async def test_a_slow_start_is_not_the_grammars_fault(
    checker: GrammarChecker, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_START_LIMIT", 0)
    with pytest.raises(ModelLoadError, match="too long to start"):
        await checker.check(GOOD, model, "paged", param="p")
    monkeypatch.undo()
    await checker.check(GOOD, model, "paged", param="p")


async def test_who_leaves_harms_nobody(checker: GrammarChecker, model: str) -> None:
    leaving = asyncio.create_task(checker.check(GOOD, model, "paged", param="p"))
    await asyncio.sleep(0)  # it has begun
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert "parenthesis" in await fault_of(checker, BAD, model)
    await checker.check(GOOD, model, "paged", param="p")
    assert len(children()) == 1


async def test_a_verdict_keeps_nothing_of_its_request(checker: GrammarChecker, model: str) -> None:
    """Thousands of verdicts are remembered, and the requests they were made for may have megabytes each."""

    class Request:
        pass

    current = ContextVar[Request]("current")

    async def ask() -> weakref.ref[Request]:
        current.set(request := Request())
        await checker.check(GOOD, model, "paged", param="p")
        return weakref.ref(request)

    kept = await asyncio.create_task(ask())
    await asyncio.sleep(0)  # the loop forgets the task
    gc.collect()
    assert kept() is None


async def test_it_starts_ahead_of_the_first_grammar(checker: GrammarChecker, model: str) -> None:
    checker.prepare("/nowhere/at/all", "paged")  # which the first request is told
    checker.prepare(model, "paged")
    async with asyncio.timeout(60):
        while not children():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (child,) = children()
    checker.prepare(model, "paged")
    await checker.check(GOOD, model, "paged", param="p")
    assert children() == [child]


async def test_another_release_of_xgrammar_may_need_torch(
    checker: GrammarChecker, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NEEDS_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await checker.check(GOOD, model, "paged", param="p")
    assert "parenthesis" in await fault_of(checker, BAD, model)
    (child,) = children()
    assert any("libtorch" in file.path for file in psutil.Process(child).memory_maps())


async def test_it_does_without_torch(checker: GrammarChecker, model: str) -> None:
    await checker.check(GOOD, model, "paged", param="p")
    (child,) = children()
    assert not any("libtorch" in file.path for file in psutil.Process(child).memory_maps())
