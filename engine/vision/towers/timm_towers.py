"""The towers that FastVLM and Perception LM take from the library timm, without it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, TimmWrapperConfig
from transformers.modeling_outputs import BaseModelOutput

from ....schemas.errors import ModelLoadError
from .fastvit import ARCHITECTURE, FastViT
from .perception import ARCHITECTURES, PerceptionEncoder


class TimmTower(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Takes the place of transformers' `TimmWrapperModel`."""

    config_class = TimmWrapperConfig
    config: TimmWrapperConfig
    main_input_name = "pixel_values"
    base_model_prefix = "timm_model"
    _supports_sdpa = True

    def __init__(self, config: TimmWrapperConfig) -> None:
        """Raises `ModelLoadError` for another tower of timm."""
        super().__init__(config)
        self.timm_model = _encoder(config.architecture, dict(config.model_args or {}))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.timm_model(pixel_values.to(self.dtype)))


def provide_timm_towers() -> None:
    """Let transformers build models with these towers."""
    AutoModel.register(TimmWrapperConfig, TimmTower, exist_ok=True)


def _encoder(architecture: str, options: dict[str, Any]) -> nn.Module:
    if architecture == ARCHITECTURE:
        return FastViT(options)
    if architecture in ARCHITECTURES:
        return PerceptionEncoder(architecture, options)
    raise ModelLoadError(
        f"the vision_config in config.json names the tower {architecture!r}; of timm's towers "
        f"{', '.join((ARCHITECTURE, *ARCHITECTURES))} are supported"
    )
