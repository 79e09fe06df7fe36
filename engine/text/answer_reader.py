"""From an engine's deltas to what a client reads: thoughts and tool calls told apart from what is said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...schemas.events import Delta, FinishReason, Token, Usage
from ...schemas.jobs import Form
from .output_parser import OutputParser, Parsed

_PLAIN = Form()


@dataclass
class _Thought:
    """A thought at the beginning of a choice, with whatever stands around it."""

    tokens: int = 0
    is_said: bool = False
    is_over: bool = False


class AnswerReader:
    """Reads one request of `choices` choices, each delta once and in order; the same deltas give the same tokens."""

    def __init__(self, request: str, form: Form | None, choices: int) -> None:
        self._request = request
        self._form = form or _PLAIN
        self._choices = choices
        self._parsers: dict[int, OutputParser] = {}
        self._begun: set[int] = set()  # choices of which something was read; set by `_echo`
        self._thoughts: dict[int, _Thought] = {}  # by choice; set by `_count`
        self._is_read = self._form.tool_format is not None or self._form.reasoning_format is not None

    def read(self, delta: Delta) -> Token:
        """The token event that `delta` means."""
        if self._form.prompt_alone:
            delta = _without_answer(delta)
        said = self._parse(delta) if self._is_read else Parsed(self._echo(delta.choice) + delta.text, "", ())
        token = Token(
            request=self._request,
            choice=delta.choice,
            index=delta.index,
            token_ids=delta.token_ids,
            text=said.text,
            logprobs=delta.logprobs,
            finish_reason=self.reason(delta.choice, delta.finish_reason),
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
            stop_reason=delta.stop_reason,
            prompt_logprobs=delta.prompt_logprobs,
        )
        if self._form.reasoning_format is not None:
            self._count(token)
        return token

    def reason(self, choice: int, reason: FinishReason | None) -> FinishReason | None:
        """Why a choice ended, to its client: with its tool calls, unless they were cut or dictated."""
        parser = self._parsers.get(choice)
        is_called = reason == "stop" and parser is not None and parser.called and self._form.choice != "named"
        return "tool_calls" if is_called else reason

    def usage(self, usage: Usage) -> Usage:
        if self._form.prompt_alone:
            return replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        tokens = sum(thought.tokens for thought in self._thoughts.values() if thought.is_said)
        return replace(usage, reasoning_tokens=tokens) if tokens else usage

    def _parse(self, delta: Delta) -> Parsed:
        parser = self._parsers.get(delta.choice)
        if parser is None:
            parser = self._parsers[delta.choice] = OutputParser(self._form, self._request, delta.choice)
        said = parser.push(delta.text)
        if delta.finish_reason is None:
            return said
        rest = parser.finish()
        return Parsed(said.text + rest.text, said.reasoning + rest.reasoning, said.tool_calls + rest.tool_calls)

    def _count(self, token: Token) -> None:
        """Count the tokens up to the end of the choice's thought, however they came: this end ends a delta. In one that
        goes on behind it, they are a share by characters."""
        thought = self._thoughts.setdefault(token.choice, _Thought())
        if thought.is_over:
            return
        is_answer = bool(token.text or token.tool_calls)
        thought.tokens += token.num_thought_tokens if is_answer else len(token.token_ids)
        thought.is_said = thought.is_said or bool(token.reasoning)
        thought.is_over = is_answer or (thought.is_said and not self._parsers[token.choice].thinking)

    def _echo(self, choice: int) -> str:
        """The prompt's text, the first time that a choice says something."""
        if not self._form.echo or choice in self._begun:
            return ""
        self._begun.add(choice)
        return self._form.echo[choice * len(self._form.echo) // self._choices]


def _without_answer(delta: Delta) -> Delta:
    """The one token that was made has its place in the stream, and nothing else."""
    logprobs = delta.logprobs and ()
    reason: FinishReason | None = "length" if delta.finish_reason in ("stop", "stop_sequence") else delta.finish_reason
    return replace(delta, text="", logprobs=logprobs, finish_reason=reason, stop_reason=None)
