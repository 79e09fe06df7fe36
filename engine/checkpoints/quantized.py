"""What config.json says about a quantised checkpoint; `rounded` reads and writes its weights. Needs no torch.

`quantization_config` is `{"quant_method": "penstock", "version": 1, "group_size": 32, "modules": {…}, "tied": {…}}`.
`modules` has "int8" or "int4" for each quantised module. `tied` has the embedding for an output head that is tied to
it: the head's numbers are the embedding's, too, and the files hold them once.

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
    """The quantised modules of a checkpoint with their methods, and the tied heads with their embeddings."""

    modules: dict[str, str]
    tied: dict[str, str]

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
        modules, tied = given.get("modules"), given.get("tied", {})
        if not isinstance(modules, dict) or not isinstance(tied, dict) or not set(modules.values()) <= {*_METHODS}:
            raise ModelLoadError(f"the quantization_config of {source} is broken; quantise the model again")
        return cls(modules, tied)

    @property
    def config(self) -> dict[str, Any]:
        """What `of` reads."""
        own = {"quant_method": _METHOD, "version": _VERSION, "group_size": GROUP_SIZE}
        return own | {"modules": self.modules, "tied": self.tied}

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
        return found
