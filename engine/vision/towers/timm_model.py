"""What Penstock's own towers of timm have in common."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class TimmModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Takes the place of transformers' `TimmWrapperModel`. A subclass sets `timm_model`, which makes the features."""

    main_input_name = "pixel_values"
    base_model_prefix = "timm_model"
    _supports_sdpa = True
    timm_model: nn.Module

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutput:
        """[B, 3, H, W] → [B, N, C], or [B, C, H', W'] of a tower of convolutions."""
        return BaseModelOutput(last_hidden_state=self.timm_model(pixel_values.to(self.dtype)))
