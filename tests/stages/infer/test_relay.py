"""How a worker publishes what its engine says: in few messages, however many choices a request has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from memory_pipeline import Pipeline, validated

from penstock.engine import EngineRequest, RequestHandle
from penstock.schemas.events import Delta, FinishReason, Started, TokenLogprob
from penstock.schemas.params import GenerationParams
from penstock.schemas.wire import codec
from penstock.stages.infer.relay import OutputPublisher, messages, next_turn, pace
from penstock.stages.infer.request_metrics import RequestMetrics, WorkerMetrics


def delta(choice: int, tokens: int = 1, reason: FinishReason | None = None, *, logprobs: bool = False) -> Delta:
    entries = (TokenLogprob("x", 1, -0.5, (120,)),) * tokens if logprobs else None
    return Delta("r", 1, choice, 0, (1,) * tokens, "x" * tokens, entries, reason)


def handle_of(choices: int, deltas: Sequence[Delta]) -> RequestHandle:
    request = EngineRequest(id="r", prompt=(1,), params=GenerationParams(n=choices), seed=0)
    handle = RequestHandle(request, lambda: None)
    for one in deltas:
        handle.put(one)
    return handle


def test_what_many_choices_have_to_say_is_one_message(pipeline: Pipeline) -> None:
    async def scene() -> None:
        pipe, job = pipeline.pipe, validated("wide", pipeline.pipe)
        job = job.model_copy(update={"params": job.params.model_copy(update={"n": 40})})
        publisher = OutputPublisher(pipe, job, lambda: 0.0, RequestMetrics(job, WorkerMetrics("model", "w0")))
        await publisher.relay(handle_of(40, [delta(choice, reason="stop") for choice in range(40)]))
        (message,) = await pipe.broker.replay("STREAM", pipe.outputs_of(job.tenant, job.id))
        started, *said = codec.decode_outputs(message.data)
        assert isinstance(started, Started)
        assert [one.choice for one in said if isinstance(one, Delta)] == list(range(40))
        assert {one.request for one in said} == {"wide"}

    pipeline.runner.run(scene())


def test_a_message_holds_no_more_than_fits() -> None:
    def sizes(deltas: Sequence[Delta]) -> list[int]:
        return [len(message) for message in messages(deltas)]

    assert sizes([delta(choice, 3_000) for choice in range(3)]) == [1, 1, 1]
    assert sizes([delta(choice, 2_000) for choice in range(4)]) == [2, 2]
    assert sizes([delta(0), delta(1, logprobs=True), delta(2), delta(3)]) == [1, 1, 2]
    assert sizes([]) == []


@pytest.mark.parametrize(
    ("events", "interval", "pace", "turn"),
    [
        (1, 0.04, 0.001, 7.04),
        (0, 0.04, 0.001, 7.04),
        (4, 0.04, 0.001, 7.04),
        (8, 0.04, 0.001, 7.08),
        (30, 0.04, 0.001, 7.28),
        (128, 0.04, 0.001, 7.48),
        (1, 0.04, 0.04, 7.04),
        (1, 0.04, 0.12, 7.12),
        (1, 0.04, 1, 7.48),
        (4, 0.8, 0.001, 7.2),
        (2, 0.0, 0, 7.01),
        (2, 0.0, 0.1, 7.21),
    ],
)
def test_streams_take_turns_together_and_time_passes_for_each_event(
    events: int, interval: float, pace: float, turn: float
) -> None:
    assert next_turn(7.01, events, interval, pace) == pytest.approx(turn)


@pytest.mark.parametrize(
    ("streams", "interval", "cores", "events"),
    [(32, 0.04, 2, 300), (1, 0.04, 2, 300), (32, 0.04, 16, 1000), (32, 0.04, 4, 600), (32, 0.0, 2, 1000)],
)
def test_on_few_cores_streams_make_fewer_events(streams: int, interval: float, cores: int, events: int) -> None:
    assert streams / pace(streams, interval, cores) == pytest.approx(events)


async def test_a_pause_ends_with_the_last_delta() -> None:
    handle = handle_of(2, [delta(0, reason="stop")])
    handle.wake()
    pausing = asyncio.create_task(handle.pause(1e6))
    handle.put(delta(1))
    handle.wake()
    await asyncio.sleep(0)
    assert not pausing.done()
    handle.put(delta(1, reason="stop"))
    handle.wake()
    await pausing
    assert len(await handle.take()) == 2


async def test_a_pause_ends_in_time() -> None:
    handle = handle_of(1, [delta(0)])
    await handle.pause(0.001)
    assert not handle.finished


def test_each_turn_is_an_interval_after_the_one_before() -> None:
    for interval in (0.01, 0.04, 0.1, 1.0):
        told = 12_345.6
        for _ in range(1000):
            turn = next_turn(told, 1, interval, 0.001)
            assert 0 < turn - told < 1.001 * interval
            assert told == 12_345.6 or turn - told > 0.999 * interval
            told = turn - 1e-9  # timers may be early by the resolution of the clock
