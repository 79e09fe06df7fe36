"""Connects the scheduler to the runner: turns rows into segments, and the logits of prompts into scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from ..sampler import score
from .packing import Computed, Segment
from .scheduling.rows import Row, Scheduled


def to_segment(scheduled: Scheduled, pending: int | None) -> Segment:
    """The segment of a row; `pending` is the index of its token in the last step, if the host has not read that."""
    row, count, samples = scheduled
    tokens = _tokens(row, count) if pending is None else [~pending]
    choice, state = row.choice, row.state.use(row.num_computed)
    segment = Segment(tokens, row.num_computed, row.tables.blocks, samples, not choice.is_scored, choice.adapter, state)
    if choice.layout is None:
        return segment
    return segment._replace(**choice.layout.place(segment.start, segment.end)._asdict())


def split_scores(scheduled: Sequence[Scheduled], computed: Computed) -> Computed:
    """Score prompts with their logits; returns the others, from which to choose tokens."""
    if all(one.row.choice.is_scored for one in scheduled):
        return computed
    kept: list[int] = []
    logits, sampled, best = computed
    for index, rows in groupby(range(len(sampled)), key=sampled.__getitem__):
        first, *others = rows
        row, _, samples = scheduled[index]
        choice, start = row.choice, row.num_computed + 1
        if not choice.is_scored and (tokens := choice.prompt[start : start + 1 + len(others)]):
            count = choice.request.params.prompt_logprobs or 0
            choice.score(start, score(logits[first : first + len(tokens)], tokens, count))
        if samples:
            kept.append(others[-1] if others else first)
    if best is not None:
        best = best[kept] if isinstance(best, Tensor) else [best[row] for row in kept]
    return Computed(logits[kept], [sampled[row] for row in kept], best)


def _tokens(row: Row, count: int) -> Sequence[int]:
    """The next `count` tokens that are not computed."""
    prompt, tokens = row.choice.prompt, row.choice.tokens
    start = row.num_computed - len(prompt)
    if start >= 0:
        return tokens[start : start + count]
    return [*prompt[row.num_computed : row.num_computed + count], *tokens[: max(start + count, 0)]]
