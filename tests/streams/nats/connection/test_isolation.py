"""When a part leaves a NATS server by which JetStream does not answer, and for how long it stays with the next one."""

from __future__ import annotations

from penstock.streams.nats.connection.isolation import MOST_PATIENCE, PATIENCE, Isolation


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_has_its_answers_stays() -> None:
    clock = Clock()
    isolation = Isolation(clock)
    for _ in range(10):
        isolation.asked()
        clock.now += 0.9 * PATIENCE
        assert not isolation.is_due()
        isolation.answered()
    clock.now += 100 * PATIENCE  # nothing was asked
    assert not isolation.is_due()


def test_each_server_without_an_answer_is_given_longer_up_to_a_limit() -> None:
    clock = Clock()
    isolation = Isolation(clock)
    isolation.asked()
    waited, since = list[float](), clock.now
    while len(waited) < 6:
        clock.now += 1.0
        isolation.asked()  # again, which does not begin the wait anew
        if isolation.is_due():
            waited.append(clock.now - since)
            since = clock.now
    assert waited == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, *[MOST_PATIENCE] * 3]
    isolation.answered()
    isolation.asked(ago=PATIENCE)  # as where a consumer has been silent for so long
    assert isolation.is_due()
