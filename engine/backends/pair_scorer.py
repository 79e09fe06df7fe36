"""A model that scores pairs of texts: a cross-encoder of sentence-transformers, encoder or decoder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from ...schemas.errors import GenerationFailed, ModelLoadError
from ..text.tokenizer import PairTokenizer

_PROBE = "a query", "A document, longer than the query."
_ROWS = "input_ids", "attention_mask", "token_type_ids"


class PairScorer:
    """Scores are what `CrossEncoder.predict` gives: most models' lie between 0 and 1, those of others are logits."""

    def __init__(self, directory: Path, source: str, tokenizer: PairTokenizer, *, device: str, dtype: str) -> None:
        """Raises `ModelLoadError` for a model with several scores a pair, or whose inputs `tokenizer` writes otherwise
        than the library does."""
        from sentence_transformers import CrossEncoder

        self._model: Any = CrossEncoder(
            str(directory), device=device, local_files_only=True, model_kwargs={"dtype": dtype}
        )
        self._model.eval()
        if self._model.num_labels != 1:
            raise ModelLoadError(
                f"{source} gives {self._model.num_labels} scores a pair, as classifiers do; use a reranker, "
                "which gives one"
            )
        self.max_length: int | None = self._model.max_seq_length
        self._separator = tokenizer.separator
        self._pad = self._model.tokenizer.pad_token_id or 0
        default = self._model.default_prompt_name
        theirs = self._model.preprocess([_PROBE], prompt=self._model.prompts[default] if default else None)
        self._same = {name: theirs[name] for name in ("modality", "logits_to_keep") if name in theirs}
        self._side = "left" if "logits_to_keep" in theirs else "right"  # the last place counts in decoders
        self._named = [name for name in _ROWS if name in theirs]
        ours = self._features(list(tokenizer.pairs(_PROBE[0], [_PROBE[1]])))
        if any(theirs[name].tolist() != ours[name].tolist() for name in self._named):
            raise ModelLoadError(f"{source} reads pairs in a form that is not supported; use another model")

    def vectors(self, prompts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """The scores [N, 1] of N pairs. Raises `GenerationFailed` if the model's numbers overflow."""
        features = {name: rows.to(self._model.device) for name, rows in self._features(prompts).items()}
        scores = self._model.activation_fn(self._model(features | self._same)["scores"].float())
        if not scores.isfinite().all():
            raise GenerationFailed("the model's score is not finite; serve it with dtype float32")
        found: NDArray[np.float32] = scores.reshape(len(prompts), 1).cpu().numpy()
        return found

    def _features(self, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """What the model reads of N pairs, each [N, T]."""
        ids = [torch.tensor(prompt) for prompt in prompts]
        rows = ids, [torch.ones_like(row) for row in ids], [self._types(row) for row in ids]
        fillers = self._pad, 0, 0
        found = {
            name: pad_sequence(each, batch_first=True, padding_value=filler, padding_side=self._side)
            for name, each, filler in zip(_ROWS, rows, fillers, strict=True)
        }
        return {name: found[name] for name in self._named}

    def _types(self, ids: torch.Tensor) -> torch.Tensor:
        """0 for the query and its separator, 1 for the document, where the model is told which is which."""
        types = torch.zeros_like(ids)
        if self._separator is not None and (ends := (ids == self._separator).nonzero()).numel():
            types[ends[0] + 1 :] = 1
        return types
