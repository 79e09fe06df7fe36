"""Whether a model is to think before it answers: the switch of its chat template, and what the prompt shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...schemas.errors import InvalidRequest
from ...schemas.jobs import Form
from ..text.forms import ends_in_thought, ends_thought

_SWITCHES = ("enable_thinking", "thinking")  # names of the switch in templates


def switch_thinking(options: dict[str, Any], effort: str, template: str, form: Form) -> None:
    """Add the template's variables for a `reasoning_effort`, where `options` does not have them.

    Raises `InvalidRequest` for a model that does not think."""
    switch = _switch(template)
    if effort == "none":
        options.setdefault(switch or "enable_thinking", False)
    elif "reasoning_effort" in template:
        options.setdefault("reasoning_effort", effort)
    elif switch:
        options.setdefault(switch, True)
    elif form.reasoning_format is None:
        raise InvalidRequest(
            "This model does not reason; leave reasoning_effort out.",
            code="unsupported_parameter",
            param="reasoning_effort",
        )


def may_think(
    prompt: str, form: Form, options: Mapping[str, Any], template: str, render: Callable[[dict[str, Any]], str]
) -> bool:
    """Whether an answer to the prompt, rendered with `options`, may have a thought.

    Not if the client or the template has switched thinking off. A template that has is one that would begin the thought
    itself if thinking were on; `render` writes the prompt with other options.
    """
    if form.thinking:
        return True
    if ends_thought(prompt, form) or any(options.get(name) is False for name in _SWITCHES):
        return False
    switch = _switch(template)
    return switch is None or switch in options or not ends_in_thought(render({**options, switch: True}), form)


def _switch(template: str) -> str | None:
    return next((name for name in _SWITCHES if name in template), None)
