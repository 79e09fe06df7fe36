"""Which models are shown the images of tools: those that see, by whatever name a response asks for them."""

from __future__ import annotations

import pytest
from memory_pipeline import Pipeline

from penstock.schemas.jobs import AdapterSource
from penstock.schemas.registry import ModelCard
from penstock.stages.tools.images import ToolImages

SEER = ModelCard(
    name="seer",
    source="s",
    backend="paged",
    context_length=64,
    created=0,
    aliases=("eye",),
    adapters=(AdapterSource(name="tuned", path="p"),),
    modalities=("text", "image"),
)


@pytest.mark.parametrize(
    ("name", "sees"), [("seer", True), ("eye", True), ("tuned", True), ("blind", False), ("unknown", False)]
)
def test_a_model_sees_by_each_of_its_names(pipeline: Pipeline, name: str, sees: bool) -> None:
    blind = SEER.model_copy(update={"name": "blind", "aliases": (), "adapters": (), "modalities": ("text",)})
    pipeline.pipe.registry.models = {card.name: card for card in (SEER, blind)}
    images = ToolImages(pipeline.pipe)
    assert images.are_seen(name) is sees
    assert (images.keeper("acme", name) is not None) is sees
