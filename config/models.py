"""The settings of a server that offers several models by name."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings


class ModelsSettings(BaseSettings):
    """A part of `Settings`."""

    models: Path | None = Field(
        None,
        description="TOML file with a table for each model that `serve` offers by name; one is loaded when it is asked "
        "for, and unloaded when another needs its memory.",
    )
    model_dir: Path | None = Field(
        None, description="Directory whose folders are models that `serve` offers, each under its folder's name."
    )
    models_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory that loaded models may take together; by default nine tenths of what is free at the start.",
    )
    least_residency: float = Field(
        5.0, ge=0, description="How long a model stays loaded at least before another may take its memory."
    )
    longest_wait: float = Field(
        15.0, ge=0, description="How long requests wait for memory before models that are busy drain for theirs."
    )
    probe_timeout: float = Field(
        60.0,
        gt=0,
        le=600,
        description="How long a model that is to replace another by a hot swap may take to answer a test request; "
        "past it, the swap fails and the other one serves on.",
    )
    max_models: int = Field(
        16,
        ge=1,
        le=500,
        description="Models for which requests may wait, each in lanes of its own; together they have a quarter of "
        "store_limit. One that has had no worker for ten minutes, and nothing waiting, gives its lanes up to another.",
    )
    tool_format: str = Field(
        "auto", min_length=1, description="How the model writes tool calls; auto: as its chat template suggests."
    )
    reasoning_format: str = Field(
        "auto",
        min_length=1,
        description="How the model writes thoughts; auto: as its chat template suggests; none: all is content.",
    )
