"""Shows an answer while it arrives: as Markdown on a terminal, as plain text elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.spinner import Spinner
from rich.text import Text

_control = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # control characters of terminals


@dataclass
class AnswerView:
    """The part of an answer that has arrived, set by `take`, and how much of it is printed, set by `settled`."""

    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    reason: str | None = None
    tokens: int = 0
    first: float = 0.0  # time of the first chunk; 0 before
    printed_text: int = 0  # characters of `text`
    printed_reasoning: int = 0  # characters of `reasoning`

    def take(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of the stream."""
        if usage := chunk.get("usage"):
            self.tokens = usage["completion_tokens"]
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            self.text += delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
            self.reason = choice.get("finish_reason") or self.reason
            for piece in delta.get("tool_calls") or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = self.calls.setdefault(piece.get("index", 0), empty)
                call["id"] += piece.get("id") or ""
                for name, text in piece.get("function", {}).items():
                    call["function"][name] += text or ""
        self.first = self.first or time.monotonic()

    def turn(self) -> dict[str, Any]:
        """The assistant's message, for the rest of the conversation."""
        calls = {"tool_calls": list(self.calls.values())} if self.calls else {}
        return {"role": "assistant", "content": self.text, **calls}

    def settled(self) -> Iterator[RenderableType]:
        """What can be printed for good: complete paragraphs, and all thoughts once the answer itself begins."""
        thoughts, text = self.reasoning[self.printed_reasoning :], self.text[self.printed_text :]
        if not text:
            thoughts = thoughts.rpartition("\n\n")[0]
        text = text.rpartition("\n\n")[0]
        text = text if text.count("```") % 2 == 0 else ""
        self.printed_reasoning += len(thoughts)
        self.printed_text += len(text)
        return _rendered(thoughts, text)

    def rest(self) -> Iterator[RenderableType]:
        """The part that is not printed yet."""
        yield from _rendered(self.reasoning[self.printed_reasoning :], self.text[self.printed_text :])
        for call in self.calls.values():
            yield Text("→ {name}({arguments})".format(**call["function"]).translate(_control), "cyan")

    def summary(self) -> str:
        """The speed, if the server counts tokens, and the reason of an early end."""
        span = time.monotonic() - self.first
        parts = [f"{self.tokens} tokens, {(self.tokens - 1) / span:.1f} tok/s"] if self.tokens > 1 else []
        if self.reason not in ("stop", "tool_calls"):
            parts.append(f"ended by {self.reason}" if self.reason else "stopped")
        return ", ".join(parts)


def show(stream: Iterator[dict[str, Any] | str], answer: AnswerView, console: Console) -> None:
    """Take the stream into `answer`, and show it as it comes. Raises what the stream does."""
    if not console.is_terminal:
        for piece in stream:
            if isinstance(piece, dict):
                shown = len(answer.text)
                answer.take(piece)
                print(answer.text[shown:], end="", flush=True)
        print(end="" if answer.text.endswith("\n") else "\n")
        return
    spinner = Spinner("dots")
    live = Live(get_renderable=lambda: Group(*answer.rest(), spinner), console=console, transient=True)
    try:
        with live:
            for piece in stream:
                spinner.text = Text(piece if isinstance(piece, str) else "", "dim")
                if isinstance(piece, dict):
                    answer.take(piece)
                    for part in answer.settled():
                        console.print(part)
                        console.print()
    finally:
        for part in answer.rest():
            console.print(part)
        if answer.first:
            console.print(answer.summary(), style="dim", highlight=False)


def _rendered(thoughts: str, text: str) -> Iterator[RenderableType]:
    if thoughts := thoughts.strip():
        yield Text(thoughts.translate(_control), "dim italic")
    if text := text.strip("\n"):
        yield Markdown(text.translate(_control))
