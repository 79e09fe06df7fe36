"""Between the scheduler and the runner: rows as segments, and the logits of prompts as their scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from ..sampler import score
from .packing import Segment
from .rows import Row, Scheduled


def to_segment(scheduled: Scheduled, place: int | None) -> Segment:
    """`place` is that of a pending token among those chosen last."""
    row, count, samples = scheduled
    tokens = _tokens(row, count) if place is None else [~place]
    return Segment(tokens, row.num_computed, row.tables.blocks, samples, not row.choice.is_scored)


def split_scores(
    scheduled: Sequence[Scheduled], logits: Tensor, sampled: Sequence[int]
) -> tuple[Tensor, Sequence[int]]:
    """Hand prompts their log-probabilities; the logits that are left are those that tokens are chosen from."""
    kept: list[int] = []
    for index, places in groupby(range(len(sampled)), key=sampled.__getitem__):
        first, *others = places
        row, _, samples = scheduled[index]
        choice, start = row.choice, row.num_computed + 1
        if not choice.is_scored and (tokens := choice.prompt[start : start + 1 + len(others)]):
            count = choice.request.params.logprobs or 0
            choice.score(start, score(logits[first : first + len(tokens)], tokens, count))
        if samples:
            kept.append(others[-1] if others else first)
    return logits[kept], [sampled[place] for place in kept]


def _tokens(row: Row, count: int) -> Sequence[int]:
    """`count` tokens from the first that is not computed."""
    prompt, tokens = row.choice.prompt, row.choice.tokens
    start = row.num_computed - len(prompt)
    if start >= 0:
        return tokens[start : start + count]
    return [*prompt[row.num_computed : row.num_computed + count], *tokens[: max(start + count, 0)]]
