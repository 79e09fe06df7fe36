"""The rotations of plain decoders: those of Llama 2, of Llama 3, and YaRN's. Source: transformers' `rope_utils`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

_ORIGINAL = "original_max_position_embeddings"
_PLAIN = {"rope_type", "type", "rope_theta"}
_NEEDED = {
    "default": set[str](),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {"factor", _ORIGINAL},
}
_MORE = {"yarn": {"beta_fast", "beta_slow", "attention_factor", "truncate"}}


class Rope(NamedTuple):
    """The kind of rotations, and the numbers of its scaling."""

    kind: str
    theta: float
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """What a config.json says; None for another kind, and for what it leaves open."""
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta: Any = given.get("rope_theta", config.get("rope_theta"))
        kind = given.get("rope_type", given.get("type", "default"))
        numbers = {name: value for name, value in given.items() if name not in ("rope_type", "type")}
        if kind not in (*_NEEDED,) or not all(isinstance(value, int | float) for value in (theta, *numbers.values())):
            return None
        needed = _NEEDED[kind]
        fits = needed <= given.keys() <= needed | _MORE.get(kind, set()) | _PLAIN
        if not fits or (needed and _ORIGINAL in config):  # the latter would count
            return None
        return cls(kind, float(theta), numbers)

    def frequencies(self, size: int) -> Tensor:
        """Of heads of that size: [size / 2] in float32."""
        powers: Tensor = self.theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
        if self.kind == "llama3":
            return self._llama3(1.0 / powers)
        return self._yarn(powers, size) if self.kind == "yarn" else 1.0 / powers

    @property
    def scale(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        factor = self.numbers["factor"]
        return self.numbers.get("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)

    def _llama3(self, plain: Tensor) -> Tensor:
        factor, low, high, length = (
            self.numbers[name] for name in ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
        )
        waves = 2 * math.pi / plain
        found = torch.where(waves > length / low, plain / factor, plain)
        smooth = (length / waves - low) / (high - low)
        between = ~(waves < length / high) * ~(waves > length / low)
        return torch.where(between, (1 - smooth) * found / factor + smooth * found, found)

    def _yarn(self, powers: Tensor, size: int) -> Tensor:
        factor, length = self.numbers["factor"], self.numbers[_ORIGINAL]
        low, high = (
            size * math.log(length / ((self.numbers.get(name) or default) * 2 * math.pi)) / (2 * math.log(self.theta))
            for name, default in (("beta_fast", 32), ("beta_slow", 1))
        )
        if self.numbers.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept


class Rotary(nn.Module):
    """The cosines and sines of positions [1, T]: [1, T, D] each, in the dtype of `x`."""

    def __init__(self, frequencies: Tensor, scale: float) -> None:
        super().__init__()
        self.inv_freq: Tensor = nn.Buffer(frequencies, persistent=False)
        self._scale = scale

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return (both.cos() * self._scale).to(x.dtype), (both.sin() * self._scale).to(x.dtype)
