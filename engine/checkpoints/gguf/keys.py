"""The metadata that a GGUF file has for its architecture. Needs no torch."""

from __future__ import annotations

from typing import Any

from ....schemas.errors import ModelLoadError
from .file import Gguf, GgufTensor

HEADS, KV_HEADS = "attention.head_count", "attention.head_count_kv"
_BY_LAYER = ("attention.sliding_window_pattern", "attention.recurrent_layers")
_SECTIONS = "rope.dimension_sections"


class Keys:
    """The metadata of the architecture, by the names that follow its own."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf
        self._prefix = gguf.metadata["general.architecture"]

    def find(self, name: str, default: Any = None) -> Any:
        """A value; an array with one number for each layer must have the same for all that have any."""
        value = self.gguf.metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, list) and name not in (*_BY_LAYER, _SECTIONS):
            if len(values := {*value} - {0}) > 1:
                raise ModelLoadError(
                    f"{self.gguf.path}: {self._prefix}.{name} differs between layers, which is not supported; choose "
                    "another model"
                )
            return values.pop() if values else 0
        return value

    def by_layer(self, name: str) -> list[Any]:
        """A number for each layer, of those that may differ. Raises `ModelLoadError` for fewer of them."""
        value = self.gguf.metadata.get(f"{self._prefix}.{name}")
        found = value if isinstance(value, list) else [value] * self.num_layers
        if len(found) < self.num_layers or None in found:
            raise ModelLoadError(
                f"{self.gguf.path} has no {self._prefix}.{name} for each of {self.num_layers} layers; convert it again"
            )
        return found[: self.num_layers]

    def need(self, name: str) -> Any:
        value = self.find(name)
        if value is None:
            raise ModelLoadError(f"{self.gguf.path} has no {self._prefix}.{name}; convert the model again")
        return value

    @property
    def head_dim(self) -> int:
        return int(self.find("attention.key_length") or self.need("embedding_length") // (self.need(HEADS) or 1))

    @property
    def kv_heads(self) -> int:
        """Of each layer that attends."""
        if found := self.find(KV_HEADS, 0):
            return int(found)
        rows = self.first("attn_k.weight")
        return rows.shape[0] // self.head_dim if rows and self.by_layer(KV_HEADS) else int(self.need(HEADS))

    @property
    def num_layers(self) -> int:
        """Without those that guess tokens further ahead, which come last."""
        return int(self.need("block_count") - (self.find("nextn_predict_layers") or 0))

    @property
    def sections(self) -> list[int] | None:
        """How many frequencies rotate by each of three dimensions of positions, or of four."""
        found = self.find(_SECTIONS)
        if not isinstance(found, list) or len(found) < 3:
            return None
        return found if all(found) else found[:3]

    def has(self, name: str) -> bool:
        """Whether a layer has this tensor."""
        return self.first(name) is not None

    def first(self, name: str) -> GgufTensor | None:
        """The first layer's tensor of that name among those that have it."""
        return next((found for layer in range(self.num_layers) if (found := self.layer(layer, name))), None)

    def layer(self, number: int, name: str) -> GgufTensor | None:
        return self.gguf.tensors.get(f"blk.{number}.{name}")
