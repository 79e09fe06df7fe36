"""The header of hops: each stage adds its own behind what it found, whatever that is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.wire.hops import Hop, append_hop, parse_hops

SECONDS = st.floats(1e9, 3e9).map(lambda seconds: round(seconds, 6))


def test_what_is_added_is_read_again() -> None:
    one = append_hop("", "validate", at=1.7e9, began=1.7e9 + 0.25, left=1.7e9 + 0.5)
    two = append_hop(one, "infer", at=1.7e9 + 1, began=1.7e9 + 2, attempt=3, worker="w-1", epoch=2)
    assert parse_hops(two) == [
        Hop("validate", 1.7e9, 1.7e9 + 0.25, 1.7e9 + 0.5, 1, {}),
        Hop("infer", 1.7e9 + 1, 1.7e9 + 2, None, 3, {"worker": "w-1", "epoch": "2"}),
    ]


def test_a_message_that_was_not_stored_came_when_it_was_taken() -> None:
    assert parse_hops(append_hop("", "tools", at=0.0, began=5.0))[0].at == 5.0


@given(st.text(), SECONDS)
def test_nothing_that_was_there_can_spoil_a_hop(before: str, at: float) -> None:
    assert parse_hops(append_hop(before, "queue", at=at, began=at, left=at))[-1] == Hop("queue", at, at, at, 1, {})


def test_the_header_stays_short() -> None:
    header = ""
    for number in range(1000):
        header = append_hop(header, f"stage{number}", at=1.0, began=1.0, left=2.0)
    assert len(header) < 5000
    assert parse_hops(header)[-1].stage == "stage999"
