"""The settings of an engine in vLLM's words: the arguments of its `EngineArgs`. Needs no vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...schemas.errors import ConfigurationError
from ..config import EngineConfig
from ..planning.sizing import SizedConfig

_SETTINGS = {  # arguments of vLLM that settings of Penstock decide
    "model": "model",
    "dtype": "dtype",
    "max_model_len": "max_sequence_length",
    "max_num_seqs": "max_batch_size",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "gpu_memory_utilization": "kv_cache_memory",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "max_num_batched_tokens": "prefill_chunk_size",
}
_FIXED: dict[str, Any] = {  # what the rest of the backend relies on
    "skip_tokenizer_init": True,  # token ids in, token ids out
    "generation_config": "vllm",  # a request says all of its parameters
    "logprobs_mode": "raw_logprobs",
    "disable_log_stats": True,
    "async_scheduling": False,
    "data_parallel_size": 1,
    "enable_lora": False,
    "logits_processors": None,  # those of grammars come later
}


def options_of(config: EngineConfig) -> dict[str, Any]:
    """`backend_options` by name, each value as JSON or else as text. Raises `ConfigurationError`."""
    found, faults = {}, []
    for entry in config.backend_options:
        name, is_pair, text = (part.strip() for part in entry.partition("="))
        if not name or not is_pair:
            faults.append(f"backend_options: {entry!r} is no NAME=VALUE; give an engine argument of vLLM and its value")
        elif name in _SETTINGS:
            faults.append(f"backend_options: {name} is decided by {_SETTINGS[name]}; set that instead")
        elif name in _FIXED:
            faults.append(f"backend_options: {name} is always {_FIXED[name]!r} here; leave it out")
        else:
            found[name] = _value(text)
    if faults:
        raise ConfigurationError(faults)
    return found


def arguments_of(config: SizedConfig, path: Path, device: str, known: Collection[str]) -> dict[str, Any]:
    """The arguments for a model at `path` on vLLM's own type of device; `known` are those that this vLLM has.

    On a CPU vLLM runs the model's own code unless an option says otherwise: compiling takes longer than it saves until
    many tokens are computed. Raises `ConfigurationError`.
    """
    options = options_of(config)
    if unknown := sorted(options.keys() - known):
        raise ConfigurationError([f"backend_options: this vLLM has no engine argument {name}" for name in unknown])
    on_cpu = device == "cpu"
    if on_cpu and config.enable_cuda_graph:
        raise ConfigurationError(["enable_cuda_graph=True: vLLM runs on a CPU here; leave it out"])
    own = {
        "model": str(path),
        "dtype": config.dtype,
        "max_model_len": config.max_sequence_length or -1,  # -1: the model's, or as much of it as fits
        "max_num_seqs": config.max_batch_size,
        "kv_cache_memory_bytes": int(config.kv_cache_memory),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "max_num_batched_tokens": config.prefill_chunk_size,
        "use_tqdm_on_load": False,
        "enforce_eager": on_cpu if config.enable_cuda_graph is None else not config.enable_cuda_graph,
    }
    return own | _FIXED | options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
