"""Safetensors with packed weights: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4. Says what makes up each weight.

Knows the names and shapes of tensors alone, and needs no torch; `packed_weights` expands them. Sources: the packages
GPTQModel, AutoAWQ and compressed-tensors, the model card of DeepSeek-V3 for FP8 in blocks, and transformers'
`integrations/mxfp4.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...schemas.errors import ModelLoadError
from .quantized import GROUP_SIZE

_METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
_PASSED_ON = ("penstock",)  # `rounded` reads our own
_BITS = {"gptq": (2, 4, 8), "awq": (4,), "compressed-tensors": (4, 8)}
_LAYOUTS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PARTS = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")  # any of them makes a weight a packed one
_OPTIONAL = ("weight", "qzeros", "scales", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx")
_BLOCKS, _SCALES = "_blocks", "_scales"  # end the names of MXFP4's parts
_BLOCK_BYTES = 16
_ALWAYS_PACKED = (".qweight", ".weight_packed", f"_proj{_BLOCKS}")
_UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale", "input_zero_point")


class Packing(NamedTuple):
    """How the weights of a checkpoint are packed; `bits` is 8 where they are not packed into words.

    `group_size` counts the weights of a row that share a scale, 0 for the whole row or what the shapes say. `block` are
    the rows and columns that share a scale of FP8. `zero_offset` is what GPTQ's first format subtracts from zeros. With
    `act_order` the weights of a group need not be neighbours.
    """

    method: str
    bits: int
    group_size: int = 0
    block: tuple[int, int] | None = None
    zero_offset: int = 0
    act_order: bool = False


class PackedWeight(NamedTuple):
    """The names of the tensors by their last part, and the weight's shape: [O, I], or [E, I, O] of all experts."""

    parts: dict[str, str]
    shape: tuple[int, ...]

    @property
    def of_experts(self) -> bool:
        return len(self.shape) == 3

    def keeps_levels(self, packing: Packing) -> bool:
        """Whether it can be used as the levels that it is packed from: whole groups of neighbours, of whole numbers."""
        if self.of_experts:
            return True
        inputs = self.shape[1]
        size = packing.group_size or inputs
        in_groups = not size % GROUP_SIZE and not inputs % size and packing.block is None
        in_words = "qweight" in self.parts or ("weight_packed" in self.parts and "weight_g_idx" not in self.parts)
        return in_groups and in_words and not packing.act_order


def packing_of(config: Mapping[str, Any], path: Path) -> Packing | None:
    """What config.json says of packed weights; None if there are none. Raises `ModelLoadError` for another method."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else None)
    if method in _PASSED_ON:
        return None
    if method not in _METHODS:
        raise _unsupported(path, f"is quantised by {method!r}", f"one of {', '.join(_METHODS)}")
    if method == "compressed-tensors":
        return _compressed(settings, path)
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


def _compressed(settings: Mapping[str, Any], path: Path) -> Packing:
    layouts = {settings.get("format", "dense")}
    groups = [group for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
    layouts |= {group["format"] for group in groups if group.get("format")}
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    for layout in (*layouts, sparsity):
        if layout not in _LAYOUTS and layout != "mixed-precision":
            raise _unsupported(path, f"has compressed-tensors' layout {layout!r}", ", ".join(_LAYOUTS))
    sizes = {group["weights"].get("num_bits") for group in groups}
    if len(sizes) != 1 or not sizes <= {*_BITS["compressed-tensors"]}:
        raise _unsupported(path, f"has weights of {', '.join(map(str, sizes)) or 'no'} bits", "all of 4 or all of 8")
    block = next((group["weights"].get("block_structure") for group in groups), None)
    size = next((group["weights"].get("group_size") for group in groups), None)
    rows_columns = (int(block[0]), int(block[1])) if isinstance(block, list | tuple) else None
    return Packing("compressed-tensors", sizes.pop(), max(0, size or 0), rows_columns)


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
    if packing.method in ("gptq", "awq"):
        needed = ("qweight", "qzeros", "scales")
    elif "weight_packed" in parts:
        needed = ("weight_packed", "weight_scale")
    else:
        needed = ("weight",)
    if missing := [f"{module}.{part}" for part in needed if part not in parts]:
        raise ModelLoadError(f"the weight files of {path} lack {', '.join(missing)}; download them again")
    rows, columns = shapes[parts[needed[0]]]
    in_word = 32 // packing.bits
    if packing.method == "gptq":
        return columns, rows * in_word
    if packing.method == "awq":
        return columns * in_word, rows
    return rows, columns * in_word if "weight_packed" in parts else columns


def _unsupported(path: Path, what: str, instead: str) -> ModelLoadError:
    return ModelLoadError(f"{path} {what}, which is not supported; supported: {instead}. Use another checkpoint")
