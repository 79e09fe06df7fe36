"""Safetensors with packed weights: GPTQ, AWQ, compressed-tensors, ModelOpt, FP8, MXFP4. Says what makes up each weight.

Knows the names and shapes of tensors alone, and needs no torch; `packed_weights` expands them. Whether a module is
packed its tensors say: those that a configuration ignores lie there as they are. Sources: the packages GPTQModel,
AutoAWQ, compressed-tensors and nvidia-modelopt, the model card of DeepSeek-V3 for FP8 in blocks, and transformers'
`integrations/mxfp4.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...schemas.errors import ModelLoadError
from .files import read_json
from .quantized import GROUP_SIZE

_METHODS = ("gptq", "awq", "compressed-tensors", "modelopt", "fp8", "mxfp4")
_PASSED_ON = ("penstock",)  # `rounded` reads our own
_BITS = {"gptq": (2, 4, 8), "awq": (4,), "compressed-tensors": (4, 8)}
_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_IN_BYTES = ("int-quantized", "float-quantized", "naive-quantized", _NVFP4, _MXFP4)
_LAYOUTS = ("dense", "pack-quantized", *_IN_BYTES)
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")  # ModelOpt's
_MODELOPT_BLOCK = (128, 128)  # of FP8_PB_WO
_MODELOPT_FILE = "hf_quant_config.json"
_WHOLE_SCALES = ("weight_global_scale", "weight_scale_2")
"""What NVFP4 has for a whole weight: compressed-tensors divides by it, ModelOpt multiplies."""

_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv", *_WHOLE_SCALES)  # any makes a weight packed
_OPTIONAL = ("weight", "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx")
_UNREADABLE = ("pre_quant_scale", "_weight_scale", "_weight_scale_2")  # end names: of inputs, and of experts in one
_NVFP4_GROUP = 16
_BLOCKS, _SCALES = "_blocks", "_scales"  # end the names of MXFP4's parts
_BLOCK_BYTES = 16
_ALWAYS_PACKED = (".qweight", ".weight_packed", f"_proj{_BLOCKS}")
_UNUSED = (
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale"),
    *("k_scale", "v_scale", "q_scale", "kv_scale"),
)


class Packing(NamedTuple):
    """How the weights of a checkpoint are packed; `bits` is 0 or 8 where none are packed into words.

    `group_size` counts the weights of a row that share a scale, 0 for the whole row or what the shapes say. `block` are
    the rows and columns that share a scale of FP8. `zero_offset` is what GPTQ's first format subtracts from zeros. With
    `act_order` the weights of a group need not be neighbours. `is_mxfp4`: weights in bytes are MXFP4's, unless NVFP4's
    scales belong to them.
    """

    method: str
    bits: int
    group_size: int = 0
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    act_order: bool = False
    is_mxfp4: bool = False


class PackedWeight(NamedTuple):
    """The names of the tensors by their last part, and the weight's shape: [O, I], or [E, I, O] of all experts."""

    parts: dict[str, str]
    shape: tuple[int, ...]

    @property
    def of_experts(self) -> bool:
        return len(self.shape) == 3

    def float_group(self, packing: Packing) -> int:
        """How many numbers of 4 bits with a point share a scale; 0 if it has none."""
        return _float_group(self.parts, packing)

    def keeps_levels(self, packing: Packing) -> bool:
        """Whether it can be used as the levels that it is packed from: whole groups of neighbours, of whole numbers."""
        if self.of_experts:
            return True
        inputs = self.shape[1]
        if self.float_group(packing):
            return not inputs % GROUP_SIZE
        size = packing.group_size or inputs
        in_groups = not size % GROUP_SIZE and not inputs % size and packing.block is None
        in_words = "qweight" in self.parts or ("weight_packed" in self.parts and "weight_g_idx" not in self.parts)
        return in_groups and in_words and not packing.act_order

    def keeps_bytes(self, packing: Packing) -> bool:
        """Whether it lies in bytes, floating or whole, whose scales are those of whole groups of neighbours."""
        if "weight" not in self.parts or self.of_experts or self.float_group(packing):
            return False
        inputs, block = self.shape[1], packing.block
        in_groups = not inputs % GROUP_SIZE and (block is None or not block[1] % GROUP_SIZE)
        return in_groups and not packing.group_size and not self.parts.keys() & {"weight_zero_point", "weight_g_idx"}


def packing_of(config: Mapping[str, Any], path: Path) -> Packing | None:
    """What config.json says of packed weights; None if there are none. Raises `ModelLoadError` for another method."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings and (path / _MODELOPT_FILE).is_file():
        settings = read_json(path / _MODELOPT_FILE)
    if not isinstance(settings, dict):
        return None
    method = _method(settings)
    if method in _PASSED_ON:
        return None
    if method not in _METHODS:
        raise _unsupported(path, f"is quantised by {method!r}", f"one of {', '.join(_METHODS)}")
    if method == "compressed-tensors":
        return _compressed(settings, path)
    if method == "modelopt":
        return _modelopt(settings, path)
    if method == "mxfp4":
        return Packing(method, 4, GROUP_SIZE)
    if method == "fp8":
        block = settings.get("weight_block_size")
        return Packing(method, 8, block=(int(block[0]), int(block[1])) if block else None)
    bits, size = settings.get("bits", settings.get("w_bit")), settings.get("group_size", settings.get("q_group_size"))
    if bits not in _BITS[method]:
        raise _unsupported(path, f"is quantised by {method} to {bits} bits", " or ".join(map(str, _BITS[method])))
    if method == "awq" and settings.get("version", "gemm").lower() != "gemm":
        raise _unsupported(path, f"has AWQ's layout {settings['version']!r}", "gemm")
    first = method == "gptq" and settings.get("checkpoint_format", "gptq") == "gptq"
    act_order = method == "gptq" and bool(settings.get("desc_act"))
    return Packing(method, bits, max(0, size or 0), zero_offset=int(first), act_order=act_order)


def _method(settings: Mapping[str, Any]) -> Any:
    producer = settings.get("producer")
    if isinstance(producer, dict) and producer.get("name") == "modelopt":
        return "modelopt"
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else None)
    return "modelopt" if method == "modelopt_fp4" else method


def _modelopt(settings: Mapping[str, Any], path: Path) -> Packing:
    own = settings.get("quantization")
    own = own if isinstance(own, dict) else settings
    algorithm, layers = own.get("quant_algo"), own.get("quantized_layers")
    found = {algorithm}
    if algorithm == "MIXED_PRECISION" and layers:
        found = {layer.get("quant_algo") for layer in layers.values()}
    elif algorithm is None and (own.get("kv_cache_quant_algo") or own.get("kv_cache_scheme")):
        found = set()  # weights lie there as they are
    if unknown := [one for one in found if str(one).upper() not in _ALGORITHMS]:
        raise _unsupported(path, f"is quantised by modelopt to {unknown[0]!r}", ", ".join(_ALGORITHMS))
    return Packing("modelopt", 8, block=_MODELOPT_BLOCK)


def _compressed(settings: Mapping[str, Any], path: Path) -> Packing:
    whole = settings.get("format", "dense")
    groups = [group for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
    layouts = {whole} | {group["format"] for group in groups if group.get("format")}
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    for layout in (*layouts, sparsity):
        if layout not in _LAYOUTS and layout != "mixed-precision":
            raise _unsupported(path, f"has compressed-tensors' layout {layout!r}", ", ".join(_LAYOUTS))
    if _MXFP4 in layouts and "pack-quantized" in layouts:
        raise _unsupported(path, f"has compressed-tensors' layouts {_MXFP4!r} and 'pack-quantized'", "one of the two")
    by_group = [(group.get("format") or whole, group["weights"]) for group in groups]
    others = [weights for layout, weights in by_group if layout not in (_NVFP4, _MXFP4)]
    sizes = {f"{one.get('num_bits')}{' floating' if _is_float4(one) else ''}" for one in others}
    if not groups or len(sizes) > 1 or not sizes <= {"4", "8"}:
        raise _unsupported(path, f"has weights of {', '.join(sorted(sizes)) or 'no'} bits", "all of 4 or all of 8")
    block = next((one.get("block_structure") for one in others), None)
    size = next((one.get("group_size") for one in others), None)
    rows_columns = (int(block[0]), int(block[1])) if isinstance(block, list | tuple) else None
    bits = 0 if all(layout in _IN_BYTES for layout, _ in by_group) else int(sizes.pop())
    return Packing("compressed-tensors", bits, max(0, size or 0), rows_columns, is_mxfp4=_MXFP4 in layouts)


def _is_float4(weights: Mapping[str, Any]) -> bool:
    return weights.get("type") == "float" and weights.get("num_bits") == 4


def find_weights(shapes: Mapping[str, list[int]], packing: Packing | None, path: Path) -> dict[str, PackedWeight | str]:
    """The model's weights by name: packed ones, and the names of tensors that are weights as they are.

    Raises `ModelLoadError` naming a part that is missing.
    """
    if packing is None:
        if packed := next((name for name in shapes if name.endswith(_ALWAYS_PACKED)), None):
            raise ModelLoadError(
                f"{packed} is packed, and {path}/config.json has no quantization_config to say how; download it again"
            )
        return {name: name for name in shapes}
    if packing.method == "mxfp4":
        return _experts(shapes, path)
    modules: dict[str, dict[str, str]] = {}
    found: dict[str, PackedWeight | str] = {}
    for name in shapes:
        module, _, part = name.rpartition(".")
        if part in _UNUSED:
            continue
        if part.endswith(_UNREADABLE):
            raise ModelLoadError(f"{path}: {name} is not supported in a checkpoint of {packing.method}; choose another")
        if part in (*_PARTS, *_OPTIONAL):
            modules.setdefault(module, {})[part] = name
        else:
            found[name] = name
    for module, parts in modules.items():
        if not parts.keys() & {*_PARTS}:
            found.update({name: name for name in parts.values()})
            continue
        found[f"{module}.weight"] = PackedWeight(parts, _shape(module, parts, shapes, packing, path))
    return found


def _experts(shapes: Mapping[str, list[int]], path: Path) -> dict[str, PackedWeight | str]:
    """Those of MXFP4: blocks [E, O, G, 16] with scales [E, O, G]."""
    found: dict[str, PackedWeight | str] = {}
    for name in shapes:
        stem = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
        blocks, scales = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
        if stem == name:
            found[name] = name
            continue
        if missing := [part for part in (blocks, scales) if part not in shapes]:
            raise ModelLoadError(f"the weight files of {path} lack {', '.join(missing)}; download them again")
        if len(shapes[blocks]) != 4 or shapes[blocks] != [*shapes[scales], _BLOCK_BYTES]:
            raise ModelLoadError(
                f"{path}: {blocks} has the shape {shapes[blocks]}, which does not go with {shapes[scales]} scales of "
                f"blocks of {_BLOCK_BYTES} bytes; download it again"
            )
        experts, outputs, groups = shapes[scales]
        found[stem] = PackedWeight({"blocks": blocks, "scales": scales}, (experts, groups * GROUP_SIZE, outputs))
    return found


def _shape(
    module: str, parts: Mapping[str, str], shapes: Mapping[str, list[int]], packing: Packing, path: Path
) -> tuple[int, int]:
    """Rows and columns of a packed weight."""
    needed: tuple[str, ...]
    if size := _float_group(parts, packing):
        return _float_shape(module, parts, shapes, size, path)
    if packing.method in ("gptq", "awq"):
        needed = ("qweight", "qzeros", "scales")
    elif "weight_packed" in parts:
        needed = ("weight_packed", "weight_scale")
    else:
        needed = ("weight",)
    if missing := [f"{module}.{part}" for part in needed if part not in parts]:
        raise ModelLoadError(f"the weight files of {path} lack {', '.join(missing)}; download them again")
    if len(shapes[parts[needed[0]]]) != 2:
        raise ModelLoadError(f"{path}: {parts[needed[0]]} is no matrix; choose a checkpoint with experts apart")
    rows, columns = shapes[parts[needed[0]]]
    if needed[0] == "weight":
        return rows, columns
    in_word = 32 // packing.bits
    if packing.method == "gptq":
        return columns, rows * in_word
    return (columns * in_word, rows) if packing.method == "awq" else (rows, columns * in_word)


def _float_group(parts: Mapping[str, str], packing: Packing) -> int:
    if parts.keys() & {*_WHOLE_SCALES}:
        return _NVFP4_GROUP
    if "weight_packed" not in parts or packing.bits:
        return 0
    return GROUP_SIZE if packing.is_mxfp4 else _NVFP4_GROUP


def _float_shape(
    module: str, parts: Mapping[str, str], shapes: Mapping[str, list[int]], size: int, path: Path
) -> tuple[int, int]:
    """The same of numbers of 4 bits with a point, two to a byte, of which `size` share a scale."""
    levels, whole = ("weight", _WHOLE_SCALES[1]) if _WHOLE_SCALES[1] in parts else ("weight_packed", _WHOLE_SCALES[0])
    needed = (levels, "weight_scale", *((whole,) if size == _NVFP4_GROUP else ()))
    if missing := [f"{module}.{part}" for part in needed if part not in parts]:
        raise ModelLoadError(f"the weight files of {path} lack {', '.join(missing)}; download them again")
    if "weight_zero_point" in parts:
        raise ModelLoadError(f"{path}: {parts['weight_zero_point']} is not supported; choose another checkpoint")
    packed, scales = shapes[parts[levels]], shapes[parts["weight_scale"]]
    if len(packed) != 2 or 2 * packed[1] % size or scales != [packed[0], 2 * packed[1] // size]:
        raise ModelLoadError(
            f"{path}: {parts[levels]} has the shape {packed}, which does not go with {scales} scales of {size} numbers "
            "each; download it again"
        )
    if whole in parts and shapes[parts[whole]] not in ([], [1]):
        raise ModelLoadError(f"{path}: {parts[whole]} has the shape {shapes[parts[whole]]} and must be one number")
    return packed[0], 2 * packed[1]


def _unsupported(path: Path, what: str, instead: str) -> ModelLoadError:
    return ModelLoadError(f"{path} {what}, which is not supported; supported: {instead}. Use another checkpoint")
