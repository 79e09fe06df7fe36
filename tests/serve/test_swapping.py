"""Hot swaps over the in-memory pipeline: every answer is one revision's, and a failed swap changes nothing."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from in_process import BROKEN, MODEL, PATIENCE, TOKENS, Hosting

from penstock.api.serve import swapping
from penstock.schemas.errors import BrokerUnavailable, InvalidRequest
from penstock.schemas.models.catalogue import Catalogue, CatalogueEntry, RevisionKey
from penstock.schemas.registry import Admission, LoadProgress, ModelLanes
from penstock.stages import admission
from penstock.streams.lanes import present_lanes, remove_lanes
from penstock.streams.stores.catalogue import CatalogueStore
from penstock.streams.topology import PRIORITIES, batch_stream, lanes_of

UNKNOWN = 5.0  # seconds of Retry-After while nothing has left a lane
ASK = st.just("ask")
PAUSES = st.sampled_from(["moment", "settle"])  # from one step to the next


async def play(hosting: Hosting, steps: list[str]) -> dict[int, str]:
    """Ask, swap and restart as the steps say, one after another, while the answers run; returns all revisions."""
    sources = {1: "a"}
    for step in steps:
        match step:
            case "ask":
                await hosting.ask()
            case "moment":
                await asyncio.sleep(0.05)
            case "settle":
                await hosting.settled()
            case "restart":
                await hosting.stop_agent()
                hosting.start_agent()
            case source:
                try:
                    sources[await hosting.swap(source)] = source
                except InvalidRequest as error:
                    assert error.code == "swap_in_progress"
    await hosting.settled()
    return sources


@settings(max_examples=5, deadline=None)
@given(st.lists(ASK | PAUSES | st.sampled_from("bcd") | st.just("restart"), max_size=10))
@example(["ask", "b", "ask", "moment", "ask", "settle", "ask", "a", "ask", "settle", "ask"])
@example(["ask", "b", "moment", "restart", "ask", "settle", "ask"])
def test_requests_keep_the_revision_that_was_current_when_they_came(steps: list[str]) -> None:
    """P28: during a model swap, earlier requests get the old model, later ones the new: each answer is one's, whole."""

    async def run() -> None:
        hosting = await Hosting.start()
        sources = await play(hosting, steps)
        await hosting.ask()
        served = []
        for asked in hosting.asked:
            text = await asked.answer()
            possible = {number: sources[number] * TOKENS for number in range(asked.oldest, asked.newest + 1)}
            assert text in possible.values(), f"{text} is none of {possible}"
            served.append(max(number for number, each in possible.items() if each == text))
        assert served == sorted(served), "nobody gets the old one after somebody has got the new one"
        assert served[-1] == max(sources), "every swap to a good one succeeds"
        await hosting.stop()

    asyncio.run(run())


@settings(max_examples=4, deadline=None)
@given(st.lists(ASK | PAUSES | st.sampled_from(BROKEN), max_size=8))
@example(["ask", *(step for source in BROKEN for step in (source, "ask", "settle", "ask"))])
def test_a_failed_swap_interrupts_nothing(steps: list[str]) -> None:
    """P29: a failed swap leaves the old model serving without interruption, and says why it has failed."""

    async def run() -> None:
        hosting = await Hosting.start()
        await (await hosting.ask()).answer()  # it is loaded
        sources = await play(hosting, steps)
        await hosting.ask()
        assert {await asked.answer() for asked in hosting.asked} == {"a" * TOKENS}
        entry, state = await hosting.entry(), await hosting.state(1)
        assert (entry.revision, entry.source) == (1, "a")
        assert state is not None and (state.status, state.loads) == ("ready", 1), "it was loaded all the time"
        assert (entry.failed_swap.revision if entry.failed_swap else 1) == max(sources)
        await hosting.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("dead", "it could not be loaded: its worker ended with status 1"),
        ("killed", "it could not be loaded: its worker was killed by SIGKILL, as the system does when its memory"),
        ("fatal", "it could not be loaded: its weights are broken"),
        ("faulty", "it failed a test request: "),
        ("mute", "it did not answer a test request "),
    ],
)
async def test_a_failed_swap_says_why_and_ends_its_worker(source: str, reason: str) -> None:
    hosting = await Hosting.start()
    await hosting.swap(source)
    failed = (await hosting.settled()).failed_swap
    assert failed is not None and failed.source == source and failed.reason.startswith(reason)
    await hosting.until(lambda: not hosting.pipeline.pipe.registry.workers_for(MODEL, 2))
    await hosting.until(lambda: hosting.is_in(2, "failed", "draining", "unloaded"))
    await hosting.stop()


async def test_a_former_revision_goes_when_nothing_is_left_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "LEFT", 0.2)
    hosting = await Hosting.start()
    before = await hosting.ask()
    await hosting.swap("b")
    await hosting.settled()
    assert await before.answer() == "a" * TOKENS
    registry = hosting.pipeline.pipe.registry
    await hosting.until(lambda: lanes_of(MODEL, 1) not in registry.lanes)

    async def gone() -> bool:
        known, states = set((await hosting.entry()).sources), await hosting.store.states()
        return known == {2} and RevisionKey(MODEL, 1) not in states

    await hosting.until(gone)
    assert await (await hosting.ask()).answer() == "b" * TOKENS
    await hosting.stop()


@pytest.mark.parametrize("noted", [False, True], ids=["whole", "half"])
async def test_a_former_revision_goes_though_its_lanes_have_gone_before(
    monkeypatch: pytest.MonkeyPatch, noted: bool
) -> None:
    """Another host has removed them for want of room, or died in the middle: this one serves on."""
    monkeypatch.setattr(swapping, "LEFT", 0.2)
    hosting = await Hosting.start()
    assert await (await hosting.ask()).answer() == "a" * TOKENS
    await hosting.stop_agent()
    await hosting.change(partial(Catalogue.remove, name=MODEL))
    broker, lanes = hosting.pipeline.pipe.broker, lanes_of(MODEL, 1)
    if noted:
        for priority in PRIORITIES:
            await broker.remove(batch_stream(lanes, priority))
    else:
        await remove_lanes(broker, ModelLanes(model=MODEL, revision=1))
    await hosting.change(lambda catalogue: catalogue.add(CatalogueEntry(name=MODEL, source="b", backend="echo")))
    hosting.start_agent()

    async def gone() -> bool:
        return RevisionKey(MODEL, 1) not in await hosting.store.states() and lanes not in await present_lanes(broker)

    await hosting.until(gone)
    assert await (await hosting.ask()).answer() == "b" * TOKENS
    await hosting.stop()


async def test_requests_that_wait_for_a_former_revision_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "LEFT", 0.0)
    hosting = await Hosting.start()
    await hosting.stop_agent()
    waiting = await hosting.ask()
    await hosting.swap("b")
    await hosting.change(lambda catalogue: catalogue.promote(RevisionKey(MODEL, 2)))
    hosting.start_agent()
    assert await waiting.answer() == "a" * TOKENS
    await hosting.stop()


async def test_requests_that_wait_for_a_model_that_is_removed_before_it_was_ever_loaded_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its lanes go as those of any other model."""
    monkeypatch.setattr(swapping, "LEFT", 0.2)
    hosting = await Hosting.start()
    await hosting.stop_agent()
    waiting = await hosting.ask()
    await hosting.change(lambda catalogue: catalogue.remove(MODEL))
    assert await hosting.state(1) is None, "it was never loaded"
    hosting.start_agent()
    with pytest.raises(AssertionError, match="m was removed from the models that are served"):
        await waiting.answer()
    await hosting.until(lambda: lanes_of(MODEL, 1) not in hosting.pipeline.pipe.registry.lanes)
    await hosting.stop()


async def test_a_swap_goes_on_with_the_next_agent() -> None:
    hosting = await Hosting.start()
    before = await hosting.ask()
    await hosting.stop_agent()
    await hosting.swap("b")
    hosting.start_agent()
    assert (await hosting.settled()).revision == 2
    assert (await before.answer(), await (await hosting.ask()).answer()) == ("a" * TOKENS, "b" * TOKENS)
    await hosting.stop()


async def test_a_preloaded_model_is_loaded_at_every_start() -> None:
    hosting = await Hosting.start({"preload": True})
    for loads in (1, 2):
        await hosting.until(lambda: hosting.workers)
        await hosting.until(lambda: hosting.is_in(1, "ready"))
        state = await hosting.state(1)
        assert state is not None and state.loads == loads
        await hosting.stop_agent()
        await hosting.until(lambda: not hosting.workers)
        hosting.start_agent()
    await hosting.stop()


async def test_an_agent_ends_though_the_broker_is_gone_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> None:
        raise BrokerUnavailable("the broker is away")

    hosting = await Hosting.start({"preload": True})
    await hosting.until(lambda: hosting.workers)
    with monkeypatch.context() as gone:
        gone.setattr(CatalogueStore, "change_state", away)
        async with asyncio.timeout(PATIENCE):
            await hosting.stop_agent()
    await hosting.stop()


async def test_the_state_of_a_load_says_how_far_its_own_worker_is() -> None:
    hosting = await Hosting.start()
    pipe, revision = hosting.pipeline.pipe, await hosting.swap("endless")
    ours = f"host-{lanes_of(MODEL, revision)}"
    async with asyncio.timeout(PATIENCE):
        while (state := await hosting.state(revision)) is None or state.progress == 0:
            for worker, percent in ((ours, 40), ("another", 90)):
                load = LoadProgress(worker=worker, model=MODEL, revision=revision, percent=percent, elapsed=1.0)
                await pipe.broker.notify(pipe.subjects.loading(), load.model_dump_json().encode())
            await asyncio.sleep(0.01)
    assert (state.status, state.progress) == ("loading", 40)
    await hosting.stop()


async def test_the_time_for_which_a_model_is_unloaded_makes_no_later_request_wait_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it did a second when it was loaded counts, not that nothing goes while others have the memory."""
    monkeypatch.setattr(admission, "_HALF_LIFE", 0.01)
    hosting, looks = await Hosting.start(), list[Admission]()
    pipe = hosting.pipeline.pipe
    await pipe.broker.listen(
        pipe.subjects.admission(), lambda message: looks.append(Admission.model_validate_json(message.data))
    )
    assert await (await hosting.ask()).answer() == "a" * TOKENS
    await hosting.until(lambda: any(look.retry_after["normal"] != UNKNOWN for look in looks))
    await hosting.stop_agent()
    await hosting.until(lambda: not hosting.workers)
    waiting = [await hosting.ask(), await hosting.ask()]
    looks.clear()
    await hosting.until(lambda: sum(look.depth["normal"] == 2 for look in looks) >= 3)
    waiting.append(await hosting.ask())
    hosting.start_agent()
    assert [await asked.answer() for asked in waiting] == ["a" * TOKENS] * 3
    await hosting.stop()
