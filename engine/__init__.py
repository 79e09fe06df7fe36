"""The engine: an LLM as a library. Knows nothing of brokers and HTTP, and imports torch only to run a model."""

from __future__ import annotations

import warnings
from typing import Any

from ..schemas.params import GenerationParams
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


def __getattr__(name: str) -> Any:
    if name != "Choice":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = f"{__name__}.ChoiceOutput"
    warnings.warn(f"{__name__}.Choice is now {new}; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
    return ChoiceOutput
