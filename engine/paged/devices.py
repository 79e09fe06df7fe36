"""What computes attention and mixtures of experts on a device: Triton's kernels where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..cpu.library import Kernels
from .attention import MatmulAttention
from .decoding.experts import MakeProduct, pack_experts
from .kv.kv_cache import LayerSpec


def choose_attention(
    block_size: int, specs: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, on_triton: bool
) -> Any:
    """What attends, over pools of its own kind: Triton's kernels where they run, else products of matrices."""
    if not on_triton:
        return MatmulAttention(block_size, dtype, device)
    from .cuda.attention import PagedAttention

    return PagedAttention(block_size, max(spec.size for spec in specs), dtype, device)


class TakenExperts(Protocol):
    """Experts of a layer in the place of transformers'."""

    @property
    def num_active_weights(self) -> int:
        """The numbers of the weights that a token passes."""
        ...

    @property
    def active_bytes(self) -> int:
        """The bytes of the weights that a decoding step of one row reads."""
        ...

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The addresses and sizes of the weights in the machine's memory."""
        ...


def take_experts(
    model: Any, make: MakeProduct, kernels: Kernels | None, device: torch.device, *, on_triton: bool
) -> Sequence[TakenExperts]:
    """Put the device's experts in the place of transformers'; returns all. Other devices than a CPU need Triton."""
    if device.type == "cpu":
        return pack_experts(model, make, kernels)
    if not on_triton:
        return ()
    from .decoding.cuda_experts import group_experts

    return group_experts(model)
