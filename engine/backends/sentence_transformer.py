"""The backend for embeddings and rankings: models in the format of the library sentence-transformers, encoders and
decoders alike."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...schemas.errors import ConfigurationError, ModelLoadError
from ..backend import ProgressCallback
from ..config import EngineConfig
from ..loading import counting_weights
from ..models import count_parameters, read_model_info, resolve_model
from ..planning.device import resolve_device
from ..planning.manifests import SENTENCE_TRANSFORMERS
from ..text.tokenizer import PairTokenizer, load_tokenizer
from .embedding import EmbeddingBackend
from .pair_scorer import PairScorer
from .text_embedder import TextEmbedder

_ROOM = {"cpu": 512}  # tokens of a pass: larger ones are no faster there, and delay other requests
_LARGE_ROOM = 16_384


class SentenceTransformerBackend(EmbeddingBackend):
    """Passes are padded on the right, which no model sees: causal ones do not look ahead, others mask it."""

    manifest = SENTENCE_TRANSFORMERS

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        """Raises `ConfigurationError` and `ModelLoadError`."""
        super().__init__()
        config.refuse("quantization", "attention", "enable_cuda_graph", "enable_chunked_prefill", "prefill_chunk_size")
        config.refuse("kv_cache_memory", "cache_answers", "echo_rate", "prefix_cache_dir", "prefix_cache_limit")
        try:
            import sentence_transformers  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                [f"backend={config.backend!r}: {error}; install it with: pip install 'penstock[embeddings]'"]
            ) from error
        self._device = resolve_device(config.device)
        directory = resolve_model(config.model)
        info = read_model_info(directory, config.model)
        if not info.ranks and not (directory / "modules.json").is_file():
            raise ModelLoadError(
                f"{directory} has no modules.json, which defines how token vectors become one; "
                "use a model in the format of sentence-transformers"
            )
        parameters = count_parameters(directory)
        self.tokenizer = load_tokenizer(config.model, config.backend)
        self.room = _ROOM.get(self._device.type, _LARGE_ROOM)
        self.ranks = isinstance(self.tokenizer, PairTokenizer)
        try:
            with counting_weights(progress):
                self._model = self._load(directory, config)
            self.embedding_size = self.embed([(0,)]).shape[1]
        except ModelLoadError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelLoadError(f"{config.model} does not fit into the memory of {self._device}") from error
        except Exception as error:  # a model brings its own modules, which may raise anything
            raise ModelLoadError(f"{config.model} cannot be loaded: {error}") from error
        own = min(info.context_length, self._model.max_length or info.context_length)
        if (config.max_sequence_length or own) > own:
            raise ConfigurationError(
                [f"max_sequence_length={config.max_sequence_length}: {config.model} takes {own} tokens; set no more"]
            )
        self.info = replace(info, context_length=config.max_sequence_length or own, parameters=parameters)

    def _load(self, directory: Path, config: EngineConfig) -> PairScorer | TextEmbedder:
        device, dtype = str(self._device), config.dtype
        if isinstance(self.tokenizer, PairTokenizer):
            return PairScorer(directory, config.model, self.tokenizer, device=device, dtype=dtype)
        return TextEmbedder(directory, config.model, device=device, dtype=dtype)

    @torch.inference_mode()
    def embed(self, prompts: list[tuple[int, ...]]) -> NDArray[np.float32]:
        """The vectors [N, D] of N prompts, or the scores [N, 1] of N pairs.

        Raises `GenerationFailed` if the model's numbers overflow.
        """
        return self._model.vectors(prompts)

    def close(self) -> None:
        del self._model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
