"""`penstock dead` and `penstock scheduling` on a real nats-server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.config.settings import Settings
from penstock.schemas.jobs import InferenceBatch, Job, ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.schemas.wire import codec
from penstock.stages import Pipe, endings
from penstock.stages.cancellations import Cancellations
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import DEAD_ATTEMPTS, DEAD_REASON, DEAD_SUBJECT, DEADLINE, NEXT, SCHEMA, ConsumerSpec
from penstock.streams.stores.dead_letters import DeadLetters
from penstock.streams.stores.registry import Registry
from penstock.streams.topology import DEAD_DATA, Subjects, batch_stream, lanes_of, topology

LANES = lanes_of("m")
Penstock = Callable[..., Awaitable[Result]]


@pytest.fixture
async def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JetStreamBroker]:
    server = await EmbeddedServer.start(tmp_path / "nats")
    monkeypatch.setenv("PENSTOCK_NATS_URL", server.url)
    broker = await JetStreamBroker.connect(server.url, namespace="penstock", timeout=5.0)
    await broker.ensure(*topology("penstock", ("queue",), store_limit=2 << 30))
    yield broker
    await broker.close()
    await server.stop()


@pytest.fixture
def penstock() -> Penstock:
    return lambda *words: asyncio.to_thread(CliRunner().invoke, app, list(words))


def validated(name: str) -> ValidatedJob:
    return ValidatedJob(
        id=name,
        endpoint="/v1/completions",
        bridge="b",
        tenant="acme",
        priority="low",
        model="m",
        prompts=((1, 2),),
        params=GenerationParams(),
        created=1.0,
        deadline=2.0,
        body={"prompt": "a secret"},
    )


async def bury(broker: JetStreamBroker, stage: str, subject: str, data: bytes, schema: str | None) -> None:
    headers = {
        DEAD_REASON: "ValueError",
        DEAD_SUBJECT: subject,
        DEAD_ATTEMPTS: "5",
        DEADLINE: "2.0",
        "traceparent": "x",
    }
    if schema:
        headers[SCHEMA] = schema
    await broker.publish(f"penstock.dead.{stage}", data, message_id=f"{stage}.{subject}", headers=headers)


async def test_dead_letters_are_listed_shown_retried_and_dropped(broker: JetStreamBroker, penstock: Penstock) -> None:
    assert (await penstock("dead", "list")).stdout == "no dead letters\n"
    batch = InferenceBatch(id="b1", worker="gone", jobs=(validated("one"), validated("two")))
    await bury(broker, "infer", "penstock.infer.gone", codec.encode(batch), codec.BATCH)
    job = Job(id="three", body={"model": "m", "messages": []})
    await bury(broker, "validate", "penstock.jobs.high.acme", codec.encode(job), codec.JOB)
    await bury(broker, "queue", "penstock.queue.low.acme", b"\xffnot a job", None)

    listed = await penstock("dead", "list", "--json")
    rows = [orjson.loads(line) for line in listed.stdout.splitlines()]
    assert [(row["number"], row["stage"], row["requests"]) for row in rows] == [
        (1, "infer", ["one", "two"]),
        (2, "validate", ["three"]),
        (3, "queue", []),
    ]
    assert rows[0]["reason"] == "ValueError" and rows[0]["deliveries"] == "5"
    table = (await penstock("dead", "list")).stdout
    assert "one two" in table and "unreadable" in table and "secret" not in table
    shown = orjson.loads((await penstock("dead", "show", "1")).stdout)
    assert shown["payload"]["jobs"][1]["id"] == "two"
    assert shown["headers"][DEAD_SUBJECT] == "penstock.infer.gone"

    assert (await penstock("dead", "retry", "1", "2")).exit_code == 0
    again = await broker.replay(batch_stream(LANES, "low"), f"penstock.batch.{LANES}.low.acme")
    jobs = [codec.decode_model(ValidatedJob, message.data, message.headers[SCHEMA]) for message in again]
    assert [job.id for job in jobs] == ["one-r1", "two-r1-1"]
    assert all(job.deadline > time.time() for job in jobs)
    (message,) = await broker.replay("JOBS_HIGH", "penstock.jobs.high.acme")
    assert codec.decode_model(Job, message.data, message.headers[SCHEMA]) == job.model_copy(update={"id": "three-r2"})
    assert DEADLINE not in message.headers and message.headers["traceparent"] == "x"

    unreadable = await penstock("dead", "retry", "3")
    assert unreadable.exit_code == 2 and "dead letter 3 cannot be read" in unreadable.stderr
    assert (await penstock("dead", "drop", "--all")).stdout == "dropped 1\n"
    assert await broker.replay("DEAD", "penstock.dead.>") == []


async def test_a_letter_of_eight_megabytes(
    broker: JetStreamBroker, penstock: Penstock, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fits no message once it has the headers that say why; its burial failed for ever, and its client waited."""
    job = validated("large")
    data = codec.encode(job.model_copy(update={"body": {"prompt": "a secret " * ((broker.max_payload - 3_000) // 9)}}))
    settings, subjects = Settings(), Subjects("penstock")
    pipe = Pipe(broker, subjects, settings, Registry(broker, interval=1.0), Cancellations())
    headers = {SCHEMA: codec.VALIDATED_JOB, NEXT: "penstock.batch.low.acme", "x-long": "x" * 2_000}
    await broker.publish("penstock.queue.low.acme", data, message_id="large", headers=headers)
    consumer = await broker.consume(ConsumerSpec("STAGE_QUEUE_LOW", "queue", "penstock.queue.>"), prefetch=1)
    (delivery,) = await consumer.take(1)
    for _ in range(2):  # it may be delivered again before it is terminated
        await endings.bury(pipe, "queue", delivery, "some\nreason " * 1_000, 2)
    assert await broker.replay("STAGE_QUEUE_LOW", "penstock.queue.>") == []
    logged = "".join(capsys.readouterr())
    assert logged.count("buried") == 1 and "large" in logged and "acme" in logged and "secret" not in logged

    (row,) = map(orjson.loads, (await penstock("dead", "list", "--json")).stdout.splitlines())
    assert (row["stage"], row["requests"], row["reason"][:11]) == ("queue", ["large"], "some reason")
    shown = orjson.loads((await penstock("dead", "show", "1")).stdout)
    assert shown["payload"]["body"]["prompt"].startswith("a secret")
    assert (await penstock("dead", "retry", "1")).stdout == "1: large-r1\n"
    (again,) = await broker.replay("STAGE_QUEUE_LOW", "penstock.queue.low.acme")
    assert codec.decode_model(ValidatedJob, again.data, again.headers[SCHEMA]).id == "large-r1"
    assert not {name for name in again.headers if name.startswith("Penstock-Dead")}
    assert await (await broker.bucket(DEAD_DATA)).entries() == [] == await broker.replay("DEAD", "penstock.dead.>")


async def test_a_letter_whose_headers_alone_fill_a_message(broker: JetStreamBroker, penstock: Penstock) -> None:
    headers = {"x-long": "x" * (broker.max_payload - 5_000), SCHEMA: codec.JOB, DEAD_REASON: "odd"}
    letters = await DeadLetters.of(broker, Subjects("penstock"))
    await letters.bury("validate", "m1", codec.encode(Job(id="one", body={})), headers, ["one"])
    shown = orjson.loads((await penstock("dead", "show", "1")).stdout)
    assert shown["headers"][SCHEMA] == codec.JOB and "x-long" not in shown["headers"]
    assert shown["payload"]["id"] == "one"


async def test_a_body_that_gave_way_to_newer_ones(broker: JetStreamBroker, penstock: Penstock) -> None:
    letters = await DeadLetters.of(broker, Subjects("penstock"))
    headers = {DEAD_REASON: "odd", DEAD_SUBJECT: "penstock.jobs.low.acme"}
    await letters.bury("validate", "m1", bytes(1 << 20), headers, ["one"])
    bucket = await broker.bucket(DEAD_DATA)
    await bucket.delete((await bucket.entries())[0].key)  # as a full bucket does with its oldest
    assert orjson.loads((await penstock("dead", "show", "1")).stdout)["payload"] is None
    retried = await penstock("dead", "retry", "1")
    assert retried.exit_code == 2 and "the body of dead letter 1 has expired; drop the letter" in retried.stderr
    assert (await penstock("dead", "drop", "1")).stdout == "dropped 1\n"
    assert await bucket.entries() == []


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("show", "7"), "no dead letter 7; `penstock dead list` shows all"),
        (("retry", "7"), "no dead letter 7"),
        (("retry",), "give the numbers of dead letters, or --all"),
        (("drop", "1", "--all"), "give the numbers of dead letters"),
    ],
)
async def test_faults(broker: JetStreamBroker, penstock: Penstock, words: tuple[str, ...], fault: str) -> None:
    result = await penstock("dead", *words)
    assert result.exit_code == 2
    assert fault in result.stderr


async def test_the_strategy_is_shown_and_changed(broker: JetStreamBroker, penstock: Penstock) -> None:
    assert (await penstock("scheduling")).stdout == "least_loaded (the setting)\n"
    assert (await penstock("scheduling", "memory_aware")).stdout == "memory_aware\n"
    assert (await penstock("scheduling")).stdout == "memory_aware\n"
    assert (await penstock("scheduling", "fastest")).exit_code == 2
