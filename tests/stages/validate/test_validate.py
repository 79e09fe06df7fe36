"""The stage validate, by itself."""

from __future__ import annotations

from memory_pipeline import Pipeline

from penstock.stages.validate.stage import Validate


def test_it_tells_once_of_each_tokenizer_that_it_has_loaded(pipeline: Pipeline) -> None:
    async def scene() -> None:
        told: list[str] = []
        validate = Validate(pipeline.pipe, lambda: told.append("loaded"))
        (card,) = pipeline.pipe.registry.models.values()
        first = await validate._preparers.get(card)
        assert told == ["loaded"]
        assert await validate._preparers.get(card) is first
        assert told == ["loaded"]

    pipeline.runner.run(scene())
