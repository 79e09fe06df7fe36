"""What transformers' code calls for attention in each layer: it hands the layer on to whoever runs the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...schemas.errors import ModelLoadError
from .attention import Rules

ATTENTION = "penstock"
"""The name under which transformers knows our attention function."""

_HARMLESS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
"""Keywords of attention functions that change nothing for a causal one."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    penstock: Callable[..., Tensor] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer, [1, H, T, D] each; `penstock` is handed through the model's forward."""
    unknown = sorted(name for name in others.keys() - _HARMLESS if others[name] is not None)
    if penstock is None or attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        reason = f"it asks for {', '.join(unknown)}" if unknown else "its attention is not plain and causal"
        raise ModelLoadError(f"{type(module).__name__} cannot be run so: {reason}; use --backend hf")
    rules = Rules(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    index: Any = module.layer_idx
    mixed = penstock(index, query[0], key[0], value[0], rules, sliding_window)
    return mixed.view(1, len(mixed), query.shape[1], -1), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
