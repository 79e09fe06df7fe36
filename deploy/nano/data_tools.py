"""Conversations with tools: one call, several at once, chains of calls, and wishes that no tool fits.

What a wish says is exactly what the arguments must be; answers follow one rule, so that a small model can learn it: an
object is read out (`The price is 12.`), a status is `Done.`, a failure is told, and text is passed on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from catalogue import EVERYDAY, Tool, fill
from coined import coin, coin_chain
from words import Draw, Value, join

Message = dict[str, Any]
REFUSAL = "I have no tool for that."
SUMS = ("sum", "product", "difference")  # these the model answers by itself
SINGLE, PARALLEL, CHAIN, UNFIT = "tool_call", "parallel_calls", "tool_chain", "no_fitting_tool"


@dataclass
class Toolbox:
    """The tools of one conversation and their definitions."""

    tools: list[Tool]
    definitions: list[dict[str, Any]] = field(default_factory=list)

    def define(self, draw: Draw) -> Toolbox:
        """Put the tools in random order and write their definitions."""
        draw.random.shuffle(self.tools)
        self.definitions = [tool.definition(draw) for tool in self.tools]
        return self


def draw_tool(draw: Draw, taken: Sequence[Tool] = ()) -> Tool:
    """An everyday or a coined tool whose name, theme and noun differ from those taken, mostly."""
    while True:
        if draw.chance(0.35):
            tool = draw.pick(draw.pick(EVERYDAY))
        elif taken and draw.chance(0.3) and " " in taken[-1].theme:  # the same noun with another verb is the hard case
            tool = coin(draw, noun=taken[-1].theme.split()[1])
        elif taken and draw.chance(0.15) and " " in taken[-1].theme:
            tool = coin(draw, verb=taken[-1].theme.split()[0])
        else:
            tool = coin(draw)
        if all(tool.name != other.name and tool.theme != other.theme for other in taken):
            return tool


def draw_toolbox(draw: Draw, least: int = 1, most: int = 4) -> Toolbox:
    """Some tools, none like another."""
    tools: list[Tool] = []
    for _ in range(draw.random.randint(least, most)):
        tools.append(draw_tool(draw, tools))
    return Toolbox(tools).define(draw)


def call(tool: Tool, arguments: dict[str, Value]) -> Message:
    """A tool call as in OpenAI's messages, with the arguments as an object."""
    return {"type": "function", "function": {"name": tool.name, "arguments": arguments}}


def ended(draw: Draw, text: str) -> str:
    """`text` as a user would end, begin and spell it."""
    if draw.chance(0.1):
        text = draw.pick(("Please ", "Can you ", "Could you ", "Hi, ", "I want you to ")) + text[0].lower() + text[1:]
    elif draw.chance(0.12):
        text = text[0].lower() + text[1:]
    asks = text.startswith(("What", "How", "Is ", "Does", "Who", "Can ", "Could "))
    return text + draw.pick(("?", "?", "?", "") if asks else (".", ".", ".", "", ", please."))


def read_out(result: object) -> str:
    """What the model makes of a result."""
    if isinstance(result, dict):
        if "error" in result:
            return f"That failed: {result['error']}."
        if result.get("status") == "ok":
            return "Done."
        return f"{join([f'the {spoken(key)} is {show(value)}' for key, value in result.items()])}.".replace(
            "the", "The", 1
        )
    return f"The result is {show(result)}." if isinstance(result, (int, float)) else str(result)


def spoken(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def show(value: object) -> str:
    """A value inside a sentence; booleans as in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def respond(draw: Draw, tool: Tool) -> tuple[Message, str]:
    """A tool's message, and what the model says to it: mostly an object, sometimes text, a number or a failure."""
    result: object = tool.answer(draw)
    style = draw.random.random()
    if style < 0.06:
        result = {"error": draw.pick(("not found", "no access", "time-out", f"unknown {draw.word()}", draw.phrase()))}
    elif style < 0.14:
        result = draw.pick((draw.integer(), draw.decimal()))
    elif style < 0.22:
        words = draw.phrase().capitalize()
        return {"role": "tool", "content": f"{words}."}, f"{words}."
    return {"role": "tool", "content": json.dumps(result)}, read_out(result)


def finish(draw: Draw, calls: list[tuple[Tool, dict[str, Value]]]) -> list[Message]:
    """The assistant's calls, their results, and the answer that reads them out."""
    responses = [respond(draw, tool) for tool, _ in calls]
    said = {"role": "assistant", "content": "", "tool_calls": [call(tool, arguments) for tool, arguments in calls]}
    answer = " ".join(dict.fromkeys(text for _, text in responses))
    return [said, *(message for message, _ in responses), {"role": "assistant", "content": answer}]


def single(draw: Draw, box: Toolbox) -> list[Message]:
    """One call."""
    tool = draw.pick(box.tools)
    text, arguments = tool.ask(draw)
    return [{"role": "user", "content": ended(draw, text)}, *finish(draw, [(tool, arguments)])]


def parallel(draw: Draw, box: Toolbox) -> list[Message]:
    """Two or three calls in one turn: of one tool with several values, or of several tools."""
    if len(box.tools) == 1 or draw.chance(0.5):
        for tool in draw.some(box.tools, len(box.tools), len(box.tools)):
            if often := tool.ask_often(draw, 2 if draw.chance(0.65) else 3):
                text, several = often
                calls = [(tool, arguments) for arguments in several]
                return [{"role": "user", "content": ended(draw, text)}, *finish(draw, calls)]
    tools = draw.some(box.tools, 2, 2 if draw.chance(0.75) else 3)
    if len(tools) < 2:
        return single(draw, box)
    wishes = [tool.ask(draw) for tool in tools]
    texts = [text if place == 0 else text[0].lower() + text[1:] for place, (text, _) in enumerate(wishes)]
    joined = draw.pick((" and ", ", and ", ", also ", " and also "))
    text = joined.join(texts) if len(texts) == 2 else f"{texts[0]}, {texts[1]} and {texts[2]}"
    calls = [(tool, arguments) for tool, (_, arguments) in zip(tools, wishes, strict=True)]
    return [{"role": "user", "content": ended(draw, text)}, *finish(draw, calls)]


def unfit(draw: Draw, box: Toolbox) -> list[Message]:
    """A wish for a tool that is not there."""
    while True:
        tool = draw_tool(draw, box.tools)
        generic = any(one.theme in ("search", "echo") for one in box.tools)
        same = any(one.theme.split()[-1:] == tool.theme.split()[-1:] for one in box.tools)
        if tool.theme in SUMS:
            continue
        if not generic or (" " in tool.theme and not same):
            break
    text, _ = tool.ask(draw)
    return [{"role": "user", "content": ended(draw, text)}, {"role": "assistant", "content": REFUSAL}]


def chain(draw: Draw, length: int = 3, extra: int = 1) -> tuple[Toolbox, list[Message]]:
    """A wish that takes several calls, each with what the one before has found."""
    tools, wish = coin_chain(draw, length)
    box = Toolbox([*tools])
    for _ in range(draw.random.randint(0, extra)):
        box.tools.append(draw_tool(draw, box.tools))
    box.define(draw)
    start = tools[0].parameters[0]
    found: dict[str, Value] = {start.name: start.value(draw)}
    messages: list[Message] = [{"role": "user", "content": ended(draw, fill(wish, found))}]
    answer = ""
    for tool in tools:
        arguments = {one.name: found[one.name] for one in tool.parameters}
        result = tool.answer(draw)
        found |= {name: value for name, value in result.items() if name.endswith("_id")}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(tool, arguments)]})
        messages.append({"role": "tool", "content": json.dumps(result)})
        answer = read_out(result)
    return box, [*messages, {"role": "assistant", "content": answer}]
