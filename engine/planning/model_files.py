"""What a model's files say of the memory that it needs; nothing is loaded, and torch is imported for a GPU alone."""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import prod
from typing import Any, NamedTuple, Self

from ...schemas.sources import is_gguf
from ..checkpoints.gguf.file import read_gguf
from ..checkpoints.quantized import PRECISE
from ..checkpoints.states import kinds_of_layers, remembered
from ..checkpoints.widths import TABLES, WIDTHS, byte_widths, gguf_widths, packed_widths, tables_in_rows
from ..config import EngineConfig
from ..cpu.machine import KERNEL_FLAGS, computes_bfloat16, cpu_flags
from ..models import packed_files, read_config, read_model_info, read_quantized, read_shapes, seeing_family
from ..vision.families.family import family_of
from ..vision.families.names import is_of_tower, is_unused
from ..vision.families.writing import side_of
from .discovery import files_for, find_backend

_LOADING = 1.5  # peak memory over the weights' size, while they are packed
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_PACKING = 4  # bytes of a number of the weight that is being packed
_HEADS = ("lm_head.weight", "embed_out.weight")  # the output head's names in weight files
_EMBEDDING, _TABLE = (f"{name}.weight" for name in TABLES)  # how their names in a GGUF file end, translated
STATES, LEAST_STATES = 4, 2  # running states for each row: two while a step computes it, the others are checkpoints


_EXPERTS = ".experts."  # in the names of their weights, which a GPU does not round


class Weights(NamedTuple):
    """Bytes of a model's weights: all that are read before any is packed, as they are kept, and the most at a time."""

    read: int
    kept: int
    loading: int


class ModelFiles(NamedTuple):
    """What a model's files say: how many numbers they have, and of these the embedding and the output head."""

    config: dict[str, Any]  # config.json
    settings: dict[str, Any]  # those of the language model in it
    context: int
    parameters: int
    embedding: int
    head: int  # 0 if it is the embedding
    precise: int  # the head's and those of other weights that int4 leaves at int8
    method: str | None  # if the checkpoint is quantised
    number: int  # bytes of each number as it is loaded
    widths: Mapping[str, float]  # bytes of a number of the weights whose levels are kept, by their names
    on_gpu: Mapping[str, float]  # the same of those that take other memory on a GPU, or keep levels there alone
    rows: Set[str]  # the weights of embeddings that stay in the blocks of a GGUF file
    sizes: Mapping[str, int]  # numbers of each weight
    stored: int  # bytes of all tensors of a GGUF file; 0 of another
    mutual: int  # tokens of an image that one step computes, however few it computes of text
    unused: int  # numbers that are dropped once they are loaded
    tables: int  # numbers of embeddings other than the first
    crosses: bool  # some layers attend to images

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        path = files_for(find_backend(config.backend, config.allowed_backends), config.model)
        is_paged = config.backend == "paged"
        info = read_model_info(path, config.model, config.max_sequence_length)
        whole = read_config(path)
        settings = whole.get("text_config", whole)
        name = config.dtype if config.dtype != "auto" else str(settings.get("dtype") or settings.get("torch_dtype"))
        width = width_of(settings) or 0
        sizes, quantized = {own: prod(shape) for own, shape in read_shapes(path).items()}, read_quantized(path)
        head = sum(size for name, size in sizes.items() if name.endswith(_HEADS))
        inputs = [size for name, size in sizes.items() if {*name.split(".")} & PRECISE and not is_of_tower(name)]
        gguf, family = read_gguf(path) if is_gguf(path) else None, family_of(whole)
        packed = None if gguf else packed_files(path)
        widths = gguf_widths(gguf) if gguf else packed_widths(packed.weights, packed.packing) if packed else {}
        on_gpu = byte_widths(packed.weights, packed.packing) if packed else {}
        if gguf:
            on_gpu = {name: width for name, width in gguf_widths(gguf, on_gpu=True).items() if not is_of_tower(name)}
        return cls(
            config=whole,
            settings=settings,
            context=info.context_length,
            parameters=sum(sizes.values()),
            embedding=info.vocabulary_size * width,
            head=head,
            precise=head + sum(inputs),
            method=quantized.method if quantized else None,
            number=_BYTES.get(name, 4),
            widths={name: width for name, width in widths.items() if not is_of_tower(name)},
            on_gpu=on_gpu,
            rows=tables_in_rows(gguf) if gguf else frozenset(),
            sizes=sizes,
            stored=sum(tensor.nbytes for tensor in gguf.tensors.values()) if gguf else 0,
            mutual=family.mutual(whole) if family else 0,
            tables=sum(size for name, size in sizes.items() if name.endswith(_TABLE)),
            unused=sum(size for name, size in sizes.items() if is_unused(name)) if family and is_paged else 0,
            crosses=is_paged and (seeing := seeing_family(path, whole)) is not None and seeing.crosses,
        )

    @property
    def has_levels(self) -> bool:
        """Whether weights lie in fewer bits than they have when they are loaded in a dtype."""
        return bool(self.method or self.widths or self.on_gpu)

    def weights(self, config: EngineConfig, device: str) -> Weights:
        """`device` is the type of the device."""
        if self.stored and not find_backend(config.backend, config.allowed_backends).expands:
            return Weights(self.stored, self.stored, self.stored)
        rounds = device == "cuda" and config.quantization is not None
        packs = config.backend == "paged" and (device == "cpu" or rounds or self._takes_levels(config, device))
        widths = {**self.widths, **(self.on_gpu if device == "cuda" else {})}
        tower = sum(size for name, size in self.sizes.items() if is_of_tower(name))
        wide = 4 if packs and device == "cpu" and not computes_bfloat16() else 0
        seeing = tower * max(self.number, wide)  # the tower's bytes
        expanded = (self.parameters - tower) * self.number + seeing
        lasting = expanded - self.unused * self.number
        method = config.quantization or (self.method if packs else None)
        tied: float = self.number  # bytes of a number in a head that is the embedding
        if method in WIDTHS:
            products = self.parameters - self.embedding - self.precise - tower - self.unused - self.tables
            whole = sum(size for name, size in self.sizes.items() if _EXPERTS in name) if rounds else 0
            packed = (products - whole) * WIDTHS[method] + whole * self.number + self.precise * WIDTHS["int8"]
            kept = int((self.embedding + self.tables) * self.number + seeing + packed)
            tied = WIDTHS["int8"]
        elif packs and widths and self._keeps_levels(config, device):
            embedding = next((name for name in widths if name.endswith(_EMBEDDING)), "")
            expands = {name for name in widths if name.endswith((_EMBEDDING, _TABLE))} - self.rows
            saved = sum(self.sizes[name] * (self.number - widths[name]) for name in widths.keys() - expands)
            kept = int(lasting - saved)
            tied = widths.get(embedding, tied)
        else:
            kept = lasting
        if packs and not self.head:  # the embedding is the head, whose product packs a copy of it
            kept += int(self.embedding * tied)
        if packs and config.quantization is None and (self.method or widths) and self._keeps_levels(config, device):
            largest = max(size for name, size in self.sizes.items() if name not in self.rows)
            most = kept + _PACKING * largest  # each weight is packed as it is read
            return Weights(most, kept, most)
        return Weights(expanded, kept, int(expanded * _LOADING) if device == "cpu" else expanded)

    def _keeps_levels(self, config: EngineConfig, device: str) -> bool:
        """Whether products keep the levels that the files have."""
        if device == "cuda":
            return True
        fits = self._in_bfloat16(config) or (self.method and self.number == _BYTES["float32"])
        return bool(fits and config.compile_kernels) and {*cpu_flags().split()} >= KERNEL_FLAGS

    def _takes_levels(self, config: EngineConfig, device: str) -> bool:
        """Whether a GPU has products of levels, and the model is one whose products are all made by us."""
        if device != "cuda" or not self._in_bfloat16(config):
            return False
        import torch

        from ..cuda.levels import unsupported
        from ..plain.config import PlainConfig

        plain, name = PlainConfig.of(self.config), "cuda" if config.device == "auto" else config.device
        return plain is not None and plain.mixture is None and not unsupported(torch.device(name))

    def _in_bfloat16(self, config: EngineConfig) -> bool:
        return self.number == _BYTES["bfloat16"] and config.dtype != "float16"

    def cache(self, tokens: int, step: int) -> int:
        """Bytes of the keys and values of a sequence of so many tokens, computed `step` at a time, in all layers.

        For some architectures an overestimate, which is harmless.
        """
        given = self.settings
        heads = given.get("num_attention_heads") or given.get("n_head") or given.get("n_heads") or 1
        width = width_of(given) or 1
        pairs = given.get("num_key_value_heads") or given.get("num_kv_heads") or heads
        if given.get("multi_query") and not given.get("new_decoder_architecture"):
            pairs = 1
        head = given.get("head_dim") or width // heads
        if given.get("kv_lora_rank"):  # latent attention: what is cached is expanded for each head
            pairs = heads
            key = given.get("qk_nope_head_dim", 0) + given.get("qk_rope_head_dim", 0)
            key += -(-given.get("index_head_dim", 0) // heads)  # what tokens are chosen by lies behind all heads' keys
            head = max(key, given.get("v_head_dim", 0))
        if given.get("model_type") in ("bloom", "mpt"):  # biases by position are further numbers of keys
            head += 3
        elif given.get("alibi"):
            head += heads // pairs + 1
        kinds, window = given.get("layer_types") or (), given.get("sliding_window")
        slides = sum(kind == "sliding_attention" for kind in kinds) if window else 0
        attending, _ = kinds_of_layers(given)
        if not attending:  # a prefix is found by blocks that hold next to nothing
            attending, pairs, head = 1, 1, 8
        seen = (attending - slides) * tokens + slides * min(tokens, (window or 0) + max(step, self.mutual))
        return int(2 * pairs * head * self.number * seen)

    def image(self) -> int:
        """Bytes of what the layers that attend to images read of one; 0 if none do."""
        given, tower = self.settings, self.config.get("vision_config") or {}
        if not self.crosses:
            return 0
        heads = given.get("num_attention_heads", 32)
        numbers = 2 * given.get("num_key_value_heads", 8) * given.get("hidden_size", 4096) // heads
        patches = (side_of(tower.get("image_size", 448)) // side_of(tower.get("patch_size", 14))) ** 2 + 1
        layers = len(given.get("cross_attention_layers") or ())
        return int(layers * numbers * tower.get("max_num_tiles", 4) * patches * self.number)

    def states(self) -> int:
        """Bytes of the running states that are kept for one sequence, in all layers; 0 if the model keeps none."""
        _, layers = kinds_of_layers(self.settings)
        inputs, numbers = remembered(self.settings)
        return int(STATES * layers * (inputs * self.number + numbers * _BYTES["float32"]))


def width_of(settings: Mapping[str, Any]) -> int | None:
    """The numbers between layers, as a config.json has them."""
    names = "hidden_size", "n_embd", "n_embed", "d_model"
    return next((settings[name] for name in names if settings.get(name)), None)
