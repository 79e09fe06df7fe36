"""The engine: an LLM as a library. Knows nothing of brokers and HTTP, and imports torch only to run a model.

Its names are each imported when they are first used: a process that only needs a tokenizer loads no more.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..schemas.lazy_names import lazy_names

if TYPE_CHECKING:
    from ..schemas.params import GenerationParams, Grammar
    from .adapters.loaded import AdapterInfo
    from .backend import Backend
    from .backends.embedding import EmbeddingBackend
    from .config import EngineConfig
    from .engine import InferenceEngine
    from .handle import RequestHandle
    from .models import ModelInfo, resolve_model
    from .output import CacheStats, ChoiceOutput, Embedding, EngineStats, GenerationOutput, GenerationStats
    from .planning.discovery import find_backend, find_backends
    from .planning.manifest import Manifest
    from .plug_ins.found import FoundPlugIn, find_plug_ins
    from .plug_ins.port import CleanUp, Context, LogitsProcessor, PlugIn, StoppingCriterion
    from .preparing.prompts import ImageText
    from .request import EmbeddingInput, EngineRequest, check_request, resolve_seed
    from .text.tokenizer import Tokenizer, load_tokenizer
    from .text.tokenizer_port import TokenizerLike

__all__ = [
    "AdapterInfo",
    "Backend",
    "CacheStats",
    "ChoiceOutput",
    "CleanUp",
    "Context",
    "Embedding",
    "EmbeddingBackend",
    "EmbeddingInput",
    "EngineConfig",
    "EngineRequest",
    "EngineStats",
    "FoundPlugIn",
    "GenerationOutput",
    "GenerationParams",
    "GenerationStats",
    "Grammar",
    "ImageText",
    "InferenceEngine",
    "LogitsProcessor",
    "Manifest",
    "ModelInfo",
    "PlugIn",
    "RequestHandle",
    "StoppingCriterion",
    "Tokenizer",
    "TokenizerLike",
    "check_request",
    "find_backend",
    "find_backends",
    "find_plug_ins",
    "load_tokenizer",
    "resolve_model",
    "resolve_seed",
]

_HOMES = {
    "AdapterInfo": ".adapters.loaded",
    "Backend": ".backend",
    "CacheStats": ".output",
    "ChoiceOutput": ".output",
    "CleanUp": ".plug_ins.port",
    "Context": ".plug_ins.port",
    "Embedding": ".output",
    "EmbeddingBackend": ".backends.embedding",
    "EmbeddingInput": ".request",
    "EngineConfig": ".config",
    "EngineRequest": ".request",
    "EngineStats": ".output",
    "FoundPlugIn": ".plug_ins.found",
    "GenerationOutput": ".output",
    "GenerationParams": "..schemas.params",
    "GenerationStats": ".output",
    "Grammar": "..schemas.params",
    "ImageText": ".preparing.prompts",
    "InferenceEngine": ".engine",
    "LogitsProcessor": ".plug_ins.port",
    "Manifest": ".planning.manifest",
    "ModelInfo": ".models",
    "PlugIn": ".plug_ins.port",
    "RequestHandle": ".handle",
    "StoppingCriterion": ".plug_ins.port",
    "Tokenizer": ".text.tokenizer",
    "TokenizerLike": ".text.tokenizer_port",
    "check_request": ".request",
    "find_backend": ".planning.discovery",
    "find_backends": ".planning.discovery",
    "find_plug_ins": ".plug_ins.found",
    "load_tokenizer": ".text.tokenizer",
    "resolve_model": ".models",
    "resolve_seed": ".request",
}

_find = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "Choice":
        new = f"{__name__}.ChoiceOutput"
        warnings.warn(f"{__name__}.Choice is now {new}; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
        return _find("ChoiceOutput")
    return _find(name)


def __dir__() -> list[str]:
    return __all__
