"""Every architecture that GGUF files may hold, by the name that they have for it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .....schemas.errors import ModelLoadError
from ..file import Gguf
from ..keys import Keys
from .architecture import Architecture, rope_of
from .delta_nets import DELTA_NETS, GROUPED, NEXT, TILED, hybrid_config
from .dense import DENSE
from .experts import EXPERTS, experts_config, shared_size
from .gemma import GEMMAS
from .granite import GRANITES
from .recurrent import HYBRIDS
from .sparse import SPARSE


def architecture_of(gguf: Gguf) -> Architecture:
    """Raises `ModelLoadError` for one that is not supported."""
    name = gguf.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{gguf.path} has the architecture {name!r}, which is not supported in GGUF files; supported: "
            f"{', '.join(ARCHITECTURES)}. Use the model's safetensors files instead"
        )
    found = ARCHITECTURES[name]
    return found if isinstance(found, Architecture) else found(Keys(gguf))


def _hybrid(keys: Keys) -> dict[str, Any]:
    rope = rope_of(keys) | {"mrope_interleaved": True}
    return hybrid_config(keys) | {"rope_parameters": rope | ({"mrope_section": keys.sections} if keys.sections else {})}


def _hybrid_with_experts(keys: Keys) -> dict[str, Any]:
    return _hybrid(keys) | experts_config(keys) | {"shared_expert_intermediate_size": shared_size(keys)}


def _next(keys: Keys) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 1.0} | rope_of(keys)  # else transformers' own of this model
    experts = experts_config(keys) | {"shared_expert_intermediate_size": shared_size(keys), "norm_topk_prob": True}
    return hybrid_config(keys) | {"rope_parameters": rope} | experts


_DELTA_NETS = {
    "qwen3next": Architecture(
        "qwen3_next", "Qwen3NextForCausalLM", NEXT | EXPERTS, GROUPED, norm_offset=1, extra=_next
    ),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", DELTA_NETS, TILED, norm_offset=1, extra=_hybrid),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        DELTA_NETS | EXPERTS,
        TILED,
        norm_offset=1,
        extra=_hybrid_with_experts,
    ),
}
ARCHITECTURES: dict[str, Architecture | Callable[[Keys], Architecture]] = {
    **SPARSE,
    **DENSE,
    **_DELTA_NETS,
    **GEMMAS,
    **GRANITES,
    **HYBRIDS,
}
