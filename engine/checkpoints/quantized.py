"""What config.json says about a quantised checkpoint; `rounded` reads and writes its weights. Needs no torch.

`quantization_config` is `{"quant_method": "penstock", "version": 1, "group_size": 32, "modules": {…}, "tied": {…}}`.
`modules` has "int8" or "int4" for each quantised module. Those of experts are called like transformers' tensor of all
of a layer, with the expert's number: `….experts.0.down_proj`. `transposed` names the layers' experts, if any, whose
tensors have inputs before outputs in transformers; levels never do. `tied` has the embedding for an output head that
is tied to it: the head's numbers are the embedding's, too, and the files hold them once.

Of a module NAME with a weight [O, I] the files hold, by groups of 32 inputs, `NAME.scales` bfloat16 [O, ⌈I / 32⌉], and

- int8: `NAME.levels` int8 [O, I]; the weight is level · scale;
- int4: `NAME.levels` uint8 [O, I / 2], the first of two inputs in the low bits, and `NAME.zeros` like the scales; the
  weight is (level - 8) · scale + zero, levels 0 to 15.

Other tensors are stored as in any checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...schemas.errors import ModelLoadError

GROUP_SIZE = 32
PRECISE = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"})
"""The last names of modules that int4 leaves at int8, besides the output head: the inputs of attention."""

_METHOD, _VERSION = "penstock", 1
_METHODS = ("int8", "int4")


class Quantized(NamedTuple):
    """The quantised modules of a checkpoint with their methods, the tied heads with their embeddings, and the names of
    the experts that transformers has transposed."""

    modules: dict[str, str]
    tied: dict[str, str]
    transposed: list[str]

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> Quantized | None:
        """What config.json says; None for a checkpoint that Penstock has not quantised. Raises `ModelLoadError`."""
        given = config.get("quantization_config")
        if not isinstance(given, dict) or given.get("quant_method") != _METHOD:
            return None
        version, size = given.get("version"), given.get("group_size")
        if (version, size) != (_VERSION, GROUP_SIZE):
            raise ModelLoadError(
                f"{source} was quantised as version {version} with groups of {size}; this Penstock reads version "
                f"{_VERSION} with groups of {GROUP_SIZE}: update it, or quantise the model again"
            )
        modules, tied, transposed = given.get("modules"), given.get("tied", {}), given.get("transposed", [])
        if not (
            isinstance(modules, dict)
            and isinstance(tied, dict)
            and isinstance(transposed, list)
            and set(modules.values()) <= {*_METHODS}
        ):
            raise ModelLoadError(f"the quantization_config of {source} is broken; quantise the model again")
        return cls(modules, tied, transposed)

    @property
    def config(self) -> dict[str, Any]:
        """What `of` reads."""
        own = {"quant_method": _METHOD, "version": _VERSION, "group_size": GROUP_SIZE}
        more = {"transposed": self.transposed} if self.transposed else {}
        return own | {"modules": self.modules, "tied": self.tied} | more

    @property
    def method(self) -> str:
        """int4 if any module is, else int8."""
        return "int4" if "int4" in self.modules.values() else "int8"

    def shapes(self, stored: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The shapes of the weights that the stored tensors stand for, by transformers' names."""
        found = dict(stored)
        for name, method in self.modules.items():
            found.pop(f"{name}.scales", None)
            found.pop(f"{name}.zeros", None)
            if f"{name}.levels" not in found:
                raise ModelLoadError(f"the weight files lack {name}.levels: they are incomplete; quantise it again")
            rows, columns = found.pop(f"{name}.levels")
            found[f"{self.tied.get(name, name)}.weight"] = [rows, columns * (2 if method == "int4" else 1)]
        for whole, parts in self.wholes().items():
            shape, *_ = [found.pop(f"{part}.weight") for part in parts]
            found[whole] = [len(parts), *reversed(shape)]
        return found

    def wholes(self) -> dict[str, list[str]]:
        """By the names of the tensors of transposed experts: the modules of each expert, in their order."""
        found: dict[str, list[str]] = {}
        for experts in self.transposed:
            names = [name for name in self.modules if name.startswith(f"{experts}.")]
            for name in sorted(names, key=lambda one: int(one.split(".")[-2])):
                found.setdefault(f"{experts}.{name.rpartition('.')[2]}", []).append(name)
        return found
