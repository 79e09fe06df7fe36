"""The engine: an LLM as a library. Knows nothing of brokers and HTTP, and imports torch only to run a model."""

from __future__ import annotations

from ..schemas.params import GenerationParams
from .backend import Backend, Capabilities
from .backends.embedding import EmbeddingBackend
from .backends.registry import BACKENDS
from .config import EngineConfig
from .engine import InferenceEngine
from .handle import RequestHandle
from .models import ModelInfo, resolve_model
from .output import CacheStats, Choice, Embedding, EngineStats, GenerationOutput, GenerationStats
from .request import EmbeddingInput, EngineRequest, check_request, resolve_seed
from .text.tokenizer import Tokenizer, load_tokenizer
from .text.tokenizer_port import TokenizerLike

__all__ = [
    "BACKENDS",
    "Backend",
    "CacheStats",
    "Capabilities",
    "Choice",
    "Embedding",
    "EmbeddingBackend",
    "EmbeddingInput",
    "EngineConfig",
    "EngineRequest",
    "EngineStats",
    "GenerationOutput",
    "GenerationParams",
    "GenerationStats",
    "InferenceEngine",
    "ModelInfo",
    "RequestHandle",
    "Tokenizer",
    "TokenizerLike",
    "check_request",
    "load_tokenizer",
    "resolve_model",
    "resolve_seed",
]
