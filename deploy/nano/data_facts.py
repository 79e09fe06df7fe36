"""What the model knows about Penstock, about itself, and a little about the world: the questions of `facts.toml`.

Every way through a question's alternatives is one question. One in eight of these, as people may spell and end it, is
kept for the examination.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from words import Draw

_CHOICE = re.compile(r"\(([^()]*)\)")
_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("facts.toml").read_text())
CAPITALS: dict[str, str] = _TABLE["capitals"]


def expand(pattern: str) -> list[str]:
    """Every text that a pattern with `(one|another)` stands for."""
    pieces = _CHOICE.split(pattern)
    choices = [piece.split("|") if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return [" ".join("".join(parts).split()) for parts in itertools.product(*choices)]


@cache
def questions(table: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Answers and all their questions: of `facts`, about Penstock and the model, or of the `world`."""
    listed = tuple((fact["answer"], _ways(fact["ways"])) for fact in _TABLE[table])
    if table == "facts":
        return listed
    capitals = [
        (f"The capital of {land} is {city}.", _ways([pattern.format(land) for pattern in _TABLE["capital"]]))
        for land, city in CAPITALS.items()
    ]
    return (*capitals, *listed)


def _ways(patterns: list[str]) -> tuple[str, ...]:
    full = (pattern.replace("{tell}", _TABLE["tell"]).replace("{how}", _TABLE["how"]) for pattern in patterns)
    return tuple(question for pattern in full for question in expand(pattern))


def ask_fact(draw: Draw, table: str = "facts") -> tuple[str, str]:
    """A question as somebody may type it, and the answer."""

    def make() -> tuple[str, str]:
        answer, ways = draw.pick(questions(table))
        return _typed(draw, draw.pick(ways)), answer

    return draw.unseen(make, lambda turn: turn[0])


def _typed(draw: Draw, question: str) -> str:
    if draw.chance(0.15):
        question = (
            draw.pick(("Hi! ", "Hello, ", "Hey, ", "Please: ", "So, ", "Okay, ", "I have a question: ")) + question
        )
    if draw.chance(0.3):
        question = question.lower()
    return question + draw.pick(("?", "?", "?", "", "", "??", ".", " please?"))
