"""Write a tiny causal language model with random weights: a directory like any other, made in seconds.

    python deploy/tiny_model.py DIR [--shape llama|qwen3|gemma2|gpt_oss|…] [--vocab 512] [--seed 0]

It has a real byte-level BPE tokenizer, whose merges were learnt from documentation of Python, and a ChatML template.
The same arguments and versions of libraries give the same bytes. It says nothing sensible; it is for trying out and
testing a server.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MERGES = Path(__file__).with_name("tiny_model_merges.txt")  # the first learnt first
CONTEXT_LENGTH = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, object] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}
_GROUPED: dict[str, object] = _COMMON | {
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": CONTEXT_LENGTH,
}
_SMALL: dict[str, object] = _GROUPED | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.15}
_MIXED: dict[str, object] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
# Tied embeddings, which the family has, would make these models repeat one token for ever.
_GEMMA: dict[str, object] = {"head_dim": 32, "query_pre_attn_scalar": 24, "tie_word_embeddings": False}
_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_HYBRID: dict[str, object] = _SMALL | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_REMEMBERING: dict[str, object] = _SMALL | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
}
_CHOOSING: dict[str, object] = {"index_topk": 16, "index_head_dim": 18, "index_n_heads": 16}
_MULTIPLIED: dict[str, object] = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
_MAMBA: dict[str, object] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
_SELECTIVE: dict[str, object] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "state_size": 12,
    "time_step_rank": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.15,
}
_OLD: dict[str, object] = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": CONTEXT_LENGTH,
    "initializer_range": 0.15,
}
SHAPES: dict[str, dict[str, object]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 128, "n_positions": CONTEXT_LENGTH},
    "mistral": _GROUPED | {"sliding_window": 16},
    "cohere": _SMALL | {"logit_scale": 0.5, "use_qk_norm": True, "tie_word_embeddings": False},
    "gemma2": _SMALL | _MIXED | _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": _SMALL | _MIXED | _GEMMA,
    "gemma4_text": _SMALL
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "glm4": _SMALL | {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm": _SMALL | {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "ernie4_5": _SMALL | {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False},
    "glm_moe_dsa": _SMALL | _LATENT | _CHOOSING | {"indexer_types": ["full", "shared"]},
    "helium": _SMALL | {"head_dim": 16},
    "bailing_hybrid": _SMALL
    | _LATENT
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "moe_shared_expert_intermediate_size": 64,
    },
    "bamba": _SMALL | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "bloom": {
        "n_layer": 2,
        "n_head": 3,
        "hidden_size": 96,
        "seq_length": CONTEXT_LENGTH,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
    },
    "codegen": _OLD | {"rotary_dim": 8},
    "deepseek_v3": _SMALL | _LATENT,
    "deepseek_v32": _SMALL | _LATENT | _CHOOSING,
    "falcon": _SMALL | {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_rw": _SMALL | {"model_type": "falcon", "alibi": True, "multi_query": False, "num_key_value_heads": 4},
    "falcon_mamba": _SELECTIVE,
    "falcon_h1": _SMALL
    | _MAMBA
    | {
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "ssm_in_multiplier": 1.5,
        "ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9],
    },
    "granitemoehybrid": _REMEMBERING
    | _MAMBA
    | _MULTIPLIED
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96},
    "hunyuan_v1_moe": _SMALL | {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": _SMALL
    | {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "mamba_d_state": 12,
        "mamba_dt_rank": 8,
    },
    "kimi_linear": _REMEMBERING
    | _LATENT
    | {
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts_per_token": 2,
        "num_local_experts": 4,
        "n_shared_experts": 1,
    },
    "lfm2": _REMEMBERING | {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": _REMEMBERING
    | _EXPERTS
    | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "lfm3": _REMEMBERING
    | {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "sliding_window": 16,
        "head_dim": 16,
        "conv_L_cache": 5,
    },
    "nemotron_h": _SMALL
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 20,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 64,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 16,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.15,
    },
    "gptj": _OLD | {"rotary_dim": 8},
    "gpt_oss": _SMALL | _MIXED | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": _SMALL | _MULTIPLIED,
    "llama4_text": _SMALL
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "longcat_flash": _GROUPED
    | {
        "num_layers": 1,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 64,
        "initializer_range": 0.15,
    },
    "mamba": _SELECTIVE,
    "mamba2": _SELECTIVE | {"state_size": 24, "num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mellum": _SMALL | _MIXED | _EXPERTS | {"head_dim": 32},
    "ministral3": _SMALL
    | {
        "head_dim": 32,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "llama_4_scaling_beta": 0.3,
        },
    },
    "mixtral": _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": {
        "d_model": 96,
        "n_heads": 6,
        "n_layers": 2,
        "max_seq_len": CONTEXT_LENGTH,
        "attn_config": {"clip_qkv": 2.0},
    },
    "nemotron": _SMALL,
    "olmo2": _SMALL,
    "olmo_hybrid": _HYBRID,
    "phi3": _SMALL | {"sliding_window": 16, "partial_rotary_factor": 0.5},
    "qwen3": _SMALL | {"head_dim": 32},
    "qwen3_5_moe_text": _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5_text": _HYBRID,
    "qwen3_moe": _SMALL | _EXPERTS | {"head_dim": 32},
    "qwen3_next": _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 64},
    "smollm3": _SMALL | {"no_rope_layers": [1, 0]},
    "stablelm": _SMALL | {"partial_rotary_factor": 0.25},
}


def make_tiny_model(
    directory: str | Path,
    shape: str = "llama",
    seed: int = 0,
    vocabulary_size: int = 512,
    sizes: Mapping[str, object] | None = None,
) -> Path:
    """Write the model into `directory`, which is made if need be, and return it.

    `shape` is a key of `SHAPES`: a model type of transformers, mostly; `sizes` change its configuration. Every sliding
    window is 16 tokens wide. The global state of torch's random generator is left as it was.
    """
    import torch
    import transformers

    library: Any = transformers  # most of it is not typed
    directory = Path(directory)
    tokenizer = make_tokenizer(vocabulary_size)
    end_of_text, _, end_of_turn = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS)
    ids = {"bos_token_id": None, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    settings = {"vocab_size": vocabulary_size, "initializer_range": 0.1} | SHAPES[shape] | dict(sizes or {}) | ids
    if "index_topk" in settings:
        settings["pad_token_id"] = None  # whose embedding would be zero: it would choose any tokens
    if "hidden_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = vocabulary_size
    config = library.AutoConfig.for_model(settings.pop("model_type", shape), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = library.GenerationConfig(**ids | {"eos_token_id": [end_of_text, end_of_turn]})
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    import transformers
    from tokenizers import Tokenizer

    library: Any = transformers
    fast: PreTrainedTokenizerFast = library.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer(vocabulary_size)),
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
    )
    return fast


@functools.cache
def _tokenizer(vocabulary_size: int) -> str:
    """As the contents of its file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocabulary_size - len(SPECIAL_TOKENS) - len(alphabet)
    lines = MERGES.read_text(encoding="utf-8").splitlines()
    if not 0 <= num_merges <= len(lines):
        least = vocabulary_size - num_merges
        raise ValueError(f"a vocabulary has from {least} to {least + len(lines)} entries, not {vocabulary_size}")
    merges = [(left, right) for left, right in (line.split(" ") for line in lines[:num_merges])]
    entries = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, merges))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama")
    parser.add_argument("--vocab", type=int, default=512, help="entries of the vocabulary, 259 to 512")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    make_tiny_model(options.directory, options.shape, options.seed, options.vocab)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
