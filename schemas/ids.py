"""Ids that tell when they were made, so that a list's page can begin behind an entry that has been deleted since."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence

_DIGITS = re.compile(r"[0-9a-f]{12}7[0-9a-f]{19}")
_BITS_OF_TIME, _BITS_BEHIND = 12, 62  # fractions of a millisecond, and what makes it unique


def new_id(prefix: str) -> str:
    """The prefix and 32 hexadecimal digits: a UUID of version 7 (RFC 9562, section 5.7, method 3), without hyphens."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << _BITS_OF_TIME) // 1_000_000
    behind = 0b10 << _BITS_BEHIND | secrets.randbits(_BITS_BEHIND)
    return f"{prefix}{milliseconds & 0xFFFF_FFFF_FFFF:012x}7{fraction:03x}{behind:016x}"


def index_behind(ids: Sequence[str], id: str, *, newest_first: bool) -> int | None:
    """Where the entries begin that follow `id` in a list, or would if it were still there; None if nothing tells.

    Where `id` is gone, that is behind the last one known to come before it: some ids do not tell, as those of an
    earlier release, and a client had better see an entry twice than never.
    """
    if id in ids:
        return ids.index(id) + 1
    if not (made := _made(id)):
        return None
    before = [at for at, each in enumerate(map(_made, ids)) if each and (each > made if newest_first else each < made)]
    return before[-1] + 1 if before else 0


def _made(id: str) -> str:
    """What sorts as the times do at which ids were made; empty if the id does not tell."""
    digits = re.split("[_-]", id)[-1]
    return digits if _DIGITS.fullmatch(digits) else ""
