"""Tokens of text that a model which sees takes otherwise than by the table of its language model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...schemas.errors import ModelLoadError

APART = "moe_mm_token_type_ids"
"""The name under which ERNIE 4.5 VL takes which tokens pass experts of their own."""


class FurtherEmbeddings(NamedTuple):
    """The embeddings [K, E] of the tokens from `first` on, in place of those in the table."""

    first: int
    rows: Tensor

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """[B, T], [B, T, E] → [B, T, E]."""
        own = (ids - self.first).clamp(0, len(self.rows) - 1)
        return torch.where((ids >= self.first)[..., None], self.rows[own].to(embedded.dtype), embedded)


@torch.inference_mode()
def further_embeddings(whole: Any) -> FurtherEmbeddings | None:
    """Those of a model of transformers: Gemma 3n has some for the tokens around and in images and sounds. Raises
    `ModelLoadError`."""
    if whole.config.model_type != "gemma3n":
        return None
    seen, heard = whole.model.embed_vision, whole.model.embed_audio
    if heard.vocab_offset != seen.vocab_offset + seen.vocab_size:
        raise ModelLoadError(
            f"config.json begins the tokens of sounds at {heard.vocab_offset}, and not behind those of images at "
            f"{seen.vocab_offset + seen.vocab_size}, which is not supported; correct vocab_offset and vocab_size"
        )
    ids = (torch.arange(one.vocab_size, device=whole.device) + one.vocab_offset for one in (seen, heard))
    rows = [embed(input_ids=own[None])[0] for embed, own in zip((seen, heard), ids, strict=True)]
    return FurtherEmbeddings(seen.vocab_offset, torch.cat(rows).clone())


def replaced_tokens(config: Any) -> dict[int, int]:
    """Tokens that stand for what a text has not, and those that take their place in the model with this config."""
    if config.model_type not in ("gemma4", "gemma4_unified"):
        return {}
    ids = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
    return dict.fromkeys((id for id in ids if id is not None), config.get_text_config().pad_token_id)
