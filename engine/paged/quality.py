"""How far a model's predictions are from a reference's: perplexity, KL divergence, and how often they agree.

Both models read the same texts token by token, as decoding does, so that the kernels which serve requests are judged.
Only the distributions at one position of every text are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, exp, sqrt
from typing import NamedTuple

import torch
from pydantic import ByteSize
from torch import Tensor

from ...schemas.errors import ConfigurationError
from ..backend import ProgressCallback
from ..config import EngineConfig
from .backend import PagedBackend
from .packing import Segment
from .state.slots import NO_STATE, StateUse

ROWS = 16
"""Texts that are read side by side."""

_CACHE = ByteSize(1 << 30)  # until `Reader` allocates its own


class Quality(NamedTuple):
    """What `compare` found at `positions` predictions; divergences are KL(reference || model) in nats."""

    positions: int
    perplexity: float
    reference_perplexity: float
    divergence: float
    divergence_error: float  # the standard error of the mean
    divergence_p99: float
    same_best: float  # the share of positions where both think the same token the most likely


class Reader:
    """A model that reads texts, and nothing else."""

    def __init__(self, config: EngineConfig, length: int, progress: ProgressCallback | None = None) -> None:
        """`length` is the number of tokens of a text, at most. Raises `ConfigurationError` and `ModelLoadError`."""
        given = {"kv_cache_memory": config.kv_cache_memory or _CACHE, "enable_cuda_graph": None}
        self._backend = PagedBackend(config.model_copy(update=given), progress)
        self._runner = self._backend.runner
        self._blocks = -(-length // self._runner.block_size)  # of one text
        self._runner.allocate([ROWS * self._blocks] * len(self._runner.groups))
        self._runner.states.allocate(2 * ROWS, ROWS, self._runner.dtype)

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a decoding step of one row reads."""
        return self._backend.weight_bytes

    @property
    def slow_paths(self) -> tuple[str, ...]:
        """The fast paths that the model does not take, and why not."""
        return self._backend.info.slow_paths

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """For each position but the last of up to `ROWS` texts of equal length: log-probabilities of what follows.

        Each is float32 [rows, V].
        """
        of_row = [range(row * self._blocks, (row + 1) * self._blocks) for row in range(len(texts))]
        tables = [[blocks] * len(self._runner.groups) for blocks in of_row]
        for position in range(len(texts[0]) - 1):
            step = [
                Segment([text[position]], position, table, True, state=self._state(row, position))
                for row, (text, table) in enumerate(zip(texts, tables, strict=True))
            ]
            logits, sampled, _ = self._runner.forward(step)
            yield logits.float()[torch.tensor(sampled, device=logits.device).argsort()].log_softmax(-1)

    def _state(self, row: int, position: int) -> StateUse | None:
        """The slots of a row's token: it has two, which take turns."""
        if not self._runner.states:
            return None
        own, other = (row + ROWS * (number % 2) for number in (position, position + 1))
        return StateUse(other if position else NO_STATE, own)

    def close(self) -> None:
        self._backend.close()


@torch.inference_mode()
def compare(
    reference: Reader, model: Reader, texts: Sequence[Sequence[int]], progress: Callable[[int], object]
) -> Quality:
    """Let both read `texts` of equal length, at least two tokens each; `progress` gets the number of positions done.

    Raises `ConfigurationError` if their vocabularies differ in size.
    """
    divergences: list[Tensor] = []
    surprise = reference_surprise = 0.0
    same = 0
    for start in range(0, len(texts), ROWS):
        rows = texts[start : start + ROWS]
        tokens = torch.tensor(rows)
        for position, (right, other) in enumerate(zip(reference.read(rows), model.read(rows), strict=True), start=1):
            right, other = right.cpu(), other.cpu()
            if right.shape != other.shape:
                raise ConfigurationError(
                    [
                        f"the vocabulary of the model has {other.shape[1]} tokens, and that of the reference "
                        f"{right.shape[1]}; compare models with the same tokenizer"
                    ]
                )
            following = tokens[:, position, None]
            divergences.append((right.exp() * (right - other)).sum(-1))
            surprise -= float(other.gather(1, following).sum(dtype=torch.float64))
            reference_surprise -= float(right.gather(1, following).sum(dtype=torch.float64))
            same += int((right.argmax(-1) == other.argmax(-1)).sum())
            progress(len(rows))
    every = torch.cat(divergences).double()
    count = len(every)
    return Quality(
        positions=count,
        perplexity=exp(surprise / count),
        reference_perplexity=exp(reference_surprise / count),
        divergence=float(every.mean()),
        divergence_error=float(every.std(correction=0)) / sqrt(count),
        divergence_p99=float(every.kthvalue(ceil(0.99 * count)).values),
        same_best=same / count,
    )
