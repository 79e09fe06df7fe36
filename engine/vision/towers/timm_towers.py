"""The towers that FastVLM and Perception LM take from the library timm, without it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModel, TimmWrapperConfig

from ....schemas.errors import ModelLoadError
from .fastvit import ARCHITECTURE, FastViT
from .perception import ARCHITECTURES, PerceptionEncoder
from .timm_model import TimmModel


class TimmTower(TimmModel):
    config_class = TimmWrapperConfig
    config: TimmWrapperConfig

    def __init__(self, config: TimmWrapperConfig) -> None:
        """Raises `ModelLoadError` for another tower of timm."""
        super().__init__(config)
        self.timm_model = _encoder(config.architecture, dict(config.model_args or {}))
        self.post_init()  # type: ignore[no-untyped-call]


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
