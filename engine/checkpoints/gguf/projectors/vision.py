"""What the file with the vision part of a model says, and what a kind of such files is. Needs no torch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from math import isqrt
from types import MappingProxyType
from typing import Any, NamedTuple

from .....schemas.errors import ModelLoadError
from ..file import Gguf

Names = Mapping[str, str]
Settings = Callable[["Vision"], dict[str, Any]]


class Vision:
    """The metadata of a projector, by the names that follow `clip.vision.`, and the sizes of its tensors."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf = gguf

    def find(self, name: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"clip.vision.{name}", default)

    def need(self, name: str) -> int:
        """A number from 1 on."""
        value = self.find(name)
        if not isinstance(value, int) or value < 1:
            fault = f"has no clip.vision.{name}" if value is None else f"says that clip.vision.{name} is {value!r}"
            raise ModelLoadError(f"{self.gguf.path} {fault}; convert the model again")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        """As many floats."""
        value = self.find(name)
        found = value if isinstance(value, list) else [value]
        if len(found) != count or not all(isinstance(each, float) for each in found):
            raise ModelLoadError(f"{self.gguf.path} has no {count} numbers clip.vision.{name}; convert the model again")
        return [*map(short, found)]

    def size(self, name: str, axis: int) -> int:
        """The length of a tensor along an axis. Raises `ModelLoadError` if it is missing."""
        tensor = self.gguf.tensors.get(name)
        if tensor is None or axis >= len(tensor.shape):
            raise ModelLoadError(f"{self.gguf.path} lacks the tensor {name}: it is incomplete; download it again")
        return tensor.shape[axis]

    @property
    def width(self) -> int:
        return self.need("embedding_length")

    def merge(self, name: str) -> int:
        """The side of the square of patches that the tensor `name` makes one token of."""
        return isqrt(self.size(name, 1) // self.width)

    def activation(self, gelu: str, neither: str) -> str:
        """The name of the function between the layers of a perceptron."""
        given = self.gguf.metadata
        return "silu" if given.get("clip.use_silu") else gelu if given.get("clip.use_gelu") else neither

    @property
    def tower(self) -> dict[str, Any]:
        """What most towers have in common."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.need("feed_forward_length"),
            "num_hidden_layers": self.need("block_count"),
            "num_attention_heads": self.need("attention.head_count"),
            "image_size": self.need("image_size"),
            "patch_size": self.need("patch_size"),
            "layer_norm_eps": self.numbers("attention.layer_norm_epsilon", 1)[0],
        }

    @property
    def colours(self) -> dict[str, Any]:
        """How colours become numbers around 0."""
        return {f"image_{name}": self.numbers(f"image_{name}", 3) for name in ("mean", "std")}


class Projector(NamedTuple):
    """One kind. `texts` are the architectures of language models that it goes with in GGUF, and transformers' names for
    them there, empty where it is the one that they have alone; `language_model` is where these lie in transformers'
    model of `model_type`, `head` what the name of their output begins with there, and `layers` those of the tower, if
    it has any.

    `names` and `layer` map tensors to transformers' weights; several that map to the same one are parts of it.
    `optional` ones may be missing, `ignored` ones need not be read, of `permuted` ones the rows of each head are
    interleaved; `dimensions` has how many some have, the first of which are 1. Nor need those be read whose names begin
    like one of `ignored_parts`. Of `by_pixels` the file has all pixels of a colour together, and transformers all
    colours of a pixel; of `by_axis` it has all positions along an axis together. `unused` are weights that transformers
    wants and does not use, each with a tensor of its shape. `output` has as many rows as tokens have numbers, or along
    its `output_axis`. `mark` is the text of an image token; a token whose text begins like `spare` may stand in for it.
    `config` has what config.json has besides, `processor` is preprocessor_config.json. `names_of` are more names, which
    depend on the file. `offsets` are to be added to tensors; `tokens` are texts by what config.json calls their ids.
    `models` are transformers' model and its class for architectures with which these are others. `leading` are rows
    that tensors lack before theirs, which are of no account.
    """

    model_type: str
    class_name: str
    texts: Names
    language_model: str
    mark: str
    names: Names
    layers: str
    layer: Names
    output: str
    config: Settings
    processor: Settings
    optional: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    ignored_parts: tuple[str, ...] = ()
    permuted: frozenset[str] = frozenset()
    by_pixels: frozenset[str] = frozenset()
    by_axis: frozenset[str] = frozenset()
    dimensions: Mapping[str, int] = MappingProxyType({})
    unused: Names = MappingProxyType({})
    names_of: Callable[[Vision], Names] = lambda vision: {}
    output_axis: int = 0
    spare: str | None = None
    offsets: Mapping[str, int] = MappingProxyType({})
    tokens: Names = MappingProxyType({})
    models: Mapping[str, tuple[str, str]] = MappingProxyType({})
    leading: Mapping[str, int] = MappingProxyType({})
    head: str = ""


def short(value: float) -> float:
    """The decimal number of which `value` is the 32-bit float."""
    written = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((each for each in written if struct.pack("f", each) == struct.pack("f", value)), value)


def both(names: Names) -> dict[str, str]:
    """Weights and biases of modules."""
    return {f"{name}.{part}": f"{own}.{part}" for name, own in names.items() for part in ("weight", "bias")}


# What is in a layer of CLIP's and SigLIP's towers, and of those built like them.
CLIP_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_out": "self_attn.out_proj"}
CLIP_LAYER = both(
    CLIP_ATTENTION | {"ln1": "layer_norm1", "ln2": "layer_norm2"} | {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
)
