"""Turns logits into tokens, one row a choice.

Order: log-probabilities of the raw distribution → logit bias, grammar, min_tokens → penalties (repetition over
prompt and output; frequency and presence over output) → logits processors of plug-ins → greedy, or temperature → min_p
→ top-k → top-p → draw.
The sampler keeps no state: a draw depends only on (seed, choice, index) and the row's logits, never on the rest of the
batch or on torch's generators, so another worker can resume where one stopped.

Within floating point: on a CPU a row gives the same bits alone and in any batch (softmax by row, sums of blocks,
running sums, maxima and sorts preserve that; the sum of a whole row would depend on the batch's shape); on a GPU the
last bit may depend on the shape. A draw inverts the exact distribution except for uniform numbers within 1e-6 of a
boundary; a nucleus is one token off only where its mass is that close to top_p. Of equal logits the lowest id wins.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from ..schemas.errors import GenerationFailed
from ..schemas.params import MAX_TOP_LOGPROBS, GenerationParams
from .choice import Choice, ChosenLogprob
from .cpu.library import DrawParams, Kernels
from .grammar.matcher import Matcher
from .transfer import Download, upload

Best = Sequence[int] | Tensor | None  # tokens on the host, or still on a device
_BLOCK = 64  # columns summed, or searched, as one
_BITS = torch.arange(1 << 16)[:, None] >> torch.arange(16) & 1  # the bits of every 16-bit word of a mask
_ADDENDS = torch.where(_BITS == 1, 0.0, -torch.inf)
_FEW = 16  # the most rows for which numpy's argmax is faster than torch's maxima by block
_COLDEST = 1e-30  # a lower temperature would overflow; sampling is greedy long before
_SCORED = 64  # rows of logits scored together
_PREFIX = 256  # the largest tokens, searched for a nucleus before sorting all (not on a GPU: its answer costs more)


class Sampled(NamedTuple):
    """A chosen token; `logprob` only if the request asked for it."""

    token: int
    logprob: ChosenLogprob | None


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1), a pure function of its arguments: 53 bits of the BLAKE2b of their little-endian bytes."""
    digest = blake2b(struct.pack("<qqq", seed, choice, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class DeviceTokens:
    """Every row's next token: `tokens` [B] on the logits' device, -1 for none, and a copy under way to the host."""

    def __init__(
        self,
        tokens: Tensor,
        num_logprobs: dict[int, int],
        logprobs: tuple[Tensor, ...],
        faults: dict[int, GenerationFailed],
    ) -> None:
        """`logprobs` of the rows in `num_logprobs`: those of the tokens [R], the best ids [R, N] and theirs [R, N].

        `faults` are those of rows whose plug-ins have failed.
        """
        self.tokens = tokens
        self._faults = faults
        self._num_logprobs = num_logprobs
        self._download = Download(tokens, *logprobs)

    def read(self) -> list[Sampled | GenerationFailed]:
        """Wait for the copy, but not for anything launched later.

        A row without a possible token, or whose logits are NaN, gets an error; the other rows are not affected.
        """
        tokens, *logprobs = self._download.read()
        columns = zip(self._num_logprobs.items(), *logprobs, strict=True) if logprobs else ()
        found = {row: ChosenLogprob(own, (*zip(ids[:n], top[:n], strict=True),)) for (row, n), own, ids, top in columns}
        return [self._faults.get(row) or _result(token, found.get(row)) for row, token in enumerate(tokens)]


class HostTokens:
    """Like `DeviceTokens`, for tokens that are on the host already; saves torch's 0.1 ms a step."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    @property
    def tokens(self) -> Tensor:
        return torch.tensor(self._tokens)

    def read(self) -> list[Sampled | GenerationFailed]:
        return [_result(token, None) for token in self._tokens]


def _result(token: int, logprob: ChosenLogprob | None) -> Sampled | GenerationFailed:
    if token >= 0:
        return Sampled(token, logprob)
    return GenerationFailed(
        "no token can be chosen: the request's constraints forbid every token, or the model's logits are not finite; "
        "loosen logit_bias, min_tokens or the grammar, or serve the model with dtype float32"
    )


def sample(logits: Tensor, rows: Sequence[Choice], kernels: Kernels | None = None) -> list[Sampled | GenerationFailed]:
    """`choose`, then read the result at once."""
    return choose(logits, rows, kernels).read()


def choose(
    logits: Tensor, rows: Sequence[Choice], kernels: Kernels | None = None, best: Best = None
) -> DeviceTokens | HostTokens:
    """Choose each row's token at its `index` without waiting for a device; `logits` [B, V] are not changed.

    `kernels`, if given, draw from logits on a CPU. `best` [B], if known, are the results of `best_tokens`.
    """
    if kernels is not None and best is not None and not any(_asks_more(choice) for choice in rows):
        chosen = list(best)
        drawn = [row for row, choice in enumerate(rows) if choice.request.params.temperature]
        for row, token in zip(drawn, kernels.draw(logits, _draw_params(rows, drawn)) if drawn else (), strict=True):
            chosen[row] = token
        return HostTokens(chosen)
    logits = logits.cpu() if logits.device.type == "mps" else logits  # mps has no float64
    kinds = [2 if choice.request.params.temperature else int(_is_edited(choice)) for choice in rows]
    plain, edited, drawn = ([row for row, kind in enumerate(kinds) if kind == one] for one in range(3))
    own = slice(None) if len(plain) == len(rows) else _put(plain, logits)
    parts = [best[own] if isinstance(best, Tensor) else best_tokens(logits[own])] if plain else []
    parts += [best_tokens(_scores(logits, edited, rows), _BLOCK)] if edited else []
    parts += [_draw(_scores(logits, drawn, rows), [rows[row] for row in drawn], kernels)] if drawn else []
    order = _put(np.argsort(plain + edited + drawn), logits) if len(parts) != 1 else None
    tokens = parts[0] if order is None else torch.cat([*parts, _put([], logits)])[order]
    counts = {row: s.request.params.logprobs for row, s in enumerate(rows) if s.request.params.logprobs is not None}
    faults = {row: s.plug_ins.fault for row, s in enumerate(rows) if s.plug_ins is not None and s.plug_ins.fault}
    return DeviceTokens(tokens, counts, _logprobs(logits, tokens, list(counts)) if counts else (), faults)


def score(logits: Tensor, tokens: Sequence[int], count: int) -> list[ChosenLogprob]:
    """The log-probability and rank of each of `tokens`, one for each row of the logits, and the `count` best."""
    scores: list[ChosenLogprob] = []
    given = _put(tokens, logits)
    for first in range(0, len(tokens), _SCORED):
        rows = list(range(first, min(first + _SCORED, len(tokens))))
        part = logits[first : rows[-1] + 1]
        ranks = (part > part.gather(-1, given[rows][:, None])).sum(-1) + 1
        columns = *_logprobs(logits, given, rows), ranks
        for own, ids, top, rank in zip(*(column.tolist() for column in columns), strict=True):
            scores.append(ChosenLogprob(own, tuple(zip(ids[:count], top[:count], strict=True)), rank))
    return scores


def _asks_more(choice: Choice) -> bool:
    """Whether a choice needs more than an argmax or a draw from the logits as they are."""
    return choice.request.params.logprobs is not None or _is_edited(choice)


def needs_tokens(choice: Choice) -> bool:
    """Whether choosing its next token needs the earlier ones, not just the logits: then they must be read first."""
    p = choice.request.params
    processes = choice.plug_ins is not None and choice.plug_ins.processes
    return bool(choice.matcher or processes or p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty)


def _put(values: ArrayLike, like: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Upload numbers or indices to the device of `like`."""
    return upload(torch.as_tensor(values, dtype=dtype), like.device)


def best_tokens(scores: Tensor, block: int = 128) -> Tensor:
    """Each row's best token, [R, V] → [R], or -1 where the best is not finite."""
    if scores.device.type == "cpu" and len(scores) <= _FEW:
        values = scores.float().numpy()
        ids = values.argmax(-1).tolist()
        return torch.tensor([id if isfinite(row[id]) else -1 for row, id in zip(values, ids, strict=True)])
    if scores.shape[-1] > block:  # only `amax` is vectorised: on large vocabularies `max` and `argmax` are far slower
        blocks = _blocks(scores, block)
        first = blocks.amax(-1).max(-1).indices
        offsets = best_tokens(blocks[torch.arange(len(scores), device=scores.device), first])
        return (first * block + offsets).where(offsets >= 0, -1)
    best, tokens = scores.max(-1)
    return tokens.where(best.isfinite(), -1)


def _blocks(scores: Tensor, block: int) -> Tensor:
    rest = -scores.shape[-1] % block  # impossible tokens fill up the last block: [R, V] → [R, N, block]
    return (F.pad(scores, (0, rest), value=-torch.inf) if rest else scores).view(len(scores), -1, block)


def _is_edited(choice: Choice) -> bool:
    p = choice.request.params
    return bool(p.logit_bias or choice.index < p.min_tokens or needs_tokens(choice))


def _scores(logits: Tensor, indices: list[int], rows: Sequence[Choice]) -> Tensor:
    """A float32 copy of the rows `indices`, edited as their requests ask: [R, W], V rounded up to whole blocks."""
    scores = logits[_put(indices, logits)].float() if len(indices) < len(rows) else logits.to(torch.float32, copy=True)
    scores = _blocks(scores, _BLOCK).flatten(1)
    if any(_is_edited(rows[index]) for index in indices):
        edited = [rows[index] for index in indices]
        _edit(scores, edited)
        _process(scores[:, : logits.shape[-1]], edited)
    return scores


def _edit(scores: Tensor, rows: Sequence[Choice]) -> None:
    """Apply bias, grammars, min_tokens and penalties in place, [R, W], with one scatter for each kind."""
    flat, width = scores.view(-1), scores.shape[-1]
    each = [(row * width, s, s.request.params) for row, s in enumerate(rows)]  # (where its row starts in `flat`, …)

    def cells(parts: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        # An id without a logit is left out: its index in `flat` would be in the next row.
        ids = [(start, np.fromiter(tokens, np.int64, len(tokens))) for start, tokens in parts]
        return np.concatenate([tokens[tokens < width] + start for start, tokens in ids])

    # Only the kinds that a request asks for: even an empty scatter takes 30 µs of a step.
    if bias := {start + token: by for start, _, p in each for token, by in p.logit_bias.items() if token < width}:
        flat[_put([*bias], flat)] += _put([*bias.values()], flat, flat.dtype)
    forbid(scores, {row: s.matcher for row, s in enumerate(rows) if s.matcher is not None})
    if ends := [(start, [*s.end_token_ids]) for start, s, p in each if s.index < p.min_tokens]:
        flat[_put(cells(ends), flat)] = -torch.inf
    asked = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, p in each]
    repetition, frequency, presence = np.array(asked, np.float32).T
    # https://arxiv.org/abs/1909.05858, section 4.1; a token seen twice is written twice, with the same value
    if repeated := [(start, [*s.prompt, *s.tokens]) for start, s, p in each if p.repetition_penalty != 1]:
        seen = cells(repeated)
        at, factor = _put(seen, flat), _put(repetition[seen // width], flat, flat.dtype)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / factor, values * factor)
    if counted := [(start, s.tokens) for start, s, p in each if p.frequency_penalty or p.presence_penalty]:
        used, times = np.unique(cells(counted), return_counts=True)
        flat[_put(used, flat)] -= _put(frequency[used // width] * times + presence[used // width], flat, flat.dtype)


def _process(scores: Tensor, rows: Sequence[Choice]) -> None:
    """Have the rows' plug-ins change their scores [R, V], in place; one that fails leaves its row without a token."""
    for row, choice in zip(scores, rows, strict=True):
        if choice.plug_ins is None or not choice.plug_ins.processes:
            continue
        try:
            row.copy_(choice.plug_ins.process(choice.tokens, row))
        except GenerationFailed as fault:
            choice.plug_ins.fault = fault
            row.fill_(-torch.inf)


def forbid(scores: Tensor, matchers: dict[int, Matcher]) -> None:
    """Make the tokens that a row's grammar forbids impossible, in place; rows without a grammar keep theirs.

    `matchers` are by row, in order.
    """
    if not matchers:
        return
    masks = np.stack([matcher.mask() for matcher in matchers.values()]).view(np.uint16).astype(np.int32)
    # Looked up 16 bits at a time: faster than 8 at a time, or than filling by a mask.
    addends = upload(F.embedding(torch.from_numpy(masks), _ADDENDS).flatten(1), scores.device)  # [M, V]
    fit = scores[:, : addends.shape[-1]]
    if len(matchers) == len(scores):
        fit += addends
    else:
        fit[_put([*matchers], fit)] += addends


def _draw_params(rows: Sequence[Choice], indices: Sequence[int]) -> list[DrawParams]:
    """How to draw for the rows `indices`, each from the row of logits with its own index."""
    params = []
    for index in indices:
        s, p = rows[index], rows[index].request.params
        at = uniform(s.request.seed, s.number, s.index)
        params.append(DrawParams(index, max(p.temperature, _COLDEST), p.min_p, p.top_k or 0, p.top_p, at))
    return params


def _draw(scores: Tensor, rows: Sequence[Choice], kernels: Kernels | None = None) -> Tensor:
    """Draw one token a row after temperature, min_p, top-k and top-p, [R, W] → [R]; -1 where there is none."""
    if kernels is not None and scores.device.type == "cpu":
        return torch.tensor(kernels.draw(scores, _draw_params(rows, range(len(rows)))))
    params = [choice.request.params for choice in rows]
    if any(p.temperature != 1 for p in params):
        scores.div_(_put([max(p.temperature, _COLDEST) for p in params], scores, scores.dtype)[:, None])
    weights = torch.softmax(scores, -1, out=scores)  # in place: allocating costs as much as the sums
    cut = [row for row, p in enumerate(params) if p.min_p or p.top_k or p.top_p < 1]
    if len(cut) == len(rows):
        weights = _truncate(weights, params)
    elif cut:
        at = _put(cut, weights)
        weights[at] = _truncate(weights[at], [params[row] for row in cut])
    return _invert(weights, [uniform(s.request.seed, s.number, s.index) for s in rows])


def _truncate(weights: Tensor, params: list[GenerationParams]) -> Tensor:
    """Probabilities [R, W] with zeros for what min_p, top-k and top-p exclude. `weights` is overwritten."""
    if weights.shape[-1] <= _PREFIX * _BLOCK or weights.device.type != "cpu":
        return _keep(weights, params)[0]
    # The largest are in the blocks with the largest maxima: finding them there is faster than a `topk` of the row.
    blocks = weights.view(len(weights), -1, _BLOCK).amax(-1).topk(_PREFIX, sorted=False).indices.sort(-1).values
    ids = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)  # [R, _PREFIX * _BLOCK]
    ids = ids.gather(-1, weights.gather(-1, ids).topk(_PREFIX, sorted=False).indices.sort(-1).values)
    kept, certain = _keep(weights.gather(-1, ids), params)
    whole = {row: _keep(weights[[row]], [params[row]])[0] for row, enough in enumerate(certain.tolist()) if not enough}
    weights.zero_().scatter_(-1, ids, kept)
    for row, values in whole.items():
        weights[row] = values
    return weights


def _keep(weights: Tensor, params: list[GenerationParams]) -> tuple[Tensor, Tensor]:
    """Probabilities [R, N], zero where excluded; and whether `weights`, a row's largest, decide all the others [R]."""
    on_cpu = weights.device.type == "cpu"  # where numpy sorts values far faster than torch sorts values with indices
    ordered = (torch.from_numpy(np.sort(weights.numpy())) if on_cpu else weights.sort().values).flip(-1)
    asked = [(p.min_p, p.top_p if p.top_p < 1 else 2, p.top_k or torch.inf, bool(p.min_p or p.top_k)) for p in params]
    min_p, top_p, top_k, limited = _put(asked, weights, torch.float64).T.unsqueeze(-1)
    least = torch.maximum(ordered[:, :1] * min_p, ordered.gather(-1, top_k.clamp(max=weights.shape[-1]).long() - 1))
    sums = ordered.where(ordered >= least, 0).cumsum(-1, dtype=torch.float64)
    enough = top_p * sums[:, -1:].where(limited > 0, 1)
    size = ((ordered >= least) & (sums - ordered < enough)).sum(-1, keepdim=True).clamp(min=1)
    edge = ordered.gather(-1, size - 1)
    room = size - (ordered > edge).sum(-1, keepdim=True)  # for ties with the last one; ties with the k-th all stay
    inside = (weights > edge) | ((weights == edge) & ((weights == edge).cumsum(-1) <= room))
    return weights.where(inside, 0), (ordered[:, -1:] < least.where(limited > 0, edge))[:, 0]


def _invert(weights: Tensor, uniforms: list[float]) -> Tensor:
    """Invert each row's cumulative distribution at its uniform number, [R, W] → [R]; -1 if all is 0 or NaN."""
    blocks = weights.view(len(weights), -1, _BLOCK)  # [R, N, C]
    masses = blocks.sum(-1)  # find the block first, then the index in it: far faster than one running sum
    sums = masses.cumsum(-1, dtype=torch.float64)  # [R, N]
    block = _search(sums, reached := _put(uniforms, sums, sums.dtype)[:, None] * sums[:, -1:])
    inside = blocks.take_along_dim(block[..., None], 1)[:, 0].cumsum(-1, dtype=torch.float64)  # [R, C]
    tokens = block * _BLOCK + _search(inside, reached - (sums - masses).gather(-1, block))
    return tokens.where(sums[:, -1:] > 0, -1)[:, 0]


def _search(sums: Tensor, reached: Tensor) -> Tensor:
    """The index where running sums [R, N] first exceed `reached`; the last that adds to them if rounding lets none."""
    return torch.minimum((sums <= reached).sum(-1, keepdim=True), (sums < sums[:, -1:]).sum(-1, keepdim=True))


def _logprobs(logits: Tensor, tokens: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    """For each of `rows`: the log-probability of its token [R], the best ids [R, N] and theirs [R, N]."""
    at = _put(rows, logits)
    logprobs = logits[at].float().log_softmax(-1)  # [R, V]
    top, ids = logprobs.topk(min(MAX_TOP_LOGPROBS, logprobs.shape[-1]))  # fixed N: ties must not depend on the batch
    return logprobs.gather(-1, tokens[at, None].clamp(min=0))[:, 0], ids, top
