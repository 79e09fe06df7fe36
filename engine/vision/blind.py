"""The language model of one that sees images in a way that is not supported: it takes text alone.

Its tower is dropped. What is left must make the same of a text as the whole model does, which is tried when it loads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from ...schemas.errors import ModelLoadError
from .families.names import language_model_of
from .tower import LanguageModel

_NEAR = 1e-3  # of logits in float32


class BlindModel(LanguageModel):
    """Call `check` before any of its modules is replaced."""

    def __init__(self, whole: Any, text: Any, head: nn.Module) -> None:
        super().__init__(whole, text, head, None)
        self._whole: list[Any] = [whole]  # in a list, so that it is no part of this one

    @torch.inference_mode()
    def check(self, ids: Tensor) -> None:
        """Compare the logits of the tokens `ids` [T] with those of the whole model, which may scale them. Raises
        `ModelLoadError`."""
        whole = self._whole.pop()
        name, kept = type(whole).__name__, torch.tensor([len(ids) - 1], device=ids.device)
        own, self.config._attn_implementation = self.config._attn_implementation, "eager"
        try:
            expected: Tensor = whole(input_ids=ids[None], use_cache=False).logits[0, -1]
            positions = torch.arange(len(ids), device=ids.device)[None]
            found = self(ids[None], positions, kept, use_cache=False).logits[0, -1]
        except Exception as error:
            raise ModelLoadError(f"the backend 'paged' cannot run {name} without images ({error})") from error
        finally:
            self.config._attn_implementation = own
        if self._softcap is None:
            scale = float(f"{float((expected @ found) / (found @ found)):.5g}")
            self.logit_scale *= scale
            found = found * scale
        if not (far := float((found - expected).abs().max() / expected.abs().max())) <= _NEAR:
            raise ModelLoadError(
                f"{name} computes text in a way that is not supported (off by {far:.3g}); choose another model"
            )


def split_text(model: Any) -> LanguageModel | PreTrainedModel:
    """What computes text in a model of transformers that sees images. Raises `ModelLoadError`."""
    name, body = type(model).__name__, getattr(model, "model", model)
    if type(model).generate is not GenerationMixin.generate or model.config.is_encoder_decoder:
        raise ModelLoadError(f"{name} does not generate text token by token; choose another model")
    text, head = language_model_of(body), model.get_output_embeddings()
    if text is None or head is None:
        whole: PreTrainedModel = model
        return whole
    for child, module in list(body.named_children()):
        if module is not text:
            setattr(body, child, None)
    return BlindModel(model, text, head)
