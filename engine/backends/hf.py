"""The backend that runs transformers' own model classes: the correctness reference, and the widest choice of models.

Waiting choices are admitted together as one left-padded batch; every step decodes one token of every running row.
Newcomers start at once as a batch of their own, which merges into the others after its prefill where the caches allow.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from transformers import DynamicCache

from ...schemas.errors import ConfigurationError, ModelLoadError, Refusal
from ...schemas.events import Delta
from ..adapters.files import AdapterFiles
from ..adapters.loaded import Adapter, Targets
from ..adapters.low_rank import Adaptation, place, users
from ..backend import NoPrefixes, ProgressCallback
from ..choice import Choice
from ..config import EngineConfig
from ..loading import load_causal_lm
from ..models import count_parameters, keeps_states, read_model_info
from ..planning.device import resolve_device
from ..planning.discovery import files_for
from ..planning.manifests import HF
from ..planning.sizing import sized
from ..sampler import sample
from ..text.tokenizer import Tokenizer
from .padded_batch import PaddedBatch

_log = logging.getLogger(__name__)

_ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_PROBE = torch.tensor([[0, 1, 2]])  # any tokens: only the shapes matter


class HfBackend(NoPrefixes):
    """`kv_cache_memory` is a threshold: above it no choice is admitted, but running ones may exceed it."""

    manifest = HF

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        """Raises `ConfigurationError` and `ModelLoadError`."""
        config.refuse("quantization", "enable_cuda_graph", "enable_chunked_prefill", "prefill_chunk_size", "echo_rate")
        config.refuse("prefix_cache_dir", "prefix_cache_limit")
        config = sized(config)
        if config.attention not in _ATTENTION:
            raise ConfigurationError([f"attention={config.attention!r}: must be one of {', '.join(_ATTENTION)}"])
        self._device = resolve_device(config.device)
        path = files_for(self.manifest, config.model)
        info = read_model_info(path, config.model, config.max_sequence_length)
        self.info = replace(info, parameters=count_parameters(path))
        self.tokenizer = Tokenizer(path)
        attention = None if config.attention == "auto" else config.attention
        self._model = load_causal_lm(config, path, info.architecture, self._device, progress, attention)
        self._accepted = frozenset(inspect.signature(self._model.forward).parameters)
        if keeps_states(self._model) or "past_key_values" not in self._accepted:
            raise ModelLoadError(
                f"{info.architecture} keeps a recurrent state; the backend 'hf' needs a model with a key-value cache"
            )
        self._max_batch_size = config.max_batch_size
        self._kv_cache_memory = config.kv_cache_memory
        self._adaptation: Adaptation | None = None  # set by `adapter_targets`
        self._waiting: dict[Choice, None] = {}  # in order of arrival
        self._batches: list[PaddedBatch] = []

    @property
    def num_running(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, choice: Choice) -> None:
        self._waiting[choice] = None

    def remove(self, choice: Choice) -> None:
        self._waiting.pop(choice, None)
        for batch in self._batches:
            if choice in batch.rows:
                batch.keep([row for row, other in enumerate(batch.rows) if other is not choice])
        self._batches = [batch for batch in self._batches if batch.rows]

    @torch.inference_mode()
    def adapter_targets(self) -> Targets:
        if self._adaptation is None:
            adaptation = Adaptation(self._model)
            with adaptation.observe(_PROBE.numel()):
                self._run(input_ids=_PROBE.to(self._device))
            adaptation.hook(self._model)
            self._adaptation = adaptation
        return self._adaptation.targets

    @torch.inference_mode()
    def load_adapter(self, files: AdapterFiles) -> Adapter:
        return place(files, self._model.dtype, self._device)

    def delay(self) -> float:
        return 0.0 if self._waiting or self._batches else inf

    def close(self) -> None:
        self._waiting.clear()
        self._batches.clear()
        del self._model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        self._admit()
        deltas = []
        for batch in list(self._batches):
            deltas += self._advance(batch)
        self._batches = [batch for batch in self._batches if batch.rows]
        self._merge()
        return deltas

    def _admit(self) -> None:
        room = self._max_batch_size - self.num_running
        if not self._waiting or room <= 0:
            return
        if sum(batch.memory() for batch in self._batches) >= self._kv_cache_memory:
            return
        admitted = list(self._waiting)[:room]
        for choice in admitted:
            del self._waiting[choice]
            choice.is_waiting = False
        self._batches.append(self._new_batch(admitted))

    def _advance(self, batch: PaddedBatch) -> list[Delta]:
        """Generate one token for every row of the batch, and drop the rows that have finished."""
        try:
            run = self._run if self._adaptation is None else partial(self._run_adapted, batch.rows, self._adaptation)
            results = sample(batch.forward(run), batch.rows)
        except Exception as error:
            return self._isolate(batch, error)
        deltas = []
        for choice, result in zip(batch.rows, results, strict=True):
            try:
                delta = choice.fail(result) if isinstance(result, Refusal) else choice.append(*result)
            except Exception as error:
                delta = choice.fail(error)
            if delta is not None:
                deltas.append(delta)
        batch.keep([row for row, choice in enumerate(batch.rows) if choice.finish is None])
        return deltas

    def _isolate(self, batch: PaddedBatch, error: Exception) -> list[Delta]:
        """Restart each row of a failed batch by itself, so that only the culprit fails."""
        self._batches.remove(batch)
        if len(batch.rows) == 1:
            return [batch.rows[0].fail(error)]
        _log.warning("batch of %d failed (%r), restarting its rows one by one", len(batch.rows), error)
        self._batches += [self._new_batch([choice]) for choice in batch.rows]
        return []

    def _merge(self) -> None:
        merged: list[PaddedBatch] = []
        for batch in self._batches:
            if not any(earlier.absorb(batch) for earlier in merged):
                merged.append(batch)
        self._batches = merged

    def _run(self, **inputs: Any) -> Any:
        """Call the model with the inputs that its `forward` accepts: one with ALiBi, say, takes no positions."""
        keywords = inputs | {"use_cache": True, "logits_to_keep": 1}
        return self._model(**{name: value for name, value in keywords.items() if name in self._accepted})

    def _run_adapted(self, rows: Sequence[Choice], adaptation: Adaptation, **inputs: Any) -> Any:
        count, width = inputs["input_ids"].shape
        used = users([choice.adapter for choice in rows], [width] * count, self._device)
        with adaptation.using(used, count * width):
            return self._run(**inputs)

    def _new_batch(self, rows: list[Choice]) -> PaddedBatch:
        return PaddedBatch(rows, DynamicCache(config=self._model.config), self._device)
