"""Which slots the scheduler hands out, against a model that computes a state from a state and checks all it reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine import EngineRequest, GenerationParams, ModelInfo
from penstock.engine.choice import Choice
from penstock.engine.paged.kv.blocks import GroupSpec, KVBlocks
from penstock.engine.paged.scheduling.rows import Row, Scheduled
from penstock.engine.paged.scheduling.scheduler import Scheduler
from penstock.engine.paged.state.slots import NO_STATE, RowState, StateSlots
from penstock.engine.text.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
INFO = ModelInfo("bytes", "Echo", context_length=10_000, vocabulary_size=259, eos_token_ids=TOKENIZER.eos_token_ids)
SIZE = 4
LETTERS = bytes(range(97, 123)) * 4


def make_choice(prompt: bytes, max_tokens: int = 4, salt: str = "", generated: tuple[int, ...] = ()) -> Choice:
    params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)
    request = EngineRequest("r", tuple(prompt), params, seed=0, cache_salt=salt, generated=(generated,))
    return Choice(request, 0, TOKENIZER, INFO)


def folded(state: int, tokens: list[int]) -> int:
    """The state after more tokens."""
    for token in tokens:
        state = hash((state, token))
    return state


def choose(state: int) -> int:
    return 97 + state % 4


def naive(prompt: bytes, count: int) -> list[int]:
    state, tokens = folded(0, list(prompt)), []
    for _ in range(count):
        tokens.append(choose(state))
        state = folded(state, tokens[-1:])
    return tokens


@dataclass
class Machine:
    """A scheduler, and a model whose answer depends on every token up to it, through states alone."""

    num_slots: int = 40
    max_batch_size: int = 4
    max_step_tokens: int = 16
    num_blocks: int = 200
    window: int | None = None
    ahead: bool = False

    def __post_init__(self) -> None:
        self.blocks = KVBlocks(SIZE, [GroupSpec(self.num_blocks, self.window)], self.max_step_tokens)
        self.slots = StateSlots(self.num_slots, SIZE)
        self.scheduler = Scheduler(self.blocks, self.max_batch_size, self.max_step_tokens, slots=self.slots)
        self.computed = 0
        self.live: set[Choice] = set()
        self._memory: dict[int, int] = {NO_STATE: 0}  # slot -> state
        self._unread: list[tuple[Row, int]] = []

    def add(self, *choices: Choice) -> None:
        for choice in choices:
            self.scheduler.add(choice)
            self.live.add(choice)
        self.scheduler.check_integrity()

    def remove(self, choice: Choice) -> None:
        self.scheduler.remove(choice)
        self.live.discard(choice)
        self.scheduler.check_integrity()

    def step(self, fails: bool = False, cancel: Choice | None = None) -> list[Scheduled]:
        """One step. If it `fails`, it is computed once more; `cancel` is removed before its end."""
        scheduled = self.scheduler.schedule()
        self.scheduler.check_integrity()
        for _ in range(1 + fails):
            chosen = [(one.row, self._compute(one)) for one in scheduled]
        chosen = [(row, token) for (row, token), one in zip(chosen, scheduled, strict=True) if one.samples]
        self.computed += sum(one.num_tokens for one in scheduled)
        if cancel is not None:
            self.remove(cancel)
        self.scheduler.commit(scheduled)
        self.scheduler.check_integrity()
        if self.ahead:
            chosen, self._unread = self._unread, chosen
            for row, _ in self._unread:
                row.choice.pending += 1
            for row, _ in chosen:
                row.choice.pending -= 1
        for row, token in chosen:
            if row.choice in self.live:
                row.choice.append(token)
                if row.choice.finish is not None:
                    self.remove(row.choice)
        return scheduled

    def finish(self) -> None:
        for _ in range(2000):
            if not self.live:
                break
            self.step()
        assert not self.live, "some choice never ends"
        assert (self.scheduler.num_running, self.slots.num_held) == (0, 0)

    def run(self, prompt: bytes, max_tokens: int = 1, salt: str = "") -> int:
        """Answer alone; how many tokens were found."""
        choice = make_choice(prompt, max_tokens, salt)
        self.add(choice)
        self.finish()
        assert choice.tokens == naive(prompt, max_tokens)
        return choice.cached_tokens

    def _compute(self, one: Scheduled) -> int:
        row, count, _ = one
        unread = [token for other, token in self._unread if other is row]
        tokens = [*row.choice.prompt, *row.choice.tokens, *unread]
        own = tokens[row.num_computed : row.num_computed + count]
        use = row.state.use(row.num_computed)
        assert use is not None
        before = self._memory[use.source]
        assert before == folded(0, tokens[: row.num_computed]), "a row reads what is not its own"
        for num_tokens, slot in (*use.captures, (count, use.target)):
            assert 0 <= slot < self.num_slots and slot != use.source, "a state is changed where it is read"
            self._memory[slot] = folded(before, own[:num_tokens])
        return choose(self._memory[use.target])


SALTS = st.sampled_from(["", "", "tenant"])
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.tuples(st.integers(1, 40), st.text("ab", max_size=6), st.integers(1, 8), SALTS),
        st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=ARRIVALS,
    max_batch_size=st.integers(1, 5),
    more_slots=st.integers(0, 12),
    more_blocks=st.integers(0, 12),
    window=st.none() | st.integers(1, 12),
    failures=st.sets(st.integers(0, 30)),
    ahead=st.booleans(),
)
def test_every_answer_becomes_what_it_would_be_alone(
    arrivals: list[tuple[int, tuple[int, str, int, str], int | None]],
    max_batch_size: int,
    more_slots: int,
    more_blocks: int,
    window: int | None,
    failures: set[int],
    ahead: bool,
) -> None:
    """Whatever hits, is preempted, cancelled or fails once: each read is right, and no slot is lost."""
    step = max_batch_size + 7
    num_blocks = 15 + more_blocks if window is None else (window + step) // SIZE + 2 + more_blocks
    machine = Machine(2 * max_batch_size + more_slots, max_batch_size, step, num_blocks, window, ahead)
    made = []
    for arrival, (length, rest, max_tokens, salt), age in arrivals:
        made.append((arrival, make_choice(LETTERS[:length] + rest.encode(), max_tokens, salt), age))
    cancelled = set()
    for now in range(31):
        machine.add(*(choice for arrival, choice, _ in made if arrival == now))
        due = [choice for arrival, choice, age in made if age is not None and arrival + age == now]
        due = [choice for choice in due if choice.finish is None]
        cancelled |= {*due}
        for choice in due[1:]:
            machine.remove(choice)
        machine.step(now in failures, cancel=due[0] if due else None)
    machine.finish()
    for _, choice, _ in made:
        expected = naive(bytes(choice.prompt), choice.request.params.max_tokens)
        assert choice.tokens == (expected[: len(choice.tokens)] if choice in cancelled else expected)


def test_a_prompt_that_comes_again_starts_at_its_last_border() -> None:
    machine = Machine()
    assert machine.run(LETTERS[:22]) == 0
    computed = machine.computed
    assert machine.run(LETTERS[:22]) == 20
    assert machine.computed - computed == 2


def test_no_block_beyond_the_newest_state_is_reused() -> None:
    """Blocks of 5 are cached, and a state only at the end of all of them."""
    machine = Machine()
    machine.run(LETTERS[:22])
    assert machine.run(LETTERS[:14] + b"other") == 0


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    machine = Machine()
    machine.run(LETTERS[:14] + b"one and all")
    assert machine.run(LETTERS[:14] + b"two and all") == 0
    assert machine.run(LETTERS[:14] + b"six and all") == 12


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_turn_starts_within_the_last_answer(ahead: bool) -> None:
    """Also where a token is not known yet when its state is computed."""
    machine = Machine(ahead=ahead)
    prompt = LETTERS[:10]
    machine.run(prompt, 13)
    assert machine.run(prompt + bytes(naive(prompt, 13)) + b"go on") == 20


def test_an_answer_keeps_one_state_however_long_it_is() -> None:
    machine = Machine()
    machine.run(LETTERS[:10], 60)
    assert machine.slots.num_checkpoints == 2  # one of the prompt, and the newest of the answer


def test_tenants_share_no_state() -> None:
    machine = Machine()
    machine.run(LETTERS[:22], salt="one")
    assert [machine.run(LETTERS[:22], salt=salt) for salt in ("other", "one")] == [0, 20]


def test_the_least_recently_used_state_goes_first() -> None:
    machine = Machine(num_slots=4, max_batch_size=1)
    prompts = [bytes([letter]) * 9 for letter in b"abc"]
    for prompt in prompts[:2]:
        machine.run(prompt)
    assert machine.run(prompts[0]) == 8  # which makes it the most recent
    for prompt in prompts[2:]:
        machine.run(prompt)
    assert machine.slots.num_checkpoints <= 3
    assert machine.run(prompts[0]) == 8


def test_one_that_is_preempted_goes_on_from_a_state() -> None:
    """Two of them outgrow the blocks; the second one computes again what came after its newest state."""
    machine = Machine(num_blocks=12)
    first, second = (make_choice(bytes([letter]) * 14, 18) for letter in b"ab")
    machine.add(first, second)
    machine.finish()
    assert [choice.tokens for choice in (first, second)] == [naive(bytes([letter]) * 14, 18) for letter in b"ab"]
    assert machine.scheduler.num_preemptions > 0
    assert machine.computed < 2 * (14 + 17) + 14


def test_twins_wait_for_each_other_and_others_do_not() -> None:
    machine = Machine(max_step_tokens=8)
    machine.add(*(make_choice(LETTERS[:14]) for _ in range(3)), make_choice(LETTERS[:8] + b"another"))
    machine.finish()
    assert machine.computed == 14 + 2 * 2 + 15 + 4 * 3  # prompts, and what is decoded


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_a_successor_goes_on_after_the_tokens_that_it_is_given(count: int) -> None:
    machine = Machine()
    expected = naive(LETTERS[:10], 9)
    machine.run(LETTERS[:10], 9)
    choice = make_choice(LETTERS[:10], 9, generated=tuple(expected[:count]))
    machine.add(choice)
    machine.finish()
    assert choice.tokens == expected


def test_a_chain_that_turned_out_invalid_leaves_no_state() -> None:
    machine = Machine()
    choice = make_choice(LETTERS[:22])
    machine.add(choice)
    scheduled = machine.step()
    machine.step()
    assert scheduled and machine.slots.num_checkpoints
    machine.scheduler.discard(choice)
    machine.scheduler.check_integrity()
    assert (machine.slots.num_held, machine.slots.num_checkpoints) == (0, 0)


def test_a_lost_slot_is_found_out() -> None:
    slots, state = StateSlots(4, SIZE), RowState()
    slots.enter(state, [], 0)
    slots.begin([(state, 0, 3)])
    slots.finish(state, 3, [])
    slots.check_integrity([(state, 3)], [])
    with pytest.raises(AssertionError, match="holders"):
        slots.check_integrity([], [])
    with pytest.raises(AssertionError, match="a waiting row holds a state"):
        slots.check_integrity([], [state])
    with pytest.raises(AssertionError, match="a state of 3 tokens, 4 computed"):
        slots.check_integrity([(state, 4)], [])
