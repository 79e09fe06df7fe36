"""What a config.json leaves to transformers' classes. Knows no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
    "gemma": {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}
_IMAGE_TOKENS = {"hunyuan_vl": 120_120, "kimi_k25": 163_605}


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it and its text_config leave to transformers' classes, as those of LLaVA and Gemma 3
    do."""
    text: Any = config.get("text_config")
    if (token := _IMAGE_TOKENS.get(config.get("model_type", ""))) is not None:
        config = {"image_token_id": token, **config}
    if not isinstance(text, dict) or (known := _TEXTS.get(text.get("model_type", ""))) is None:
        return dict(config)
    own = {"dtype": config.get("dtype", config.get("torch_dtype"))} if "torch_dtype" not in text else {}
    whole = own | known | text
    if period := whole.get("sliding_window_pattern"):
        kinds = ("sliding_attention", "full_attention")
        layers = [kinds[not (layer + 1) % period] for layer in range(whole["num_hidden_layers"])]
        whole["layer_types"] = text.get("layer_types", layers)
    return {**config, "text_config": whole}
