"""What a step of a worker's engine takes, by what it computes: no step is computed, it only takes its time.

A step that only decodes takes what was measured for as many rows, between two measurements in proportion. One with
tokens of prompts takes so long for each of its tokens and each pair of one with an earlier one, and at least as long as
its decoding rows alone. To both comes the reading of the keys and values that decoding rows see beyond those of the
measurement.

An engine is measured alone. What a server was measured to take longer on the same machine, where stages, broker and
front need the cores, too, comes to each request before its first step, and in proportion to each step that decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..config.files import read_bytes
from ..schemas.errors import ConfigurationError

Milliseconds = Annotated[float, Field(gt=0)]


class _Decoded(NamedTuple):
    """A measurement of decoding: `seen` counts the tokens that a row sees."""

    rows: int
    seen: float
    seconds: float


class _Served(NamedTuple):
    """What a server with one worker was measured to take, by clients that ask at once and wait for their answers."""

    rows: int  # so many clients
    prompt: int  # tokens
    answer: int
    first: float  # seconds to the first token
    each: float  # seconds of a token after the first


class StepCosts(BaseModel):
    """`decode_ms` is the time of a decoding step by its number of rows, each of which sees `context` tokens.

    `context_us` is that of each token more that a row sees. A prompt's tokens take `prefill_us` each, and
    `prefill_context_us` for each token that they see. A request is `request_ms` on its way to the engine and back.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    prefill_us: Annotated[float, Field(gt=0)]
    prefill_context_us: Annotated[float, Field(ge=0)] = 0.0
    decode_ms: Annotated[dict[str, Milliseconds], Field(min_length=1)]
    context: Annotated[int, Field(ge=0)] = 0
    context_us: Annotated[float, Field(ge=0)] = 0.0
    request_ms: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("decode_ms")
    @classmethod
    def _by_rows(cls, value: dict[str, float]) -> dict[str, float]:
        if bad := [rows for rows in value if not rows.isdecimal() or not int(rows)]:
            raise ValueError(f"{', '.join(bad)}: name numbers of rows, such as 1, 8 and 32")
        return dict(sorted(value.items(), key=lambda each: int(each[0])))

    @classmethod
    def read(cls, *files: Path) -> Self:
        """From the JSON of `penstock bench engine`; several runs with different --context say what a context costs.

        That of `penstock bench serve` beside it says what the rest of the deployment adds. Raises
        `ConfigurationError`, with a line for each file that cannot be used.
        """
        documents, served, faults = [], list[_Served](), []
        for file in files:
            try:
                document = orjson.loads(read_bytes(file))
                match document["benchmark"]:
                    case "engine":
                        documents.append((document["options"]["context"], document["medians"]))
                    case "serve":
                        served += _levels(document["levels"])
                    case other:
                        raise ValueError(f"its benchmark is {other!r}")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                what = "not the JSON of `penstock bench engine` or `penstock bench serve`"
                faults.append(f"{file}: {what} ({type(error).__name__}: {error})")
        if faults:
            raise ConfigurationError(faults)
        return cls.fit(documents).as_served(served)

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, Mapping[str, Mapping[str, float]]]]) -> Self:
        """From contexts and medians as `penstock bench engine` writes them. Raises `ConfigurationError`."""
        prefills: list[tuple[int, float]] = []  # tokens, and seconds
        decoded: list[_Decoded] = []
        for context, medians in measured:
            for name, one in medians.items():
                kind, _, number = name.partition(" ")
                if kind == "prefill":
                    prefills.append((int(number), int(number) / one["tokens_per_second"]))
                elif kind == "decode":
                    rows = int(number)
                    decoded.append(_Decoded(rows, context + one["passes"] / 2, rows / one["tokens_per_second"]))
        if not prefills or not decoded:
            raise ConfigurationError(["a measurement needs prompts (--prompt) and rows that decode (--batch)"])
        nearest = min(one.seen for one in decoded)
        slope = _slope(decoded)
        at_first: dict[int, list[float]] = {}
        for step in decoded:
            at_first.setdefault(step.rows, []).append(step.seconds - slope * step.rows * (step.seen - nearest))
        decode = {str(rows): max(1e-3, 1000 * median(seconds)) for rows, seconds in sorted(at_first.items())}
        each, pair = _of_prompts(prefills)
        return cls(
            prefill_us=1e6 * each,
            prefill_context_us=1e6 * pair,
            decode_ms=decode,
            context=round(nearest),
            context_us=1e6 * slope,
        )

    def as_served(self, measured: Sequence[_Served]) -> Self:
        """With what a server was measured to take beyond these costs.

        Clients that ask at once for answers of one length go on together: they wait for all their prompts, and then
        each step decodes a row of each. Between two numbers of clients, what is added is in proportion.
        """
        clock, ways, factors = StepClock(self), list[float](), dict[int, list[float]]()
        for one in sorted(measured):
            prompt = clock.seconds(one.prompt, one.prompt**2 / 2, 0, 0)
            if one.rows == 1:
                ways.append(max(0.0, one.first - prompt))
            behind = (one.rows - 1) / 2 * prompt / (one.answer - 1)  # the others' prompts, of the median client
            step = clock.seconds(0, 0, one.rows, round(one.rows * (one.prompt + one.answer / 2)))
            factors.setdefault(one.rows, []).append(max(1.0, (one.each - behind) / step))
        if not factors:
            return self
        known = {rows: median(each) for rows, each in factors.items()}
        decode = {rows: ms * _between(known, int(rows)) for rows, ms in self.decode_ms.items()}
        way = 1000 * median(ways) if ways else self.request_ms
        return self.model_copy(update={"decode_ms": decode, "request_ms": way})


def _levels(levels: Sequence[Mapping[str, Any]]) -> Iterator[_Served]:
    """Of `penstock bench serve`; a level whose answers came in one piece says nothing."""
    for level in levels:
        done, times = level["completed"], (level["ttft_ms"]["p50"], level["tpot_ms"]["p50"])
        if not done or None in times:
            continue
        prompt, answer = (round(level[kind] / done) for kind in ("input_tokens", "output_tokens"))
        if answer > 1:
            yield _Served(level["concurrency"], prompt, answer, *(ms / 1000 for ms in times))


def _between(known: Mapping[int, float], at: int) -> float:
    """In proportion between two known values, and the nearest one outside of them; `known` is in order."""
    (first, value), *_ = known.items()
    inside = min(max(at, first), next(reversed(known)))
    for (left, low), (right, high) in pairwise(known.items()):
        if left <= inside <= right:
            return low + (high - low) * (inside - left) / (right - left)
    return value


def _of_prompts(measured: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds for each token of a prompt, and for each pair of one with an earlier one: by least squares of the
    relative errors."""
    ys = [seconds / tokens for tokens, seconds in measured]
    xs = [tokens / 2 for tokens, _ in measured]
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    pair = max(0.0, joint / spread) if spread > 0 else 0.0
    each = mean_y - pair * mean_x
    return (each, pair) if each > 0 else (mean_y, 0.0)


def _slope(decoded: Sequence[_Decoded]) -> float:
    """Seconds for each token more that a row sees: the median over pairs of equal rows; 0 without any."""
    slopes = []
    for rows in {one.rows for one in decoded}:
        own = sorted(one for one in decoded if one.rows == rows)
        slopes += [(b.seconds - a.seconds) / (rows * (b.seen - a.seen)) for a, b in pairwise(own) if b.seen > a.seen]
    return max(0.0, median(slopes)) if slopes else 0.0


class StepClock:
    """Tells what steps take, in seconds; `speed` divides it, and may change."""

    def __init__(self, costs: StepCosts, speed: float = 1.0) -> None:
        self.speed = speed
        self._per_token, self._per_pair = costs.prefill_us / 1e6, costs.prefill_context_us / 1e6
        self._rows = [int(rows) for rows in costs.decode_ms]
        self._seconds = [ms / 1000 for ms in costs.decode_ms.values()]
        self._context, self._per_seen = costs.context, costs.context_us / 1e6

    def seconds(self, prompt_tokens: int, pairs: float, rows: int, seen: int) -> float:
        """Of a step with so many tokens of prompts, which see `pairs` tokens, and so many decoding rows, which see
        `seen`."""
        taken = self._decode(rows) if rows else 0.0
        if prompt_tokens:
            taken = max(taken, (prompt_tokens + rows) * self._per_token) + pairs * self._per_pair
        return (taken + max(0, seen - rows * self._context) * self._per_seen) / self.speed

    def _decode(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        right = bisect_left(known, rows)
        if right < len(known) and known[right] == rows:
            return seconds[right]
        if right == 0:  # fewer than were measured
            return seconds[0]
        if len(known) == 1:
            return seconds[0] * rows / known[0]
        left = min(right, len(known) - 1) - 1
        slope = (seconds[left + 1] - seconds[left]) / (known[left + 1] - known[left])
        return max(seconds[left], seconds[left] + slope * (rows - known[left]))
