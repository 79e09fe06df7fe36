"""What callers of the library may pass as prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

Prompt = str | Sequence[int]


def is_list(prompts: Prompt | list[str] | list[list[int]]) -> bool:
    """Whether `prompts` is a list of prompts; a list of token ids is a single one."""
    return isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int))


def as_list(prompts: Prompt | list[str] | list[list[int]]) -> list[Prompt]:
    return list(cast("list[Prompt]", prompts)) if is_list(prompts) else [cast("Prompt", prompts)]
