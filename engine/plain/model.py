"""The modules of plain decoders, made from config.json and weights alone: importing transformers takes seconds.

Llama, Mistral, Qwen 2 and Qwen 3 have this structure. `PlainModel.of` makes a model only of files in which nothing is
out of the ordinary; transformers loads all others. The tests compare every number that it reads from a configuration,
and the answers, with those of transformers' own classes. Source: `modeling_llama.py` there, and its siblings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

Attend = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""Layer, query [Hq, T, D], key and value [H, T, D], scaling of the scores, window → [T, Hq · D]."""

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_PLAIN_ROPE = {"rope_type", "type", "rope_theta"}
_LLAMA3 = _PLAIN_ROPE | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """What the modules need to know. `window` is that of every layer; `rope` has the numbers of Llama 3's scaling."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    epsilon: float
    theta: float
    rope: Mapping[str, float] | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    has_head_norms: bool
    is_tied: bool
    window: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Read a config.json; None for another structure, and wherever a default of transformers would count."""
        architecture = (config.get("architectures") or ["unknown"])[0]
        kind = architecture.removesuffix("ForCausalLM")
        if kind not in ("Llama", "Mistral", "Qwen2", "Qwen3") or config.get("model_type") != kind.lower():
            return None
        counts = {name: config.get(name) for name in _COUNTS}
        if not all(isinstance(count, int) and count > 0 for count in counts.values()):
            return None
        if config.get("hidden_act") not in ("silu", None) or not isinstance(config.get("rms_norm_eps"), float):
            return None
        if {*(config.get("layer_types") or ())} - {"full_attention"} or config.get("use_sliding_window"):
            return None
        rope = _rope(config)
        head_dim = config.get("head_dim") or (
            None if kind == "Qwen3" else config["hidden_size"] // config["num_attention_heads"]
        )
        if rope is None or not isinstance(head_dim, int) or head_dim % 2:
            return None
        if kind == "Mistral" and "sliding_window" not in config:
            return None
        has_bias = bool(config.get("attention_bias")) and kind in ("Llama", "Qwen3")
        return cls(
            architecture=architecture,
            **counts,  # type: ignore[arg-type]
            head_dim=head_dim,
            epsilon=config["rms_norm_eps"],
            theta=rope.theta,
            rope=rope.scaling,
            qkv_bias=has_bias or kind == "Qwen2",
            output_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias")) and kind == "Llama",
            has_head_norms=kind == "Qwen3",
            is_tied=bool(config.get("tie_word_embeddings")),
            window=config["sliding_window"] if kind == "Mistral" else None,
        )

    def get_text_config(self) -> Self:
        """As transformers' configurations have it."""
        return self

    def frequencies(self) -> Tensor:
        """Of the rotations, [D / 2] in float32."""
        plain: Tensor = 1.0 / (
            self.theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim)
        )
        if self.rope is None:
            return plain
        factor, low, high, length = (
            self.rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)
        )
        waves = 2 * math.pi / plain
        found = torch.where(waves > length / low, plain / factor, plain)
        smooth = (length / waves - low) / (high - low)
        between = ~(waves < length / high) * ~(waves > length / low)
        return torch.where(between, (1 - smooth) * found / factor + smooth * found, found)


_ORIGINAL = "original_max_position_embeddings"


class _Rope(NamedTuple):
    theta: float
    scaling: Mapping[str, float] | None


def _rope(config: Mapping[str, Any]) -> _Rope | None:
    """The rotations; None unless they are those of Llama 2 or 3."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta: Any = given.get("rope_theta", config.get("rope_theta"))
    kind = given.get("rope_type", given.get("type", "default"))
    numbers = {name: value for name, value in given.items() if name not in ("rope_type", "type")}
    if not all(isinstance(value, int | float) for value in (theta, *numbers.values())):
        return None
    if kind == "default" and given.keys() <= _PLAIN_ROPE:
        return _Rope(float(theta), None)
    if kind == "llama3" and given.keys() <= _LLAMA3 and given.keys() >= _LLAMA3 - _PLAIN_ROPE:
        return _Rope(float(theta), numbers)
    return None


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


class Rotary(nn.Module):
    """The cosines and sines of positions [1, T]: [1, T, D] each, in the dtype of `x`."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.inv_freq: Tensor = nn.Buffer(frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        self.head_dim = size = config.head_dim
        self._index, self._window = index, config.window
        queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        if config.has_head_norms:
            self.q_norm, self.k_norm = Norm(size, config.epsilon), Norm(size, config.epsilon)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        query, key, value = (
            projection(x).view(len(x), -1, self.head_dim) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        scaling = self.head_dim**-0.5
        mixed = attend(self._index, _rotated(query, angles), _rotated(key, angles), value, scaling, self._window)
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
        self.mlp = GatedMLP(config)
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
        self.rotary_emb = Rotary(torch.empty(0))

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
        self.config = config
        with torch.device("meta"):
            self.model = Body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def of(cls, config: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> Self | None:
        """The model of a config.json, without its weights; None for another structure, or if its weights, whose
        `shapes` are known, are not exactly those that it needs."""
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
            weight = nn.Parameter(read(name).to(device), requires_grad=False)
            setattr(self.get_submodule(owner), attribute, weight)
            if progress is not None:
                progress(done, len(names))
        if self.config.is_tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.model.rotary_emb.inv_freq = self.config.frequencies().to(device)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, positions: Tensor, logits_to_keep: Tensor, attend: Attend) -> Tensor:
        """The logits [len(logits_to_keep), V] of those among the packed `ids` [T] at `positions` [T]."""
        logits: Tensor = self.lm_head(self.model(ids, positions, attend)[logits_to_keep])
        return logits
