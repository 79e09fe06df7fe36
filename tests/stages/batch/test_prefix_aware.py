"""The laws of the prefix-aware strategy: what goes together, what spreads, and what is remembered of whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.jobs import AdapterSource, JobImage, ValidatedJob
from penstock.schemas.params import GenerationParams
from penstock.stages.batch.prefixes import BLOCK, CROWDED, SLACK, WINDOW, PrefixAware, prefix_keys
from penstock.stages.batch.scheduling import Candidate

EXAMPLES = settings(max_examples=100, deadline=None)
LENGTH = 4 * BLOCK  # tokens of a shared beginning


def asking(beginning: int, end: int = 0, tenant: str = "ada", adapter: AdapterSource | None = None) -> ValidatedJob:
    """A request whose prompt begins like all others with this `beginning`."""
    return ValidatedJob(
        id="r",
        endpoint="/v1/completions",
        bridge="test",
        tenant=tenant,
        priority="normal",
        model="m",
        prompts=((*(beginning * LENGTH + place for place in range(LENGTH)), *(2**31 + end,) * BLOCK),),
        params=GenerationParams(),
        created=0.0,
        deadline=1.0,
        body={},
        adapter=adapter,
    )


def worker(name: int, active: int = 0, **values: object) -> Candidate:
    return replace(Candidate(f"w{name}", active, 1 << 20), **values)  # type: ignore[arg-type]


@dataclass
class Fleet:
    """Workers that end their oldest request when told."""

    size: int
    total_tokens: int = 0
    strategy: PrefixAware = field(default_factory=PrefixAware)
    active: Counter[str] = field(default_factory=Counter)
    incarnations: Counter[str] = field(default_factory=Counter)

    def workers(self) -> list[Candidate]:
        return [
            worker(
                number,
                self.active[f"w{number}"],
                total_tokens=self.total_tokens,
                incarnation=str(self.incarnations[f"w{number}"]),
            )
            for number in range(self.size)
        ]

    def ask(self, job: ValidatedJob) -> str:
        chosen = self.strategy.pick(self.workers(), job).worker
        self.active[chosen] += 1
        self.strategy.prefixes.check_integrity()
        return chosen

    def end(self, name: str) -> None:
        self.active[name] -= 1


# What happens: a request with one of few beginnings (≥ 0), or all requests of a worker end (-1 - its number).
histories = st.lists(st.integers(-6, 9), max_size=200)


@EXAMPLES
@given(st.integers(1, 6), histories)
def test_no_worker_gets_a_request_above_the_bound_unless_none_has_less(size: int, history: list[int]) -> None:
    fleet = Fleet(size)
    for number, event in enumerate(history):
        if event < 0:
            fleet.active[f"w{-1 - event}"] = 0
            continue
        before = {each.worker: each.active for each in fleet.workers()}
        chosen = fleet.ask(asking(event, number))
        bound = CROWDED * sum(before.values()) / size + SLACK
        assert before[chosen] <= bound or before[chosen] == min(before.values())


@EXAMPLES
@given(st.integers(2, 6), st.lists(st.integers(0, 9), min_size=50, max_size=300))
def test_a_popular_beginning_spreads_over_the_workers(size: int, beginnings: list[int]) -> None:
    """Also where each request ends before the next comes, so that nobody ever has more to do than the others."""
    fleet, sent = Fleet(size), Counter[str]()
    for number, beginning in enumerate(beginnings):
        chosen = fleet.ask(asking(beginning, number))
        fleet.end(chosen)
        sent[chosen] += 1
        if sum(sent.values()) <= WINDOW * size:  # all of it is remembered
            assert sent[chosen] <= 1.5 * sum(sent.values()) / size + 3


@EXAMPLES
@given(st.integers(1, 6), st.lists(st.integers(0, 99), unique=True, min_size=1, max_size=12))
def test_equal_beginnings_go_together_and_new_ones_to_whom_has_the_least(size: int, beginnings: list[int]) -> None:
    fleet = Fleet(size)
    first = {beginning: fleet.ask(asking(beginning)) for beginning in beginnings}
    counts = Counter(first.values())
    assert max(counts.values()) - min(counts[f"w{number}"] for number in range(size)) <= 1
    fleet.active.clear()
    for beginning in reversed(beginnings):
        assert fleet.ask(asking(beginning, end=1)) == first[beginning]


@EXAMPLES
@given(st.integers(1, 6), histories)
def test_the_same_history_gives_the_same_choices(size: int, history: list[int]) -> None:
    def run() -> list[str]:
        fleet = Fleet(size)
        return [fleet.ask(asking(event)) for event in history if event >= 0]

    assert run() == run()


@EXAMPLES
@given(st.integers(0, 9), st.integers(1, 5), st.integers(SLACK + 1, 50))
def test_a_favourite_with_too_much_to_do_gets_nothing_and_another_becomes_one(
    beginning: int, others: int, more: int
) -> None:
    fleet = Fleet(others + 1)
    favourite = fleet.ask(asking(beginning))
    fleet.active = Counter({favourite: SLACK})
    assert fleet.ask(asking(beginning, 1)) == favourite
    fleet.active = Counter({favourite: 2 * more})  # above 1.25 times the mean of it and the others, and the slack
    bound = CROWDED * 2 * more / (others + 1) + SLACK
    second = fleet.ask(asking(beginning, 2))
    assert (second != favourite) == (2 * more > bound)
    if second != favourite:
        fleet.active = Counter({favourite: 1})
        assert fleet.ask(asking(beginning, 3)) == second


def test_who_has_no_room_is_passed_over() -> None:
    strategy = PrefixAware()
    assert strategy.pick([worker(0), worker(1)], asking(0)).worker == "w0"
    assert strategy.pick([worker(1)], asking(0, 1)).worker == "w1"
    assert strategy.pick([worker(0), worker(1)], asking(0, 2)).worker == "w0"


def test_the_longest_known_beginning_decides() -> None:
    strategy = PrefixAware()
    conversation = asking(0, 1)
    assert strategy.pick([worker(0), worker(1)], asking(0, 2)).worker == "w0"
    assert strategy.pick([worker(1)], conversation).worker == "w1"
    assert strategy.pick([worker(0), worker(1, active=SLACK)], conversation).worker == "w1"


def test_a_short_common_beginning_decides_nothing() -> None:
    """As that which a chat template puts in front of every prompt."""
    strategy = PrefixAware()
    strategy.pick([worker(0)], asking(0))
    job = asking(0).model_copy(update={"prompts": ((*asking(0).prompts[0][:BLOCK], *range(9, 9 + 4 * BLOCK)),)})
    assert strategy.pick([worker(0, active=1), worker(1)], job).worker == "w1"


@EXAMPLES
@given(st.integers(1, 40), st.lists(st.integers(0, 20), max_size=100))
def test_of_a_worker_no_more_is_remembered_than_its_cache_holds(blocks: int, beginnings: list[int]) -> None:
    fleet = Fleet(2, total_tokens=blocks * BLOCK)
    for number, beginning in enumerate(beginnings):
        job = asking(beginning, number)
        fleet.end(fleet.ask(job))
        known, _ = fleet.strategy.prefixes.longest(prefix_keys(job))
        assert known == min(blocks, len(prefix_keys(job))), "the newest is remembered first"
        assert all(len(keys) <= blocks for keys in fleet.strategy.prefixes._sent.values())


def test_a_worker_that_restarts_or_goes_holds_nothing() -> None:
    fleet = Fleet(2)
    assert [fleet.ask(asking(beginning)) for beginning in range(2)] == ["w0", "w1"]
    fleet.active = Counter({"w1": 1})
    assert fleet.ask(asking(1, 1)) == "w1"
    fleet.incarnations["w1"] += 1
    assert fleet.ask(asking(1, 2)) == "w0"
    fleet.strategy.keep(["w1"])
    assert fleet.strategy.prefixes.longest(prefix_keys(asking(0))) == (0, set())
    assert fleet.ask(asking(0)) in {"w0", "w1"}


def test_what_workers_do_not_share_has_no_key_in_common() -> None:
    kinds = [
        asking(0),
        asking(0, tenant="bob"),
        asking(0, adapter=AdapterSource(name="a", path="/a", digest="1")),
        asking(0, adapter=AdapterSource(name="a", path="/a", digest="2")),
        asking(0).model_copy(update={"model": "other"}),
        asking(0).model_copy(update={"revision": 2}),
    ]
    keys = [key for job in kinds for key in prefix_keys(job)]
    assert len(set(keys)) == len(keys)
    assert prefix_keys(asking(0, 1))[:4] == prefix_keys(asking(0, 2))[:4]


def test_another_picture_is_another_beginning_from_its_place_on() -> None:
    def about(digit: str) -> list[bytes]:
        image = JobImage(key="k", digest=digit * 64, offset=BLOCK + 5, length=20, grid=(1, 4, 4))
        return prefix_keys(asking(0).model_copy(update={"images": (image,)}))

    one, other = about("a"), about("b")
    assert [first == second for first, second in zip(one, other, strict=True)] == [True] + [False] * (len(one) - 1)
    assert about("a") == one


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/rerank"])
def test_one_of_inputs_has_no_beginning_that_a_worker_keeps(endpoint: str) -> None:
    strategy = PrefixAware()
    job = asking(0).model_copy(update={"endpoint": endpoint})
    job = job.model_copy(update={"prompts": job.prompts * 3})
    assert job.seats == 1  # its inputs take turns
    assert [strategy.pick([worker(0), worker(1)], job).worker for _ in range(4)] == ["w0", "w1", "w0", "w1"]


def test_what_is_no_token_ends_no_stage() -> None:
    job = asking(0).model_copy(update={"prompts": ((-1, 1 << 70) * BLOCK,)})
    assert PrefixAware().pick([worker(0)], job).worker == "w0"
