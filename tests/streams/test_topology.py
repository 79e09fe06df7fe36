"""Subjects, the streams behind them, and the patterns that join the two."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.streams.memory.broker import MemoryBroker
from penstock.streams.memory.stream import matcher, overlap
from penstock.streams.port import Broker, BucketSpec, StreamSpec
from penstock.streams.topology import PRIORITIES, Subjects, consumed_by, model_lanes, partition, stage_stream, topology

SUBJECTS = Subjects("root")


@pytest.mark.parametrize("name", ["", "a.b", "*", ">", "a b", "a\r\n", "é"])
def test_only_tokens_enter_a_subject(name: str) -> None:
    for subject in (SUBJECTS.infer, SUBJECTS.dead, SUBJECTS.events_of, stage_stream):
        with pytest.raises(ValueError, match="cannot be a token"):
            subject(name)
    with pytest.raises(ValueError, match="cannot be a token"):
        SUBJECTS.events("tenant", name, "request")
    for of_request in (SUBJECTS.cancel, SUBJECTS.events_at):
        with pytest.raises(ValueError, match="cannot be a token"):
            of_request(name, "request")
        with pytest.raises(ValueError, match="cannot be a token"):
            of_request("tenant", name)


def test_every_subject_belongs_to_one_stream() -> None:
    streams = [*topology("root", ["queue", "custom"]).streams, *model_lanes("root", "m1"), *model_lanes("root", "m2")]
    patterns = {subject: spec.name for spec in streams for subject in spec.subjects}
    assert not [pair for pair in itertools.combinations(patterns, 2) if overlap(*pair)]

    def owner(subject: str) -> str | None:
        return next((name for pattern, name in patterns.items() if matcher(pattern).fullmatch(subject)), None)

    assert [owner(SUBJECTS.jobs(priority, "t")) for priority in PRIORITIES] == ["JOBS_HIGH", "JOBS_NORMAL", "JOBS_LOW"]
    assert owner(SUBJECTS.stage("queue", "low", "t")) == "STAGE_QUEUE_LOW"
    assert owner(SUBJECTS.stage("custom", "high", "t")) == "STAGE_CUSTOM_HIGH"
    assert [owner(SUBJECTS.batch("m2", priority, "t")) for priority in PRIORITIES] == [
        "BATCH_M2_HIGH",
        "BATCH_M2_NORMAL",
        "BATCH_M2_LOW",
    ]
    assert owner(SUBJECTS.infer("w1")) == "INFER"
    assert owner(SUBJECTS.stream(3, "t", "r1")) == "STREAM"
    assert owner(SUBJECTS.events("t", "b", "r1")) == "EVENTS"
    assert owner(SUBJECTS.tools("low", "t")) == "TOOLS_LOW"
    assert owner(SUBJECTS.dead("validate")) == "DEAD"
    assert owner(SUBJECTS.cancel("t", "r1")) is None


def test_every_work_queue_has_one_stage() -> None:
    streams = [*topology("root", ["queue", "custom_low"]).streams, *model_lanes("root", "m1")]
    works = {spec.name: consumed_by(spec.name) for spec in streams if spec.retention == "work_queue"}
    single = {"INFER": ("infer", ""), "BATCHES": ("batches", "")}
    lanes = {
        f"{name}_{priority.upper()}": (stage, priority)
        for name, stage in {
            "JOBS": "validate",
            "STAGE_QUEUE": "queue",
            "STAGE_CUSTOM_LOW": "custom_low",
            "BATCH_M1": "batch",
            "TOOLS": "tools",
        }.items()
        for priority in PRIORITIES
    }
    assert works == single | lanes
    assert consumed_by("STREAM") == ("stream", "")


@pytest.mark.parametrize(
    ("pattern", "subject"),
    [
        (SUBJECTS.jobs_all(), SUBJECTS.jobs("high", "t")),
        (SUBJECTS.jobs_of("high"), SUBJECTS.jobs("high", "t")),
        (SUBJECTS.stage_of("queue", "high"), SUBJECTS.stage("queue", "high", "t")),
        (SUBJECTS.batch_of("m1", "low"), SUBJECTS.batch("m1", "low", "t")),
        (SUBJECTS.stream_all(3), SUBJECTS.stream(3, "t", "r")),
        (SUBJECTS.events_of("b"), SUBJECTS.events("t", "b", "r")),
        (SUBJECTS.tools_of("low"), SUBJECTS.tools("low", "t")),
        (SUBJECTS.dead_all(), SUBJECTS.dead("infer")),
        (SUBJECTS.cancel_all(), SUBJECTS.cancel("t", "r")),
    ],
)
def test_a_wildcard_takes_in_its_subjects(pattern: str, subject: str) -> None:
    assert matcher(pattern).fullmatch(subject)


async def test_the_whole_topology_can_be_made(broker: Broker, namespace: str) -> None:
    await broker.ensure(*topology(namespace, ["queue"]))
    await broker.ensure(model_lanes(namespace, "m1"), [])
    subjects = Subjects(namespace)
    for index, priority in enumerate(PRIORITIES):
        published = await broker.publish(subjects.batch("m1", priority, "t"), b"", message_id=f"m{index}")
        assert published == (1, False)
    for name in ("workers", "models", "responses", "state", "leases"):
        assert await (await broker.bucket(name)).create("key", b"") is not None


async def test_stream_names_are_case_blind(namespace: str) -> None:
    broker = MemoryBroker()
    await broker.ensure(*topology(namespace, ["queue"]))
    assert await broker.replay("STAGE_queue_low", "x") == []
    await broker.close()


def test_partitions_never_change() -> None:
    assert [partition("t", name, 8) for name in ("a", "b", "request-1")] == [4, 6, 1]


token = st.sampled_from(["a", "b", "*"])
pattern = st.lists(token, min_size=1, max_size=4).flatmap(
    lambda tokens: st.sampled_from([".".join(tokens), ".".join([*tokens, ">"])])
)


@given(pattern, pattern)
def test_patterns_overlap_where_a_subject_matches_both(one: str, other: str) -> None:
    subjects = [".".join(tokens) for length in range(1, 7) for tokens in itertools.product("ab", repeat=length)]
    first, second = matcher(one), matcher(other)
    shared = any(first.fullmatch(subject) and second.fullmatch(subject) for subject in subjects)
    assert overlap(one, other) == shared


@pytest.mark.parametrize("stages", [("queue",), ("queue", "one", "two")])
def test_everything_is_bounded_and_fits_the_store(stages: tuple[str, ...]) -> None:
    store = 1 << 30
    streams, buckets = topology("root", stages, store_limit=store, relay_bytes=64 << 20)
    specs: list[StreamSpec | BucketSpec] = [*streams, *buckets]
    assert all(spec.max_bytes > 0 for spec in specs)
    assert sum(spec.max_bytes for spec in specs if spec.storage == "file") <= store
    assert all(spec.max_messages > 0 for spec in streams if spec.discard == "new")
    forgetful = {spec.name for spec in specs if spec.discard == "old"}
    assert forgetful == {"STREAM", "EVENTS", "DEAD", "dead-data", "idempotency", "rates"}
