"""The backend for embeddings: models in the format of the library sentence-transformers, encoders and decoders alike.

The model's own modules define how its token vectors become the text's vector.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from ...schemas.errors import ConfigurationError, GenerationFailed, ModelLoadError
from ..backend import ProgressCallback
from ..config import EngineConfig
from ..loading import counting_weights
from ..models import count_parameters, read_model_info, resolve_model
from ..planning.device import resolve_device
from ..planning.manifests import SENTENCE_TRANSFORMERS
from ..text.tokenizer import load_tokenizer
from .embedding import EmbeddingBackend

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
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ConfigurationError(
                [f"backend={config.backend!r}: {error}; install it with: pip install 'penstock[embeddings]'"]
            ) from error
        self._device = resolve_device(config.device)
        directory = resolve_model(config.model)
        info = read_model_info(directory, config.model)
        if not (directory / "modules.json").is_file():
            raise ModelLoadError(
                f"{directory} has no modules.json, which defines how token vectors become one; "
                "use a model in the format of sentence-transformers"
            )
        parameters = count_parameters(directory)
        self.tokenizer = load_tokenizer(config.model, config.backend)
        self.room = _ROOM.get(self._device.type, _LARGE_ROOM)
        try:
            with counting_weights(progress):
                self._model: Any = SentenceTransformer(
                    str(directory),
                    device=str(self._device),
                    local_files_only=True,
                    model_kwargs={"dtype": config.dtype},
                )
            self._model.eval()
            self._is_normal = type(self._model[-1]).__name__ == "Normalize"
            self._pad = self._model.tokenizer.pad_token_id or 0
            self.embedding_size = self.embed([[self._pad]]).shape[1]
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ModelLoadError(f"{config.model} does not fit into the memory of {self._device}") from error
        except Exception as error:  # a model brings its own modules, which may raise anything
            raise ModelLoadError(f"{config.model} cannot be loaded: {error}") from error
        if "message" in getattr(self._model[0], "modality_config", ()):
            raise ModelLoadError(f"{config.model} embeds chat messages; use one that embeds plain texts")
        if self._model.default_prompt_name and not all(getattr(m, "include_prompt", True) for m in self._model):
            raise ModelLoadError(
                f"{config.model} leaves its prompt out of its vectors, which this backend cannot; use another model"
            )
        own = min(info.context_length, self._model.max_seq_length or info.context_length)
        if (config.max_sequence_length or own) > own:
            raise ConfigurationError(
                [f"max_sequence_length={config.max_sequence_length}: {config.model} takes {own} tokens; set no more"]
            )
        self.info = replace(info, context_length=config.max_sequence_length or own, parameters=parameters)

    @torch.inference_mode()
    def embed(self, prompts: list[Sequence[int]]) -> NDArray[np.float32]:
        """The vectors [N, D] of N prompts. Raises `GenerationFailed` if the model's numbers overflow."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True, padding_value=self._pad)  # [N, T]
        mask = torch.arange(ids.shape[1]) < lengths[:, None]  # [N, T]
        features = {"input_ids": ids.to(self._device), "attention_mask": mask.long().to(self._device)}
        vectors = self._model(features)["sentence_embedding"].float()[:, : self._model.truncate_dim]
        if self._is_normal:  # again: the model may have normalised in fewer bits
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        if not vectors.isfinite().all():
            raise GenerationFailed("the model's vector is not finite; serve it with dtype float32")
        found: NDArray[np.float32] = vectors.cpu().numpy()
        return found

    def close(self) -> None:
        del self._model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
