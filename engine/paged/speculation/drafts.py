"""Guesses tokens for decoding steps to check: a step may then yield several tokens of one choice.

A guess changes no bit of any answer. The model computes the guessed tokens behind the last one, each as one more row of
the step, the backend draws each position as ever, keyed by seed, choice and index, and keeps a guessed token's keys and
values only if the draw before it was that token. So a runner whose rows depend on the rows beside them must not guess.

What the grammar leaves no choice about is guessed first, then what followed the same tokens earlier in the prompt or
the answer. Nothing comes from other requests. How many tokens are guessed depends on how often such guesses were right,
also where none was computed, and on what a further row costs: none at all where they would not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import log
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ...choice import Choice
from ...cpu.library import Kernels
from ...output import SpeculationStats
from ...sampler import DeviceTokens, HostTokens, choose
from ...text.tokenizer_port import TokenizerLike
from ..packing import Computed, Segment
from ..scheduling.rows import Row, Scheduled
from ..segments import to_segment
from .repeats import LONG, Repeats


class Draws(NamedTuple):
    """The next tokens of rows, drawn together."""

    rows: list[Scheduled]
    chosen: DeviceTokens | HostTokens


Forward = Callable[[Sequence[Segment]], Computed]
Encode = Callable[[str], Sequence[int]]

_FORCED, _NEW, _STEADY, _LONG_RUN = range(4)  # the kinds of guesses, differently reliable
_RATES = (0.9, 0.15, 0.4, 0.75)  # of right guesses, before any is seen
_OWN, _ALL = 0.15, 0.01  # the weight of a guess in the rates of its choice, and in those that new choices begin with
_SURE = 0.98  # no rate is taken to be higher
_MARGIN = 1.25  # a further row must be worth so much more than it costs
_MOST_FORCED = 256  # characters
_ROW_COST, _QUANTIZED_ROW_COST = 0.06, 0.17  # of a step's row, in what its first one takes to read the weights


def row_cost(is_quantized: bool) -> float:
    """What a further row of a step costs, in what all of them share."""
    return _QUANTIZED_ROW_COST if is_quantized else _ROW_COST


class Guesser:
    """Guesses for one choice, and learns from how the answer goes on."""

    __slots__ = ("_choice", "_encode", "_guessed", "_kind", "_rates", "_repeats", "_seen", "_shared")

    def __init__(self, choice: Choice, rates: list[float], encode: Encode) -> None:
        """`rates`, by kind, are those of all choices."""
        self._choice, self._encode = choice, encode
        self._rates, self._shared = rates.copy(), rates
        self._repeats = Repeats.of(choice.prompt)
        self._seen = 0  # tokens of the answer that `_repeats` has
        self._kind, self._guessed = _NEW, list[int]()  # the newest guess; set by `guess`

    def guess(self, count: int, least_rate: float) -> list[int]:
        """Up to `count` tokens, as many as are all right more often than `least_rate`."""
        self._learn()
        if count <= 0:
            return []
        repeats, matcher = self._repeats, self._choice.matcher
        found = repeats.propose(count) if repeats.run else []
        kind = _NEW if repeats.run < LONG else _STEADY if repeats.run < 2 * LONG else _LONG_RUN
        if matcher is not None and (forced := [*self._encode(matcher.forced(_MOST_FORCED)[:_MOST_FORCED])][:count]):
            kind = _FORCED
            if found[: len(forced)] != forced:
                found = forced
        if not found:
            return found
        rate = min(self._rates[kind], _SURE)
        worth = int(log(least_rate) / log(rate)) if rate > least_rate else 0
        # Where none is worth its row, the first is still compared with the answer: that costs nothing.
        self._kind, self._guessed = kind, found[: max(worth, 1)]
        return found[:worth]

    def _learn(self) -> None:
        new = self._choice.tokens[self._seen :]
        self._seen += len(new)
        self._repeats.extend(new)
        kind, own, shared = self._kind, self._rates, self._shared
        for token, guessed in zip(new, self._guessed, strict=False):
            is_right = token == guessed
            own[kind] += _OWN * (is_right - own[kind])
            shared[kind] += _ALL * (is_right - shared[kind])
            if not is_right:
                break
        self._guessed = []


class Speculation:
    """Guesses for the steps of one backend, and counts them."""

    def __init__(self, tokenizer: TokenizerLike, depth: int, row_cost: float) -> None:
        """At most `depth` tokens a choice and step; each row of a step adds `row_cost` times what all share."""
        self._depth, self._row_cost = depth, row_cost
        self._rates = [*_RATES]
        self._guessers = WeakKeyDictionary[Row, Guesser]()  # a choice that has ended must not be kept
        self._encode: Encode = lru_cache(maxsize=4096)(lambda text: tuple(tokenizer.encode(text, False)))
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = 0

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, self._num_accepted_tokens)

    def guess(
        self, scheduled: Sequence[Scheduled], room: int, reserve: Callable[[Row, int], int]
    ) -> dict[Row, list[int]]:
        """The rows for which there are guesses; none in a step that computes more than one token of a row.

        `room` is how many more tokens the step may have; `reserve` takes blocks for a row's, and returns for how many.
        """
        if any(one.num_tokens > 1 or not one.samples or not one.row.choice.is_scored for one in scheduled):
            return {}
        if any(one.row.choice.layout and one.row.num_computed < len(one.row.choice.prompt) for one in scheduled):
            return {}  # the last token of a prompt may show an image
        cost = self._row_cost * len(scheduled)
        least_rate = min(_MARGIN * cost / (1 + cost), _SURE)
        found: dict[Row, list[int]] = {}
        for row, _, _ in scheduled:
            guesser = self._guessers.get(row)
            if guesser is None:
                guesser = self._guessers[row] = Guesser(row.choice, self._rates, self._encode)
            guessed = guesser.guess(min(self._depth, room, row.choice.num_left - 1), least_rate)
            if guessed and (guessed := guessed[: reserve(row, len(guessed))]):
                found[row] = guessed
                room -= len(guessed)
        return found

    def check(
        self,
        scheduled: Sequence[Scheduled],
        guesses: Mapping[Row, list[int]],
        forward: Forward,
        kernels: Kernels | None,
    ) -> Iterator[Draws]:
        """Compute a step with guesses, and draw from it as several steps would.

        Yields rows and their next tokens; before it asks for more, the caller commits the rows' next token each, and
        appends what was drawn. The rows go on whose token had been guessed.
        """
        segments: list[Segment] = []
        firsts: dict[Row, int] = {}
        for one in scheduled:
            segment, firsts[one.row] = to_segment(one, None), len(segments)
            each = [segment.tokens, *([token] for token in guesses.get(one.row, ()))]
            segments += [segment._replace(tokens=ids, start=segment.start + i) for i, ids in enumerate(each)]
        logits, sampled, best = forward(segments)
        place = {segment: index for index, segment in enumerate(sampled)}
        going, depth = [*scheduled], 0
        while going:
            at = [place[firsts[one.row] + depth] for one in going]
            try:
                chosen = choose(
                    logits[at[0] : at[-1] + 1] if at == [*range(at[0], at[-1] + 1)] else logits[at],
                    [one.row.choice for one in going],
                    kernels,
                    [best[index] for index in at] if isinstance(best, Sequence) else None,
                )
            except Exception:
                if not depth:
                    raise
                return  # the next step draws at the same index, and finds out whose fault it is
            yield Draws(going, chosen)
            going = [one for one in going if _is_right(one.row.choice, guesses.get(one.row, ()), depth)]
            depth += 1
            self._num_accepted_tokens += len(going)
        self._num_drafts += len(guesses)
        self._num_draft_tokens += sum(map(len, guesses.values()))


def _is_right(choice: Choice, guessed: Sequence[int], depth: int) -> bool:
    return choice.finish is None and depth < len(guessed) and choice.tokens[-1] == guessed[depth]
