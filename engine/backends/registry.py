"""Loads the backend that is chosen; no other one is imported."""

from __future__ import annotations

import os
from importlib import import_module

from ...schemas.errors import ConfigurationError, ModelLoadError
from ..backend import Backend, ProgressCallback
from ..config import EngineConfig
from ..planning.discovery import find_backend, why_not
from .answer_cache import AnswerCache

_TORCH_HAS_NO_MEMORY = "can't allocate memory"  # in the RuntimeError of its allocator for CPUs


def load_backend(config: EngineConfig, progress: ProgressCallback | None = None) -> Backend:
    """Load the backend and the model that `config` names.

    Raises `ConfigurationError` for an unknown backend, an absent device or a setting that the backend cannot honour,
    and `ModelLoadError` for a model that cannot be loaded.
    """
    try:
        os.getcwd()
    except OSError as error:  # there MKL, which torch brings along, ends the process
        raise ConfigurationError([f"the current directory cannot be used ({error.strerror}); go to another"]) from None
    manifest = find_backend(config.backend, config.allowed_backends)
    if reason := why_not(manifest, config.model, config.device):
        raise ConfigurationError([reason])
    if not manifest.options:
        config.refuse("backend_options")
    module, _, name = manifest.backend.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError([f"the backend {manifest.id!r} cannot be imported: {error}"]) from error
    try:
        backend: Backend = kind(config, progress)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and _TORCH_HAS_NO_MEMORY not in str(error):
            raise
        raise ModelLoadError(
            f"{config.model} does not fit into the memory that this process may have; set a smaller "
            "--kv-cache-memory, use a smaller model, or allow more (ulimit -v)"
        ) from error
    return AnswerCache(backend) if config.cache_answers else backend
