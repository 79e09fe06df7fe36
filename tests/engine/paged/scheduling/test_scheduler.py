"""Who is computed when, under one budget and with blocks that run out; against a model that checks what it reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import EngineRequest, GenerationParams, ModelInfo
from penstock.engine.choice import Choice
from penstock.engine.paged.kv.block_pool import chain, root
from penstock.engine.paged.kv.blocks import NO_BLOCK, GroupSpec, KVBlocks
from penstock.engine.paged.scheduling.rows import Row, Scheduled
from penstock.engine.paged.scheduling.scheduler import Scheduler
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.engine.vision.images import PromptImage
from penstock.engine.vision.layout import ImageLayout

TOKENIZER = ByteTokenizer()
INFO = ModelInfo("bytes", "Echo", context_length=10_000, vocabulary_size=259, eos_token_ids=TOKENIZER.eos_token_ids)
SIZE = 4
IMAGE = 7  # the most tokens of an image, which see each other


def make_choices(prompt: bytes, max_tokens: int = 4, n: int = 1, salt: str = "", priority: int = 0) -> list[Choice]:
    """The choices of one request; zeros are the tokens of an image."""
    params = GenerationParams(max_tokens=max_tokens, n=n, ignore_eos=True)
    images = [PromptImage(str(count), prompt.index(0), count, (count,))] if (count := prompt.count(0)) else []
    request = EngineRequest("r", tuple(prompt), params, 0, cache_salt=salt, priority=priority, images=tuple(images))
    choices = [Choice(request, index, TOKENIZER, INFO) for index in range(n)]
    for choice in choices if images else ():
        choice.layout = ImageLayout.of(request, 0, 0, is_mutual=True)
    return choices


def make_choice(prompt: bytes, max_tokens: int = 4, salt: str = "", priority: int = 0) -> Choice:
    return make_choices(prompt, max_tokens, salt=salt, priority=priority)[0]


def digest(tokens: list[int], salt: str) -> list[int]:
    """What a model computes at each position: something that depends on all tokens up to it, and here on the tenant."""
    states = [sum(salt.encode())]
    for token in tokens:
        states.append(hash((states[-1], token)))
    return states[1:]


def choose(state: int, target: Choice) -> int:
    return 97 + (state + target.number) % 4


def naive(target: Choice) -> list[int]:
    """What the choice must become, computed alone and without a cache."""
    tokens = list(target.prompt)
    for _ in range(target.request.params.max_tokens):
        tokens.append(choose(digest(tokens, target.request.cache_salt)[-1], target))
    return tokens[len(target.prompt) :]


@dataclass
class Machine:
    """A scheduler, and a model that checks all that it reads from the cache.

    With `ahead`, tokens are read one step after they were chosen. Each step also asserts what holds at any time.
    """

    groups: list[GroupSpec]
    max_batch_size: int = 8
    max_step_tokens: int = 16
    chunked: bool = True
    ahead: bool = False
    reserved: int = 0

    def __post_init__(self) -> None:
        longest_step = max(self.max_step_tokens, IMAGE) if self.chunked else INFO.context_length
        self.blocks = KVBlocks(SIZE, self.groups, longest_step)
        self.scheduler = Scheduler(self.blocks, self.max_batch_size, self.max_step_tokens, self.chunked, self.reserved)
        self.computed = 0  # tokens, all steps together
        self._live: set[Choice] = set()
        self._rows: list[Row] = []  # all that ever ran
        self._passed: Row | None = None  # the first in line, if it waited in the last step
        self._unread: list[tuple[Row, int]] = []
        self._memory: dict[tuple[int, int, int], int] = {}  # (group, block, offset) -> state

    def add(self, *targets: Choice) -> None:
        for target in targets:
            self.scheduler.add(target)
            self.scheduler.check_integrity()
            self._live.add(target)

    def remove(self, target: Choice) -> None:
        self.scheduler.remove(target)
        self.scheduler.check_integrity()
        self._live.discard(target)

    def step(self, cancel: Choice | None = None) -> dict[Choice, int]:
        """One step; how many tokens of which choices it computed. `cancel` is removed before its end."""
        scheduled = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self._check(scheduled)
        states = [self._write(one) for one in scheduled]
        for one in scheduled:
            self._read(one)
        if cancel is not None:
            self.remove(cancel)
        self.scheduler.commit(scheduled)
        self.scheduler.check_integrity()
        for row in self._running():
            for table, spec in zip(row.tables.blocks, self.groups, strict=True):
                passed = 0 if spec.window is None else max(row.num_computed - spec.window + 1, 0) // SIZE
                assert set(table[:passed]) <= {NO_BLOCK}, "blocks behind the window are released"
        chosen = [
            (one.row, choose(state, one.row.choice))
            for one, state in zip(scheduled, states, strict=True)
            if one.samples
        ]
        if self.ahead:
            chosen, self._unread = self._unread, chosen
            for row, _ in self._unread:
                row.choice.pending += 1
            for row, _ in chosen:
                row.choice.pending -= 1
        for row, token in chosen:
            if row.choice in self._live:
                row.choice.append(token)
                if row.choice.finish is not None:
                    self.remove(row.choice)
        self.scheduler.check_integrity()
        return {one.row.choice: one.num_tokens for one in scheduled}

    def finish(self) -> None:
        for _ in range(2000):
            if not self._live:
                break
            self.step()
        assert not self._live, "some choice never ends"
        assert (self.scheduler.num_running, self.scheduler.num_waiting, self.blocks.usage) == (0, 0, 0)

    def _running(self) -> list[Row]:
        return sorted({row for row in self._rows if row.running}, key=lambda row: row.order)

    def _place(self, row: Row) -> int:
        return self.scheduler._precedence.place(row)

    def _check(self, scheduled: list[Scheduled]) -> None:
        rows = [one.row for one in scheduled]
        self._rows += rows
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(self._running())
        assert not any(row.choice.is_complete for row in rows), "no token is computed for nothing"
        first = min((row for row in self._running() if not row.choice.is_complete), key=self._place, default=None)
        assert first is None or first in rows or first is not self._passed, "the first in line waits for one step only"
        self._passed = None if first in rows else first
        assert len(self._running()) == self.scheduler.num_running <= self.max_batch_size
        total = sum(one.num_tokens for one in scheduled)
        one_whole_prompt = not self.chunked and sum(one.num_tokens > 1 for one in scheduled) == 1
        has_image = any(row.choice.layout for row in rows)
        assert total <= self.max_step_tokens + (IMAGE - 1) * has_image or one_whole_prompt
        for row, count, _ in scheduled:
            end = row.num_computed + count
            assert row.choice.prompt[end - 1 : end + 1] != (0, 0), "no step ends inside an image"
        self.computed += total

    def _states(self, row: Row) -> list[int]:
        unread = [token for other, token in self._unread if other is row]
        assert row.choice.pending == len(unread)
        tokens = [*row.choice.prompt, *row.choice.tokens, *unread]
        return digest(tokens, row.choice.request.cache_salt)

    def _write(self, one: Scheduled) -> int:
        """Compute a row's tokens; the state at the last."""
        row, states = one.row, self._states(one.row)
        end = row.num_computed + one.num_tokens
        assert one.num_tokens > 0 and one.samples == (end == len(states))
        for position in range(row.num_computed, end):
            for group, table in enumerate(row.tables.blocks):
                self._memory[group, table[position // SIZE], position % SIZE] = states[position]
        return states[end - 1]

    def _read(self, one: Scheduled) -> None:
        """All that the row's tokens see must be what the row itself would have computed."""
        row, states = one.row, self._states(one.row)
        for group, (table, spec) in enumerate(zip(row.tables.blocks, self.groups, strict=True)):
            begin = 0 if spec.window is None else max(row.num_computed - spec.window + 1, 0)
            for position in range(begin, row.num_computed + one.num_tokens):
                assert self._memory[group, table[position // SIZE], position % SIZE] == states[position]


FULL = [GroupSpec(100, None)]
MIXED = [GroupSpec(100, None), GroupSpec(100, 6)]
LETTERS = bytes(range(97, 123)) * 8


@st.composite
def requests(draw: st.DrawFn) -> list[Choice]:
    """Choices of a request that has its beginning in common with many others; 54 tokens at most."""
    beginning = draw(st.sampled_from([LETTERS, LETTERS[::-1]]))[: draw(st.integers(1, 40))]
    if image := draw(st.sampled_from([0, 0, 2, IMAGE])):
        at = draw(st.sampled_from([0, 5, 6]))
        beginning = (beginning[:at] + bytes(image) + beginning[at:])[: max(len(beginning), at + image)]
    return make_choices(
        beginning + draw(st.text("ab", max_size=6)).encode(),
        max_tokens=draw(st.integers(1, 8)),
        n=draw(st.sampled_from([1, 1, 2, 3])),
        salt=draw(st.sampled_from(["", "", "tenant"])),
        priority=draw(st.integers(0, 2)),
    )


ARRIVALS = st.lists(st.tuples(st.integers(0, 20), requests(), st.none() | st.integers(0, 9)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=ARRIVALS,
    groups=st.lists(st.tuples(st.integers(0, 8), st.none() | st.integers(1, 12)), min_size=1, max_size=3),
    max_batch_size=st.integers(1, 6),
    more_tokens=st.integers(0, 20),
    chunked=st.booleans(),
    ahead=st.booleans(),
)
def test_every_sequence_becomes_what_it_would_be_alone(
    arrivals: list[tuple[int, list[Choice], int | None]],
    groups: list[tuple[int, int | None]],
    max_batch_size: int,
    more_tokens: int,
    chunked: bool,
    ahead: bool,
) -> None:
    """Whatever is shared, preempted, cancelled: every read is right, the laws hold, and all come to their end.

    A tenant's name is part of what the model computes, so one that read another's blocks would be found out.
    """
    step = max_batch_size + more_tokens
    whole = 14  # blocks that hold any of the choices
    specs = [
        GroupSpec(more + (whole if window is None or not chunked else (window + max(step, IMAGE)) // SIZE + 2), window)
        for more, window in groups
    ]
    machine = Machine(specs, max_batch_size, step, chunked, ahead)
    cancelled = set()
    for now in range(31):
        for arrival, choices, _ in arrivals:
            if arrival == now:
                machine.add(*choices)
        due = [choices[0] for arrival, choices, age in arrivals if age is not None and arrival + age == now]
        cancelled |= {target for target in due if target.finish is None}
        for target in due[1:]:
            machine.remove(target)
        machine.step(cancel=due[0] if due else None)
    machine.finish()
    for _, choices, _ in arrivals:
        for target in choices:
            expected = naive(target)
            assert target.tokens == (expected[: len(target.tokens)] if target in cancelled else expected)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.integers(1, 60),
    common=st.integers(0, 60),
    rest=st.text("xy", max_size=20),
    groups=st.sampled_from([FULL, MIXED, [GroupSpec(100, 2)], [GroupSpec(100, 5), GroupSpec(100, 9)]]),
)
def test_a_cached_prefix_is_not_computed_again(prompt: int, common: int, rest: str, groups: list[GroupSpec]) -> None:
    """P9: a request whose tokens begin with a cached request's tokens reuses its KV blocks."""
    machine = Machine(groups)
    first, second = make_choice(LETTERS[:prompt]), make_choice(LETTERS[:common] + rest.encode() + b"!")
    machine.add(first)
    machine.finish()
    before = machine.computed
    machine.add(second)
    machine.finish()
    cached = [*first.prompt, *first.tokens[:-1]]  # the last token was chosen, never read
    same = next(
        (index for index, (one, other) in enumerate(zip(cached, second.prompt, strict=False)) if one != other),
        min(len(cached), len(second.prompt)),
    )
    reused = min(same, len(second.prompt) - 1) // SIZE * SIZE
    assert (first.cached_tokens, second.cached_tokens) == (0, reused)
    assert machine.computed - before == len(second.prompt) - reused + 3
    assert machine.blocks.stats().hits == reused


@pytest.mark.parametrize(("salt", "cached"), [("one", 28), ("another", 0)])
def test_tenants_never_share(salt: str, cached: int) -> None:
    machine = Machine(MIXED)
    first, second = make_choice(LETTERS[:30], salt="one"), make_choice(LETTERS[:30], salt=salt)
    machine.add(first)
    machine.finish()
    machine.add(second)
    machine.finish()
    assert second.cached_tokens == cached


@pytest.mark.parametrize(
    ("lengths", "shares"),
    [
        ([40], [16]),
        ([40, 40], [8, 8]),
        ([40, 40, 40], [8, 8]),
        ([40, 3], [13, 3]),
        ([3, 40], [3, 13]),
        ([3, 3, 40, 40], [3, 3, 8, 2]),
    ],
)
def test_prompts_share_a_step_and_waste_none(lengths: list[int], shares: list[int]) -> None:
    machine = Machine(FULL)
    prompts = [make_choice(LETTERS[index : index + length]) for index, length in enumerate(lengths)]
    machine.add(*prompts)
    assert machine.step() == dict(zip(prompts, shares, strict=False))


def test_what_is_left_goes_to_the_first_in_line() -> None:
    machine = Machine(FULL, max_step_tokens=17)
    first, second = make_choice(LETTERS[:40]), make_choice(LETTERS[1:41])
    machine.add(first, second)
    assert machine.step() == {first: 9, second: 8}


def test_rows_that_decode_come_first_and_count() -> None:
    machine = Machine(FULL)
    early, one, other = make_choice(b"?", max_tokens=9), make_choice(LETTERS[:40]), make_choice(LETTERS[1:41])
    machine.add(early)
    machine.step()
    machine.add(one, other)
    assert list(machine.step().items()) == [(early, 1), (one, 8), (other, 7)]
    assert list(machine.step().items()) == [(early, 1), (one, 8), (other, 7)]


def test_a_step_without_chunks_computes_whole_prompts() -> None:
    machine = Machine(FULL, chunked=False)
    small, large, late = make_choice(b"?"), make_choice(LETTERS[:40]), make_choice(b"!")
    machine.add(small, large, late)
    assert machine.step() == {small: 1}  # the large one does not fit into what is left, and is not passed
    assert machine.step() == {small: 1, large: 40}
    assert machine.step() == {small: 1, large: 1, late: 1}


def test_the_last_in_line_is_preempted_and_keeps_its_order() -> None:
    machine = Machine([GroupSpec(8, None)], max_step_tokens=40)
    first, second, third = (make_choice(LETTERS[index : index + 14], max_tokens=12) for index in (0, 20, 40))
    machine.add(first, second, third)
    for _ in range(3):
        assert second in machine.step()
    steps = [machine.step()]  # the first needs a fifth block
    assert list(steps[0]) == [first] and machine.scheduler.num_preemptions == 1
    assert (machine.scheduler.num_running, machine.scheduler.num_waiting) == (1, 2)
    (preemption,) = second.preemptions
    assert preemption.resumed is None
    while first.finish is None:
        steps.append(machine.step())
    assert all(list(step) == [first] for step in steps)
    back = machine.step()
    assert list(back) == [second], "the third came later"
    assert 1 <= back[second] < 17, "what was not evicted is not computed again"
    assert preemption.resumed is not None
    assert preemption.resumed >= preemption.at
    assert not first.preemptions
    assert second.cached_tokens == 0, "nor is it told as a hit of the prompt"
    machine.finish()
    assert [one.tokens for one in (first, second, third)] == [naive(one) for one in (first, second, third)]


def test_a_row_that_is_preempted_leaves_the_step() -> None:
    machine = Machine([GroupSpec(13, None)], max_batch_size=2, max_step_tokens=4)
    long, short = make_choice(LETTERS[:40]), make_choice(b"??", max_tokens=30)
    machine.add(long, short)
    while not machine.scheduler.num_preemptions:
        before, step = len(short.tokens), machine.step()
    assert step == {long: 4} and before == len(short.tokens) > 0
    machine.finish()
    assert short.tokens == naive(short)


def test_a_window_lets_a_long_prompt_through_a_small_pool() -> None:
    machine = Machine([GroupSpec(100, None), GroupSpec(6, 6)])
    first, second = make_choice(LETTERS[:100]), make_choice(LETTERS[:150])
    machine.add(first)
    machine.finish()
    machine.add(second)
    machine.finish()
    assert (first.tokens, second.tokens) == (naive(first), naive(second))
    assert second.cached_tokens == 100


def test_a_large_one_is_passed_by_32_others_and_by_no_more() -> None:
    machine = Machine([GroupSpec(32, None)], max_step_tokens=64)
    runner, large = make_choice(LETTERS[:40], max_tokens=60), make_choice(LETTERS[:100], salt="other")
    machine.add(runner)
    machine.step()
    machine.add(large)
    others = []
    while large.finish is None:
        others.append(make_choice(b"ab", max_tokens=1))
        machine.add(others[-1])
        step = machine.step()
        if large in step:
            break
    assert large in step and sum(other.finish is not None for other in others) in (32, 32 + len(step) - 1)
    machine.finish()


def test_an_urgent_prompt_has_steps_of_its_own_before_those_that_began_earlier() -> None:
    machine = Machine(FULL)
    low, normal, late = (make_choice(LETTERS[index : index + 40], priority=2 - index) for index in (0, 1, 2))
    machine.add(low, normal)
    assert machine.step() == {normal: 16}
    machine.add(late)
    assert [machine.step() for _ in range(3)] == [{late: 16}, {late: 16}, {late: 8}]
    assert late.tokens and not normal.tokens and not low.tokens
    assert [machine.step() for _ in range(3)] == [{late: 1, normal: 8}] * 3  # half a step, beside the more urgent
    assert late.finish and machine.step() == {normal: 1, low: 8}
    machine.finish()


def test_less_urgent_streams_let_a_prompt_end_first_and_never_wait_twice_in_a_row() -> None:
    machine = Machine(FULL)
    low, equal = make_choice(b"?", max_tokens=20, priority=1), make_choice(b"!", max_tokens=20)
    machine.add(low, equal)
    while not low.tokens:
        machine.step()
    long, short = make_choice(LETTERS[:20]), make_choice(LETTERS[1:4])
    machine.add(long)
    assert machine.step() == {equal: 1, low: 1, long: 14}
    assert machine.step() == {equal: 1, long: 6}
    machine.add(short)
    assert machine.step() == {equal: 1, long: 1, low: 1, short: 3}
    less = make_choice(LETTERS[2:5], priority=2)
    machine.add(less)
    assert machine.step() == {equal: 1, long: 1, short: 1, low: 1, less: 3}
    machine.finish()


def flooded() -> tuple[Machine, list[Choice]]:
    """A tenant of which four choices decode."""
    machine = Machine(FULL)
    flood = [make_choice(LETTERS[index : index + 3], max_tokens=20, salt="flood") for index in range(4)]
    machine.add(*flood)
    assert machine.step() == dict.fromkeys(flood, 3)
    return machine, flood


def test_a_prompt_does_not_wait_for_those_of_a_tenant_that_floods() -> None:
    machine, flood = flooded()
    more = [make_choice(LETTERS[index : index + 10], salt="flood") for index in range(4, 6)]
    prompt = make_choice(LETTERS[:10], max_tokens=2, salt="quiet")
    machine.add(*more, prompt)
    assert machine.step() == {prompt: 10}
    assert machine.step() == {**dict.fromkeys(flood, 1), prompt: 1, more[0]: 8}  # half a step, beside the other
    machine.finish()


def test_a_prompt_that_takes_several_steps_shares_them_with_a_flood() -> None:
    machine, flood = flooded()
    more, prompt = make_choice(LETTERS[4:34], salt="flood"), make_choice(LETTERS[:24], salt="quiet")
    machine.add(more, prompt)
    assert [machine.step() for _ in range(2)] == [{**dict.fromkeys(flood, 1), prompt: 8, more: 4}] * 2
    assert machine.step() == {prompt: 8}
    machine.finish()


def test_a_prompt_does_not_wait_for_long_ones_of_another_tenant() -> None:
    machine = Machine(FULL)
    long = [make_choice(LETTERS[index : index + 80], max_tokens=1, salt="long") for index in range(3)]
    machine.add(*long)
    assert machine.step() == dict.fromkeys(long[:2], 8)
    for index in range(10):
        prompt = make_choice(LETTERS[index : index + 4], max_tokens=1, salt="quiet")
        machine.add(prompt)
        assert machine.step() == {prompt: 4}
        assert sum(machine.step().values()) == 16
    machine.finish()


def test_a_prompt_that_an_older_one_takes_the_blocks_of_is_in_no_step() -> None:
    machine = Machine([GroupSpec(14, None)])
    older, prompt = make_choice(LETTERS[:40], salt="long"), make_choice(LETTERS[:36], salt="quiet")
    machine.add(older)
    assert machine.step() == {older: 16}
    machine.add(prompt)
    assert [machine.step() for _ in range(2)] == [{prompt: 8, older: 8}] * 2
    assert machine.step() == {older: 8}  # the other was before it in line, and has been preempted
    machine.finish()
    assert (older.tokens, prompt.tokens) == (naive(older), naive(prompt))


def test_what_is_left_goes_to_the_prompt_that_a_flood_gives_way_to() -> None:
    machine = Machine(FULL, max_step_tokens=17)
    more, prompt = make_choice(LETTERS[:60], salt="flood"), make_choice(LETTERS[:40], salt="quiet")
    machine.add(more)
    assert machine.step() == {more: 17}
    machine.add(prompt)
    assert machine.step() == {prompt: 9, more: 8}
    machine.finish()


def test_a_scored_prompt_shares_the_steps_in_which_it_cannot_end_with_a_flood() -> None:
    params = GenerationParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    scored = Choice(EngineRequest("r", tuple(bytes(600)), params, 0, cache_salt="quiet"), 0, TOKENIZER, INFO)
    scheduler = Scheduler(KVBlocks(SIZE, [GroupSpec(1_000, None)], 1_024), 8, 1_024)
    flood = [make_choice(LETTERS[index : index + 90], max_tokens=9, salt="flood") for index in range(4)]
    scheduler.add(flood[0])
    scheduler.commit(scheduler.schedule())
    for choice in [*flood[1:], scored]:
        scheduler.add(choice)
    steps = []
    for _ in range(3):
        scheduler.commit(scheduled := scheduler.schedule())
        steps.append({one.row.choice: one.num_tokens for one in scheduled if one.num_tokens > 1})
    assert steps == [{scored: 256, **dict.fromkeys(flood[1:], 90)}, {scored: 256}, {scored: 88}]


def test_tenants_with_about_as_much_do_not_wait_for_each_other() -> None:
    machine, flood = flooded()
    others = [make_choice(LETTERS[index : index + 3], max_tokens=20, salt="other") for index in range(4)]
    machine.add(*others)
    assert machine.step() == dict.fromkeys(others, 3)
    machine.step()
    machine.remove(others.pop())
    prompt = make_choice(LETTERS[4:7], salt="other")
    machine.add(prompt)
    assert machine.step() == {**dict.fromkeys([*flood, *others], 1), prompt: 3}
    machine.finish()


def test_no_stream_of_short_prompts_keeps_those_of_the_larger_tenant_back_for_long() -> None:
    machine, _ = flooded()
    late = make_choice(LETTERS[4:14], max_tokens=1, salt="flood")
    machine.add(late)
    passed = 0
    while late.finish is None and passed < 100:
        machine.add(make_choice(LETTERS[:16], max_tokens=1, salt="quiet"))
        machine.step()
        passed += late.finish is None
    assert passed < 10
    machine.finish()


def test_preemption_spares_the_urgent() -> None:
    machine = Machine([GroupSpec(8, None)], max_step_tokens=40)
    low = make_choice(LETTERS[:14], max_tokens=12, priority=2)
    high = make_choice(LETTERS[20:34], max_tokens=12)
    machine.add(low)
    machine.step()
    machine.add(high)
    while not machine.scheduler.num_preemptions:
        step = machine.step()
    assert list(step) == [high] and not high.finish
    machine.finish()
    assert (low.tokens, high.tokens) == (naive(low), naive(high))


def test_no_less_urgent_row_passes_one_that_waits_for_blocks() -> None:
    machine = Machine([GroupSpec(32, None)], max_step_tokens=64)
    runner, large = (
        make_choice(LETTERS[:40], max_tokens=60, priority=1),
        make_choice(LETTERS[:100], salt="o", priority=1),
    )
    machine.add(runner)
    machine.step()
    low, equal = make_choice(b"ab", max_tokens=1, priority=2), make_choice(b"ab", max_tokens=1, priority=1)
    machine.add(large, low, equal)
    assert machine.step() == {runner: 1, equal: 2}
    while runner.finish is None:
        assert machine.step() == {runner: 1}
    assert list(machine.step()) == [large]
    machine.finish()


def test_no_stream_of_urgent_prompts_keeps_a_low_one_back_for_ever() -> None:
    machine = Machine(FULL, max_batch_size=2, max_step_tokens=4)
    low = make_choice(b"?", max_tokens=1, priority=1)
    machine.add(low)
    passed = 0
    while low.finish is None and passed < 2_000:
        machine.add(make_choice(LETTERS[:4], max_tokens=1))
        machine.step()
        passed += low.finish is None
    assert passed == 999


def test_one_system_prompt_is_computed_once() -> None:
    machine = Machine(MIXED, max_batch_size=32, max_step_tokens=32)
    twins = [make_choice(LETTERS[:64] + bytes([65 + index]) * 3, max_tokens=1) for index in range(32)]
    machine.add(*twins)
    machine.finish()
    assert machine.computed == 64 + 32 * 3
    assert [twin.cached_tokens for twin in twins] == [0] + [64] * 31


def test_the_choices_of_one_prompt_share_it() -> None:
    machine = Machine(MIXED)
    choices = make_choices(LETTERS[:30], max_tokens=5, n=4)
    machine.add(*choices)
    machine.finish()
    assert machine.computed == 30 + 3 * 2 + 4 * 4
    assert len({tuple(choice.tokens) for choice in choices}) == 4


def test_a_twin_takes_over_where_the_other_is_cancelled() -> None:
    machine = Machine(MIXED)
    first, second, third = (make_choice(LETTERS[:40]) for _ in range(3))
    machine.add(first, second, third)
    assert machine.step(cancel=first) == {first: 16}
    assert machine.step() == {second: 16}
    machine.finish()
    assert third.tokens == second.tokens == naive(second)
    assert third.cached_tokens == 36


def test_a_cancelled_one_leaves_its_finished_blocks() -> None:
    machine = Machine(FULL)
    first, second = make_choice(LETTERS[:40]), make_choice(LETTERS[:40])
    machine.add(first)
    machine.step()
    machine.remove(first)
    machine.remove(first)  # an unknown one is no error
    machine.add(second)
    machine.finish()
    assert second.cached_tokens == 16


def test_some_rows_are_for_urgent_ones_alone() -> None:
    machine = Machine(FULL, max_batch_size=4, reserved=1)
    wide, urgent = make_choices(b"wide", n=8, max_tokens=6, priority=1), make_choice(b"now", max_tokens=2)
    machine.add(*wide)
    for _ in range(3):
        machine.step()
    assert machine.scheduler.num_running == 3
    machine.add(urgent)
    machine.step()
    assert machine.scheduler.num_running == 4 and urgent in machine.scheduler
    machine.finish()
    assert all(list(one.tokens) == naive(one) for one in (*wide, urgent))


def test_a_request_for_many_answers_leaves_rows_to_others() -> None:
    machine = Machine(FULL, max_batch_size=8)
    many = make_choices(b"wide", n=20)
    machine.add(*many)
    machine.step()
    machine.step()
    assert machine.scheduler.num_running == 6
    late = make_choice(b"late")
    machine.add(late)
    assert late in machine.step()
    machine.finish()


def test_what_can_never_fit_is_refused() -> None:
    machine = Machine([GroupSpec(8, None)])
    with pytest.raises(ValueError, match="33 tokens; the key-value cache holds 32"):
        machine.add(make_choice(LETTERS[:33]))
    machine.add(make_choice(LETTERS[:30], max_tokens=10))
    with pytest.raises(RuntimeError, match="33 tokens of one choice outgrow"):
        machine.finish()
    with pytest.raises(ValueError, match="7 tokens a step are too few for 8 rows"):
        Scheduler(machine.blocks, max_batch_size=8, max_step_tokens=7)


def test_the_chain_of_keys_is_that_of_prompt_and_answer() -> None:
    machine = Machine(FULL)
    target = make_choice(LETTERS[:6], max_tokens=9, salt="s")
    machine.add(target)
    machine.finish()
    tokens, key = [*target.prompt, *target.tokens], root("s")
    for begin in range(0, 12, SIZE):
        key = chain(key, tokens[begin : begin + SIZE])
        assert machine.blocks.pools[0].lookup(key) is not None
    assert machine.blocks.stats().num_cached == 3


def test_a_lost_block_is_found_out() -> None:
    machine = Machine(FULL)
    machine.add(make_choice(LETTERS[:10]))
    machine.step()
    machine.blocks.pools[0].allocate()
    with pytest.raises(AssertionError, match="holders"):
        machine.scheduler.check_integrity()


@pytest.mark.parametrize("chunked", [True, False])
def test_a_scored_prompt_is_computed_in_pieces_whose_logits_fit(chunked: bool) -> None:
    params = GenerationParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    request = EngineRequest("r", tuple(bytes(600)), params, seed=0)
    scheduler = Scheduler(KVBlocks(SIZE, [GroupSpec(1_000, None)], INFO.context_length), 8, 1_024, chunked)
    scheduler.add(Choice(request, 0, TOKENIZER, INFO))
    steps: list[Scheduled] = []
    while not steps or not steps[-1].samples:
        steps += (scheduled := scheduler.schedule())
        scheduler.commit(scheduled)
    assert [one.num_tokens for one in steps] == [256, 256, 88]


def test_who_waits_for_its_turn_is_known() -> None:
    machine = Machine([GroupSpec(100, None)], max_batch_size=2, max_step_tokens=8)
    low, urgent = make_choice(b"a" * 12, priority=2), make_choice(b"b" * 16)
    third = make_choice(b"c", max_tokens=1)
    machine.add(low)
    machine.step()
    assert (low.is_waiting, low.num_computed) == (False, 8)
    machine.add(urgent, third)
    machine.step()
    assert (low.is_waiting, urgent.is_waiting, third.is_waiting) == (True, False, True)
    machine.step()
    assert (low.num_computed, urgent.num_computed) == (8, 16)
    machine.step()
    assert (low.is_waiting, low.num_computed) == (False, 12)


def test_one_that_is_preempted_waits_and_what_it_had_computed_is_no_hit() -> None:
    machine = Machine([GroupSpec(6, None)], max_batch_size=2)
    first, last = make_choice(b"a" * 8, max_tokens=8), make_choice(b"b" * 8, max_tokens=8)
    machine.add(first, last)
    while not machine.scheduler.num_preemptions:
        machine.step()
    assert last.is_waiting and not first.is_waiting
    before = last.num_computed
    machine.finish()
    assert last.num_computed > before and last.cached_tokens == 0


def test_one_that_is_taken_out_and_put_back_goes_on_from_its_blocks_which_are_no_hit() -> None:
    machine = Machine([GroupSpec(20, None)])
    one = make_choice(b"a" * 12)
    machine.add(one)
    machine.step()
    machine.remove(one)
    assert one.is_waiting
    machine.add(one)
    assert machine.step()[one] == 1
    assert one.cached_tokens == 0
    machine.finish()
    assert one.tokens == naive(one)
