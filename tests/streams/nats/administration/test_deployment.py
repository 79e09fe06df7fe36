"""One configuration a deployment: the first agrees, the others adopt or refuse, and only an explicit act changes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from penstock.__main__ import app
from penstock.config.deployment import explicit, shared_settings
from penstock.config.settings import BUILT_IN_STAGES, Settings
from penstock.config.sources import Loaded, flag
from penstock.schemas.deployment import LAYOUT, Configuration
from penstock.schemas.errors import BrokerUnavailable, ConfigurationError, StartupError
from penstock.schemas.jobs import ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.schemas.wire import codec
from penstock.streams.lanes import open_lanes
from penstock.streams.nats.administration.deployment import KEY, Deployment, joined, layout, owned
from penstock.streams.nats.administration.migration import move_into_lanes
from penstock.streams.nats.administration.verification import Differences
from penstock.streams.nats.broker import JetStreamBroker
from penstock.streams.nats.management import call
from penstock.streams.nats.servers.server import EmbeddedServer
from penstock.streams.port import NEXT, BucketSpec, ConsumerSpec, StreamSpec
from penstock.streams.topology import RESPONSES, STATE, WORKERS, Subjects, batch_stream, lanes_of

DAY = 86400.0
LONG = {"responses_ttl": 90 * DAY, "tenant_limit": 7, "events_ttl": 3600.0}
SMALL: dict[str, Any] = {"store_limit": 256 << 20, "events_limit": 16 << 20}
CUSTOM = ("validate", "custom", *BUILT_IN_STAGES[1:])


@pytest.fixture
def part(namespace: str) -> Callable[..., Loaded]:
    """The settings of a part, of which these were given."""

    def load(**given: Any) -> Loaded:
        origins = dict.fromkeys(Settings.model_fields, "default") | {name: flag(name) for name in given}
        return Loaded(Settings(namespace=namespace, **SMALL | given), origins)

    return load


Part = Callable[..., Loaded]


async def limits(broker: JetStreamBroker, name: str) -> dict[str, Any]:
    present = await broker.present(broker.server_name(name))
    assert present is not None
    return present


async def test_a_part_without_flags_adopts_what_the_first_agreed_on(jetstream: JetStreamBroker, part: Part) -> None:
    """It used to write its defaults over the limits of all, and so to delete what they had kept."""
    await owned(jetstream, part(**LONG))
    await (await jetstream.bucket(RESPONSES)).put("key", b"kept")
    before = await limits(jetstream, "JOBS_LOW"), await limits(jetstream, RESPONSES)
    settings = await joined(jetstream, part())
    assert (settings.responses_ttl, settings.tenant_limit, settings.events_ttl) == (90 * DAY, 7, 3600.0)
    assert (await limits(jetstream, "JOBS_LOW"), await limits(jetstream, RESPONSES)) == before
    assert before[0]["max_msgs_per_subject"] == 7 and before[1]["max_age"] == 90 * DAY * 1e9
    assert (await joined(jetstream, part(**LONG))).responses_ttl == 90 * DAY


async def test_a_part_that_was_given_other_values_refuses(jetstream: JetStreamBroker, part: Part) -> None:
    await owned(jetstream, part(**LONG))
    with pytest.raises(ConfigurationError) as refused:
        await joined(jetstream, part(tenant_limit=5, stream_partitions=16, jobs_limit=1_000))
    partitions, tenant = sorted(refused.value.faults)
    assert partitions.startswith("stream_partitions is 16 (--stream-partitions), but this deployment (namespace test")
    assert "agreed on 8: omit the setting" in partitions
    assert "tenant_limit is 5" in tenant and "`penstock config apply --tenant-limit 5`" in tenant
    assert (await limits(jetstream, "JOBS_LOW"))["max_msgs_per_subject"] == 7


async def test_of_many_that_come_at_once_one_agrees(server: EmbeddedServer, part: Part, namespace: str) -> None:
    async def set_up(number: int) -> int:
        broker = await JetStreamBroker.connect(server.url, namespace=namespace, timeout=30.0)
        try:
            loaded = part(queue_limit=number)
            return (await owned(broker, replace(loaded, origins=part().origins))).queue_limit
        finally:
            await broker.close()

    ended = await asyncio.gather(*map(set_up, range(1, 9)), return_exceptions=True)
    agreed = {end for end in ended if isinstance(end, int)}
    refusals = [str(end) for end in ended if not isinstance(end, int)]
    assert len(agreed) == 1 and all("another process has just changed" in refusal for refusal in refusals)
    broker = await JetStreamBroker.connect(server.url, namespace=namespace)
    assert (await limits(broker, "STAGE_QUEUE_LOW"))["max_msgs"] == agreed.pop()
    await broker.close()


async def test_streams_of_0_1_0_are_adopted_without_loss(jetstream: JetStreamBroker, part: Part) -> None:
    former = layout(part(**LONG, queue_limit=50, heartbeat_interval=2.0, files_ttl=9 * DAY, jobs_limit=33).settings)
    streams = [replace(spec, max_bytes=0) if spec.discard == "new" else spec for spec in _of_0_1_0(former.streams)]
    streams = [replace(spec, max_age=3600.0) if spec.name in ("STREAM", "EVENTS") else spec for spec in streams]
    await jetstream.ensure(streams, [replace(spec, max_bytes=0) for spec in former.buckets if spec.name != "dead-data"])
    subjects = Subjects(part().settings.namespace)
    for name in ("m", "n"):
        await jetstream.publish(subjects.jobs("low", "t"), b"job", message_id=name, headers={NEXT: "x"})
    await jetstream.publish(f"{subjects.root}.jobs.urgent.t", b"odd", message_id="o")
    await jetstream.publish(subjects.stage("queue", "high", "t"), b"validated", message_id="m")
    await jetstream.publish(f"{subjects.root}.tools.t", b'{"priority": "high"}', message_id="m")
    await jetstream.publish(f"{subjects.root}.tools.t", b"{}", message_id="n")
    consumer = await jetstream.consume(ConsumerSpec("JOBS", "validate", subjects.jobs_all()), prefetch=1)
    await consumer.take(1)  # and its process dies
    await consumer.close()
    await (await jetstream.bucket(RESPONSES)).put("key", b"kept")
    spec = ConsumerSpec("STREAM", "stream-11", subjects.stream_all(11), takeover=True)
    await (await jetstream.consume(spec, prefetch=1)).close()
    with pytest.raises(StartupError, match=r"is not set up .*`penstock nats setup --apply --tenant-limit 5`"):
        await joined(jetstream, part(tenant_limit=5))

    settings = await owned(jetstream, part())
    assert explicit(part(**LONG)) == {name: getattr(settings, name) for name in LONG}
    assert (settings.queue_limit, settings.heartbeat_interval, settings.jobs_limit) == (50, 2.0, 33)
    assert (settings.files_ttl, settings.stream_partitions) == (9 * DAY, 12)
    low = await jetstream.replay("JOBS_LOW", subjects.jobs_all())
    assert [message.data for message in low] == [b"job", b"job", b"odd"]
    assert [message.headers["Nats-Msg-Id"] for message in low] == ["m", "n", "o"] and low[0].headers[NEXT] == "x"
    for name, data in (
        ("STAGE_QUEUE_HIGH", b"validated"),
        ("TOOLS_HIGH", b'{"priority": "high"}'),
        ("TOOLS_NORMAL", b"{}"),
    ):
        assert [message.data for message in await jetstream.replay(name, ">")] == [data]
    for name in ("JOBS", "STAGE_QUEUE", "TOOLS"):
        assert await jetstream.present(jetstream.server_name(name)) is None
    entry = await (await jetstream.bucket(RESPONSES)).get("key")
    assert entry is not None and entry.value == b"kept"
    assert (await limits(jetstream, "JOBS_LOW"))["max_bytes"] > 0 < (await limits(jetstream, RESPONSES))["max_bytes"]
    assert (await joined(jetstream, part())) == settings


async def test_a_lost_agreement_is_found_again_in_the_streams(jetstream: JetStreamBroker, part: Part) -> None:
    given = {
        **LONG,
        "jobs_limit": 33,
        "queue_limit": 50,
        "infer_limit": 60,
        "tools_limit": 70,
        "dead_ttl": DAY,
        "files_ttl": 9 * DAY,
        "heartbeat_interval": 2.0,
    }
    settings = await owned(jetstream, part(**given))
    before = await limits(jetstream, "EVENTS"), await limits(jetstream, "JOBS_LOW")
    await call(jetstream._link, f"STREAM.DELETE.{jetstream.server_name(STATE)}")
    assert await owned(jetstream, part()) == settings
    assert (await limits(jetstream, "EVENTS"), await limits(jetstream, "JOBS_LOW")) == before


def _of_0_1_0(streams: Sequence[StreamSpec]) -> list[StreamSpec]:
    """The same, with one stream for all lanes but those of the batch stage, which all models share."""
    found = {spec.name: spec for spec in _shared_lanes(streams)}
    for spec in streams:
        name, _, priority = spec.name.rpartition("_")
        if priority in ("HIGH", "NORMAL", "LOW"):
            subject = spec.subjects[0].removesuffix(f"{priority.lower()}.>") + ">"
            spec = replace(spec, name=name, subjects=(subject,))
        found[spec.name] = spec
    return list(found.values())


def _shared_lanes(streams: Sequence[StreamSpec]) -> list[StreamSpec]:
    """The lanes that all models shared, beside the streams of the queue."""
    return [
        replace(
            spec,
            name=spec.name.replace("STAGE_QUEUE", "BATCH"),
            subjects=(spec.subjects[0].replace(".queue.", ".batch."),),
        )
        for spec in streams
        if spec.name.startswith("STAGE_QUEUE")
    ]


def waiting(name: str, model: str) -> bytes:
    job = ValidatedJob(
        id=name,
        endpoint="/v1/completions",
        bridge="b",
        tenant="t",
        priority="low",
        model=model,
        prompts=((1, 2),),
        params=GenerationParams(),
        created=1.0,
        deadline=2.0,
        body={},
    )
    return codec.encode(job)


async def test_what_waits_in_lanes_that_models_shared_moves_into_their_own(
    jetstream: JetStreamBroker, part: Part
) -> None:
    """The owner upgrades the layout while no part runs; a part alone refuses to work with the older one."""
    former, subjects = layout(part().settings), Subjects(part().settings.namespace)
    await jetstream.ensure((*former.streams, *_shared_lanes(former.streams)), former.buckets)
    old = shared_settings(part().settings).model_copy(update={"layout": 2})
    state = await jetstream.bucket("state")
    await state.put("configuration", old.model_dump_json().encode())
    for name, model in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        await jetstream.publish(f"{subjects.root}.batch.low.t", waiting(name, model), message_id=f"t.{name}")
    await jetstream.publish(f"{subjects.root}.batch.high.t", b"nonsense", message_id="odd")
    with pytest.raises(StartupError, match=r"layout 2, but this Penstock uses layout 3.*`penstock nats setup --apply`"):
        await joined(jetstream, part())
    await (await jetstream.bucket("workers")).put("worker.w0", b"{}")
    with pytest.raises(StartupError, match=r"the layout of the streams can change only while no part runs"):
        await owned(jetstream, part())
    await (await jetstream.bucket("workers")).delete("worker.w0")

    await owned(jetstream, part())
    for model, names in (("a", ["t.a1", "t.a2"]), ("b", ["t.b1"])):
        moved = await jetstream.replay(batch_stream(lanes_of(model), "low"), ">")
        assert [message.headers["Nats-Msg-Id"] for message in moved] == names
        assert {message.subject for message in moved} == {subjects.batch(lanes_of(model), "low", "t")}
    assert [letter.data for letter in await jetstream.replay("DEAD", ">")] == [b"nonsense"]
    for priority in ("HIGH", "NORMAL", "LOW"):
        assert await jetstream.present(jetstream.server_name(f"BATCH_{priority}")) is None
    assert await joined(jetstream, part()) == part().settings


async def test_several_may_move_what_waits_into_lanes_and_may_die_at_it(
    server: EmbeddedServer, part: Part, namespace: str
) -> None:
    """One that died has moved a part; the others find the rest, and nothing twice."""
    brokers = [await JetStreamBroker.connect(server.url, namespace=namespace) for _ in range(3)]
    streams = layout(part().settings).streams
    await brokers[0].ensure(_of_0_1_0(streams), [])
    subjects = Subjects(namespace)
    names = [f"m{number}" for number in range(20)]
    for name in names:
        await brokers[0].publish(subjects.stage("queue", "low", "t"), name.encode(), message_id=name)

    with pytest.raises(BrokerUnavailable):
        await move_into_lanes(_Dying(brokers[0]), subjects, ["queue"], streams)  # type: ignore[arg-type]
    await asyncio.gather(*(move_into_lanes(broker, subjects, ["queue"], streams) for broker in brokers))
    moved = await brokers[0].replay("STAGE_QUEUE_LOW", ">")
    assert sorted(message.data.decode() for message in moved) == sorted(names)
    assert await brokers[0].present(brokers[0].server_name("STAGE_QUEUE")) is None
    for broker in brokers:
        await broker.close()


class _Dying:
    """A broker whose process dies behind its fifth publish."""

    def __init__(self, broker: JetStreamBroker) -> None:
        self._broker = broker
        self._left = 5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    async def publish(self, *arguments: Any, **values: Any) -> None:
        await self._broker.publish(*arguments, **values)
        self._left -= 1
        if not self._left:
            raise BrokerUnavailable("it has died")


async def test_who_owns_the_broker_changes_what_it_was_given(
    jetstream: JetStreamBroker, part: Part, capsys: pytest.CaptureFixture[str]
) -> None:
    await owned(jetstream, part(**LONG))
    settings = await owned(jetstream, part(queue_limit=5))
    assert (settings.queue_limit, settings.tenant_limit) == (5, 7), "what was agreed before stays"
    logged = "".join(capsys.readouterr())
    assert "queue_limit" in logged and "10000" in logged and "tenant_limit" not in logged
    assert (await limits(jetstream, "STAGE_QUEUE_LOW"))["max_msgs"] == 5
    assert (await joined(jetstream, part())).queue_limit == 5


async def test_a_lower_tenant_limit_deletes_nothing_that_waits(jetstream: JetStreamBroker, part: Part) -> None:
    """The server would delete the oldest of a tenant until no more than its limit waited."""
    settings = await owned(jetstream, part())
    await open_lanes(jetstream, settings, "a")
    lane = lanes_of("a")
    for number in range(9):
        subject = Subjects(settings.namespace).batch(lane, "low", "ada" if number < 5 else "bob")
        await jetstream.publish(subject, b"job", message_id=f"m{number}")
    for limit in (2, None, 4):
        await owned(jetstream, part(tenant_limit=limit))
        held = await jetstream.held(batch_stream(lane, "low"))
        assert sorted(held.by_subject.values()) == [4, 5]
    stream = await limits(jetstream, batch_stream(lane, "low"))
    assert (stream["max_msgs_per_subject"], stream["max_msgs"]) == (5, settings.queue_limit)
    assert (await limits(jetstream, "JOBS_LOW"))["max_msgs_per_subject"] == 4
    await jetstream.delete(batch_stream(lane, "low"), 1)
    await owned(jetstream, part())
    assert (await limits(jetstream, batch_stream(lane, "low")))["max_msgs_per_subject"] == 4


async def test_limits_grow_and_shrink_within_the_store(tmp_path: Path) -> None:
    """What shrinks goes first: the server reserves the limits of all, and there is room for one layout alone."""
    server = await EmbeddedServer.start(tmp_path / "nats", max_store=SMALL["store_limit"])
    broker = await JetStreamBroker.connect(server.url, namespace="p")

    def part(**given: Any) -> Loaded:
        return Loaded(Settings(namespace="p", **SMALL | given), dict.fromkeys(Settings.model_fields, "--flag"))

    with pytest.raises(StartupError, match=r"insufficient storage resources .* lower --store-limit"):
        await owned(broker, part(store_limit=512 << 20))
    await owned(broker, part())  # nothing was agreed by who failed
    await owned(broker, part(pipeline=CUSTOM))
    await joined(broker, part(pipeline=CUSTOM))
    await owned(broker, part(events_limit=32 << 20))
    assert await broker.present("P_STAGE_CUSTOM") is None, "the stream of a stage that is gone would hold its share"
    with pytest.raises(StartupError, match="insufficient storage"):
        await owned(broker, part(store_limit=512 << 20))
    assert (await Deployment(broker, part()).agreed()).configuration.store_limit == SMALL["store_limit"]
    await broker.close()
    await server.stop()


def _account(**limits: int) -> str:
    own = ", ".join(f"{name}: {value}" for name, value in limits.items())
    return f"accounts {{ A: {{ jetstream: {{ {own} }}, users: [{{ user: u, password: p }}] }} }}"


async def test_an_account_with_few_consumers_is_set_up_with_what_it_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As accounts of services have them. Streams in memory are made again so when the server has lost them."""
    server = await EmbeddedServer.start(tmp_path / "nats", more=[_account(max_consumers=40)], authorization="")
    broker = await JetStreamBroker.connect(server.url.replace("//", "//u:p@"), namespace="p")
    part = Loaded(Settings(namespace="p", **SMALL), dict.fromkeys(Settings.model_fields, "--flag"))
    await owned(broker, part)
    for name in ("JOBS_HIGH", WORKERS, STATE):
        assert (await limits(broker, name))["max_consumers"] == 40
    found = await Deployment(broker, part).differences((await Deployment(broker, part).agreed()).configuration)
    assert not any(found)
    await broker.reconfigure(*layout(part.settings))
    capsys.readouterr()
    await joined(broker, part)
    assert "not as agreed" not in "".join(capsys.readouterr())
    await call(broker._link, f"STREAM.DELETE.{broker.server_name(WORKERS)}")
    await broker._restore()
    assert (await limits(broker, WORKERS))["max_consumers"] == 40
    await broker.close()
    await server.stop()


async def test_an_account_with_few_streams_is_told_how_many_are_needed(tmp_path: Path) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats", more=[_account(max_streams=9)], authorization="")
    broker = await JetStreamBroker.connect(server.url.replace("//", "//u:p@"), namespace="p")
    part = Loaded(Settings(namespace="p", **SMALL), dict.fromkeys(Settings.model_fields, "--flag"))
    with pytest.raises(StartupError, match=r"may have 9 streams and has \d: Penstock needs \d+ more"):
        await owned(broker, part)
    assert await broker.present(broker.server_name("JOBS_HIGH")) is None
    await broker.close()
    await server.stop()


async def test_an_account_with_few_unsettled_messages_has_consumers_with_what_it_allows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await EmbeddedServer.start(tmp_path / "nats", more=[_account(max_ack_pending=500)], authorization="")
    broker = await JetStreamBroker.connect(server.url.replace("//", "//u:p@"), namespace="p")
    await broker.ensure([StreamSpec("RELAY", ("p.relay.>",), "limits", "file")], [])
    for name, takeover in (("work", False), ("share", True)):
        spec = ConsumerSpec("RELAY", name, f"p.relay.{name}", max_ack_pending=2000, takeover=takeover)
        consumer = await broker.consume(spec, prefetch=4)
        await broker.publish(f"p.relay.{name}", b"news", message_id=name)
        [delivery] = await consumer.take(1)
        await delivery.ack()
        assert "the account allows 500 unsettled messages of 2000 wanted" in caplog.messages[-1]
    await broker.close()
    await server.stop()


async def test_partitions_stay_while_requests_run(jetstream: JetStreamBroker, part: Part) -> None:
    await owned(jetstream, part())
    subjects = Subjects(part().settings.namespace)
    await open_lanes(jetstream, part().settings, "m")
    lane = batch_stream(lanes_of("m"), "low")
    held = await jetstream.publish(subjects.batch(lanes_of("m"), "low", "t"), b"", message_id="m")
    with pytest.raises(StartupError, match=rf"stream_partitions cannot change .* are unfinished \({lane}: 1\)"):
        await owned(jetstream, part(stream_partitions=4))
    await jetstream.delete(lane, held.sequence)
    consumer = await jetstream.consume(ConsumerSpec("STREAM", "stream-7", subjects.stream_all(7)), prefetch=1)
    await jetstream.publish(f"{subjects.root}.stream.7.r", b"", message_id="output")
    with pytest.raises(StartupError, match=r"STREAM: 1"):
        await owned(jetstream, part(stream_partitions=4))
    (delivery,) = await consumer.take(1)
    await delivery.ack()
    async with asyncio.timeout(20):
        while await jetstream.unsettled("STREAM"):  # noqa: ASYNC110  # an ack is not answered
            await asyncio.sleep(0)
    await consumer.close()
    assert (await owned(jetstream, part(stream_partitions=4))).stream_partitions == 4


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_stage_leaves_when_nothing_waits_for_it(
    jetstream: JetStreamBroker, part: Part, restarted: bool
) -> None:
    await owned(jetstream, part(pipeline=CUSTOM))
    if restarted:  # the server has lost what it had in memory, such as who runs
        await call(jetstream._link, f"STREAM.DELETE.{jetstream.server_name(WORKERS)}")
    subject = Subjects(part().settings.namespace).stage("custom", "low", "t")
    published = await jetstream.publish(subject, b"", message_id="m")
    with pytest.raises(
        StartupError, match=r"pipeline cannot change while requests are unfinished \(STAGE_CUSTOM_LOW: 1\)"
    ):
        await owned(jetstream, part(pipeline=BUILT_IN_STAGES))
    await jetstream.delete("STAGE_CUSTOM_LOW", published.sequence)
    assert (await owned(jetstream, part(pipeline=BUILT_IN_STAGES))).job_stages == ("queue",)


async def test_what_parts_work_by_stays_while_they_run(jetstream: JetStreamBroker, part: Part) -> None:
    await owned(jetstream, part())
    workers = await jetstream.bucket("workers")
    await workers.put("leaving.w1", b"")  # what one that has ended leaves behind
    await owned(jetstream, part(stream_partitions=4))
    await workers.put("worker.w0", b"{}")
    with pytest.raises(StartupError, match=r"stream_partitions can change only while no part runs: .* \(worker\.w0\)"):
        await owned(jetstream, part(stream_partitions=8))
    await owned(jetstream, part(stream_partitions=4, queue_limit=5))


async def test_another_layout_is_refused(jetstream: JetStreamBroker, part: Part) -> None:
    await owned(jetstream, part())
    state = await jetstream.bucket(STATE)
    stored = shared_settings(part().settings).model_dump() | {"layout": 99, "new": 1}
    await state.put(KEY, orjson.dumps(stored))
    with pytest.raises(StartupError, match="this deployment has layout 99, but this Penstock uses layout 3"):
        await joined(jetstream, part())
    known = {name: value for name, value in stored.items() if name != "infer_limit"} | {"layout": LAYOUT}
    await state.put(KEY, orjson.dumps(known))  # by a release that knew one setting less, and one more
    assert (await joined(jetstream, part())).infer_limit == Settings.model_fields["infer_limit"].default


@pytest.fixture
def config(server: EmbeddedServer, namespace: str) -> Callable[..., Awaitable[Result]]:
    environment = {"PENSTOCK_NATS_URL": server.url, "PENSTOCK_NAMESPACE": namespace}
    return lambda *words: asyncio.to_thread(CliRunner(env=environment).invoke, app, ["config", *words])


@pytest.fixture
async def outsider(server: EmbeddedServer, namespace: str) -> AsyncIterator[JetStreamBroker]:
    broker = await JetStreamBroker.connect(server.url, namespace=namespace)
    yield broker
    await broker.close()


async def test_config_apply_shows_a_plan_and_does_it(
    config: Callable[..., Awaitable[Result]], outsider: JetStreamBroker, part: Part, namespace: str
) -> None:
    assert "nothing is agreed yet" in (await config("agreed")).stderr
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    plan = await config("apply", "--queue-limit=500", *small)
    assert "queue_limit: 500\n" in plan.stdout and "add --yes" in plan.stdout
    assert await outsider.present(outsider.server_name("JOBS_LOW")) is None
    assert "changed" in (await config("apply", "--queue-limit=500", *small, "--yes")).stdout

    plan = await config("apply", "--queue-limit=400", "--responses-ttl=86400")
    lines = plan.stdout.splitlines()
    assert lines[:2] == ["queue_limit: 500 → 400", "responses_ttl: 2592000 → 86400"]
    assert f"  {namespace}_STAGE_QUEUE_LOW: max_msgs 500 → 400".upper() in [line.upper() for line in lines]
    assert (await limits(outsider, "STAGE_QUEUE_LOW"))["max_msgs"] == 500
    assert (await config("apply", "--queue-limit=400", "--yes")).exit_code == 0
    assert (await limits(outsider, "STAGE_QUEUE_LOW"))["max_msgs"] == 400
    assert (await config("apply", "--queue-limit=400")).stdout == "nothing to change\n"
    assert (await config("apply", "--default=queue-limit", "--yes")).stdout.startswith("queue_limit: 400 → 10000\n")
    assert "queue_limit         10000\n" in (await config("agreed")).stdout
    assert "not a setting of the deployment" in (await config("apply", "--default=port")).stderr


async def test_config_apply_overwrites_nothing_that_was_agreed_on_meanwhile(
    config: Callable[..., Awaitable[Result]], outsider: JetStreamBroker, part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owned(outsider, part())
    differences = Deployment.differences

    async def slow(deployment: Deployment, wanted: Configuration) -> Differences:
        await owned(deployment._broker, part(tools_limit=9))
        return await differences(deployment, wanted)

    monkeypatch.setattr(Deployment, "differences", slow)
    assert "another process has just changed" in (await config("apply", "--queue-limit=400", "--yes")).stderr
    monkeypatch.undo()
    assert "tools_limit         9\n" in (await config("agreed")).stdout
    assert "changed" in (await config("apply", "--queue-limit=400", "--yes")).stdout
    agreed = (await config("agreed")).stdout
    assert "tools_limit         9\n" in agreed and "queue_limit         400\n" in agreed


async def test_config_apply_mends_streams_that_somebody_changed(
    config: Callable[..., Awaitable[Result]], outsider: JetStreamBroker, part: Part, namespace: str
) -> None:
    await owned(outsider, part())
    spec = StreamSpec("JOBS_LOW", (f"{namespace}.jobs.low.>",), "work_queue", "file", discard="new", max_messages=1)
    await outsider.reconfigure([spec], [BucketSpec("workers")])
    assert "JOBS_LOW: max_msgs 1 → 1000" in (await config("apply", "--yes")).stdout
    assert (await limits(outsider, "JOBS_LOW"))["max_msgs"] == 1_000
