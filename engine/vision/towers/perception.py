"""The Perception Encoder, the tower of Perception LM: a transformer whose queries and keys rotate by row and column.

transformers leaves this tower to the library timm, which needs torchvision in the build that belongs to torch's. The
modules have timm's names, so that they take the published weights, and compute what timm's do. Source: timm's `eva.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from ....schemas.errors import ModelLoadError

_LARGE: dict[str, Any] = {"embed_dim": 1024, "num_heads": 16, "mlp_ratio": 4.0, "class_token": True}
_GIGANTIC: dict[str, Any] = {"embed_dim": 1536, "num_heads": 16, "mlp_ratio": 8960 / 1536, "class_token": False}
_CORE: dict[str, Any] = {"global_pool": "map", "use_post_transformer_norm": True, "init_values": None}
_LANG: dict[str, Any] = {"global_pool": "avg", "use_post_transformer_norm": False, "init_values": 0.1}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "vit_pe_core_large_patch14_336": _LARGE | _CORE | {"depth": 24, "img_size": 336, "ref_feat_shape": 24},
    "vit_pe_core_gigantic_patch14_448": _GIGANTIC | _CORE | {"depth": 50, "img_size": 448, "ref_feat_shape": 32},
    "vit_pe_lang_large_patch14_448": _LARGE | _LANG | {"depth": 23, "img_size": 448, "ref_feat_shape": 32},
    "vit_pe_lang_gigantic_patch14_448": _GIGANTIC | _LANG | {"depth": 47, "img_size": 448, "ref_feat_shape": 32},
}
"""timm's names, and what it takes them to be unless the files say otherwise."""
_FIXED = {"patch_size": 14, "attn_type": "rope", "use_rot_pos_emb": True, "use_pre_transformer_norm": True}
_FIXED |= {"use_fc_norm": False, "rope_grid_indexing": "xy"}
"""Options that files may give as all of these towers have them."""
_PATCH, _EPSILON, _BASE = 14, 1e-5, 10_000.0


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, num_first: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self._heads, self._first = heads, num_first

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self._heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [B, heads, T, D] each
        query, key = (torch.cat([one[:, :, : self._first], self._turned(one, angles)], 2) for one in (query, key))
        made = scaled_dot_product_attention(query, key, value)
        return cast(Tensor, self.proj(made.transpose(1, 2).flatten(2)))

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """Each number with the next one; the first tokens, which are no part of the picture, are left out."""
        x, (sines, cosines) = x[:, :, self._first :], angles
        neighbours = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return cast(Tensor, x * cosines + neighbours * sines).to(x.dtype)


class _Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.fc2(gelu(self.fc1(x))))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, num_first: int, is_scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, _EPSILON), nn.LayerNorm(width, _EPSILON)
        self.attn, self.mlp = _Attention(width, heads, num_first), _Mlp(width, inner)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((width,), 0.1)) if is_scaled else None for _ in range(2))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        made = self.attn(self.norm1(x), angles)
        x = x + (made if self.gamma_1 is None else self.gamma_1 * made)
        made = self.mlp(self.norm2(x))
        return cast(Tensor, x + (made if self.gamma_2 is None else self.gamma_2 * made))


class PerceptionEncoder(nn.Module):
    def __init__(self, architecture: str, given: dict[str, Any]) -> None:
        """`given` are the options of config.json. Raises `ModelLoadError` for some that are not supported."""
        super().__init__()
        known = ARCHITECTURES[architecture]
        options = known | given
        is_plain = all(options.pop(name, value) == value for name, value in _FIXED.items())
        pools = "" if known["global_pool"] == "map" else "avg"
        has_others = options["use_post_transformer_norm"] or options["global_pool"] not in ("", pools)
        if len(options) > len(known) or has_others or not is_plain:
            raise ModelLoadError(
                f"the vision_config in config.json gives the tower {architecture} the options {given}; it is supported "
                f"with {', '.join(known)}, of which use_post_transformer_norm must be false and global_pool empty"
            )
        width, heads = int(options["embed_dim"]), int(options["num_heads"])
        side, reference = (_side(options[name]) for name in ("img_size", "ref_feat_shape"))
        side //= _PATCH
        first, inner = int(options["class_token"]), int(width * options["mlp_ratio"])
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, _PATCH, _PATCH, bias=False)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if first else None
        self.pos_embed = nn.Parameter(torch.zeros(1, side**2 + first, width))
        self.norm_pre = nn.LayerNorm(width, _EPSILON)
        is_scaled = options["init_values"] is not None
        self.blocks = nn.ModuleList(_Block(width, heads, inner, first, is_scaled) for _ in range(int(options["depth"])))
        self._head, self._side, self._reference = width // heads, side, reference
        self._offset = float(first)  # of the larger one's rows and columns, which has no class

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] → [B, T, E], the class first, if there is one."""
        x: Tensor = cast(nn.Conv2d, self.patch_embed.proj)(pixels).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = self.norm_pre(x + self.pos_embed)
        angles = self._angles(x.device)
        for block in self.blocks:
            x = block(x, angles)
        return x

    def _angles(self, device: torch.device) -> Tensor:
        """Sines and cosines by place, [2, H * W, D], half of the numbers by column and half by row."""
        count = self._head // 4
        bands = 1.0 / (_BASE ** (torch.arange(count, device=device).float() / count))
        places = (torch.arange(self._side, device=device).float() + self._offset) / self._side * self._reference
        grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)[..., None] * bands
        angles = grid.flatten(-2).flatten(0, 1).repeat_interleave(2, -1)
        return torch.stack([angles.sin(), angles.cos()])


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)
