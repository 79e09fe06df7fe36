"""The tokenizer of the models that tests make."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_model import make_tokenizer


def test_each_python_makes_the_same_tokenizer() -> None:
    """It is read, not trained: seeds that make a random model say something good stay good."""
    large: Any = make_tokenizer(512)
    assert "|".join(large.tokenize("The function returns a list")) == "The|Ġfunction|Ġreturn|s|Ġa|Ġli|st"
    text = "<|im_start|>größer — 0.\n    🙂"
    ids = large.encode(text)
    assert ids[0] == 1
    assert large.decode(ids) == text

    small: Any = make_tokenizer(320)
    assert len(small) == 320
    assert all(large.get_vocab()[token] == index for token, index in small.get_vocab().items())
    assert small.decode(small.encode(text)) == text


@pytest.mark.parametrize("size", [258, 513])
def test_no_tokenizer_of_another_size_than_asked_for(size: int) -> None:
    with pytest.raises(ValueError, match="from 259 to 512 entries"):
        make_tokenizer(size)
