"""The backend that runs transformers' own model classes: the correctness reference, and the widest choice of models.

Waiting sequences are admitted together as a left-padded cohort; every step decodes one token of every running row.
Newcomers do not wait for those before them: they begin as a cohort of their own, which joins the others after its
prefill where the caches allow it.
"""

from __future__ import annotations

import gc
import inspect
import logging
from dataclasses import replace
from math import inf
from typing import Any

import torch
from transformers import DynamicCache

from ...schemas.errors import ConfigurationError, ModelLoadError, Refusal
from ...schemas.events import Delta
from ...schemas.params import GenerationParams
from ..backend import Capabilities, NoPrefixes, ProgressCallback
from ..config import EngineConfig
from ..loading import load_causal_lm, resolve_device
from ..models import read_model_info, resolve_model
from ..sampler import sample
from ..sequence import Sequence
from ..sizing import sized
from ..text.tokenizer import Tokenizer
from ..weights import count_parameters
from .cohort import PaddedBatch

_log = logging.getLogger(__name__)

_ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class HfBackend(NoPrefixes):
    """`kv_cache_memory` is a threshold: above it newcomers wait, while those that run may finish."""

    capabilities = Capabilities(
        formats=("safetensors",),
        devices=("cpu", "cuda", "mps"),
        parameters=frozenset(GenerationParams.model_fields) - {"prompt_logprobs"},
    )

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        """Raises `ConfigurationError` and `ModelLoadError`."""
        config.refuse("quantization", "enable_cuda_graph", "enable_chunked_prefill", "prefill_chunk_size", "echo_rate")
        config = sized(config)
        if config.attention not in _ATTENTION:
            raise ConfigurationError([f"attention={config.attention!r}: must be one of {', '.join(_ATTENTION)}"])
        self._device = resolve_device(config.device)
        directory = resolve_model(config.model)
        info = read_model_info(directory, config.model, config.max_sequence_length)
        self.info = replace(info, parameters=count_parameters(directory))
        self.tokenizer = Tokenizer(directory)
        attention = None if config.attention == "auto" else config.attention
        self._model = load_causal_lm(config, directory, info.architecture, self._device, progress, attention)
        self._accepted = frozenset(inspect.signature(self._model.forward).parameters)
        if self._model._is_stateful or "past_key_values" not in self._accepted:
            raise ModelLoadError(f"{info.architecture} keeps a running state; the backend 'hf' needs a key-value cache")
        self._max_batch_size = config.max_batch_size
        self._kv_cache_memory = config.kv_cache_memory
        self._waiting: dict[Sequence, None] = {}  # in order of arrival
        self._cohorts: list[PaddedBatch] = []

    @property
    def num_running(self) -> int:
        return sum(len(cohort.rows) for cohort in self._cohorts)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)
        for cohort in self._cohorts:
            if sequence in cohort.rows:
                cohort.keep([row for row, other in enumerate(cohort.rows) if other is not sequence])
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def delay(self) -> float:
        return 0.0 if self._waiting or self._cohorts else inf

    def close(self) -> None:
        self._waiting.clear()
        self._cohorts.clear()
        del self._model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        self._admit()
        deltas = []
        for cohort in list(self._cohorts):
            deltas += self._advance(cohort)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        self._merge()
        return deltas

    def _admit(self) -> None:
        room = self._max_batch_size - self.num_running
        if not self._waiting or room <= 0:
            return
        if sum(cohort.memory() for cohort in self._cohorts) >= self._kv_cache_memory:
            return
        admitted = list(self._waiting)[:room]
        for sequence in admitted:
            del self._waiting[sequence]
            sequence.is_waiting = False
        self._cohorts.append(self._cohort(admitted))

    def _advance(self, cohort: PaddedBatch) -> list[Delta]:
        """One token for every row of the cohort; rows that have finished leave it."""
        try:
            results = sample(cohort.forward(self._run), cohort.rows)
        except Exception as error:
            return self._isolate(cohort, error)
        deltas = []
        for sequence, result in zip(cohort.rows, results, strict=True):
            try:
                delta = sequence.fail(result) if isinstance(result, Refusal) else sequence.append(*result)
            except Exception as error:
                delta = sequence.fail(error)
            if delta is not None:
                deltas.append(delta)
        cohort.keep([row for row, sequence in enumerate(cohort.rows) if sequence.finish is None])
        return deltas

    def _isolate(self, cohort: PaddedBatch, error: Exception) -> list[Delta]:
        """A pass over the cohort failed: let each row start again alone, so that only the culprit ends."""
        self._cohorts.remove(cohort)
        if len(cohort.rows) == 1:
            return [cohort.rows[0].fail(error)]
        _log.warning("a batch of %d failed (%r); its rows start again one by one", len(cohort.rows), error)
        self._cohorts += [self._cohort([sequence]) for sequence in cohort.rows]
        return []

    def _merge(self) -> None:
        merged: list[PaddedBatch] = []
        for cohort in self._cohorts:
            if not any(earlier.absorb(cohort) for earlier in merged):
                merged.append(cohort)
        self._cohorts = merged

    def _run(self, **inputs: Any) -> Any:
        """The model, called with as much as its `forward` accepts: one with ALiBi, say, takes no positions."""
        keywords = inputs | {"use_cache": True, "logits_to_keep": 1}
        return self._model(**{name: value for name, value in keywords.items() if name in self._accepted})

    def _cohort(self, rows: list[Sequence]) -> PaddedBatch:
        return PaddedBatch(rows, DynamicCache(config=self._model.config), self._device)
