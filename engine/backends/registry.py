"""Loads the backend that is chosen; no other one is imported."""

from __future__ import annotations

from importlib import import_module

from ...schemas.errors import ConfigurationError
from ..backend import Backend, ProgressCallback
from ..config import EngineConfig
from ..discovery import find_backend, why_not
from .answer_cache import AnswerCache


def load_backend(config: EngineConfig, progress: ProgressCallback | None = None) -> Backend:
    """Load the backend and the model that `config` names.

    Raises `ConfigurationError` for an unknown backend, an absent device or a setting that the backend cannot honour,
    and `ModelLoadError` for a model that cannot be loaded.
    """
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
    backend: Backend = kind(config, progress)
    return AnswerCache(backend) if config.cache_answers else backend
