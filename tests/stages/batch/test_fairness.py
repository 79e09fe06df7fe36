"""One tenant floods, and another one is served as if it had its share of the workers to itself."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from memory_pipeline import MODEL, Pipeline

from penstock.config import metrics
from penstock.schemas.events import FINAL, Done, Event
from penstock.schemas.jobs import InferenceBatch, Job, Priority
from penstock.schemas.wire.codec import BATCH, decode_event, decode_model
from penstock.stages.batch.stage import Batch
from penstock.streams.port import Message
from penstock.streams.topology import batch_stream, lanes_of

PATIENCE = 120.0


def redeliveries(reason: str) -> float:
    """Of this process, to the stage batch."""
    labels = {"stage": "batch", "reason": reason}
    return metrics.REGISTRY.get_sample_value("penstock_redeliveries_total", labels) or 0.0


class Narrow(Batch):
    """Has few jobs in hand, so that the others are hidden in the broker."""

    concurrency = 24


class Scene:
    """A pipeline whose engine stands still until `go`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.ended: list[Event] = []
        self.sent: list[str] = []  # the tenants of the jobs that workers got, in order

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, *more: type[Batch], **values: Any) -> AsyncIterator[Scene]:
        pipeline = await Pipeline.start(*more, **{"lease": 30.0, "max_batch_size": 4, "stall_timeout": 600.0} | values)
        scene = cls(pipeline)
        pipeline.backend.goes.clear()
        await pipeline.pipe.broker.listen(f"{pipeline.pipe.subjects.root}.events.>", scene._hear)
        await pipeline.pipe.broker.listen(pipeline.pipe.subjects.infer("w0"), scene._hear_batch)
        try:
            yield scene
        finally:
            await pipeline.stop()

    def _hear(self, message: Message) -> None:
        event = decode_event(message.data)
        if isinstance(event, FINAL):
            self.ended.append(event)

    def _hear_batch(self, message: Message) -> None:
        self.sent += [job.tenant for job in decode_model(InferenceBatch, message.data, BATCH).jobs]

    async def send(self, tenant: str, number: int, priority: Priority = "normal", **body: Any) -> None:
        for _ in range(number):
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, **body}
            job = Job(id=f"{tenant}-{uuid.uuid4().hex}", endpoint="/v1/completions", bridge="elsewhere", body=body)
            pipe = self.pipeline.pipe
            await pipe.broker.publish(
                pipe.subjects.jobs(priority, tenant), job.model_dump_json().encode(), message_id=str(job.id)
            )

    async def waiting(self, number: int, priority: Priority = "normal") -> None:
        """Return when so many wait in the lane."""
        await self.until(lambda: self._in_lane(priority) >= number)

    def _in_lane(self, priority: Priority) -> int:
        broker: Any = self.pipeline.pipe.broker
        return int(broker._streams[batch_stream(lanes_of(MODEL), priority)].held().messages)

    async def in_hand(self, tenant: str) -> None:
        """Return when every copy of the batch stage has found jobs of the tenant."""
        copies = [runner._stage for runner in self.pipeline._runners if isinstance(runner._stage, Batch)]
        await self.until(
            lambda: all(any(tenant in each._held for each in copy._windows._windows.values()) for copy in copies)
        )

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def all_ended(self, number: int) -> None:
        self.pipeline.backend.goes.set()
        await self.until(lambda: len(self.ended) >= number)
        assert all(isinstance(event, Done) for event in self.ended)
        assert len({event.request for event in self.ended}) == number == len(self.sent)

    def before_the_last_of(self, tenant: str) -> Counter[str]:
        """How many of each tenant had gone to the worker when the last one of `tenant` did."""
        return Counter(self.sent[: len(self.sent) - self.sent[::-1].index(tenant)])


async def test_a_flood_leaves_another_tenant_its_half() -> None:
    async with Scene.of() as scene:
        await scene.send("many", 200)
        await scene.waiting(190)
        await scene.send("few", 20)
        await scene.waiting(210)
        await scene.all_ended(220)
        before = scene.before_the_last_of("few")
        assert before["few"] == 20
        assert before["many"] <= 20 + 2 * 5  # its share, and what ran at the beginning and at the end


async def test_weights_divide_what_there_is() -> None:
    async with Scene.of(tenant_weights="many=1,few=3") as scene:
        await scene.send("many", 60)
        await scene.send("few", 60)
        await scene.waiting(110)
        await scene.all_ended(120)
        before = scene.before_the_last_of("few")
        assert 60 / 3 - 5 <= before["many"] <= 60 / 3 + 2 * 5


async def test_a_request_counts_as_its_choices() -> None:
    async with Scene.of() as scene:
        await scene.send("wide", 40, n=4)
        await scene.send("few", 40)
        await scene.waiting(70)
        await scene.all_ended(80)
        tokens = {"few": 5 + 2 * 4, "wide": 5 + 4 * 2 * 4}  # weighted: of the prompt once, and twice of each choice
        assert scene.before_the_last_of("few")["wide"] <= 40 * tokens["few"] / tokens["wide"] + 5


async def test_no_flood_hides_another_tenant_in_the_broker() -> None:
    """A copy has 24 jobs in hand, and 300 are in front of the other tenant's; none is lost or served twice.

    Those that it gave back for that are no sign of trouble.
    """
    turns, failures = redeliveries("turn"), redeliveries("failure")
    async with Scene.of(batch=Narrow) as scene:
        await scene.send("many", 300)
        await scene.waiting(290)
        await scene.send("few", 8)  # a third of the window: none of these is given back
        await scene.in_hand("few")
        await scene.all_ended(308)
        assert scene.before_the_last_of("few")["many"] <= 8 + 2 * 5
    assert redeliveries("turn") > turns
    assert redeliveries("failure") == failures


async def test_a_flood_leaves_a_seat_to_whoever_needed_some() -> None:
    """Of eight, one tenant holds three, and another one that could take the rest leaves one for the next."""
    async with Scene.of(max_batch_size=8) as scene:
        await scene.send("few", 3)
        await scene.until(lambda: scene.sent == ["few"] * 3)
        (batch,) = (runner._stage for runner in scene.pipeline._runners if isinstance(runner._stage, Batch))
        await scene.until(lambda: any(lanes.shares._needs.get("few", 0) > 1 for lanes in batch._lanes.values()))
        await scene.send("many", 50)
        await scene.waiting(46)
        await scene.send("few", 1)
        await scene.until(lambda: len(scene.sent) == 8)
        assert scene.sent == ["few"] * 3 + ["many"] * 4 + ["few"]
        await scene.all_ended(54)


async def test_copies_are_fair_together_and_one_that_leaves_loses_nothing() -> None:
    values = {"echo_rate": 100.0, "lease": 600.0}  # slower than copies look at the lane; and no lease expires
    async with Scene.of(Narrow, batch=Narrow, **values) as scene:
        await scene.send("many", 200)
        await scene.waiting(190)
        await scene.send("few", 20)
        await scene.waiting(210)
        await scene.in_hand("few")
        scene.pipeline.backend.goes.set()
        await scene.until(lambda: len(scene.ended) >= 5)
        batches = [runner for runner in scene.pipeline._runners if isinstance(runner._stage, Batch)]
        copy: Any = batches[0]._stage
        (window,) = (each for each in copy._windows._windows.values() if each.share is not None)
        behind = next(iter(window._aside._deliveries.values()))
        await copy.leave()
        assert not copy.sets_aside(behind)
        batches[0].stop()
        await scene.all_ended(220)
        assert scene.before_the_last_of("few")["many"] <= 100
