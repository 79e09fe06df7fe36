"""The metadata that a GGUF file has for its architecture. Needs no torch."""

from __future__ import annotations

from typing import Any

from ....schemas.errors import ModelLoadError
from .file import Gguf

HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
_BY_LAYER = ("attention.sliding_window_pattern", "attention.recurrent_layers")
_SECTIONS = "rope.dimension_sections"


class Keys:
    """The metadata of the architecture, by the names that follow its own."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self._prefix = gguf.metadata["general.architecture"]

    def find(self, name: str, default: Any = None) -> Any:
        """A value; an array with one number for each layer must have the same for all."""
        value = self.gguf.metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, list) and name not in (*_BY_LAYER, _SECTIONS):
            if len({*value}) != 1:
                raise ModelLoadError(
                    f"{self.gguf.path}: {self._prefix}.{name} differs between layers, which is not supported; choose "
                    "another model"
                )
            return value[0]
        return value

    def need(self, name: str) -> Any:
        value = self.find(name)
        if value is None:
            raise ModelLoadError(f"{self.gguf.path} has no {self._prefix}.{name}; convert the model again")
        return value

    @property
    def head_dim(self) -> int:
        return int(self.find("attention.key_length") or self.need("embedding_length") // self.need(HEADS))

    @property
    def num_layers(self) -> int:
        """Without those that guess tokens further ahead, which come last."""
        return int(self.need("block_count") - (self.find("nextn_predict_layers") or 0))

    @property
    def sections(self) -> list[int] | None:
        """How many frequencies rotate by each of three dimensions of positions."""
        found = self.find(_SECTIONS)
        return found[:3] if isinstance(found, list) and len(found) >= 3 else None

    def has(self, name: str) -> bool:
        """Whether the first layer has this tensor."""
        return f"blk.0.{name}" in self.gguf.tensors
