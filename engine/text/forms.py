"""Which form a model's text has: chosen from its own chat template, or named in the configuration."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...schemas.errors import ConfigurationError
from ...schemas.jobs import Form
from .tool_formats import REASONING_FORMATS, TOOL_FORMATS, format_of

_FOREIGN = ("<arg_key>", "<tool_sep>")  # formats that only look like one of ours (GLM, Hunyuan)


def choose_form(
    template: str, vocabulary: Container[str], *, tool_format: str = "auto", reasoning_format: str = "auto"
) -> Form:
    """The form of a model with this chat template, as yet without tools.

    Formats go by name, by what the template shows ("auto"), or are switched off ("none"). A model may think without a
    word of it in its template, so its vocabulary counts as well. Raises `ConfigurationError` for unknown names.
    """
    tools = None
    if not any(sign in template for sign in _FOREIGN):
        tools = next((name for name, row in TOOL_FORMATS.items() if all(sign in template for sign in row.signs)), None)
    thoughts = "harmony" if tools == "harmony" else None
    for name, markers in REASONING_FORMATS.items():
        if thoughts is None and any(marker in template or marker in vocabulary for marker in markers):
            thoughts = name if name != "harmony" else None
    return Form(
        tool_format=_named("tool format", tool_format, tools, TOOL_FORMATS),
        reasoning_format=_named("reasoning format", reasoning_format, thoughts, REASONING_FORMATS),
    )


def markers(form: Form) -> tuple[str, ...]:
    """What must stand in the text for it to be read, whether or not these are special tokens of the model."""
    tools = format_of(form)
    thoughts = REASONING_FORMATS.get(form.reasoning_format or "", ())
    return tuple(dict.fromkeys((*thoughts, *(tools.markers if tools else ()))))


def ends_in_thought(prompt: str, form: Form) -> bool:
    """Whether the template has begun a thought that the model is to go on with."""
    begin, _ = REASONING_FORMATS.get(form.reasoning_format or "", ("", ""))
    return bool(begin) and prompt.rstrip().endswith(begin)


def ends_thought(prompt: str, form: Form) -> bool:
    """Whether the template has ended a thought, mostly an empty one, so that the model answers at once."""
    _, end = REASONING_FORMATS.get(form.reasoning_format or "", ("", ""))
    return bool(end) and prompt.rstrip().endswith(end)


def _named(what: str, name: str, found: str | None, known: Iterable[str]) -> str | None:
    if name in ("auto", "none"):
        return found if name == "auto" else None
    if name not in known:
        raise ConfigurationError([f"unknown {what} {name!r}; there are: auto, none, {', '.join(sorted(known))}"])
    return name
