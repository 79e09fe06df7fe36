"""The settings of plug-ins: what installed packages may add."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from .models import split_commas


class PluginSettings(BaseModel):
    """A part of `Settings`."""

    allowed_backends: Annotated[tuple[str, ...] | None, BeforeValidator(split_commas)] = Field(
        None,
        description="Ids of the backend plug-ins that may be imported; without it all that are installed. Penstock's "
        "own need no permission.",
    )
    backend_options: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = Field(
        (),
        description="NAME=VALUE, several with commas: what the backend vllm passes on to vLLM's engine, as in "
        "tensor_parallel_size=2. Values are JSON, or else text.",
    )
    allowed_plug_ins: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = Field(
        (),
        description="Names of the installed generation plug-ins (logits processors, stopping criteria, clean-ups) that "
        "requests may use; none by default. `penstock plug-ins` lists them.",
    )
    fallback_backend: str | None = Field(
        None,
        min_length=1,
        description="Backend that runs the requests that need what --backend lacks; it loads the model a second time. "
        "Without it such requests are refused.",
    )
