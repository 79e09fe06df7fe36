"""Stop strings are found across pieces, and how the text was cut into pieces never matters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.stops import StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text("abc", max_size=4), max_size=12)


def naive(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string to be complete, reading character by character; None without one."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


def shown(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    """What may be shown of a text that came in `pieces`, and whether a stop string ended it."""
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        text += piece
        cut = matcher.push(piece)
        if cut is not None:
            return text[: len(text) - cut], True
    return text, False


@given(pieces=PIECES, stops=STOPS)
def test_any_split_gives_the_same_result(pieces: list[str], stops: tuple[str, ...]) -> None:
    expected = naive("".join(pieces), stops)
    assert shown(pieces, stops) == (("".join(pieces), False) if expected is None else (expected, True))


@given(pieces=PIECES, stops=STOPS)
def test_the_stop_string_is_told(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    for end, piece in enumerate(pieces, 1):
        if (cut := matcher.push(piece)) is not None:
            text = "".join(pieces[:end])
            assert matcher.found in stops and text[len(text) - cut :].startswith(matcher.found)
            return
    assert matcher.found is None


@given(pieces=PIECES, stops=STOPS)
def test_what_is_not_held_stays_shown(pieces: list[str], stops: tuple[str, ...]) -> None:
    result, _ = shown(pieces, stops)
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        if matcher.push(piece) is not None:
            break
        text += piece
        assert result.startswith(text[: len(text) - matcher.held])
        assert matcher.held < max(map(len, stops))


@given(pieces=PIECES, stops=STOPS)
def test_no_more_is_held_than_could_begin_a_stop_string(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        if matcher.push(piece) is not None:
            break
        text += piece
        held = text[len(text) - matcher.held :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert shown(["xabcd"], ("abcd", "bc")) == ("xa", True)
    assert shown(["xabc"], ("bc", "abc")) == ("x", True)
