"""vLLM as a backend: it batches, computes and samples; text, stop strings and who runs first are Penstock's.

A choice that goes on from another worker's tokens reads them like a prompt. At temperature 0 the next token is the one
that would have followed; otherwise not, since vLLM draws from generators whose state is lost with a worker. So the
manifest says `resume="greedy"`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from math import inf
from typing import Any

from ...schemas.errors import ConfigurationError, GenerationFailed
from ...schemas.events import Delta
from ..backend import NoAdapters, NoPrefixes, ProgressCallback
from ..choice import Choice
from ..config import EngineConfig
from ..line import Line, Row
from ..models import count_parameters, read_model_info, resolve_model
from ..output import CacheStats, SpeculationStats
from ..planning.manifests import VLLM
from ..planning.sizing import sized
from ..text.tokenizer import Tokenizer
from .parameters import chosen, sampling_of, scores

_log = logging.getLogger(__name__)

_ENVIRONMENT = {  # of vLLM, read as it is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one has no place for grammars that are kept here
}


class VllmBackend(NoAdapters, NoPrefixes):
    """`kv_cache_memory` is taken when the model loads. vLLM's own prefix cache shares prefixes within a salt."""

    manifest = VLLM

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        """Raises `ConfigurationError` and `ModelLoadError`."""
        config.refuse("quantization", "attention", "echo_rate", "prefix_cache_dir", "prefix_cache_limit")
        config = sized(config)
        path = resolve_model(config.model)
        info = read_model_info(path, config.model, config.max_sequence_length)
        parameters = count_parameters(path)
        self.tokenizer = Tokenizer(path)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
        try:
            from .core import VllmCore
        except ImportError as error:
            raise ConfigurationError([f"the backend 'vllm' cannot run here: importing vllm failed: {error}"]) from error
        if progress is not None:
            progress(0, parameters)
        self._core = VllmCore(config, path)
        if progress is not None:
            progress(parameters, parameters)
        if not self._core.takes_grammars:
            self.manifest = VLLM.model_copy(update={"parameters": VLLM.parameters - {"grammar"}})
        context = min(info.context_length, self._core.context_length)
        if context < info.context_length:
            _log.warning("context cut from %d to %d tokens by kv_cache_memory", info.context_length, context)
        self.info = replace(info, parameters=parameters, context_length=context)
        self._memory = config.kv_cache_memory
        self._line = Line(config.max_batch_size, config.reserved_batch_size)
        self._num_queried = self._num_hits = 0  # tokens of ended prompts, and those found in vLLM's prefix cache
        self._failure: Exception | None = None  # what ended vLLM's engine; set by `_die`

    @property
    def num_running(self) -> int:
        return len(self._line.running)

    @property
    def num_waiting(self) -> int:
        return len(self._line.waiting)

    def cache_stats(self) -> CacheStats:
        return CacheStats(
            memory=self._memory,
            num_tokens=self._core.num_tokens,
            usage=self._core.usage,
            num_blocks=self._core.num_blocks,
            num_cached_blocks=0,
            num_queried_tokens=self._num_queried,
            num_hit_tokens=self._num_hits,
            num_evictions=0,
            num_preemptions=0,
            speculation=SpeculationStats(off="the backend 'vllm' leaves it to vLLM"),
        )

    def add(self, choice: Choice) -> None:
        self._line.add(choice)

    def remove(self, choice: Choice) -> None:
        if (sequence := self._line.remove(choice)) is not None:
            self._core.abort(str(sequence))

    def delay(self) -> float:
        """Raises `GenerationFailed` once vLLM's engine has failed, which ends the engine and so the worker."""
        if self._failure is not None:
            raise GenerationFailed("vLLM's engine has failed, and this worker with it.") from self._failure
        return 0.0 if self._line.running or self._line.waiting else inf

    def close(self) -> None:
        self._line.clear()
        if self._failure is None:
            self._core.close()

    def step(self) -> list[Delta]:
        deltas = [delta for row in self._line.admit() for delta in self._start(row)]
        rows = {str(row.sequence): row for row in self._line.running}
        try:
            outputs = self._core.step() if rows else []
        except Exception as error:
            return deltas + self._die(error)
        for output in outputs:
            deltas += self._commit(rows[output.request_id], output)
        for row in self._line.running:
            if state := self._core.state(str(row.sequence)):
                row.choice.num_computed = state.num_computed
                row.choice.is_waiting = not state.is_running
        return deltas

    def _start(self, row: Row) -> list[Delta]:
        """Hand a choice with what it has so far to vLLM."""
        choice = row.choice
        try:
            prompt = [*choice.prompt, *choice.tokens]
            self._core.add(str(row.sequence), prompt, sampling_of(choice), choice.request.cache_salt, choice.matcher)
        except Exception as error:
            self._line.remove(choice)
            return [choice.fail(error)]
        return []

    def _commit(self, row: Row, output: Any) -> list[Delta]:
        """Add the tokens that vLLM has chosen; a choice that ends leaves."""
        choice, params, found = row.choice, row.choice.request.params, output.outputs[0]
        deltas = []
        try:
            choice.cached_tokens = min(output.num_cached_tokens or 0, len(choice.prompt))
            if not choice.is_scored and output.prompt_logprobs:
                choice.score(1, scores(choice.prompt, output.prompt_logprobs, params.prompt_logprobs or 0))
            for index, token in enumerate(found.token_ids):
                asked = params.logprobs
                logprob = None if asked is None else chosen(token, found.logprobs[index], asked)
                deltas.append(choice.append(token, logprob))
                if choice.finish is not None:
                    break
            if choice.finish is None and found.finish_reason is not None:
                raise GenerationFailed(f"vLLM ended the request ({found.finish_reason}); send it again.")
        except Exception as error:
            deltas.append(choice.fail(error))
        if choice.finish is not None:
            self.remove(choice)
            self._num_queried += len(choice.prompt)
            self._num_hits += choice.cached_tokens
        return [delta for delta in deltas if delta is not None]

    def _die(self, error: Exception) -> list[Delta]:
        """Fail all choices: whatever stops a step leaves vLLM's scheduler and caches in an unknown state."""
        _log.error("vLLM's engine failed", exc_info=error)
        self._failure = error
        choices = [row.choice for row in [*self._line.running, *self._line.waiting]]
        self._line.clear()
        failed = GenerationFailed(f"vLLM's engine failed ({type(error).__name__}), and this worker with it.")
        try:
            self._core.close()
        except Exception as another:
            _log.error("vLLM's engine cannot be closed", exc_info=another)
        return [choice.fail(failed) for choice in choices]
