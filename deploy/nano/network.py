"""A small decoder in Qwen3's shape, with Qwen3's names for its weights, so that what is trained loads anywhere.

Written out instead of taken from transformers because training on two cores needs every second: the weights are kept
in float32 and multiplied in bfloat16, which a CPU with AVX512-BF16 does seven times faster. Knows nothing of tokens'
meaning, files or data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a network; the names are those of transformers' `Qwen3Config`."""

    vocab_size: int = 1536
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def to_dict(self) -> dict[str, int | float]:
        """The sizes by name, for a checkpoint or `Qwen3Config`."""
        return asdict(self)


class Norm(nn.Module):
    """RMSNorm: x / sqrt(mean(x²)) · weight, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * self.weight).to(x.dtype)


class Linear(nn.Module):
    """A product without bias; its float32 weight is rounded to the type of what comes in."""

    def __init__(self, inputs: int, outputs: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * deviation)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Causal attention with grouped keys and values, a norm on each head's queries and keys, and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, head = shape.hidden_size, shape.head_dim
        small = hidden**-0.5
        self.q_proj = Linear(hidden, shape.num_attention_heads * head, small)
        self.k_proj = Linear(hidden, shape.num_key_value_heads * head, small)
        self.v_proj = Linear(hidden, shape.num_key_value_heads * head, small)
        self.o_proj = Linear(shape.num_attention_heads * head, hidden, small / math.sqrt(2 * shape.num_hidden_layers))
        self.q_norm = Norm(head, shape.rms_norm_eps)
        self.k_norm = Norm(head, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, C]
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin).transpose(1, 2)  # [B, H, T, D]
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        shared = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head against each other by their position's angle. `x` [B, T, H, D], `cos` [T, 1, D]."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        small = shape.hidden_size**-0.5
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, small)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, small)
        deviation = shape.intermediate_size**-0.5 / math.sqrt(2 * shape.num_hidden_layers)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, deviation)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """Attention, then the MLP, each on a normed copy and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers, norm; the names below `model.` in a Qwen3 checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """The whole: token ids in, the loss of the next tokens or their logits out. The output embedding is the input's."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.max_position_embeddings)[:, None] * frequencies  # [T, D/2]
        angles = torch.cat((angles, angles), -1)[:, None]  # [T, 1, D]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What the last layer says at every place, normed: [B, T, C] for ids [B, T]."""
        x = self.model.embed_tokens(ids).to(dtype)
        cos, sin = self.cos[: ids.shape[1]].to(dtype), self.sin[: ids.shape[1]].to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.model.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token after each of the given places."""
        return functional.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def forward(self, ids: Tensor, targets: Tensor, weights: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weighted sum of the losses of `targets` [B, T], each the token after the same place of `ids`."""
        chosen = weights.flatten() > 0  # scores are dear: none where nothing is to be learnt
        logits = self.logits(self.hidden(ids, dtype).flatten(0, 1)[chosen])
        losses = functional.cross_entropy(logits, targets.flatten()[chosen], reduction="none")
        return (losses * weights.flatten()[chosen]).sum()
