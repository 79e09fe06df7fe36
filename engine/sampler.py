"""From logits to tokens, one row a sequence.

Order: log-probabilities of the raw distribution → logit bias, grammar, min_tokens → penalties (repetition over
prompt and output; frequency and presence over output) → greedy, or temperature → min_p → top-k → top-p → draw.
Nothing here keeps state: a draw depends on (seed, choice, index) and the row's logits alone, never on batch mates or
torch's own generators, so another worker can go on where one stopped.

What floating point allows: on a CPU a row has the same bits alone and in any batch (softmax by row, sums of blocks,
running sums, maxima and sorts keep that; threads divide the sum of a whole row as the batch's shape suggests); on a
GPU the last bit may follow the shape. A draw inverts the exact distribution but for uniform numbers within 1e-6 of a
boundary; a nucleus is a token off only where its mass is that near to top_p. Of equal logits the lowest id is first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Rows
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
from .cpu.library import Kernels, Wish
from .grammar.matcher import Matcher
from .sequence import ChosenLogprob, Sequence
from .transfer import Download, upload

_BLOCK = 64  # columns that are summed, or looked at, as one
_BITS = torch.arange(1 << 16)[:, None] >> torch.arange(16) & 1  # of every half word of a mask
_ADDENDS = torch.where(_BITS == 1, 0.0, -torch.inf)
_FEW = 16  # rows whose best numpy finds sooner: 0.11 ms for bfloat16 [1, 151936] after a step, and as below 0.40
_COLDEST = 1e-30  # a lower temperature would overflow, and this is greedy long before
_SCORED = 64  # rows of logits that are made probabilities together
_PREFIX = 256  # tokens among which a nucleus is looked for before all are sorted (to ask a GPU would cost more)


class Sampled(NamedTuple):
    """`logprob` where the request asked for it."""

    token: int
    logprob: ChosenLogprob | None


def uniform(seed: int, choice: int, index: int) -> float:
    """A number in [0, 1) that is a pure function of its arguments: 53 bits of BLAKE2b of their little-endian bytes."""
    digest = blake2b(struct.pack("<qqq", seed, choice, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Chosen:
    """Every row's next token: `tokens` [B] where the logits are, -1 for none; and on their way to the host."""

    def __init__(self, tokens: Tensor, num_logprobs: dict[int, int], logprobs: tuple[Tensor, ...]) -> None:
        """`logprobs` of the rows in `num_logprobs`: the tokens' own [R], the best ids and theirs [R, N]."""
        self.tokens = tokens
        self._num_logprobs = num_logprobs
        self._download = Download(tokens, *logprobs)

    def read(self) -> list[Sampled | GenerationFailed]:
        """Wait for them, and for nothing that was launched later.

        A row without a possible token, or whose logits are not numbers, gets an error; the others do not notice.
        """
        tokens, *logprobs = self._download.read()
        columns = zip(self._num_logprobs.items(), *logprobs, strict=True) if logprobs else ()
        told = {row: ChosenLogprob(own, (*zip(ids[:n], top[:n], strict=True),)) for (row, n), own, ids, top in columns}
        return [_result(token, told.get(row)) for row, token in enumerate(tokens)]


class Known:
    """As `Chosen`, where the host has the tokens already: without torch, which is 0.1 ms of a step's 20."""

    def __init__(self, tokens: Rows[int]) -> None:
        self._tokens = tokens

    @property
    def tokens(self) -> Tensor:
        return torch.tensor(self._tokens)

    def read(self) -> list[Sampled | GenerationFailed]:
        return [_result(token, None) for token in self._tokens]


def _result(token: int, logprob: ChosenLogprob | None) -> Sampled | GenerationFailed:
    if token >= 0:
        return Sampled(token, logprob)
    return GenerationFailed("no token can be chosen: everything is forbidden, or the model's logits are not numbers")


def sample(logits: Tensor, rows: Rows[Sequence], kernels: Kernels | None = None) -> list[Sampled | GenerationFailed]:
    """`choose`, and read it at once."""
    return choose(logits, rows, kernels).read()


def choose(
    logits: Tensor, rows: Rows[Sequence], kernels: Kernels | None = None, best: Rows[int] | None = None
) -> Chosen | Known:
    """Choose each row's token at `index`, waiting for no device. `logits` is [B, V] in any floating type and stays.

    `kernels` draw faster, from logits on a CPU. `best` [B], where they know them, are what `_argmax` would find.
    """
    if kernels is not None and best is not None and not any(_asks_more(sequence) for sequence in rows):
        known = list(best)
        drawn = [row for row, sequence in enumerate(rows) if sequence.request.params.temperature]
        for row, token in zip(drawn, kernels.draw(logits, _wishes(rows, drawn)) if drawn else (), strict=True):
            known[row] = token
        return Known(known)
    logits = logits.cpu() if logits.device.type == "mps" else logits  # mps has no float64
    kinds = [2 if sequence.request.params.temperature else int(_is_edited(sequence)) for sequence in rows]
    plain, edited, drawn = ([row for row, kind in enumerate(kinds) if kind == one] for one in range(3))
    parts = [_argmax(logits if len(plain) == len(rows) else logits[_put(plain, logits)])] if plain else []
    parts += [_argmax(_scores(logits, edited, rows), _BLOCK)] if edited else []
    parts += [_draw(_scores(logits, drawn, rows), [rows[row] for row in drawn], kernels)] if drawn else []
    if len(parts) == 1:
        tokens = parts[0]
    else:
        tokens = torch.cat([*parts, _put([], logits)])[_put(np.argsort(plain + edited + drawn), logits)]
    counts = {row: s.request.params.logprobs for row, s in enumerate(rows) if s.request.params.logprobs is not None}
    return Chosen(tokens, counts, _logprobs(logits, tokens, list(counts)) if counts else ())


def score(logits: Tensor, tokens: Rows[int], count: int) -> list[ChosenLogprob]:
    """The log-probabilities of tokens that are given, one for each row of the logits, and of the `count` best."""
    told: list[ChosenLogprob] = []
    given = _put(tokens, logits)
    for first in range(0, len(tokens), _SCORED):
        rows = list(range(first, min(first + _SCORED, len(tokens))))
        for own, ids, top in zip(*(column.tolist() for column in _logprobs(logits, given, rows)), strict=True):
            told.append(ChosenLogprob(own, tuple(zip(ids[:count], top[:count], strict=True))))
    return told


def _asks_more(sequence: Sequence) -> bool:
    """Than the token with the largest logit, or one drawn by the logits as they are."""
    return sequence.request.params.logprobs is not None or _is_edited(sequence)


def needs_tokens(sequence: Sequence) -> bool:
    """Whether its next token depends on those before by more than the logits: they must be read first."""
    p = sequence.request.params
    return bool(sequence.matcher or p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty)


def _put(values: ArrayLike, like: Tensor, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers of ours, or indices, where `like` is."""
    return upload(torch.as_tensor(values, dtype=dtype), like.device)


def _argmax(scores: Tensor, block: int = 128) -> Tensor:
    """Each row's best token, [R, V] → [R], or -1 where the best is not finite."""
    if scores.device.type == "cpu" and len(scores) <= _FEW:
        values = scores.float().numpy()
        ids = values.argmax(-1).tolist()
        return torch.tensor([id if isfinite(row[id]) else -1 for row, id in zip(values, ids, strict=True)])
    if scores.shape[-1] > block:  # only `amax` is vectorised: 0.4 ms for bfloat16 [32, 151936], `max` 1.6, `argmax` 9
        blocks = _blocks(scores, block)
        first = blocks.amax(-1).max(-1).indices
        places = _argmax(blocks[torch.arange(len(scores), device=scores.device), first])
        return (first * block + places).where(places >= 0, -1)
    best, tokens = scores.max(-1)
    return tokens.where(best.isfinite(), -1)


def _blocks(scores: Tensor, block: int) -> Tensor:
    rest = -scores.shape[-1] % block  # impossible tokens fill up the last one: [R, V] → [R, N, block]
    return (F.pad(scores, (0, rest), value=-torch.inf) if rest else scores).view(len(scores), -1, block)


def _is_edited(sequence: Sequence) -> bool:
    p = sequence.request.params
    return bool(p.logit_bias or sequence.index < p.min_tokens or needs_tokens(sequence))


def _scores(logits: Tensor, places: list[int], rows: Rows[Sequence]) -> Tensor:
    """A copy of some rows in float32, edited as they ask: [R, W], V rounded up to whole blocks."""
    scores = logits[_put(places, logits)].float() if len(places) < len(rows) else logits.to(torch.float32, copy=True)
    scores = _blocks(scores, _BLOCK).flatten(1)
    if any(_is_edited(rows[place]) for place in places):
        _edit(scores, [rows[place] for place in places])
    return scores


def _edit(scores: Tensor, rows: Rows[Sequence]) -> None:
    """Apply bias, grammars, min_tokens and penalties in place, [R, W], one scatter a kind."""
    flat, width = scores.view(-1), scores.shape[-1]
    each = [(row * width, s, s.request.params) for row, s in enumerate(rows)]  # (where its row starts in `flat`, …)

    def cells(parts: Rows[tuple[int, Rows[int]]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        # 12 µs per 1,000 tokens. An id without a logit is left out: its place in `flat` would be in the next row.
        ids = [(start, np.fromiter(tokens, np.int64, len(tokens))) for start, tokens in parts]
        return np.concatenate([tokens[tokens < width] + start for start, tokens in ids])

    # Only what is asked for: each scatter takes 30 µs of a step, even if it is empty.
    if bias := {start + token: by for start, _, p in each for token, by in p.logit_bias.items() if token < width}:
        flat[_put([*bias], flat)] += _put([*bias.values()], flat, flat.dtype)
    _forbid(scores, {row: s.matcher for row, s in enumerate(rows) if s.matcher is not None})
    if ends := [(start, [*s.end_token_ids]) for start, s, p in each if s.index < p.min_tokens]:
        flat[_put(cells(ends), flat)] = -torch.inf
    asked = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, _, p in each]
    repetition, frequency, presence = np.array(asked, np.float32).T
    # https://arxiv.org/abs/1909.05858, section 4.1; a token seen twice is written twice, the same
    if repeated := [(start, [*s.prompt, *s.tokens]) for start, s, p in each if p.repetition_penalty != 1]:
        seen = cells(repeated)
        at, factor = _put(seen, flat), _put(repetition[seen // width], flat, flat.dtype)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / factor, values * factor)
    if counted := [(start, s.tokens) for start, s, p in each if p.frequency_penalty or p.presence_penalty]:
        said, times = np.unique(cells(counted), return_counts=True)
        flat[_put(said, flat)] -= _put(frequency[said // width] * times + presence[said // width], flat, flat.dtype)


def _forbid(scores: Tensor, matchers: dict[int, Matcher]) -> None:
    """What a row's grammar does not allow becomes impossible, in place; other rows are not touched."""
    if not matchers:
        return
    masks = np.stack([matcher.mask() for matcher in matchers.values()]).view(np.uint16).astype(np.int32)
    # Looked up 16 at a time: 0.15 ms for 8 rows of 151,936; 8 at a time take 0.3, filling by a mask 0.4 to 2.5.
    addends = upload(F.embedding(torch.from_numpy(masks), _ADDENDS).flatten(1), scores.device)  # [M, V]
    fit = scores[:, : addends.shape[-1]]
    if len(matchers) == len(scores):
        fit += addends
    else:
        fit[_put([*matchers], fit)] += addends


def _wishes(rows: Rows[Sequence], places: Rows[int]) -> list[Wish]:
    """Of the rows at these places, each from the row of logits with its place."""
    wishes = []
    for place in places:
        s, p = rows[place], rows[place].request.params
        at = uniform(s.request.seed, s.choice, s.index)
        wishes.append(Wish(place, max(p.temperature, _COLDEST), p.min_p, p.top_k or 0, p.top_p, at))
    return wishes


def _draw(scores: Tensor, rows: Rows[Sequence], kernels: Kernels | None = None) -> Tensor:
    """Draw one token a row after temperature, min_p, top-k and top-p, [R, W] → [R]; -1 where there is none."""
    if kernels is not None and scores.device.type == "cpu":
        return torch.tensor(kernels.draw(scores, _wishes(rows, range(len(rows)))))
    params = [sequence.request.params for sequence in rows]
    if any(p.temperature != 1 for p in params):
        scores.div_(_put([max(p.temperature, _COLDEST) for p in params], scores, scores.dtype)[:, None])
    weights = torch.softmax(scores, -1, out=scores)  # in place: fresh memory costs as much as the sums
    cut = [row for row, p in enumerate(params) if p.min_p or p.top_k or p.top_p < 1]
    if len(cut) == len(rows):
        weights = _truncate(weights, params)
    elif cut:
        at = _put(cut, weights)
        weights[at] = _truncate(weights[at], [params[row] for row in cut])
    return _invert(weights, [uniform(s.request.seed, s.choice, s.index) for s in rows])


def _truncate(weights: Tensor, params: list[GenerationParams]) -> Tensor:
    """Probabilities [R, W] with zeros for what min_p, top-k and top-p exclude. `weights` is overwritten."""
    if weights.shape[-1] <= _PREFIX * _BLOCK or weights.device.type != "cpu":
        return _keep(weights, params)[0]
    # The greatest are in the blocks with the greatest maxima: 0.07 ms for 256 of 151,936, a plain `topk` takes 0.2.
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
    """Probabilities [R, N] by id, zero where excluded; and, if they are a row's greatest, is all else out? [R]"""
    on_cpu = weights.device.type == "cpu"  # where numpy sorts 151,936 values in 0.4 ms; torch, with their places, in 11
    ordered = (torch.from_numpy(np.sort(weights.numpy())) if on_cpu else weights.sort().values).flip(-1)
    asked = [(p.min_p, p.top_p if p.top_p < 1 else 2, p.top_k or torch.inf, bool(p.min_p or p.top_k)) for p in params]
    min_p, top_p, top_k, limited = _put(asked, weights, torch.float64).T.unsqueeze(-1)
    least = torch.maximum(ordered[:, :1] * min_p, ordered.gather(-1, top_k.clamp(max=weights.shape[-1]).long() - 1))
    sums = ordered.where(ordered >= least, 0).cumsum(-1, dtype=torch.float64)
    enough = top_p * sums[:, -1:].where(limited > 0, 1)
    size = ((ordered >= least) & (sums - ordered < enough)).sum(-1, keepdim=True).clamp(min=1)
    edge = ordered.gather(-1, size - 1)
    room = size - (ordered > edge).sum(-1, keepdim=True)  # for equals of the last one; those of the k-th all stay
    inside = (weights > edge) | ((weights == edge) & ((weights == edge).cumsum(-1) <= room))
    return weights.where(inside, 0), (ordered[:, -1:] < least.where(limited > 0, edge))[:, 0]


def _invert(weights: Tensor, uniforms: list[float]) -> Tensor:
    """The token under each row's uniform number on its cumulative distribution, [R, W] → [R]; -1 if all is 0 or NaN."""
    blocks = weights.view(len(weights), -1, _BLOCK)  # [R, N, C]
    masses = blocks.sum(-1)  # the block first, then the place in it: 0.2 ms for [32, 151936], one running sum 2.2
    sums = masses.cumsum(-1, dtype=torch.float64)  # [R, N]
    block = _search(sums, reached := _put(uniforms, sums, sums.dtype)[:, None] * sums[:, -1:])
    inside = blocks.take_along_dim(block[..., None], 1)[:, 0].cumsum(-1, dtype=torch.float64)  # [R, C]
    tokens = block * _BLOCK + _search(inside, reached - (sums - masses).gather(-1, block))
    return tokens.where(sums[:, -1:] > 0, -1)[:, 0]


def _search(sums: Tensor, reached: Tensor) -> Tensor:
    """Where running sums [R, N] first exceed `reached`; where rounding lets none, the last that adds to them."""
    return torch.minimum((sums <= reached).sum(-1, keepdim=True), (sums < sums[:, -1:]).sum(-1, keepdim=True))


def _logprobs(logits: Tensor, tokens: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    """Of some rows: the log-probability of the token [R], the best ids and theirs [R, N]."""
    at = _put(rows, logits)
    logprobs = logits[at].float().log_softmax(-1)  # [R, V]
    top, ids = logprobs.topk(min(MAX_TOP_LOGPROBS, logprobs.shape[-1]))  # the same equals, whatever others ask for
    return logprobs.gather(-1, tokens[at, None].clamp(min=0))[:, 0], ids, top
