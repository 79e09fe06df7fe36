"""What the modules of plain decoders need to know of a config.json; None wherever something is out of the ordinary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ..cpu.mixture import Clamp
from .rotations import Rope

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
)
_TYPES = {
    **{"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"},
    **{"Mixtral": "mixtral", "Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss"},
}
"""The model types by the beginnings of the architectures' names."""

_ALPHA, _LIMIT = 1.702, 7.0  # of gpt-oss, whose own config.json has but the limit


class MixtureConfig(NamedTuple):
    """The experts of each layer, of which a token passes `used`; `inner` is the size between an expert's products.

    With a `clamp` the experts are gpt-oss's, which have biases, and weights of inputs by outputs.
    """

    experts: int
    used: int
    inner: int
    is_normed: bool
    clamp: Clamp | None

    @classmethod
    def of(cls, config: Mapping[str, Any], kind: str) -> Self | None:
        """None if something is missing."""
        inner: Any = config.get("moe_intermediate_size" if kind == "Qwen3Moe" else "intermediate_size")
        experts: Any = config.get("num_experts", config.get("num_local_experts"))
        used: Any = config.get("num_experts_per_tok")
        is_normed: Any = config.get("norm_topk_prob") if kind == "Qwen3Moe" else True
        clamp = Clamp(config.get("swiglu_alpha", _ALPHA), config.get("swiglu_limit", _LIMIT))
        if is_normed is None or not all(isinstance(count, int) and count > 0 for count in (experts, used, inner)):
            return None
        return cls(experts, used, inner, bool(is_normed), clamp if kind == "GptOss" else None)


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """What the modules need to know. `windows` are those of the layers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    epsilon: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    has_head_norms: bool
    is_tied: bool
    windows: tuple[int | None, ...]
    has_sinks: bool
    mixture: MixtureConfig | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Read a config.json; None for another structure, and wherever a default of transformers would count."""
        architecture = (config.get("architectures") or ["unknown"])[0]
        kind = architecture.removesuffix("ForCausalLM")
        if config.get("model_type") != _TYPES.get(kind, ""):
            return None
        counts = {name: config.get(name) for name in _COUNTS}
        if not all(isinstance(count, int) and count > 0 for count in counts.values()):
            return None
        if config.get("hidden_act") not in ("silu", None) or not isinstance(config.get("rms_norm_eps"), float):
            return None
        head_dim = config.get("head_dim") or (
            None if kind in ("Qwen3", "GptOss") else config["hidden_size"] // config["num_attention_heads"]
        )
        rope, windows = Rope.of(config), _windows(config, kind)
        if rope is None or windows is None or not isinstance(head_dim, int) or head_dim % 2:
            return None
        has_experts = kind in ("Mixtral", "Qwen3Moe", "GptOss")
        mixture = MixtureConfig.of(config, kind) if has_experts else None
        if (has_experts and mixture is None) or (kind == "GptOss" and "attention_bias" not in config):
            return None
        has_bias = bool(config.get("attention_bias")) and kind in ("Llama", "Qwen3", "Qwen3Moe", "GptOss")
        return cls(
            architecture=architecture,
            **counts,  # type: ignore[arg-type]
            head_dim=head_dim,
            epsilon=config["rms_norm_eps"],
            rope=rope,
            qkv_bias=has_bias or kind == "Qwen2",
            output_bias=has_bias,
            mlp_bias=bool(config.get("mlp_bias")) and kind == "Llama",
            has_head_norms=kind in ("Qwen3", "Qwen3Moe"),
            is_tied=bool(config.get("tie_word_embeddings")),
            windows=windows,
            has_sinks=kind == "GptOss",
            mixture=mixture,
        )

    @property
    def num_experts_per_tok(self) -> int | None:
        """As transformers' configurations have it."""
        return self.mixture.used if self.mixture else None

    def get_text_config(self) -> Self:
        """As transformers' configurations have it."""
        return self


def _windows(config: Mapping[str, Any], kind: str) -> tuple[int | None, ...] | None:
    """Of all layers; None if a default would count, or if it is not known which layers have one."""
    count: int = config["num_hidden_layers"]
    kinds, window = config.get("layer_types") or (), config.get("sliding_window")
    if kind == "GptOss":
        if len(kinds) != count or {*kinds} - {"full_attention", "sliding_attention"} or not isinstance(window, int):
            return None
        return tuple(window if one == "sliding_attention" else None for one in kinds)
    if {*kinds} - {"full_attention"} or config.get("use_sliding_window"):
        return None
    if kind not in ("Mistral", "Mixtral"):
        return (None,) * count
    return (window,) * count if "sliding_window" in config else None
