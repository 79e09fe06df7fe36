"""What an engine is built from. Frozen; what is derived from it (device, context) lives in new objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from ..schemas.errors import ConfigurationError


class EngineConfig(BaseModel):
    """One engine: which model, where, and within which limits.

    `model` is a local directory or a Hugging Face id. `dtype` "auto" keeps the checkpoint's. `max_sequence_length`
    counts prompt and answer together and can only shorten the model's own context. `kv_cache_memory` is in bytes;
    strings such as "4GiB" are understood. It and `max_batch_size` are chosen from the machine where they are left out.
    `attention` "auto" leaves the choice to the backend, and so does None for chunked prefill, its `prefill_chunk_size`
    in tokens, and CUDA graphs. `compile_kernels` lets a CPU compute short steps by `kernels.c`, where it can be
    compiled. `cache_answers` gives identical greedy requests the answer of the first, from memory. `echo_rate` is in
    tokens a second and choice, 0 for as fast as possible. A request for which nothing is computed in `stall_timeout`
    seconds, though it is its turn, begins again, and the second time ends with an error.

    Whether the chosen backend can honour it all is checked when the engine is built: see `refuse`.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(min_length=1)]
    backend: Annotated[str, Field(min_length=1)] = "paged"
    device: Annotated[str, Field(min_length=1)] = "auto"
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    quantization: Annotated[str, Field(min_length=1)] | None = None
    attention: Annotated[str, Field(min_length=1)] = "auto"
    max_batch_size: Annotated[int, Field(ge=1)] | None = None
    reserved_batch_size: Annotated[int, Field(ge=0)] = 0  # of these, for requests of priority 0 alone
    max_sequence_length: Annotated[int, Field(ge=2)] | None = None
    kv_cache_memory: Annotated[ByteSize, Field(gt=0)] | None = None
    enable_cuda_graph: bool | None = None
    compile_kernels: bool = True
    enable_chunked_prefill: bool | None = None
    prefill_chunk_size: Annotated[int, Field(ge=1)] | None = None
    cache_answers: bool = False
    stall_timeout: Annotated[float, Field(gt=0)] = 30.0
    echo_rate: Annotated[float, Field(ge=0)] = 0.0

    def refuse(self, *names: str) -> None:
        """Raise `ConfigurationError` for every one of these settings that is not at its default.

        Called by a backend with what it cannot honour: a setting is obeyed or refused, never ignored.
        """
        faults = [
            f"{name}={getattr(self, name)!r}: the backend {self.backend!r} does not support this setting; leave it out"
            for name in names
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if faults:
            raise ConfigurationError(faults)
