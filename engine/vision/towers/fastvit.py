"""FastViT, the tower of FastVLM: convolutions, and attention of all places to each other in its last two stages.

transformers leaves this tower to the library timm, which needs torchvision in the build that belongs to torch's. The
modules have timm's names, so that they take the published weights, and compute what timm's do where branches have been
joined for inference. Source: timm's `fastvit.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from ....schemas.errors import ModelLoadError

ARCHITECTURE = "fastvit_mci3"
_OPTIONS: dict[str, Any] = {  # of timm; published models leave the latter two alone
    "inference_mode": True,
    "layers": (2, 12, 24, 4, 2),
    "embed_dims": (96, 192, 384, 768, 1536),
}
_ATTENDING = 3  # the first stage that does
_HEAD, _GROWTH, _REDUCTION = 32, 4, 16  # numbers of a head; of channels in between; of channels that gates are made of


class _Joined(nn.Module):
    """A convolution, gates of its channels, if there are some, and GELU, if it has that."""

    def __init__(
        self, before: int, after: int, kernel: int, stride: int = 1, *, is_deep: bool = True, acts: bool = True
    ) -> None:
        """`is_deep`: each channel by itself."""
        super().__init__()
        groups = before if is_deep else 1
        self.reparam_conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups)
        self.se: nn.Module = nn.Identity()
        self._acts = acts

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.se(self.reparam_conv(x))
        return gelu(made) if self._acts else made


class _Gates(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        few = round(channels / _REDUCTION)
        self.fc1, self.fc2 = nn.Conv2d(channels, few, 1), nn.Conv2d(few, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid())


class _LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _ConvNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.bn(self.conv(x)))


class _Mlp(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _ConvNorm(channels)
        self.fc1 = nn.Conv2d(channels, _GROWTH * channels, 1)
        self.fc2 = nn.Conv2d(_GROWTH * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(gelu(self.fc1(self.conv(x)))))


class _Mixer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.token_mixer = _Joined(channels, channels, 3, acts=False)
        self.mlp = _Mlp(channels)
        self.layer_scale = _LayerScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token_mixer(x)
        return cast(Tensor, x + self.layer_scale(self.mlp(x)))


class _LayerNorm(nn.LayerNorm):
    """Of the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        made = layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return made.permute(0, 3, 1, 2)


class _Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x.flatten(2).transpose(1, 2)).unflatten(2, (3, -1, _HEAD))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, H * W, D] each
        made = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return cast(Tensor, self.proj(made).transpose(1, 2).reshape(x.shape))


class _Attending(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _LayerNorm(channels, eps=1e-5)
        self.token_mixer, self.mlp = _Attention(channels), _Mlp(channels)
        self.layer_scale_1, self.layer_scale_2 = _LayerScale(channels), _LayerScale(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale_1(self.token_mixer(self.norm(x)))
        return cast(Tensor, x + self.layer_scale_2(self.mlp(x)))


class _Downsample(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(_Joined(before, after, 7, 2), _Joined(after, after, 1, is_deep=False))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.proj(x))


class _Stage(nn.Module):
    def __init__(self, number: int, before: int, channels: int, depth: int) -> None:
        super().__init__()
        attends = number >= _ATTENDING
        self.downsample: nn.Module = _Downsample(before, channels) if number else nn.Identity()
        self.pos_emb: nn.Module = _Joined(channels, channels, 7, acts=False) if attends else nn.Identity()
        self.blocks = nn.ModuleList((_Attending if attends else _Mixer)(channels) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pos_emb(self.downsample(x))
        for block in self.blocks:
            x = block(x)
        return x


class FastViT(nn.Module):
    def __init__(self, given: dict[str, Any]) -> None:
        """`given` are the options of config.json. Raises `ModelLoadError` for some that are not supported."""
        super().__init__()
        options = _OPTIONS | given
        if len(options) > len(_OPTIONS) or not given.get("inference_mode"):
            raise ModelLoadError(
                f"the vision_config in config.json gives the tower {ARCHITECTURE} the options {given}; it is supported "
                f"with inference_mode true and no options but {', '.join(_OPTIONS)}"
            )
        layers, widths = options["layers"], options["embed_dims"]
        first, last = widths[0], widths[-1]
        self.stem = nn.ModuleList(
            [
                _Joined(3, first, 3, 2, is_deep=False),
                _Joined(first, first, 3, 2),
                _Joined(first, first, 1, is_deep=False),
            ]
        )
        sizes = enumerate(zip([first, *widths], widths, layers, strict=False))
        self.stages = nn.ModuleList(_Stage(number, *size) for number, size in sizes)
        self.final_conv = _Joined(last, 2 * last, 3)
        self.final_conv.se = _Gates(2 * last)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] → [B, C, H / 64, W / 64]."""
        x = pixels
        for part in (*self.stem, *self.stages):
            x = part(x)
        return cast(Tensor, self.final_conv(x))
