"""The attention function that transformers calls in each layer: it forwards the call to the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...schemas.errors import ModelLoadError
from .attention import Rules

ATTENTION = "penstock"
"""The name of this attention function in transformers."""

_HARMLESS = {
    "cache_position",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "use_cache",
}
"""Keywords that do not affect causal attention."""


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
    """Pass one layer's tensors, [1, H, T, D] each, to `penstock`, which the runner gave to the model's forward."""
    unknown = sorted(name for name in others.keys() - _HARMLESS if others[name] is not None)
    if penstock is None or attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        reason = f"it asks for {', '.join(unknown)}" if unknown else "its attention is not plain and causal"
        raise ModelLoadError(f"the backend 'paged' cannot run {type(module).__name__}: {reason}; use --backend hf")
    rules = Rules(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    index: Any = module.layer_idx
    mixed = penstock(index, query[0], key[0], value[0], rules, sliding_window)
    return mixed.view(1, len(mixed), query.shape[1], -1), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
