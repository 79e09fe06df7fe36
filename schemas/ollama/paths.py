"""What Ollama's requests call that which a refusal of the request behind them calls by its name in OpenAI's."""

from __future__ import annotations

import re

from .options import ACT, called_here

_IMAGE = re.compile(r"(messages\[[0-9]+\])\.content\[([0-9]+)\]\.image_url(\.url)?")
_FORMAT = re.compile(r"response_format(\.json_schema(\.schema)?)?")
_DELTA = re.compile("reasoning_effort|chat_template_kwargs")


def in_ollama(fault: str, param: str | None, path: str) -> str:
    """The text of a fault, with names of the body of `path`; `param` is what it names there."""
    if not param or param not in fault:
        return fault
    if (image := _IMAGE.match(param)) is not None:
        own = f"{image[1]}.images[{image[2]}]" if path == "/api/chat" else f"images[{image[2]}]"
        return fault.replace(image[0], own, 1)
    if (form := _FORMAT.match(param)) is not None:
        return fault.replace(form[0], "format", 1)
    if (effort := _DELTA.match(param)) is not None:
        return fault.replace(effort[0], "think", 1)
    first = re.split(r"[.\[]", param, maxsplit=1)[0]
    if first == "input" and path == "/api/embeddings":
        return fault.replace(first, "prompt", 1)
    option = called_here(first)
    return fault.replace(first, f"options.{option}", 1) if option in ACT else fault
