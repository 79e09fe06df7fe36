"""Pieces of text that come token by token add up to the text decoded at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine import TokenizerLike, load_tokenizer
from penstock.engine.text.byte_tokenizer import ByteTokenizer
from penstock.engine.text.detokenizer import Detokenizer

BYTES = ByteTokenizer()


def detokenize(tokenizer: TokenizerLike, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.fixture(scope="session")
def bpe(model_directory: Callable[[str], Path]) -> TokenizerLike:
    return load_tokenizer(str(model_directory("llama")))


@given(prompt=st.text(max_size=5), text=st.text(max_size=200))
def test_text_in_bytes_comes_back(prompt: str, text: str) -> None:
    pieces = detokenize(BYTES, BYTES.encode(prompt), BYTES.encode(text))
    assert "".join(pieces) == text


@given(data=st.data())
def test_text_in_byte_pairs_comes_back(bpe: TokenizerLike, data: st.DataObject) -> None:
    prompt, text = data.draw(st.text(max_size=5)), data.draw(st.text(max_size=200))
    assert "".join(detokenize(bpe, bpe.encode(prompt), bpe.encode(text))) == text


@given(ids=st.lists(st.integers(0, 511), max_size=60))
def test_any_tokens_give_what_decoding_at_once_gives(bpe: TokenizerLike, ids: list[int]) -> None:
    assert "".join(detokenize(bpe, [], ids)) == bpe.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 258), max_size=60))
def test_any_bytes_give_what_decoding_at_once_gives(ids: list[int]) -> None:
    assert "".join(detokenize(BYTES, [], ids)) == BYTES.decode(ids, skip_special_tokens=True)


def test_no_space_stands_between_special_tokens_where_none_is_wanted() -> None:
    class Spaced(ByteTokenizer):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            return " ".join(f"<{token}>" if token > 255 else chr(token) for token in ids)

    tokenizer = Spaced()
    first, second = sorted(tokenizer.special_token_ids)[:2]
    for spaces, text in ((True, f"a <{first}> <{second}> b"), (False, f"a <{first}><{second}> b")):
        detokenizer = Detokenizer(tokenizer, [], tokenizer.special_token_ids, spaces=spaces)
        assert "".join(map(detokenizer.push, [97, first, second, 98])) == text


def test_a_character_is_never_cut() -> None:
    assert detokenize(BYTES, [], list("a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_an_incomplete_character_is_flushed_at_the_end() -> None:
    assert detokenize(BYTES, [], list("a€".encode())[:-1]) == ["a", "", "", "\ufffd"]


def test_a_run_of_broken_bytes_is_not_held_for_ever() -> None:
    pieces = detokenize(BYTES, [], [0x80] * 200)
    assert "".join(pieces) == "\ufffd" * 200
    assert any(pieces[:100])


def test_special_tokens_leave_no_text() -> None:
    assert detokenize(BYTES, [257], [72, 258, 105, 256]) == ["H", "", "i", "", ""]
