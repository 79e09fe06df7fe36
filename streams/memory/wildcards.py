"""NATS subject patterns: `*` stands for one token, a final `>` for one or more."""

from __future__ import annotations

import re


def matcher(pattern: str) -> re.Pattern[str]:
    """An expression whose `fullmatch` accepts the subjects of `pattern`."""
    tokens = (r"[^.]+" if token == "*" else r".+" if token == ">" else re.escape(token) for token in pattern.split("."))
    return re.compile(r"\.".join(tokens))


def overlap(one: str, other: str) -> bool:
    """Whether some subject matches both patterns."""
    first, second = one.split("."), other.split(".")
    for a, b in zip(first, second, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(first) == len(second)
