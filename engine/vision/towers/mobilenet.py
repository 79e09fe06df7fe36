"""MobileNetV5, the tower of Gemma 3n: convolutions, and attention in which all heads share one key and one value.

transformers leaves this tower to the library timm, which needs torchvision in the build that belongs to torch's. The
modules have timm's names, so that they take the published weights, and compute what timm's do. Source: timm's
`mobilenetv5.py` and `_efficientnet_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, gelu, interpolate, pad, scaled_dot_product_attention
from transformers import AutoModel, Gemma3nVisionConfig

from ....schemas.errors import ModelLoadError
from .timm_model import TimmModel

ARCHITECTURE = "mobilenetv5_300m_enc"
_STEM, _WIDTH = 64, 2048  # channels of the first features and of the last
_WIDTHS = 128, 256, 640, 1280  # channels of each stage
_OPTIONS = {"channel_multiplier": 1.0, "msfa_output_resolution": 16}  # of timm, which published models leave alone
_HALF_WAY = 2  # the stage whose features are used beside those of the last


class _Conv(nn.Conv2d):
    """Pads as TensorFlow does: a last row or column of zeros more than first ones, where their number is odd."""

    def forward(self, input: Tensor) -> Tensor:
        sides = [_padding(input.shape[axis], self.kernel_size[0], self.stride[0]) for axis in (3, 2)]
        around = [count for side in sides for count in side]
        return super().forward(pad(input, around) if any(around) else input)


class _RMSNorm(nn.Module):
    """Of the channels of [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight[:, None, None]


class _LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[:, None, None]


class _ConvNorm(nn.Module):
    def __init__(self, before: int, after: int, kernel: int = 1, *, is_deep: bool = False, **options: Any) -> None:
        """`is_deep`: each channel by itself."""
        super().__init__()
        groups = before if is_deep else 1
        self.conv = _Conv(before, after, kernel, groups=groups, **{"bias": False} | options)
        self.bn = _RMSNorm(after)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(self.conv(x)))


class _EdgeResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv_exp = _Conv(before, 4 * before, 3, stride=stride, bias=False)
        self.bn1 = _RMSNorm(4 * before)
        self.conv_pwl = _Conv(4 * before, after, 1, bias=False)
        self.bn2 = _RMSNorm(after)
        self._skips = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.bn2(self.conv_pwl(_act(self.bn1(self.conv_exp(x)))))
        return made + x if self._skips else made


class _InvertedResidual(nn.Module):
    def __init__(
        self,
        before: int,
        after: int,
        first: int = 0,
        middle: int = 0,
        stride: int = 1,
        growth: int = 2,
        is_last: bool = False,
    ) -> None:
        """`first` and `middle` are the sides of kernels, 0 for none. `is_last`: nothing is added to what it makes."""
        super().__init__()
        wide = growth * before
        if first:
            self.dw_start = _ConvNorm(before, before, first, is_deep=True, stride=1 if middle else stride)
        self.pw_exp = _ConvNorm(before, wide)
        if middle:
            self.dw_mid = _ConvNorm(wide, wide, middle, is_deep=True, stride=stride)
        self.pw_proj = _ConvNorm(wide, after)
        if not is_last:
            self.layer_scale = _LayerScale(after)
        self._has_first, self._has_middle, self._is_last = bool(first), bool(middle), is_last
        self._skips = stride == 1 and before == after and not is_last

    def forward(self, x: Tensor) -> Tensor:
        made = self.dw_start(x) if self._has_first else x
        made = _act(self.pw_exp(made))
        if self._has_middle:
            made = _act(self.dw_mid(made))
        made = self.pw_proj(made)
        if self._is_last:
            return cast(Tensor, made)
        made = self.layer_scale(made)
        return cast(Tensor, made + x if self._skips else made)


class _SharedHeads(nn.Module):
    """Attention of all places [H, W] to each other; with a `stride`, keys and values of fewer."""

    def __init__(self, channels: int, heads: int, size: int, stride: int) -> None:
        super().__init__()
        self.query, self.output = nn.Sequential(), nn.Sequential()
        self.query.add_module("proj", nn.Conv2d(channels, heads * size, 1, bias=False))
        self.output.add_module("proj", nn.Conv2d(heads * size, channels, 1, bias=False))
        self.key, self.value = (nn.Sequential() for _ in range(2))
        for side in (self.key, self.value):
            if stride > 1:
                side.add_module("down_conv", _Conv(channels, channels, 3, stride=stride, groups=channels, bias=False))
                side.add_module("norm", _RMSNorm(channels))
            side.add_module("proj", nn.Conv2d(channels, size, 1, bias=False))
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        query = self.query(x).reshape(len(x), self._heads, -1, height * width).transpose(2, 3)  # [B, heads, H * W, D]
        key, value = (side(x).flatten(2).transpose(1, 2)[:, None].contiguous() for side in (self.key, self.value))
        if (
            x.dtype != torch.float32
        ):  # whose bits are timm's; for others torch's quick kernels want as many keys as heads
            key, value = (one.expand(-1, self._heads, -1, -1) for one in (key, value))
        made = scaled_dot_product_attention(query.contiguous(), key, value)
        return cast(Tensor, self.output(made.transpose(2, 3).reshape(len(x), -1, height, width)))


class _Attention(nn.Module):
    def __init__(self, channels: int, heads: int, size: int, stride: int) -> None:
        super().__init__()
        self.norm = _RMSNorm(channels)
        self.attn = _SharedHeads(channels, heads, size, stride)
        self.layer_scale = _LayerScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.layer_scale(self.attn(self.norm(x))) + x)


class _Fusion(nn.Module):
    """Makes one picture of features of several sizes, of `side` times `side` places."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.ffn = _InvertedResidual(channels, _WIDTH, is_last=True)
        self.norm = _RMSNorm(_WIDTH)
        self._side = side

    def forward(self, fine: Tensor, coarse: Tensor) -> Tensor:
        size = fine.shape[2:]
        x: Tensor = self.ffn(torch.cat([fine, interpolate(coarse, size, mode="nearest")], 1))
        if any(side % self._side for side in size):
            x = interpolate(x, (self._side, self._side), mode="bilinear")
        elif size != (self._side, self._side):
            x = avg_pool2d(x, [side // self._side for side in size])
        return cast(Tensor, self.norm(x))


class _Encoder(nn.Module):
    def __init__(self, multiplier: float, side: int) -> None:
        super().__init__()
        widths = [_rounded(width * multiplier) for width in _WIDTHS]
        stem = _STEM if multiplier < 1 else _rounded(_STEM * multiplier)
        self.conv_stem = _ConvNorm(3, stem, 3, stride=2, bias=True)
        stages = [nn.ModuleList(blocks) for blocks in _stages(stem, widths)]
        self.blocks = nn.ModuleList(stages)
        self.msfa = _Fusion(widths[_HALF_WAY] + widths[-1], side)

    def forward(self, pixels: Tensor) -> Tensor:
        x = _act(self.conv_stem(pixels))
        fine = x
        for number, stage in enumerate(self.blocks):
            for block in cast(nn.ModuleList, stage):
                x = block(x)
            if number == _HALF_WAY:
                fine = x
        return cast(Tensor, self.msfa(fine, x))


class MobileNetV5(TimmModel):
    config_class = Gemma3nVisionConfig
    config: Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        """Raises `ModelLoadError` for another tower of timm."""
        super().__init__(config)
        options = _OPTIONS | (config.model_args or {})
        if config.architecture != ARCHITECTURE or len(options) > len(_OPTIONS) or config.hidden_size != _WIDTH:
            raise ModelLoadError(
                f"the vision_config in config.json names the tower {config.architecture} with {config.hidden_size} "
                f"features and the options {sorted(config.model_args or {})}; of timm's towers {ARCHITECTURE} with "
                f"{_WIDTH} and no options but {', '.join(_OPTIONS)} is supported"
            )
        self.timm_model = _Encoder(float(options["channel_multiplier"]), int(options["msfa_output_resolution"]))
        stages = [len(cast(nn.ModuleList, stage)) for stage in self.timm_model.blocks]
        self.used_blocks = [sum(stages[: _HALF_WAY + 1])]
        """The numbers of blocks, from 1 on, whose results are used beside the last one's."""
        self.post_init()  # type: ignore[no-untyped-call]


def provide_tower() -> None:
    """Let transformers build models of Gemma 3n with this tower."""
    AutoModel.register(Gemma3nVisionConfig, MobileNetV5, exist_ok=True)


def _stages(before: int, widths: Sequence[int]) -> Iterator[list[nn.Module]]:
    first, second, third, fourth = widths
    yield [_EdgeResidual(before if not index else first, first, 1 if index else 2) for index in range(3)]
    yield [
        _InvertedResidual(first, second, 3, 5, 2, 6),
        *(_InvertedResidual(second, second, kernel, growth=4) for kernel in (5, 3, 5, 3)),
    ]
    yield [
        _InvertedResidual(second, third, 5, 5, 2, 6),
        *(_InvertedResidual(third, third, 5, growth=4) for _ in range(7)),
        _InvertedResidual(third, third, growth=1),
        *_pairs(14, third, 12, 64, 2),
    ]
    yield [_InvertedResidual(third, fourth, 5, 5, 2, 6), *_pairs(19, fourth, 16, 96, 1)]


def _pairs(count: int, width: int, heads: int, size: int, stride: int) -> Iterator[nn.Module]:
    for _ in range(count):
        yield _Attention(width, heads, size, stride)
        yield _InvertedResidual(width, width)


def _act(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def _padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    count = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return count // 2, count - count // 2


def _rounded(channels: float) -> int:
    """The multiple of 8 next to it, and never less than nine tenths of it."""
    found = max(8, int(channels + 4) // 8 * 8)
    return found + 8 if found < 0.9 * channels else found
