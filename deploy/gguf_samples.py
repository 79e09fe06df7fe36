"""Make the sample files of tests/engine/checkpoints/samples: a tiny random model of each architecture that GGUF files
may hold, converted by llama.cpp's own converter, with what transformers generates from it.

    python deploy/gguf_samples.py LLAMA_CPP tests/engine/checkpoints/samples [NAME …]

LLAMA_CPP is a checkout of llama.cpp. Weights are whole multiples of a power of two, so that Q8_0, float16 and bfloat16
all have the same numbers as the original, and the greedy tokens are the original's own.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_model import make_tiny_model
from torch import Tensor

LENGTH = 16
PROMPTS = [[7, 90, 201, 45, 12], [5 + 3 * index % 290 for index in range(40)]]
_LEVELS, _STEP = 127, 2.0**-9  # those of Q8_0, and how far they are apart
_GROUP = 32  # the weights that share a step
_SEEDS, _VARIETY = 200, 6  # how many weights are tried until an answer has so many different tokens, and
_APART = 0.005  # the best two are so far apart at each step that no processor's rounding exchanges them
_SIZES: dict[str, Any] = {  # each model takes those that its configuration has
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "sliding_window": 16},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_shared_experts": 1},
    "tie_word_embeddings": False,
}
_WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
_LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"head_dim": 8, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1},
}
_CHOOSING = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 4}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
_GRANITE = {
    **{"embedding_multiplier": 6.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 0.5},
    "shared_intermediate_size": 32,
}
_GRANITE_HYBRID = _GRANITE | _MAMBA | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}
_OLD = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 256}
_LFM = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_GEMMA = _SHARED | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320, "num_kv_shared_layers": 2}
SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", _WINDOWS | {"num_dense_layers": 1, "mup_enabled": True, "route_scale": 1.5}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "bloom": ("bloom", {"n_head": 2, "n_layer": 2}),
    "cohere": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "cohere2": ("cohere2", _WINDOWS | {"tie_word_embeddings": True, "logit_scale": 0.25}),
    "cohere2_moe": (
        "cohere2_moe",
        _WINDOWS
        | {"logit_scale": 0.25, "mlp_layer_types": ["dense", *["sparse"] * 3], "prefix_dense_intermediate_size": 96},
    ),
    "deepseek_v2": ("deepseek_v2", _LATENT | {"routed_scaling_factor": 1.5}),
    "deepseek_v2_lite": ("deepseek_v2", _LATENT | {"q_lora_rank": None, "rope_parameters": _YARN}),
    "deepseek_v3": ("deepseek_v3", _LATENT | {"n_group": 2, "rope_parameters": _YARN}),
    "deepseek_v32": ("deepseek_v32", _LATENT | _CHOOSING | {"n_group": 2}),
    "dots1": ("dots1", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "n_group": 1, "topk_group": 1}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    ),
    "exaone4": ("exaone4", _WINDOWS),
    "exaone_moe": (
        "exaone_moe",
        _WINDOWS | {"mlp_layer_types": ["dense", *["sparse"] * 3], "n_group": 1, "topk_group": 1},
    ),
    "falcon": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1}),
    "falcon_40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 2}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 16, "time_step_rank": 8, "tie_word_embeddings": True}),
    "falcon_h1": (
        "falcon_h1",
        _MAMBA
        | {
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_in_multiplier": 0.5,
            "ssm_out_multiplier": 2.0,
        }
        | {"ssm_multipliers": [0.5, 2.0, 0.5, 1.0, 0.5], "mlp_multipliers": [0.5, 2.0], "key_multiplier": 0.5}
        | {"attention_in_multiplier": 2.0, "embedding_multiplier": 4.0, "lm_head_multiplier": 0.5},
    ),
    "gemma3n": (
        "gemma3n_text",
        _GEMMA
        | {"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "laurel_rank": 32},
    ),
    "gemma4": (
        "gemma4_text",
        _GEMMA | {"global_head_dim": 32, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    ),
    "gemma4_moe": (
        "gemma4_text",
        _WINDOWS
        | {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_key_value_heads": 2, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "n_group": 1, "topk_group": 1, "attention_bias": True}),
    "glm_moe_dsa": ("glm_moe_dsa", _LATENT | _CHOOSING | {"indexer_types": ["full", "shared"]}),
    "gpt2": ("gpt2", _OLD),
    "gpt_bigcode": ("gpt_bigcode", _OLD),
    "granitemoe": ("granitemoe", _GRANITE),
    "granitemoeshared": ("granitemoeshared", _GRANITE),
    "granitemoehybrid": ("granitemoehybrid", _GRANITE_HYBRID),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        _GRANITE_HYBRID | {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"moe_topk": 2}),
    "hy_v3": ("hy_v3", {"mlp_layer_types": ["dense", "sparse"]}),
    "jais2": ("jais2", {}),
    "jamba": (
        "jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {"mamba_d_state": 16, "mamba_dt_rank": 8},
    ),
    "kimi_linear": (
        "kimi_linear",
        _LATENT
        | {"q_lora_rank": None, "num_hidden_layers": 3, "mlp_layer_types": ["sparse"] * 3}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"linear_head_dim": 32, "linear_num_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"n_shared_experts": 1, "max_position_embeddings": 256},
    ),
    "laguna": (
        "laguna",
        {"num_hidden_layers": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3}
        | {"mlp_layer_types": ["dense", *["sparse"] * 3], "shared_expert_intermediate_size": 32}
        | {"num_attention_heads_per_layer": [2, 3, 3, 3], "moe_routed_scaling_factor": 1.5}
        | {
            "rope_parameters": {
                "full_attention": _YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.125},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 1.0},
            }
        },
    ),
    "lfm2": ("lfm2", _LFM),
    "lfm2_moe": ("lfm2_moe", _LFM | {"num_dense_layers": 1, "tie_word_embeddings": True}),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "moe_layers": [1, 3]}
        | {"interleave_moe_layer_step": 2},
    ),
    "mamba": ("mamba", {"state_size": 16, "time_step_rank": 8}),
    "mamba2": ("mamba2", {"state_size": 16, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    "mellum": ("mellum", _WINDOWS | {"mlp_layer_types": ["sparse"] * 4}),
    "minicpm3": ("minicpm3", _LATENT),
    "minimax_m2": ("minimax_m2", {"rotary_dim": 8}),
    "mixtral_fused": ("mixtral", {"sliding_window": None}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}, "sliding_window": None},
    ),
    "nemotron": ("nemotron", {}),
    "nemotron_h": (
        "nemotron_h",
        {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16}
        | {"ssm_state_size": 16, "n_groups": 2, "moe_shared_expert_intermediate_size": 32}
        | {"n_group": 1, "topk_group": 1},
    ),
    "olmo": ("olmo", {"clip_qkv": 0.75}),
    "olmo3": ("olmo3", _WINDOWS),
    "olmoe": ("olmoe", {}),
    "phimoe": ("phimoe", {"sliding_window": None, "attention_bias": True, "lm_head_bias": True}),
    "phi": ("phi", {"num_key_value_heads": 2, "intermediate_size": 128}),
    "qwen2_fused": ("qwen2", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed_oss": ("seed_oss", {}),
}
_FUSED = ("--fuse-qkv",)
"""What the converter is told for those whose names end so."""
_FOR_CONVERTER: dict[str, dict[str, Any]] = {  # what config.json has in the originals, and transformers' has not
    "cohere2": {"rotary_pct": 1.0},
    "bloom": {"seq_length": 256},
    "glm": {"seq_length": 256, "layernorm_epsilon": 1.5625e-7},
    "gpt2": {"n_ctx": 256},
    "hunyuan_v1_moe": {"moe_intermediate_size": [64], "moe_topk": [2], "num_shared_expert": [1]},
    "kimi_linear": {
        **{"linear_attn_config": {"full_attn_layers": [2], "short_conv_kernel_size": 4, "head_dim": 32}},
        **{"first_k_dense_replace": 0, "max_position_embeddings": 256},
    },
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 256},
}


def make_sample(name: str, converter: Path, to: Path) -> None:
    """Write `name`.gguf and `name`.json, which has the greedy tokens for each of `PROMPTS`."""
    model_type, own = SAMPLES[name]
    library: Any = transformers  # most of it is not typed
    known = library.AutoConfig.for_model(model_type).to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = library.AutoConfig.for_model(model_type, **sizes | own | ids)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        with torch.no_grad():
            for own_name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(_numbers(own_name, tensor))
        tokens, gaps = zip(*(_greedy(model, prompt) for prompt in PROMPTS), strict=True)
        if min(len({*found}) for found in tokens) >= _VARIETY and min(gaps) >= _APART:
            break
    else:
        raise SystemExit(f"{name}: no weights that were tried say enough different and clear tokens; change its sizes")
    with tempfile.TemporaryDirectory() as directory:
        folder = make_tiny_model(directory, vocabulary_size=config.vocab_size)  # for its tokenizer
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder)
        settings = json.loads((folder / "config.json").read_text()) | _FOR_CONVERTER.get(model_type, {})
        kinds = settings.get("layer_types")
        if model_type == "granitemoehybrid":  # converters know the names that Granite's own files have
            names = {"linear_attention": "mamba", "full_attention": "attention"}
            settings["layer_types"] = [names.get(kind, kind) for kind in kinds]
        (folder / "config.json").write_text(json.dumps(settings))
        _convert(converter, folder, to / f"{name}.gguf", _FUSED if name.endswith("_fused") else ())
    (to / f"{name}.json").write_text(json.dumps(tokens) + "\n")


def _numbers(name: str, tensor: Tensor) -> Tensor:
    """Random levels of Q8_0; biases and what is no matrix lie around one half, one or minus one."""
    if "A_log" in name or "layer_scalar" in name:
        return torch.full_like(tensor, 0.5 if "A_log" in name else 0.75)
    if tensor.ndim < 2 or "conv1d" in name or "conv.conv" in name or "bias" in name:
        levels = torch.randint(-32, 33, tensor.shape)
        return levels * 2.0**-7 + (0.0 if "bias" in name else 1.0)
    if "kv_b_proj" in name:  # of which the converter transposes a part
        return (2 * torch.randint(0, 2, tensor.shape) - 1) * _LEVELS * _STEP
    levels = torch.randint(-_LEVELS + 1, _LEVELS, tensor.shape)
    if tensor.shape[-1] % _GROUP == 0:
        levels.view(-1, _GROUP)[:, 0] = _LEVELS  # the largest of each group says how far levels are apart
    return levels * _STEP


def _convert(converter: Path, folder: Path, to: Path, options: Sequence[str]) -> None:
    """Run llama.cpp's converter, which takes the tokenizers that it knows alone, with ours."""
    sys.path[:0] = [str(converter), str(converter / "gguf-py")]
    conversion: Any = __import__("conversion")
    original = conversion.get_model_class

    def known(*arguments: Any, **options: Any) -> Any:
        found = original(*arguments, **options)
        found.set_vocab = lambda self: self._set_vocab_gpt2()
        found.get_vocab_base_pre = lambda self, tokenizer: "smollm"
        return found

    conversion.get_model_class = known
    before = sys.argv
    try:
        sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outtype", "q8_0", "--outfile", str(to), *options]
        runpy.run_path(str(converter / "convert_hf_to_gguf.py"), run_name="__main__")
    finally:
        sys.argv, conversion.get_model_class = before, original


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """The tokens, and how far the best two logits were apart at least."""
    ids, gap = torch.tensor([prompt]), float("inf")
    with torch.no_grad():
        for _ in range(LENGTH):
            (best, second), (token, _) = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
            gap = min(gap, float(best - second))
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found, gap


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make the sample GGUF files that the tests read.")
    parser.add_argument("llama_cpp", type=Path, help="a checkout of llama.cpp, which has the converter")
    parser.add_argument("to", type=Path, help="directory for the samples")
    parser.add_argument("names", nargs="*", help="which of them; all by default")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    for name in options.names or SAMPLES:
        make_sample(name, options.llama_cpp, options.to)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
