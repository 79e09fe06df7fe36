"""Which keys of a bucket a prefix stands for."""

from __future__ import annotations

import re
from collections.abc import Callable


def begins(prefix: str) -> Callable[[str], object]:
    """Whether a key begins with `prefix`, in which a token that is `*` stands for any."""
    if "*" not in prefix:
        return lambda key: key.startswith(prefix)
    return re.compile(re.escape(prefix).replace(r"\*", "[^.]+")).match
