"""The header `Penstock-Hops`: the stages that a request has been to, and when.

Each stage that publishes a request's next message adds itself at the end, without parsing what is there. The form is a
list of RFC 8941, with times in Unix seconds and in milliseconds since then:

    validate;at=1764000000.123456;began=0.4;left=2.1, batch;at=1764000000.127001;began=0.5;left=30.2;worker=w-1;size=4

`at`: the message was stored for the stage. `began`: the stage took it. `left`: the stage had published what follows.
`attempt` counts deliveries of the message, where it was not the first one. The other parameters are the stage's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

PREEMPTED = "preempted"  # no stage: the engine had no memory for the request from `at` on, and resumed it at `left`
_LONGEST = 4096  # characters, above which the oldest hops are dropped


class Hop(NamedTuple):
    """One visit to a stage; times are in Unix seconds, and None where the stage has not left."""

    stage: str
    at: float
    began: float
    left: float | None
    attempt: int
    more: Mapping[str, str]


def append_hop(
    before: str, stage: str, *, at: float, began: float, left: float | None = None, attempt: int = 1, **more: object
) -> str:
    """The header with one more hop. Values in `more` are numbers, or tokens of a subject."""
    at = at or began  # 0 for a message that is not stored
    hop = f"{stage};at={at:.6f};began={(began - at) * 1000:.3f}"
    if left is not None:
        hop += f";left={(left - at) * 1000:.3f}"
    if attempt > 1:
        hop += f";attempt={attempt}"
    for name, value in more.items():
        hop += f";{name}={value}"
    while len(before) > _LONGEST:
        _, _, before = before.partition(", ")
    return f"{before}, {hop}" if before else hop


def parse_hops(header: str | None) -> list[Hop]:
    """The hops of a header, oldest first; what cannot be parsed is left out."""
    return [hop for text in (header or "").split(", ") if (hop := _parsed(text)) is not None]


def worker_of(header: str | None) -> str | None:
    """The last worker that a header of hops names."""
    _, named, rest = (header or "").rpartition(";worker=")
    return re.split("[;,]", rest, maxsplit=1)[0] if named else None


def _parsed(text: str) -> Hop | None:
    stage, *parameters = text.split(";")
    more = {name: value for name, _, value in (each.partition("=") for each in parameters)}
    try:
        at = float(more.pop("at"))
        began = at + float(more.pop("began")) / 1000
        left = at + float(more.pop("left")) / 1000 if "left" in more else None
        return Hop(stage, at, began, left, int(more.pop("attempt", "1")), more)
    except (KeyError, ValueError):
        return None
