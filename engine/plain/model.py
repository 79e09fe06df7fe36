"""The modules of plain decoders, made from config.json and weights alone: importing transformers takes seconds.

Llama, Mistral, Qwen 2 and Qwen 3 have this structure, and so have Mixtral, Qwen 3's mixtures and gpt-oss, with experts
in the place of the last product. `PlainModel.of` makes a model only of files in which nothing is out of the ordinary;
transformers loads all others. The tests compare every number that it reads from a configuration, and the answers, with
those of transformers' own classes. Source: `modeling_llama.py` there, and its siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..checkpoints.rounded import moved
from .config import PlainConfig
from .mixture import Mixture
from .rotations import Rotary

Attend = Callable[[int, Tensor, Tensor, Tensor, float, int | None, Tensor | None], Tensor]
"""Layer, query [Hq, T, D], key and value [H, T, D], scaling of the scores, window, sinks [Hq] → [T, Hq · D]."""


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
            x.dtype
        )


class SelfAttention(nn.Module):
    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        self.head_dim = size = config.head_dim
        self._index, self._window = index, config.windows[index]
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.has_head_norms:
            self.q_norm, self.k_norm = Norm(size, config.epsilon), Norm(size, config.epsilon)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads), False) if config.has_sinks else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).view(len(x), -1, self.head_dim) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        rules = self.head_dim**-0.5, self._window, self.sinks
        mixed = attend(self._index, _rotated(query, angles), _rotated(key, angles), value, *rules)
        projected: Tensor = self.o_proj(mixed)
        return projected


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]


class GatedMLP(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        outer, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(outer, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(outer, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, outer, bias=config.mlp_bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DecoderLayer(nn.Module):
    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, index)
        self.mlp = GatedMLP(config) if config.mixture is None else Mixture(config.hidden_size, config.mixture)
        self.input_layernorm = Norm(config.hidden_size, config.epsilon)
        self.post_attention_layernorm = Norm(config.hidden_size, config.epsilon)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        found: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Body(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        sizes = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(*sizes, _weight=torch.empty(sizes))  # to draw one imports torch's compiler
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.epsilon)
        self.rotary_emb = Rotary(torch.empty(0), config.rope.scale)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        cosines, sines = self.rotary_emb(x, positions[None])
        for layer in self.layers:
            x = layer(x, (cosines, sines), attend)
        normed: Tensor = self.norm(x)
        return normed


class PlainModel(nn.Module):
    """What `Runner` takes of a transformers model. Its weights lie nowhere until `take` has them."""

    _supports_attention_backend, _is_stateful = True, False

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config, self.name = config, config.architecture
        with torch.device("meta"):
            self.model = Body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def of(cls, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Self | None:
        """The model of a config.json, without its weights; None for another structure, or if its weights, whose
        `shapes` are known, are not exactly those that it needs. All experts of a layer are one weight."""
        plain = PlainConfig.of(config)
        if plain is None:
            return None
        model = cls(plain)
        needed = {name: list(weight.shape) for name, weight in model.named_parameters()}
        if any(shapes.get(name) != shape for name, shape in needed.items()):
            return None
        others = {name for name in shapes.keys() - needed.keys() if not name.endswith("rotary_emb.inv_freq")}
        return model if others <= ({"lm_head.weight"} if plain.is_tied else set()) else None

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def take(
        self, read: Callable[[str], Tensor], device: torch.device, progress: Callable[[int, int], object] | None
    ) -> None:
        """Take over all weights on a device; `read` gives each by its name."""
        names = [name for name, _ in self.named_parameters()]
        for done, name in enumerate(names, start=1):
            owner, _, attribute = name.rpartition(".")
            weight = nn.Parameter(moved(read(name), device), requires_grad=False)
            setattr(self.get_submodule(owner), attribute, weight)
            if progress is not None:
                progress(done, len(names))
        if self.config.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.model.rotary_emb.inv_freq = self.config.rope.frequencies(self.config.head_dim).to(device)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, positions: Tensor, logits_to_keep: Tensor, attend: Attend) -> Tensor:
        """The logits [len(logits_to_keep), V] of those among the packed `ids` [T] at `positions` [T]."""
        logits: Tensor = self.lm_head(self.model(ids, positions, attend)[logits_to_keep])
        return logits
