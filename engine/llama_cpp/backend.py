"""Continuous batching over llama.cpp's sequences, with Penstock's own sampler, grammars and stop conditions.

A step computes pieces of prompts, each by itself, and one token of every other running choice together. All choices
have a fixed part of `kv_cache_memory`, so that none loses its place to another. A choice that goes on from another
worker's tokens reads them like a prompt.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from math import inf

import numpy as np
import torch

from ...schemas.errors import ConfigurationError
from ...schemas.events import Delta
from ..backend import NoAdapters, NoPrefixes, ProgressCallback
from ..choice import Choice
from ..config import EngineConfig
from ..line import Line, Row
from ..models import count_parameters, read_model_info
from ..output import CacheStats, SpeculationStats
from ..planning.device import resolve_device
from ..planning.discovery import files_for
from ..planning.manifests import LLAMA_CPP
from ..planning.sizing import fitting_length, sized
from ..sampler import Sampled, sample, score
from ..text.tokenizer import Tokenizer
from .piece import Logits, Piece
from .plan import plan_sequences

_log = logging.getLogger(__name__)

_CHUNK = 256  # tokens of prompts in a step, and of a call: larger products are no faster, and delay decoding


class LlamaCppBackend(NoAdapters, NoPrefixes):
    """`kv_cache_memory` is taken when the model loads, but no more of it than full contexts of all choices need."""

    manifest = LLAMA_CPP

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        """Raises `ConfigurationError` and `ModelLoadError`."""
        config.refuse("dtype", "quantization", "attention", "enable_cuda_graph", "echo_rate")
        config.refuse("prefix_cache_dir", "prefix_cache_limit")
        if resolve_device("cpu" if config.device == "auto" else config.device).type != "cpu":
            raise ConfigurationError([f"device={config.device!r}: the backend 'llama_cpp' runs only on a CPU; use cpu"])
        given = config.max_batch_size
        config = sized(config)
        path = files_for(self.manifest, config.model)
        info = read_model_info(path, config.model, config.max_sequence_length)
        parameters = count_parameters(path)
        self._plan = plan = plan_sequences(config, given, info.context_length)
        context = fitting_length(config, info.context_length, plan.length)
        self.info = replace(info, parameters=parameters, context_length=context)
        # Read once, as llama.cpp is loaded: threads that spin make a busy machine a hundred times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from .model import LlamaModel

        self.tokenizer = Tokenizer(path)
        self._chunked = config.enable_chunked_prefill is not False
        self._step_tokens = (config.prefill_chunk_size or _CHUNK) if self._chunked else plan.rows * plan.length
        self._piece_tokens = min(config.prefill_chunk_size or _CHUNK, _CHUNK)
        most = max(_CHUNK, plan.num_sequences)
        self._model = LlamaModel(path, plan.num_sequences, plan.length, most, torch.get_num_threads(), progress)
        self._answer_tokens = min(self._model.steady or _CHUNK, _CHUNK)  # of a piece of what is already generated
        if not self._model.steady:
            _log.warning(
                "%s: llama.cpp rounds a token otherwise beside others, so tokens of almost the same score may swap in "
                "another batch or on another worker",
                config.model,
            )
        self._line = Line(plan.rows, config.reserved_batch_size)

    @property
    def num_running(self) -> int:
        return len(self._line.running)

    @property
    def num_waiting(self) -> int:
        return len(self._line.waiting)

    def cache_stats(self) -> CacheStats:
        plan, used = self._plan, sum(row.num_computed for row in self._line.running.copy())
        return CacheStats(
            memory=plan.memory,
            num_tokens=plan.rows * plan.length,
            usage=used / (plan.rows * plan.length),
            num_blocks=plan.rows,
            num_cached_blocks=0,
            num_queried_tokens=0,
            num_hit_tokens=0,
            num_evictions=0,
            num_preemptions=0,
            speculation=SpeculationStats(off="the backend 'llama_cpp' guesses no tokens"),
        )

    def add(self, choice: Choice) -> None:
        self._line.add(choice)

    def remove(self, choice: Choice) -> None:
        if (sequence := self._line.remove(choice)) is not None:
            self._model.clear(sequence)

    def delay(self) -> float:
        return 0.0 if self._line.running or self._line.waiting else inf

    def close(self) -> None:
        self._line.clear()
        self._model.close()

    def step(self) -> list[Delta]:
        self._line.admit()
        deltas: list[Delta] = []
        ready: list[tuple[Row, Logits]] = []  # rows whose next token can be chosen, with their logits [V]
        singles: list[Row] = []  # rows with one token to compute
        left = self._step_tokens
        for row in self._line.running.copy():
            if row.num_lacking == 1:
                singles.append(row)
                continue
            count = self._next_count(row)
            row.choice.is_waiting = count > left
            if count > left:
                continue
            left -= count
            if count == 1:
                singles.append(row)
            else:
                deltas += self._read(row, count, ready)
        deltas += self._advance(singles, ready)
        return deltas + self._choose(ready)

    def _next_count(self, row: Row) -> int:
        """The size of a row's next piece; where a prompt is cut depends on nothing else, or its bits might."""
        left = len(row.choice.prompt) - row.num_computed
        if left <= 0:
            return min(row.num_lacking, self._answer_tokens)
        return min(left, self._piece_tokens - row.num_computed % self._piece_tokens)

    def _read(self, row: Row, count: int, ready: list[tuple[Row, Logits]]) -> list[Delta]:
        """Compute the next `count` tokens of a row, more than one; without chunked prefill all that are known."""
        try:
            while count > 1:
                piece = self._piece(row, count)
                self._commit(row, piece, self._model.compute(piece), ready)
                count = 0 if self._chunked or not row.num_lacking else self._next_count(row)
        except Exception as error:
            return self._restart([row], error)
        return []

    def _advance(self, rows: list[Row], ready: list[tuple[Row, Logits]]) -> list[Delta]:
        """Compute one token of each row, together."""
        if not rows:
            return []
        pieces = [self._piece(row, 1) for row in rows]
        try:
            logits = self._model.advance(pieces)
        except Exception as error:
            return self._restart(rows, error)
        for row, piece, own in zip(rows, pieces, logits, strict=True):
            self._commit(row, piece, own[None], ready)
        return []

    def _piece(self, row: Row, count: int) -> Piece:
        return Piece(row.sequence, row.num_computed, row.next_tokens(count), not row.choice.is_scored)

    def _commit(self, row: Row, piece: Piece, logits: Logits, ready: list[tuple[Row, Logits]]) -> None:
        """Record that a piece is computed; its logits [N, V] score the prompt, if asked for."""
        choice, start = row.choice, row.num_computed + 1
        if not choice.is_scored and (tokens := choice.prompt[start : start + len(logits)]):
            found = torch.from_numpy(logits[: len(tokens)])
            choice.score(start, score(found, tokens, choice.request.params.prompt_logprobs or 0))
        row.num_computed += len(piece.tokens)
        choice.num_computed += len(piece.tokens)
        if not row.num_lacking:
            ready.append((row, logits[-1]))

    def _choose(self, ready: list[tuple[Row, Logits]]) -> list[Delta]:
        """Choose the next token of each row; rows that end leave."""
        deltas = []
        for (row, _), result in zip(ready, self._sample(ready), strict=True):
            choice = row.choice
            try:
                delta = choice.append(*result) if isinstance(result, Sampled) else choice.fail(result)
            except Exception as error:
                delta = choice.fail(error)
            if delta is not None:
                deltas.append(delta)
            if choice.finish is not None:
                self.remove(choice)
        return deltas

    def _sample(self, ready: list[tuple[Row, Logits]]) -> list[Sampled | Exception]:
        """A token for each row, or why there is none; one that cannot be sampled does not affect the others."""
        if not ready:
            return []
        try:
            return [*sample(torch.from_numpy(np.stack([own for _, own in ready])), [row.choice for row, _ in ready])]
        except Exception as error:
            if len(ready) == 1:
                return [error]
            _log.warning("sampling %d rows failed (%r), sampling them one by one", len(ready), error)
            return [result for one in ready for result in self._sample([one])]

    def _restart(self, rows: list[Row], error: Exception) -> list[Delta]:
        """Begin the rows of a failed call anew; one that was alone, or for which it is the second time, fails."""
        deltas = []
        _log.warning("a call for %d rows failed (%r)", len(rows), error)
        for row in rows:
            self._model.clear(row.sequence)
            row.num_computed = 0
            if len(rows) == 1 or row.has_failed:
                self._line.remove(row.choice)
                deltas.append(row.choice.fail(error))
            row.has_failed = True
        return deltas
