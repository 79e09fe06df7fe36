"""What a backend says of itself before it is imported. Penstock's own backends and plug-ins are found through it alone.

A plug-in package names its manifest in the entry-point group `penstock.backends`, under the backend's id. The object
is a `Manifest` or a dictionary with its fields; the module that holds it should import nothing large.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...schemas.params import GenerationParams

INTERFACE = 1
"""The version of `Backend`, `Choice` and the sampler, as backends use them. It changes whenever one of them must."""

Format = Literal["safetensors", "gguf"]
Mode = Literal["text", "images", "embeddings", "scores"]
Name = Annotated[str, Field(min_length=1)]


class Manifest(BaseModel):
    """A backend's own description. The engine checks every word of it before it loads a model or runs a request.

    `backend` is the class, as "module:Class", called with an `EngineConfig` and a `ProgressCallback` or None.
    `formats` are those of the models that it loads; none if it needs no files. `architectures` are names as in
    config.json; None if only loading finds out. `resume` says how an answer that another worker began goes on: with the
    same tokens ("exact"), with the same tokens at temperature 0 and not at all otherwise ("greedy"), or not at all.
    `parameters` are the fields of `GenerationParams` that it honours. `adapters`: it runs LoRA adapters. `cache`: it
    keeps keys and values within `kv_cache_memory`. `expands`: it holds weights as `dtype`, whatever the file has.
    `options`: it takes `backend_options`.
    `requires` are modules that must be installed, by the command `install`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)]
    interface: int
    backend: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    licence: Name
    formats: Annotated[tuple[Format, ...], Field(strict=False)]
    devices: Annotated[tuple[Literal["cpu", "cuda", "mps"], ...], Field(strict=False, min_length=1)]
    modes: Annotated[tuple[Mode, ...], Field(strict=False, min_length=1)]
    resume: Literal["exact", "greedy", "none"]
    architectures: Annotated[tuple[Name, ...] | None, Field(strict=False)] = None
    parameters: Annotated[frozenset[str], Field(strict=False)] = frozenset(GenerationParams.model_fields)
    adapters: bool = False
    cache: bool = False
    expands: bool = True
    options: bool = False
    requires: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    install: str = ""

    @model_validator(mode="before")
    @classmethod
    def _has_our_interface(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("interface", INTERFACE) != INTERFACE:
            raise ValueError(
                f"it was written for interface {values['interface']!r} of backends, and this Penstock has {INTERFACE}; "
                "install a release of it for this one"
            )
        return values

    @field_validator("parameters")
    @classmethod
    def _are_known(cls, value: frozenset[str]) -> frozenset[str]:
        if unknown := sorted(value - GenerationParams.model_fields.keys()):
            raise ValueError(f"{', '.join(unknown)}: no such parameters")
        return value

    @property
    def missing(self) -> str:
        """What is not installed and how to install it; empty if nothing is missing."""
        lacking = [name for name in self.requires if find_spec(name.partition(".")[0]) is None]
        if not lacking:
            return ""
        return f"{', '.join(lacking)} not installed" + (f"; install with: {self.install}" if self.install else "")


def read_manifest(found: object, name: str) -> Manifest:
    """The manifest that an entry point called `name` leads to. Raises `ValueError`, which says what is wrong."""
    if not isinstance(found, Manifest):
        if not isinstance(found, dict):
            raise ValueError(f"its entry point leads to a {type(found).__name__}, not to a Manifest or a dictionary")
        found = Manifest.model_validate(found)
    if found.id != name:
        raise ValueError(f"its manifest has the id {found.id!r}; the entry point must have the same name")
    return found


def explain(error: BaseException) -> str:
    """Why a plug-in cannot be used, in one line."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        texts = [(fault["msg"].removeprefix("Value error, "), ".".join(map(str, fault["loc"]))) for fault in faults]
        return "; ".join(f"{where}: {text}" if where else text for text, where in texts)
    if isinstance(error, ValueError) and type(error) is ValueError:
        return str(error)
    return f"importing it failed: {type(error).__name__}: {error}".partition("\n")[0]
