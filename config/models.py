"""The settings of a server that offers several models by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, Field, ValidationInfo, field_validator


def split_commas(value: object) -> object:
    """The parts of a text with commas between them; anything else as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _check_prefix(value: str) -> str:
    from ..schemas.urls import UrlLocation  # imports httpx2, which commands without such settings need not wait for

    UrlLocation.prefix(value)
    return value


UrlPrefix = Annotated[str, AfterValidator(_check_prefix)]


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[^\x00-\x1f\x7f]{1,256}", value):
        raise ValueError("must have 1 to 256 characters, and no control characters among them")
    return value


ServedName = Annotated[str, AfterValidator(_check_name)]  # that requests can hold


def _pairs(value: object) -> object:
    return [f"{name}={path}" for name, path in value.items()] if isinstance(value, dict) else split_commas(value)


def parse_adapters(modules: tuple[str, ...]) -> dict[str, str]:
    """The paths of adapters by name, from the setting `lora_modules`."""
    return {name: path for name, _, path in (module.partition("=") for module in modules)}


class ModelsSettings(BaseModel):
    """A part of `Settings`."""

    models: Path | None = Field(
        None,
        description="TOML file with a table for each model that `serve` offers by name; one is loaded when it is asked "
        "for, and unloaded when another needs its memory.",
    )
    model_dir: Path | None = Field(
        None, description="Directory whose folders and GGUF files are models that `serve` offers, under their names."
    )
    lora_modules: Annotated[tuple[str, ...], BeforeValidator(_pairs)] = Field(
        (),
        description="LoRA adapters of the model, NAME=DIRECTORY each: clients ask for them by these names. In TOML a "
        "table, too.",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="Let /v1/load_lora_adapter and /v1/unload_lora_adapter add and remove adapters while serving; with "
        "API keys only for those with the word admin.",
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

    @field_validator("*", mode="before")
    @classmethod
    def _is_named(cls, value: object, info: ValidationInfo) -> object:
        """A variable that expands to nothing is no directory, though `Path` takes it for the working directory."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if value == "" and Path in (kind, *get_args(kind)):
            raise ValueError("an empty path; name one, or leave the setting out")
        return value

    @field_validator("lora_modules")
    @classmethod
    def _are_adapters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [module for module in value if not all(module.partition("=")) or "," in module or "\0" in module]:
            raise ValueError(f"{', '.join(map(repr, bad))}: write NAME=DIRECTORY, without commas in either")
        if len(parse_adapters(value)) < len(value):
            raise ValueError("a name is given twice; give each adapter its own")
        for name in parse_adapters(value):
            try:
                _check_name(name)
            except ValueError as error:
                raise ValueError(f"the adapter's name {name!r} {error}") from None
        return value
