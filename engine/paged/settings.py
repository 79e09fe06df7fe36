"""The settings of this backend that exclude each other."""

from __future__ import annotations

import torch

from ...schemas.errors import ConfigurationError
from ..sizing import SizedConfig


def check_settings(config: SizedConfig, device: torch.device) -> None:
    """Raises `ConfigurationError`."""
    if config.attention not in ("auto", "paged"):
        raise ConfigurationError([f"attention={config.attention!r}: the backend 'paged' has its own; use auto"])
    if (config.prefill_chunk_size or config.max_batch_size) < config.max_batch_size:
        raise ConfigurationError(
            [
                f"prefill_chunk_size={config.prefill_chunk_size}: each of max_batch_size={config.max_batch_size} "
                "requests needs a token of it in every step; set it at least as large"
            ]
        )
    if config.enable_cuda_graph and device.type != "cuda":
        raise ConfigurationError([f"enable_cuda_graph: {device} has no CUDA graphs; leave it out"])
