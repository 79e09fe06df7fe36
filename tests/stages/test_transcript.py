"""The transcript counts every token once, whatever repetitions, zombies and successors stand in the stream."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.events import Delta, Output, Started
from penstock.stages.transcript import Transcript

ANSWER = tuple(range(100, 120))


def started(epoch: int) -> Started:
    return Started("r", epoch, f"w{epoch}", "default", "b", 1, 7)


def delta(epoch: int, begin: int, end: int) -> Delta:
    last = end == len(ANSWER)
    return Delta("r", epoch, 0, begin, ANSWER[begin:end], "", finish_reason="stop" if last else None)


# How many tokens are said next, whether that is stored twice, whether the last worker's zombie says it too, and whether
# the worker then dies.
steps = st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans(), st.booleans()), max_size=12)


def stream(script: list[tuple[int, bool, bool, bool]]) -> list[Output]:
    stored: list[Output] = [started(1)]
    place, epoch = 0, 1
    for count, twice, zombie, dies in [*script, (len(ANSWER), False, False, False)]:
        if place == len(ANSWER):
            break
        end = min(place + count, len(ANSWER))
        stored += [delta(epoch, place, end)] * (2 if twice else 1)
        if zombie and epoch > 1:
            stored.append(delta(epoch - 1, place, end))
        if dies:
            epoch += 1
            stored.append(started(epoch))
        place = end
    return stored


@settings(max_examples=200)
@given(steps)
def test_every_token_counts_once(script: list[tuple[int, bool, bool, bool]]) -> None:
    stored = stream(script)
    said = Transcript()
    counted = [output for output in stored if said.apply(output) and isinstance(output, Delta)]
    assert tuple(token for output in counted for token in output.token_ids) == ANSWER
    assert said.finished and not said.gap
    assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens) == (7, 20, 27)


def test_a_gap_is_noticed() -> None:
    said = Transcript()
    said.apply(started(1))
    assert not said.apply(delta(1, 3, 5))
    assert said.gap


def test_a_delta_without_a_beginning_is_a_gap() -> None:
    said = Transcript()
    assert not said.apply(delta(1, 0, 5))
    assert said.gap


@pytest.mark.parametrize(("begin", "end"), [(0, 12), (4, 20), (10, 20)])
def test_an_answer_that_is_begun_anew_and_cut_differently_is_noticed(begin: int, end: int) -> None:
    """Its outputs have left the stream, so that the next worker knows none: a delta may reach beyond what was said."""
    said = Transcript()
    assert said.apply(started(1)) and said.apply(delta(1, 0, 10))
    assert said.apply(started(2)) and not said.apply(delta(2, 0, begin))
    assert not said.gap
    assert not said.apply(delta(2, begin, end)) or begin == 10
    assert said.gap != (begin == 10)


def test_an_end_that_is_said_again_is_noticed() -> None:
    said = Transcript()
    for output in (started(1), delta(1, 0, 19), Delta("r", 1, 0, 19, (ANSWER[19],), ""), started(2)):
        assert said.apply(output)
    assert not said.apply(delta(2, 18, 20))
    assert said.gap, "the end is in it, and would never come"
