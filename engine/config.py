"""An engine's configuration. Frozen: values derived from it (device, context) live in new objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationInfo, field_validator

from ..schemas.base import held_as, not_above
from ..schemas.errors import ConfigurationError
from .vision.reading import ANY, MOST_DECODED, ShownPages

# To type checkers each of these is what it is read as; Any lets a caller give what becomes one: a path, or "4GiB".
_Source = Annotated[str | Any, held_as(Annotated[str, Field(min_length=1)])]
_Bytes = Annotated[int | Any, held_as(Annotated[ByteSize, Field(gt=0)])]
_Directory = Annotated[Path | Any, held_as(Annotated[Path, Field(strict=False)])]


def _as_text(model: object) -> object:
    return os.fspath(model) if isinstance(model, Path) else model


class EngineConfig(BaseModel):
    """One engine: its model, device and limits.

    `model` is a local directory, a GGUF file, alone or with its projector behind a comma, or a Hugging Face id.
    `dtype` "auto" keeps the checkpoint's. `max_sequence_length` counts prompt and answer together and can only shorten
    the model's own context. `kv_cache_memory` is in bytes or a string such as "4GiB". If it or `max_batch_size` is left
    out, the engine chooses it to suit the machine. The backend chooses where `attention` is "auto", or where chunked
    prefill, `prefill_chunk_size` in tokens, or CUDA graphs are None. `compile_kernels` lets a CPU run short steps in
    `kernels.c`, if it can be compiled. `speculation` lets decoding steps check guessed tokens, at most
    `speculation_depth` a choice, where that changes no answer and pays. `prefix_cache_dir` also keeps cached prefixes
    on disk, in `prefix_cache_limit` bytes, for later engines. `cache_answers` answers identical greedy requests from
    memory. `echo_rate` is in tokens a second for each choice, 0 for as fast as possible. If the engine
    computes nothing for a scheduled request in `stall_timeout` seconds, it restarts the request; the second time the
    request fails.

    `backend_options` are NAME=VALUE, in the words of a backend that takes some. `allowed_backends` are the ids of the
    plug-ins that may be imported, None for all. `fallback_backend` loads the model as well, and runs the requests that
    need what `backend` lacks. `allowed_plug_ins` are the installed generation plug-ins that requests may name, None for
    all.

    An image with more than `max_pixels` is reduced before the model sees it, one with fewer than `min_pixels` enlarged;
    None leaves that to the model's own processor. One whose file holds more than `max_decoded_pixels` is refused.
    Of PDFs the model is shown the pages without text; `shown_pages` says which others.

    The backend checks, when the engine is built, that it can honour every setting: see `refuse`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[_Source, BeforeValidator(_as_text)]
    backend: Annotated[str, Field(min_length=1)] = "paged"
    device: Annotated[str, Field(min_length=1)] = "auto"
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    quantization: Annotated[str, Field(min_length=1)] | None = None
    attention: Annotated[str, Field(min_length=1)] = "auto"
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    reserved_batch_size: Annotated[int, Field(ge=0)] = 0  # of these, for requests of priority 0 alone
    max_sequence_length: Annotated[int, Field(ge=2)] | None = None
    kv_cache_memory: _Bytes | None = None
    enable_cuda_graph: bool | None = None
    compile_kernels: bool = True
    enable_chunked_prefill: bool | None = None
    prefill_chunk_size: Annotated[int, Field(ge=1)] | None = None
    speculation: Literal["auto", "off"] = "auto"
    speculation_depth: Annotated[int, Field(ge=1, le=64)] = 12
    prefix_cache_dir: _Directory | None = None
    prefix_cache_limit: _Bytes = ByteSize(10 << 30)
    cache_answers: bool = False
    stall_timeout: Annotated[float, Field(gt=0)] = 30.0
    backend_options: tuple[str, ...] = ()
    allowed_backends: tuple[str, ...] | None = None
    fallback_backend: Annotated[str, Field(min_length=1)] | None = None
    allowed_plug_ins: tuple[str, ...] | None = None
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    min_pixels: Annotated[Annotated[int, Field(ge=1)] | None, not_above("max_pixels")] = None
    max_decoded_pixels: Annotated[int, Field(ge=1, le=MOST_DECODED)] = ANY.decoded
    shown_pages: ShownPages = ANY.pages
    echo_rate: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("reserved_batch_size")
    @classmethod
    def _leaves_room(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_batch_size")
        if most is not None and value >= most:
            raise ValueError(f"{value} of max_batch_size={most} leaves no room for other requests; reserve fewer")
        return value

    def refuse(self, *names: str) -> None:
        """Raise `ConfigurationError` naming each of these settings that is not at its default.

        A backend calls this with the settings that it cannot honour: a setting is obeyed or refused, never ignored.
        """
        faults = [
            f"{name}={getattr(self, name)!r}: the backend {self.backend!r} does not support this setting; leave it out"
            for name in names
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if faults:
            raise ConfigurationError(faults)
