"""Settings of this backend that exclude each other, and what they cost."""

from __future__ import annotations

import torch

from ...schemas.errors import ConfigurationError
from ..cuda.levels import unsupported
from ..planning.device import has_triton
from ..planning.model_files import ModelFiles
from ..planning.sizing import SizedConfig


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
    if config.enable_cuda_graph and not has_triton(device):
        raise ConfigurationError(["enable_cuda_graph: needs Triton; install it, or leave enable_cuda_graph out"])


def why_expanded(config: SizedConfig, device: torch.device) -> str:
    """Why weights that the model's files have in few bits take the memory of their dtype on a GPU; empty if there are
    none. Raises `ModelLoadError`."""
    if not ModelFiles.of(config).has_levels:
        return ""
    reason = unsupported(device) or "a GPU keeps levels of plain decoders alone, in bfloat16"
    return f"weights of few bits are expanded: {reason}"
