"""A model that embeds texts: its own modules, as sentence-transformers keeps them, make one vector of its tokens'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from ...schemas.errors import GenerationFailed, ModelLoadError


class TextEmbedder:
    """Passes are padded on the right, which no model sees: causal ones do not look ahead, others mask it."""

    def __init__(self, directory: Path, source: str, *, device: str, dtype: str) -> None:
        """Raises `ModelLoadError` for a model that needs more than the tokens of a plain text."""
        from sentence_transformers import SentenceTransformer

        self._model: Any = SentenceTransformer(
            str(directory), device=device, local_files_only=True, model_kwargs={"dtype": dtype}
        )
        self._model.eval()
        self._is_normal = type(self._model[-1]).__name__ == "Normalize"
        self._pad = self._model.tokenizer.pad_token_id or 0
        self.max_length: int | None = self._model.max_seq_length
        if "message" in getattr(self._model[0], "modality_config", ()):
            raise ModelLoadError(f"{source} embeds chat messages; use one that embeds plain texts")
        if self._model.default_prompt_name and not all(getattr(m, "include_prompt", True) for m in self._model):
            raise ModelLoadError(
                f"{source} leaves its prompt out of its vectors, which this backend cannot; use another model"
            )

    def vectors(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The vectors [N, D] of N prompts. Raises `GenerationFailed` if the model's numbers overflow."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True, padding_value=self._pad)  # [N, T]
        mask = torch.arange(ids.shape[1]) < lengths[:, None]  # [N, T]
        device = self._model.device
        features = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
        vectors = self._model(features)["sentence_embedding"].float()[:, : self._model.truncate_dim]
        if self._is_normal:  # again: the model may have normalised in fewer bits
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        if not vectors.isfinite().all():
            raise GenerationFailed("the model's vector is not finite; serve it with dtype float32")
        found: NDArray[np.float32] = vectors.cpu().numpy()
        return found
