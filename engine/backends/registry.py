"""The backends by name; each is imported only when chosen."""

from __future__ import annotations

from importlib import import_module

from ...schemas.errors import ConfigurationError
from ..backend import Backend, ProgressCallback
from ..config import EngineConfig
from .answer_cache import AnswerCache

BACKENDS = {
    "paged": ("..paged.backend", "PagedBackend"),
    "hf": (".hf", "HfBackend"),
    "echo": (".echo", "EchoBackend"),
    "sentence_transformers": (".sentence_transformer", "SentenceTransformerBackend"),
}


def load_backend(config: EngineConfig, progress: ProgressCallback | None = None) -> Backend:
    """Load the backend and the model that `config` names.

    Raises `ConfigurationError` for an unknown backend, an absent device or a setting that the backend cannot honour,
    and `ModelLoadError` for a model that cannot be loaded.
    """
    if config.backend not in BACKENDS:
        raise ConfigurationError([f"unknown backend {config.backend!r}; use one of: {', '.join(sorted(BACKENDS))}"])
    module, name = BACKENDS[config.backend]
    backend: Backend = getattr(import_module(module, __package__), name)(config, progress)
    return AnswerCache(backend) if config.cache_answers else backend
