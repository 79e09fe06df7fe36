"""What transformers' models that see call their parts. Knows no torch and no transformers."""

from __future__ import annotations

from typing import Any

_TOWERS = {
    *("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "embed_vision"),
    *("projector", "vision_encoder", "vision_projection", "image_newline", "merger", "density_router", "aligner"),
    *("view_separator", "visual_embeddings_table", "mm_projector", "vit"),
    *("layerwise_projectors", "spatial_projectors", "resampler_model"),
    *(f"high_res_vision_{name}" for name in ("model", "neck", "proj", "alpha")),
}
UNUSED = {"audio_tower", "embed_audio", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head"}
"""Modules' names, too."""
EMBEDDING = {"gemma3n": {"embed_audio"}}
"""Those of them that a family needs for tokens of text."""
SCALING = {"granite_docling": -1, "granite4_vision": -1, "hyperclovax_vision_v2": 1}
"""Those whose heads scale logits by this power of the `logits_scaling` of their text_config."""


def body_of(model: Any) -> Any:
    """transformers' model without its output head; of Llama 4, whose head is inside its language model, all of it."""
    return getattr(model, "model", model)


def language_model_of(body: Any) -> Any:
    """The language model inside transformers' model without its output head; None in a model of text."""
    found: Any = getattr(body, "language_model", None) or getattr(body, "text_model", None)
    return found.model if hasattr(found, "lm_head") else found


def is_unused(name: str) -> bool:
    """Whether a weight of this name belongs to what makes features of sounds, or pictures, which is dropped once it is
    loaded."""
    return not UNUSED.isdisjoint(name.split("."))


def is_of_tower(name: str) -> bool:
    """Whether a weight of this name belongs to what makes features of pictures, and not to a language model."""
    return not _TOWERS.isdisjoint(name.split("."))
