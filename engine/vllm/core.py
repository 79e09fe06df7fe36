"""vLLM's engine in this process, through its `LLMEngine`. Imports vLLM, whose environment must be set before.

`LLMEngine` and not `AsyncLLM`: a backend is stepped by one thread, and so is this one, with no event loop and no queue
between them. Its core runs in this process and not in one of its own: a step that fails raises here, a worker that is
killed leaves nothing behind, and the scheduler can be asked how far each request is. With several GPUs vLLM starts a
process for each of them, which ends with this one.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import RequestStatus

from ...schemas.errors import ConfigurationError, InvalidRequest, ModelLoadError
from ..grammar.matcher import Matcher
from ..planning.sizing import SizedConfig
from .arguments import arguments_of
from .grammars import KEY, Grammars


class State(NamedTuple):
    """How far vLLM is with a request; one that does not run waits for room."""

    num_computed: int
    is_running: bool


class VllmCore:
    """A loaded model. Use it from one thread; requests go by names that are free again once they end."""

    def __init__(self, config: SizedConfig, path: Path) -> None:
        """Raises `ConfigurationError` and `ModelLoadError`."""
        self._matchers: dict[str, Matcher] = {}  # by our names of requests
        arguments = arguments_of(config, path, _device(config.device), {field.name for field in fields(EngineArgs)})
        try:
            own = EngineArgs(**arguments).create_engine_config()
            _place(own, config.device)
            # Only the worker's own process has matchers, and they follow neither guesses nor vLLM's second runner.
            self.takes_grammars = not (
                own.parallel_config.world_size > 1 or own.speculative_config or own.use_v2_model_runner
            )
            if self.takes_grammars:
                own.model_config.logits_processors = [Grammars.of(self._matchers)]
            self._engine = LLMEngine.from_vllm_config(own, disable_log_stats=True)
        except ConfigurationError:
            raise
        except Exception as error:  # vLLM raises whatever its parts do
            reason = str(error).strip() or type(error).__name__
            raise ModelLoadError(f"vLLM cannot load {config.model}: {reason}") from error
        self._core = self._engine.engine_core.engine_core
        self._cache = self._core.scheduler.kv_cache_manager
        self._ids: dict[str, str] = {}  # vLLM's own names of requests, by ours
        cache = own.cache_config
        self.context_length = int(own.model_config.max_model_len)
        self.num_blocks = int(cache.num_gpu_blocks or 0)
        self.num_tokens = self.num_blocks * int(cache.block_size)

    @property
    def usage(self) -> float:
        """The part of the cache that requests hold, 0 to 1. Safe from any thread, and once closed."""
        return float(self._cache.usage)

    def add(
        self, name: str, prompt: Sequence[int], sampling: Mapping[str, Any], salt: str, matcher: Matcher | None
    ) -> None:
        """Queue a request; one salt shares no cached prefixes with another. Raises `InvalidRequest`."""
        tokens: dict[str, Any] = {"type": "token", "prompt_token_ids": [*prompt]}
        if salt:
            tokens["cache_salt"] = salt
        try:
            params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA, extra_args={KEY: name})
            self._ids[name] = self._engine.add_request(name, tokens, params)
        except (ValueError, VLLMValidationError) as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error
        if matcher is not None:
            self._matchers[name] = matcher

    def abort(self, name: str) -> None:
        """Forget a request, whether vLLM has finished it or not."""
        del self._ids[name]
        self._matchers.pop(name, None)
        self._engine.abort_request([name])

    def step(self) -> list[Any]:
        """Compute a step; returns vLLM's `RequestOutput` for each request with news. Raises whatever vLLM does."""
        return [*self._engine.step()]

    def state(self, name: str) -> State | None:
        """None for a request that vLLM has finished."""
        found = self._core.scheduler.requests.get(self._ids[name])
        return found and State(int(found.num_computed_tokens), found.status == RequestStatus.RUNNING)

    def close(self) -> None:
        """Free the model and end vLLM's other processes.

        Its process groups stay, since other engines in this process use them; so vLLM's own way, which ends them, is
        not taken, nor by its finalizer.
        """
        self._engine.engine_core._finalizer.detach()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        del self._engine, self._core
        gc.unfreeze()  # vLLM freezes what it has loaded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _device(name: str) -> str:
    """The type of device that this vLLM was built for. Raises `ConfigurationError` where another one is asked for."""
    built = str(current_platform.device_type)
    if name != "auto" and name.partition(":")[0] != built:
        raise ConfigurationError([f"device={name!r}: this vLLM was built for {built}; use {built}, or install another"])
    return built


def _place(own: Any, device: str) -> None:
    """Let vLLM use the GPU of that number. Raises `ConfigurationError`."""
    index = int(device.partition(":")[2] or 0)
    if not index:
        return
    if own.parallel_config.world_size > 1:
        raise ConfigurationError(
            [f"device={device!r}: vLLM uses the first GPUs for its processes; choose them by CUDA_VISIBLE_DEVICES"]
        )
    own.device_config.device = torch.device(device)
