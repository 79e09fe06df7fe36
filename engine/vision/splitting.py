"""Takes a model of transformers that sees images apart: its language model, and what sees."""

from __future__ import annotations

from typing import Any

from ...schemas.errors import ModelLoadError
from .bodies import seeing_body
from .crossing import CrossModel, CrossVision
from .families.names import EMBEDDING, UNUSED, language_model_of
from .processor import VisionProcessor
from .tower import LanguageModel, Vision


def split(model: Any, processor: VisionProcessor) -> LanguageModel:
    """The language model, with its `Vision`. Raises `ModelLoadError`."""
    body = seeing_body(model)
    text = language_model_of(body)
    head = model.get_output_embeddings()
    for name in UNUSED - EMBEDDING.get(model.config.model_type, set()):
        if hasattr(body, name):
            setattr(body, name, None)
    if text is None or head is None or not (processor.crosses or hasattr(body, "get_image_features")):
        raise ModelLoadError(f"{type(model).__name__} has no language model of its own; it cannot be served")
    if processor.crosses:
        return CrossModel(model, text, head, CrossVision(model, text, processor))
    if processor.is_prefix:
        for module in text.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = True  # but for the ends that a prompt's layout gives
    return LanguageModel(model, text, head, Vision(model, text, processor))
