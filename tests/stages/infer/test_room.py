"""Room is conserved: what a copy of the batch stage has sent to a worker has arrived, is on its way, or is lost."""

from __future__ import annotations

import asyncio
import uuid

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from memory_pipeline import MODEL, Pipeline

from penstock.schemas.events import Done
from penstock.schemas.jobs import Job
from penstock.schemas.registry import InFlight, Room
from penstock.stages.batch.seats import Seats
from penstock.stages.infer.arrivals import Arrivals
from penstock.streams.port import Consumer, ConsumerSpec, Delivery

PATIENCE = 20.0  # seconds until a wait counts as endless
COPY = "copy"


def room(arrivals: Arrivals) -> Room:
    return Room(
        worker="w0",
        incarnation="i",
        free=16,
        free_high=20,
        received=arrivals.numbers,
        active=0,
        free_tokens=1 << 20,
    )


class Conservation(RuleBasedStateMachine):
    """Messages to a worker arrive late, twice, out of order or never; what the worker says arrives late too."""

    on_the_way = Bundle("on_the_way")
    words = Bundle("words")

    def __init__(self) -> None:
        super().__init__()
        self.arrivals = Arrivals()
        self.seats = Seats(room(self.arrivals))
        self.sizes: dict[int, int] = {}
        self.known: set[int] = set()  # what the batch stage has heard of

    @rule(target=on_the_way, seats=st.integers(1, 4))
    def send(self, seats: int) -> tuple[int, int]:
        number = self.seats.send(seats, 0.0)
        self.sizes[number] = seats
        return number, self.seats.oldest

    @rule(message=on_the_way)
    def arrive(self, message: tuple[int, int]) -> None:
        number, oldest = message
        self.arrivals.add(COPY, number, oldest)

    @rule(target=words)
    def say(self) -> Room:
        return room(self.arrivals)

    @rule(word=consumes(words))
    def hear(self, word: Room) -> None:
        self.seats.hear(word, COPY)
        self.known |= set(word.received.get(COPY, ()))

    @rule(message=on_the_way)
    def lose(self, message: tuple[int, int]) -> None:
        self.seats.lose(message[0])
        self.known.add(message[0])

    @invariant()
    def nothing_is_given_away_or_kept(self) -> None:
        self.seats.check_integrity()
        waiting = self.sizes.keys() - self.known
        assert self.seats.on_the_way == sum(self.sizes[number] for number in waiting)

    def teardown(self) -> None:
        for number in self.sizes:
            self.arrivals.add(COPY, number, self.seats.oldest)
        self.seats.hear(room(self.arrivals), COPY)
        assert self.seats.on_the_way == 0


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=200, deadline=None)


async def steal(pipeline: Pipeline) -> tuple[Consumer, Delivery]:
    """Take the next message to the worker before the worker does, as a connection does that breaks at once."""
    subject = pipeline.pipe.subjects.infer("w0")
    spec = ConsumerSpec("INFER", "infer-w0", subject, ack_wait=60.0, max_deliver=-1)
    thief = await pipeline.pipe.broker.consume(spec, prefetch=1)
    await ask(pipeline)  # it goes to the copy whose turn it is: the worker's, and then the thief's
    taken = asyncio.create_task(thief.take(1))
    while not taken.done():
        await ask(pipeline)
    (delivery,) = taken.result()
    return thief, delivery


async def ask(pipeline: Pipeline) -> None:
    body = {"model": MODEL, "prompt": "room", "max_tokens": 4}
    job = Job(id=uuid.uuid4().hex, endpoint="/v1/completions", bridge="elsewhere", body=body)
    reading = await pipeline.bridge.open(job.model_copy(update={"bridge": "test"}), priority="normal", tenant="default")
    reading.close()
    for _ in range(200):
        await asyncio.sleep(0)


async def is_conserved(pipeline: Pipeline) -> None:
    """Return once a copy of the batch stage has said that nothing is in flight any more."""
    told: asyncio.Queue[InFlight] = asyncio.Queue()
    await pipeline.pipe.broker.listen(
        pipeline.pipe.subjects.in_flight_all(),
        lambda message: told.put_nowait(InFlight.model_validate_json(message.data)),
    )
    async with asyncio.timeout(PATIENCE):
        while any((await told.get()).seats.values()):
            pass


async def answered(pipeline: Pipeline) -> None:
    """As many at once as there is room for are answered."""
    body = {"model": MODEL, "prompt": "room", "max_tokens": 4}
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*(pipeline.events(body, timeout=10.0) for _ in range(16)))
    assert all(isinstance(events[-1], Done) for events in answers)


async def test_a_worker_tells_whose_its_seats_are() -> None:
    pipeline = await Pipeline.start(max_batch_size=4)
    words: list[Room] = []
    await pipeline.pipe.broker.listen(
        pipeline.pipe.subjects.room_all(), lambda message: words.append(Room.model_validate_json(message.data))
    )
    body = {"model": MODEL, "prompt": "room", "ignore_eos": True}
    async with asyncio.timeout(PATIENCE):
        while not any(word.tenants for word in words):  # requests this short can all run between two words
            await asyncio.gather(*(pipeline.events(body | {"max_tokens": 10 * length}) for length in range(1, 9)))
        while words[-1].active:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert all(sum(word.tenants.values()) == word.active for word in words)
    assert words[-1].tenants == {}
    await pipeline.stop()


async def test_a_message_that_comes_on_its_second_attempt_takes_no_room_for_good() -> None:
    pipeline = await Pipeline.start(max_batch_size=4, lease=60.0)  # no message is overdue before that
    for _ in range(8):  # twice the room that there is
        thief, delivery = await steal(pipeline)
        await thief.close()
        await delivery.nak()
    await is_conserved(pipeline)
    await answered(pipeline)
    await pipeline.stop()


async def test_a_message_that_somebody_else_settled_takes_no_room_for_good() -> None:
    pipeline = await Pipeline.start(max_batch_size=4)
    for _ in range(4):
        thief, delivery = await steal(pipeline)
        await thief.close()
        await delivery.ack()
    await is_conserved(pipeline)
    await answered(pipeline)
    await pipeline.stop()
