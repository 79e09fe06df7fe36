"""From logits to tokens, one row a sequence.

Order: log-probabilities of the raw distribution → logit bias, min_tokens → penalties (repetition over prompt and
output; frequency and presence over output) → greedy, or temperature → min_p → top-k → top-p → draw.
Nothing here keeps state: a draw depends on (seed, choice, index) alone, never on batch mates, device or torch's own
generators, so another worker can go on where one stopped.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence as Rows
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from ..schemas.errors import GenerationFailed
from .sequence import ChosenLogprob, Sequence


class Sampled(NamedTuple):
    """`logprob` where the request asked for it."""

    token: int
    logprob: ChosenLogprob | None


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) that is a pure function of its arguments: 53 bits of BLAKE2b of their little-endian bytes."""
    digest = blake2b(struct.pack("<qqq", seed, choice, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Rows[Sequence]) -> list[Sampled | GenerationFailed]:
    """Choose each row's next token. `logits` is [B, V] in any floating type and stays as it is.

    A row without a possible token, or whose logits are not numbers, gets an error; the others do not notice.
    """
    raw = logits.float()
    scores = raw.clone()  # [B, V]
    for row, sequence in enumerate(rows):
        _edit(scores[row], sequence)
    best, tokens = scores.max(dim=-1)  # [B], [B]
    drawn = [row for row, sequence in enumerate(rows) if sequence.request.params.temperature > 0]
    if drawn:
        where = torch.tensor(drawn, device=scores.device)
        tokens[where] = _draw(scores[where], [rows[row] for row in drawn])
    usable = torch.isfinite(best).tolist()
    chosen: list[int] = tokens.tolist()
    logprobs = _logprobs(raw, chosen, rows)
    return [
        Sampled(chosen[row], logprobs[row])
        if usable[row]
        else GenerationFailed("no token can be chosen: everything is forbidden, or the model's logits are not numbers")
        for row in range(len(rows))
    ]


def _edit(scores: Tensor, sequence: Sequence) -> None:
    """Apply bias, min_tokens and penalties to one row, in place. `scores` is [V]."""
    params = sequence.request.params
    if params.logit_bias:
        scores[list(params.logit_bias)] += scores.new_tensor(list(params.logit_bias.values()))
    if sequence.index < params.min_tokens and sequence.end_token_ids:
        scores[list(sequence.end_token_ids)] = -torch.inf
    if params.repetition_penalty != 1.0:  # https://arxiv.org/abs/1909.05858, section 4.1
        seen = list({*sequence.prompt, *sequence.tokens})
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and sequence.tokens:
        counts = Counter(sequence.tokens)
        times = scores.new_tensor(list(counts.values()))
        scores[list(counts)] -= params.frequency_penalty * times + params.presence_penalty


def _draw(scores: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Draw one token a row, [R, V] → [R], after temperature, min_p, top-k and top-p."""
    params = [sequence.request.params for sequence in rows]

    def column(values: list[float]) -> Tensor:
        return scores.new_tensor(values)[:, None]  # [R, 1]

    scores = scores / column([p.temperature for p in params])
    if any(p.min_p for p in params):
        floor = scores.amax(-1, keepdim=True) + column([p.min_p for p in params]).log()
        scores = scores.masked_fill(scores < floor, -torch.inf)
    ks = [min(p.top_k or 0, scores.shape[-1]) for p in params]  # 0: no limit
    if any(ks):
        limits = torch.tensor(ks, device=scores.device)[:, None]
        least = scores.topk(max(ks)).values.gather(-1, (limits - 1).clamp(min=0))
        scores = scores.masked_fill((scores < least) & (limits > 0), -torch.inf)
    if any(p.top_p < 1 for p in params):
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # mass in front of each token: 0 for the first
        outside = before >= column([p.top_p for p in params])
        scores = scores.masked_fill(torch.empty_like(outside).scatter(-1, order, outside), -torch.inf)
    return _invert(scores.softmax(-1), [uniform(s.request.seed, s.choice, s.index) for s in rows])


def _invert(probabilities: Tensor, uniforms: list[float]) -> Tensor:
    """The token under each row's uniform number on its cumulative distribution, [R, V] → [R]."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    reached = cumulative.new_tensor(uniforms)[:, None] * total
    # Rounding may carry the product up to the total: then the last token that has any probability is meant.
    last = (cumulative < total).sum(-1)
    return torch.minimum((cumulative <= reached).sum(-1), last)


def _logprobs(raw: Tensor, chosen: list[int], rows: Rows[Sequence]) -> list[ChosenLogprob | None]:
    wanted = [row for row, sequence in enumerate(rows) if sequence.request.params.logprobs is not None]
    result: list[ChosenLogprob | None] = [None] * len(rows)
    if not wanted:
        return result
    logprobs = raw[wanted].log_softmax(-1)  # [W, V]
    most = max(rows[row].request.params.logprobs or 0 for row in wanted)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(-1, torch.tensor([chosen[row] for row in wanted], device=raw.device)[:, None])[:, 0].tolist()
    for row, logprob, top_ids, top_values in zip(wanted, own, ids.tolist(), values.tolist(), strict=True):
        count = rows[row].request.params.logprobs or 0
        result[row] = ChosenLogprob(logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
    return result
