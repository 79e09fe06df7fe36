"""Loads a model for the runner: plain decoders by Penstock's own code, all others by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backend import ProgressCallback
from ..config import EngineConfig
from ..plain.loading import load_plain
from ..plain.model import PlainModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_model(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    keep_levels: bool,
) -> PreTrainedModel | PlainModel:
    """The model at `path`, whose attention is the runner's; see `load_causal_lm` for the arguments and errors."""
    plain = load_plain(config, path, device, progress, keep_levels=keep_levels)
    if plain is not None:
        return plain
    from ..loading import load_causal_lm  # it imports transformers, which takes seconds
    from .attention_hook import ATTENTION

    return load_causal_lm(config, path, architecture, device, progress, ATTENTION, keep_levels=keep_levels)
