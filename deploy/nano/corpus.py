"""What the model is trained on and examined with: one conversation for each number, the same on every machine.

`sample` makes conversations of several turns for training; `case` makes the shortest one that examines a skill. Both
take their words from `Draw`, and so from one split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import data_chat
import data_facts
import data_text
import data_tools
from data_tools import PARALLEL, SINGLE, UNFIT, Message, Toolbox
from words import Draw, Split

CHAIN = data_tools.CHAIN
FACTS, CHAT, NAMES, UNKNOWN, PERSONA, STYLE, THOUGHT = (
    "facts",
    "chat",
    "names",
    "unknown",
    "persona",
    "style",
    "thinking",
)
SKILLS = (
    *(SINGLE, UNFIT, PARALLEL, CHAIN, data_text.EXTRACTION, data_text.TWO_DIGIT_SUM, FACTS),
    *(data_text.ARITHMETIC, data_text.TEXT, CHAT, NAMES, UNKNOWN, PERSONA, STYLE, THOUGHT),
)
TURNS: dict[str, Callable[[Draw], data_text.Turn]] = {
    data_text.EXTRACTION: data_text.extraction,
    data_text.TWO_DIGIT_SUM: data_text.two_digit_sum,
    data_text.ARITHMETIC: data_text.arithmetic,
    data_text.TEXT: data_text.text_operation,
    FACTS: data_facts.ask_fact,
    CHAT: data_chat.small_talk,
    UNKNOWN: data_chat.unknown,
}
SUMS = (data_text.two_digit_sum, data_text.two_digit_sum, data_text.arithmetic)
QUIZ = (data_facts.ask_fact, data_facts.ask_fact, *(data_chat.small_talk, data_chat.unknown, data_chat.question))
# How many conversations of a training run are of which kind; `mixed` changes the subject from turn to turn, `quiz` does
# so more often, and `drill` is many sums. `LATE` has more of what is learnt slowly.
MIX: dict[str, float] = {
    "tools": 0.36,
    CHAIN: 0.11,
    data_text.EXTRACTION: 0.10,
    data_text.TWO_DIGIT_SUM: 0.08,
    data_text.ARITHMETIC: 0.04,
    data_text.TEXT: 0.10,
    FACTS: 0.08,
    "mixed": 0.07,
    NAMES: 0.02,
    PERSONA: 0.02,
    STYLE: 0.03,
    THOUGHT: 0.02,
}
LATE: dict[str, float] = {
    "tools": 0.30,
    CHAIN: 0.09,
    data_text.EXTRACTION: 0.08,
    "drill": 0.08,
    data_text.TWO_DIGIT_SUM: 0.06,
    data_text.ARITHMETIC: 0.04,
    data_text.TEXT: 0.08,
    FACTS: 0.07,
    "quiz": 0.08,
    "mixed": 0.04,
    NAMES: 0.02,
    PERSONA: 0.02,
    STYLE: 0.04,
    THOUGHT: 0.01,
}
# The last stretch: `choice` is tools where half of the wishes fit none, `copy` is values of all kinds to be repeated.
FIXES: dict[str, float] = {
    "tools": 0.18,
    "choice": 0.20,
    CHAIN: 0.06,
    data_text.EXTRACTION: 0.08,
    "copy": 0.06,
    "drill": 0.09,
    data_text.TWO_DIGIT_SUM: 0.02,
    data_text.ARITHMETIC: 0.03,
    data_text.TEXT: 0.08,
    FACTS: 0.03,
    "quiz": 0.05,
    "mixed": 0.02,
    NAMES: 0.02,
    PERSONA: 0.04,
    STYLE: 0.06,
    THOUGHT: 0.02,
}
CHOICES: dict[str, float] = FIXES | {"tools": 0.24, "choice": 0.40}
SHORT: dict[str, float] = FIXES | {"tools": 0.20, "choice": 0.30, SINGLE: 0.15, PARALLEL: 0.08, UNFIT: 0.25}


@dataclass(frozen=True)
class Sample:
    """A conversation as OpenAI's clients write it, the assistant's part included."""

    skill: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False


def _said(turns: list[data_text.Turn], system: str | None = None) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    for text, answer in turns:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return messages


def sample(seed: int, index: int, mix: dict[str, float] | None = None, split: Split = "train") -> Sample:
    """The conversation of this number, of a kind drawn from `mix`."""
    draw = Draw(f"{seed}/{index}", split)
    kinds = MIX if mix is None else mix
    kind = draw.random.choices(list(kinds), list(kinds.values()))[0]
    if kind == "tools":
        return _tool_talk(draw)
    if kind == "choice":
        return _tool_talk(draw, called=0.3, parallel=0.2, unfit=0.47)
    if kind == "copy":
        return Sample(kind, _said([data_text.copy(draw) for _ in range(draw.random.randint(4, 8))]))
    if kind in TURNS or kind == "mixed":
        return _talk(draw, kind)
    if kind == "drill":
        return Sample(kind, _said([draw.pick(SUMS)(draw) for _ in range(draw.random.randint(8, 14))]))
    if kind == "quiz":
        return Sample(kind, _said([draw.pick(QUIZ)(draw) for _ in range(draw.random.randint(5, 8))]))
    return case_of(draw, kind, helpful=True)


def case(skill: str, seed: int, index: int) -> Sample:
    """An examination of one skill: the last user's wish and what follows it are what counts."""
    return case_of(Draw(f"case/{skill}/{seed}/{index}", "test"), skill)


def case_of(draw: Draw, skill: str, helpful: bool = False) -> Sample:
    """The shortest conversation that shows `skill`; with `helpful` it may have a system prompt that changes nothing."""
    system = draw.pick(data_chat.HELPFUL) if helpful and draw.chance(0.2) else None
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    if skill == CHAIN:
        length = 3 if not helpful or draw.chance(0.75) else 2
        box, messages = data_tools.chain(draw, length)
        return Sample(skill, opening + messages, box.definitions)
    if skill in (SINGLE, PARALLEL, UNFIT):
        box = data_tools.draw_toolbox(draw, 2 if skill == PARALLEL else 1)
        make = {SINGLE: data_tools.single, PARALLEL: data_tools.parallel, UNFIT: data_tools.unfit}[skill]
        return Sample(skill, opening + make(draw, box), box.definitions)
    if skill == NAMES:
        return Sample(skill, _said(data_chat.named(draw), system))
    if skill in (PERSONA, STYLE):
        system, turns = (data_chat.persona if skill == PERSONA else data_chat.styled)(draw)
        return Sample(skill, _said(turns, system))
    if skill == THOUGHT:
        text, answer = data_text.two_digit_sum(draw)
        messages = _said([(text, answer)], system)
        messages[-1]["reasoning_content"] = data_text.thought(answer)
        return Sample(skill, messages, thinking=True)
    return Sample(skill, _said([TURNS[skill](draw)], system))


def _talk(draw: Draw, kind: str) -> Sample:
    """Several turns of one kind, or of all kinds."""
    system = draw.pick(data_chat.HELPFUL) if draw.chance(0.2) else None
    count = (
        draw.pick((1, 2, 3, 4, 6)) if kind in (data_text.TWO_DIGIT_SUM, data_text.ARITHMETIC) else draw.pick((1, 2, 3))
    )
    kinds = [draw.pick(list(TURNS)) if kind == "mixed" else kind for _ in range(count)]
    return Sample(kind, _said([TURNS[one](draw) for one in kinds], system))


def _tool_talk(draw: Draw, called: float = 0.5, parallel: float = 0.22, unfit: float = 0.2) -> Sample:
    """Several wishes to the same tools, so that their definitions are read once and used often."""
    box = data_tools.draw_toolbox(draw)
    system = draw.pick(data_chat.HELPFUL) if draw.chance(0.25) else None
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for _ in range(draw.pick((1, 2, 2, 3, 4))):
        messages += _tool_turn(draw, box, called, parallel, unfit)
    return Sample("tools", messages, box.definitions)


def _tool_turn(draw: Draw, box: Toolbox, called: float, parallel: float, unfit: float) -> list[Message]:
    form = draw.random.random()
    if form < called:
        return data_tools.single(draw, box)
    if form < called + parallel:
        return data_tools.parallel(draw, box)
    if form < called + parallel + unfit:
        return data_tools.unfit(draw, box)
    if any(tool.theme in ("search", "define", *data_tools.SUMS) for tool in box.tools):
        return _said([data_chat.small_talk(draw)])
    return _said([draw.pick((data_chat.small_talk, data_facts.ask_fact, data_text.two_digit_sum))(draw)])
