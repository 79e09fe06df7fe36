"""Which layers of a model keep a running state, and whether this backend knows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ....schemas.errors import ModelLoadError
from ...models import keeps_states
from .delta_net import NextDeltaNet, SeparateDeltaNet, SplitDeltaNet
from .kimi_delta import KimiDeltaNet
from .layer import StateLayer
from .mamba import Mamba
from .selective import Selective
from .short_convolution import ShortConvolution

_KINDS: dict[str, Callable[[Any], StateLayer]] = {
    "BailingHybridDeltaAttention": KimiDeltaNet,
    "BambaMixer": Mamba,
    "FalconH1Mixer": Mamba,
    "FalconMambaMixer": Selective,
    "GraniteMoeHybridMambaLayer": Mamba,
    "JambaMambaMixer": Selective,
    "KimiLinearDeltaAttention": KimiDeltaNet,
    "Lfm2MoeShortConv": ShortConvolution,
    "Lfm2ShortConv": ShortConvolution,
    "Lfm3ShortConv": ShortConvolution,
    "Mamba2Mixer": Mamba,
    "MambaMixer": Selective,
    "NemotronHMamba2Mixer": Mamba,
    "OlmoHybridGatedDeltaNet": SeparateDeltaNet,
    "Qwen3NextGatedDeltaNet": NextDeltaNet,
    "Qwen3_5GatedDeltaNet": SplitDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": SplitDeltaNet,
}
_ATTENDING = {"full_attention", "sliding_attention", "hybrid"}
_CHUNKED = "chunked_attention"  # full attention, in a context that ends with the first chunk
_FEEDING = {"mlp", "moe"}  # layers that keep nothing of a sequence


def find_states(model: Any, name: str) -> dict[int, nn.Module]:
    """The layers of transformers' model that keep a state, by index. Raises `ModelLoadError` for an unknown kind."""
    config = model.config.get_text_config()
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    found: dict[int, nn.Module] = {
        module.layer_idx: module for module in model.modules() if type(module).__name__ in _KINDS
    }
    known = _ATTENDING | _FEEDING | ({_CHUNKED} if hasattr(config, "attention_chunk_size") else set())
    unknown = {index: kind for index, kind in kinds if index not in found and kind not in known}
    if unknown or (model._is_stateful and not found):
        classes = {type(module).__name__ for module in model.modules() if getattr(module, "layer_idx", None) in unknown}
        what = ", ".join(sorted(classes or {*unknown.values()})) or "a recurrent state"
        advice = "choose another model, or try --backend vllm" if keeps_states(model) else "use --backend hf"
        raise ModelLoadError(f"{name} has layers of a kind that the backend 'paged' does not know ({what}); {advice}")
    return found


def layers_that_feed(config: Any) -> set[int]:
    """The layers, by index, that neither attend to tokens nor keep a state."""
    crossing = getattr(config, "cross_attention_layers", None) or ()
    return {*crossing} | {
        index for index, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind in _FEEDING
    }


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep transformers from advising packages that make its own layers faster: they run once, and are replaced."""
    log = logging.getLogger("transformers.integrations.hub_kernels")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def replace_states(model: nn.Module) -> list[StateLayer]:
    """Put this backend's layers in the place of those that `find_states` found; returns them."""
    own: list[StateLayer] = []
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if (kind := _KINDS.get(type(module).__name__)) is not None:
                own.append(kind(module))
                setattr(parent, name, own[-1])
    return own
