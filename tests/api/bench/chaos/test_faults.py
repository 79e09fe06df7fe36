"""What `penstock bench chaos` says of its strikes: how long clients waited, and because of which."""

from __future__ import annotations

from penstock.api.bench.answers import ReceivedAnswer
from penstock.api.bench.chaos.faults import Strike, longest_pauses


def answer(sent: float, *times: float, ended: float) -> ReceivedAnswer:
    return ReceivedAnswer(sent=sent, times=list(times), ended=ended)


def seconds(strikes: list[Strike], *answers: ReceivedAnswer) -> list[float]:
    return [pause.seconds for pause in longest_pauses(strikes, answers)]


def test_a_pause_is_the_first_strike_s_in_it() -> None:
    strikes = [Strike("reset", "batch 0", 14.0, 1.0), Strike("kill", "worker 0", 11.0, 2.0)]
    assert seconds(strikes, answer(10, 10.5, 16, 16.5, ended=17)) == [0.0, 5.5]


def test_what_begins_while_a_part_is_away_is_that_strike_s() -> None:
    strikes = [Strike("kill", "queue 0", 10.0, 5.0), Strike("kill", "worker 0", 20.0)]
    assert seconds(strikes, answer(12, 18, ended=18.5), answer(40, 43, ended=44)) == [6.0, 3.0]


def test_what_nothing_struck_is_nobody_s() -> None:
    strikes = [Strike("kill", "worker 0", 10.0, 1.0)]
    assert seconds(strikes, answer(0, 9, ended=9.5), answer(12, 30, ended=31)) == [0.0]


def test_a_kind_holds_for_all_copies() -> None:
    assert Strike("stop 6 s", "worker 1", 0.0).kind == "stop 6 s worker"
