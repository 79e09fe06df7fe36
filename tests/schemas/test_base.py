from __future__ import annotations

import re

import pytest

from penstock.schemas.base import TOOL_NAME_PATTERN, tool_name


@pytest.mark.parametrize(
    ("text", "name"),
    [("files.read-all", "files.read-all"), ("Wetter für heute", "Wetter_f_r_heute"), ("", "_"), ("x" * 129, "x" * 128)],
)
def test_any_text_becomes_a_name_that_every_api_accepts(text: str, name: str) -> None:
    assert tool_name(text) == name
    assert re.fullmatch(TOOL_NAME_PATTERN, name)
