"""A backend without a model that repeats the prompt. For measuring the pipeline around it, and for tests.

The next token is the prompt's next token (special ones left out) with probability 1, so temperature, penalties and the
like change nothing. After the prompt comes the end token; with `ignore_eos`, or before `min_tokens`, the prompt again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ...schemas.events import Delta
from ..backend import NoAdapters, NoPrefixes, ProgressCallback
from ..choice import Choice, ChosenLogprob
from ..config import EngineConfig
from ..models import ModelInfo, read_model_info, resolve_model
from ..planning.manifests import ECHO
from ..planning.sizing import sized
from ..text.byte_tokenizer import ByteTokenizer
from ..text.tokenizer import load_tokenizer

_CONTEXT_LENGTH = 131_072
_TICK = 0.001  # seconds; the shortest sleep
_CERTAIN = ChosenLogprob(0.0)
_READ = ChosenLogprob(0.0, rank=1)  # of a prompt


@dataclass(slots=True)
class _Row:
    choice: Choice
    cycle: tuple[int, ...]
    started: float  # on the backend's clock
    first: int  # index of the first token that this row generates


class EchoBackend(NoAdapters, NoPrefixes):
    """Needs no files; if `model` is a directory, uses its tokenizer and context length."""

    manifest = ECHO

    def __init__(
        self,
        config: EngineConfig,
        progress: ProgressCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config.refuse("quantization", "attention", "enable_cuda_graph", "enable_chunked_prefill", "prefill_chunk_size")
        config.refuse("prefix_cache_dir", "prefix_cache_limit")
        config = sized(config)
        self.tokenizer = load_tokenizer(config.model, "echo")
        self.info = (
            ModelInfo(
                source=config.model,
                architecture="Echo",
                context_length=config.max_sequence_length or _CONTEXT_LENGTH,
                vocabulary_size=self.tokenizer.vocabulary_size,
                eos_token_ids=self.tokenizer.eos_token_ids,
                parameters=0,
            )
            if isinstance(self.tokenizer, ByteTokenizer)
            else read_model_info(resolve_model(config.model), config.model, config.max_sequence_length)
        )
        self._rate = config.echo_rate
        self._max_batch_size = config.max_batch_size
        self._reserved = min(config.reserved_batch_size, config.max_batch_size - 1)
        self._clock = clock
        self._waiting: dict[Choice, None] = {}  # in order of arrival
        self._running: dict[Choice, _Row] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, choice: Choice) -> None:
        self._waiting[choice] = None

    def remove(self, choice: Choice) -> None:
        self._waiting.pop(choice, None)
        self._running.pop(choice, None)

    def step(self) -> list[Delta]:
        self._admit()
        deltas = []
        now = self._clock() if self._rate else 0.0
        for row in list(self._running.values()):
            choice = row.choice
            if self._rate and now < self._due(row):
                continue
            try:
                delta = choice.append(
                    self._next_token(row), None if choice.request.params.logprobs is None else _CERTAIN
                )
            except Exception as error:
                delta = choice.fail(error)
            if delta is not None:
                deltas.append(delta)
            if choice.finish is not None:
                del self._running[choice]
        return deltas

    def delay(self) -> float:
        if self._next_waiting() is not None:
            return 0.0
        if not self._running:
            return inf
        if not self._rate:
            return 0.0
        wait = min(map(self._due, self._running.values())) - self._clock()
        return max(wait, _TICK) if wait > 0 else 0.0

    def close(self) -> None:
        self._waiting.clear()
        self._running.clear()

    def _admit(self) -> None:
        while (choice := self._next_waiting()) is not None:
            del self._waiting[choice]
            if not choice.is_scored:
                choice.score(1, [_READ] * (len(choice.prompt) - 1))
            cycle = tuple(token for token in choice.prompt if token not in self.tokenizer.special_token_ids)
            choice.is_waiting = False
            self._running[choice] = _Row(choice, cycle or choice.prompt, self._clock(), choice.index)

    def _next_waiting(self) -> Choice | None:
        """The first choice that may be admitted now: only urgent ones may use the reserved rows."""
        free = self._max_batch_size - len(self._running)
        if free > self._reserved:
            return next(iter(self._waiting), None)
        return next((one for one in self._waiting if one.request.priority == 0), None) if free > 0 else None

    def _due(self, row: _Row) -> float:
        """The time at which the row's next token is due, on the backend's clock."""
        return row.started + (row.choice.index - row.first) / self._rate

    def _next_token(self, row: _Row) -> int:
        index = row.choice.index
        params = row.choice.request.params
        end = self.tokenizer.eos_token_ids
        if index < len(row.cycle) or index < params.min_tokens or params.ignore_eos or not end:
            return row.cycle[index % len(row.cycle)]
        return end[0]
