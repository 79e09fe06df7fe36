"""Writes models as GGUF files, with the reference package and the changes that llama.cpp's converters make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
WITH_PERMUTED_ROWS = ("llama", "granite", "internlm2", "minicpm", "mistral3", "smollm3")
WITH_NORMS_FROM_ONE = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next")
_SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_EXPERT = re.compile(r"(.*experts)\.\d+\.(.*)")


def write_gguf(
    directory: Path,
    path: Path,
    architecture: str,
    kind: Callable[[str, Array], str | None] = lambda name, values: None,
    metadata: Mapping[str, Any] | None = None,
    shards: int = 1,
    extra: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Write the model in `directory`; `kind` chooses the type of each tensor by transformers' name, else F32.

    `metadata` are more keys, without the architecture's name, and `extra` more tensors. Returns the numbers
    that the file stands for, by transformers' names.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=0 if shards == 1 else 12)
    _add_settings(writer, architecture, config, metadata or {})
    add_tokenizer(writer, directory)
    expanded: dict[str, Array] = {}
    for name, (values, kept) in _tensors(directory, architecture, config).items():
        chosen = None if name.endswith(".bias") else kind(kept[0], values)
        if chosen is None:
            writer.add_tensor(name, values)
        elif chosen == "NVFP4":
            data, whole, values = nvfp4(values)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            writer.add_tensor(name.replace(".weight", ".scale"), whole)
            writer.add_tensor(name.replace(".weight", ".input_scale"), np.full_like(whole, 7))
        else:
            quantized = gguf.GGMLQuantizationType[chosen]
            data = _random_blocks(values, chosen) if chosen in _SCALES_AT else gguf.quants.quantize(values, quantized)
            writer.add_tensor(name, data, raw_dtype=quantized)
            values = gguf.quants.dequantize(data, quantized)
        original = _restore(values, kept[0], architecture, config)
        expanded.update({kept[0]: original} if len(kept) == 1 else dict(zip(kept, original, strict=True)))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _by_key_heads(_whole_experts(expanded), config)


def _random_blocks(values: Array, kind: str) -> Array:
    """Blocks of as many numbers of a type that the package `gguf` does not write, with scales in half precision."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(values.size)
    data = random.integers(0, 256, (values.size // weights, size), dtype=np.uint8)
    for at in _SCALES_AT[kind]:
        scales = random.uniform(1e-4, 3e-4, (len(data), 1)).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8)
    return data.reshape(*values.shape[:-1], -1)


def nvfp4(values: Array) -> tuple[Array, Array, Array]:
    """Blocks of a weight or of some experts' [E, O, I], the number that each is multiplied by, and what they stand for.

    As llama.cpp's converter writes them: the package `gguf` reads this type alone.
    """
    groups = values.reshape(-1 if values.ndim == 3 else 1, *values.shape[-2:-1], values.shape[-1] // 16, 16)
    whole = (np.abs(groups).max((1, 2, 3)) / np.float32(6 * 448)).astype(np.float32)
    steps = gguf.quants.NVFP4.ue4m3_to_fp32(np.arange(0x7F, dtype=np.uint8)).astype(np.float32)  # for doubled numbers
    wanted = np.abs(groups).max(-1) / 12 / whole[:, None, None]
    codes = np.minimum(np.searchsorted(steps, wanted), 0x7E).astype(np.uint8)
    factors = (steps[codes] * whole[:, None, None])[..., None]
    doubled = np.array(gguf.quants.NVFP4.kvalues, np.float32)
    levels = np.abs((groups / factors)[..., None] - doubled).argmin(-1).astype(np.uint8)
    halves = levels[..., :8] | levels[..., 8:] << 4
    blocks = np.concatenate((codes.reshape(-1, 4), halves.reshape(-1, 32)), axis=1)
    return blocks.reshape(*values.shape[:-1], -1), whole, (doubled[levels] * factors).reshape(values.shape)


def _add_settings(writer: Any, architecture: str, config: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + more.get("nextn_predict_layers", 0))
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for key, value in more.items():
        add_key(writer, f"{architecture}.{key}", value)


def add_key(writer: Any, key: str, value: Any) -> None:
    """Add a key in the type that converters take for such a value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def add_tokenizer(writer: Any, directory: Path, kind: str = "gpt-2") -> None:
    """Add the byte-level tokenizer of a model directory."""
    whole = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
    tokens = {index: token for token, index in whole["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in whole["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list([tokens[index] for index in sorted(tokens)])
    writer.add_token_types([types[index] for index in sorted(tokens)])
    writer.add_token_merges([" ".join(merge) for merge in whole["model"]["merges"]])
    ids = {token: index for index, token in tokens.items()}
    writer.add_eos_token_id(ids[settings["eos_token"]])
    template = directory / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text("utf-8"))


def _tensors(directory: Path, architecture: str, config: Mapping[str, Any]) -> dict[str, tuple[Array, list[str]]]:
    """Each tensor of the file by its name there, with transformers' names of it or, of experts, of its parts."""
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    found: dict[str, tuple[Array, list[str]]] = {}
    experts: dict[str, list[tuple[str, Array]]] = {}
    weights = _without_gates(load_file(directory / "model.safetensors"), config)
    for name, values in _apart(weights, architecture).items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}.{match[2]}", []).append((name, values))
            continue
        found[_name(names, name)] = (_converted(values, name, architecture, config), [name])
    for name, parts in experts.items():
        parts.sort(key=lambda part: int(re.findall(r"\d+", part[0])[1]))
        found[_name(names, name)] = (np.stack([values for _, values in parts]), [part for part, _ in parts])
    return found


def _apart(weights: Mapping[str, Array], architecture: str) -> dict[str, Array]:
    """gpt-oss and Llama 4: of all experts of a layer the gates and the ups, outputs by inputs.

    Those of gpt-oss come in turns, and Llama 4's one behind the other.
    """
    if architecture not in ("gpt-oss", "llama4"):
        return dict(weights)
    found: dict[str, Array] = {}
    for name, values in weights.items():
        layer, experts, part = name.partition(".experts.")
        kind, end = part.removesuffix("_bias"), ".bias" if part.endswith("_bias") else ".weight"
        if not experts:
            found[f"{name}.weight" if name.endswith("sinks") else name] = values
            continue
        rows = values if end == ".bias" else np.ascontiguousarray(values.swapaxes(1, 2))
        if kind == "gate_up_proj":
            parts = np.split(rows, 2, axis=1) if architecture == "llama4" else (rows[:, ::2], rows[:, 1::2])
            for own, part_rows in zip(("gate_proj", "up_proj"), parts, strict=True):
                found[f"{layer}{experts}{own}{end}"] = np.ascontiguousarray(part_rows)
        else:
            found[f"{layer}{experts}{kind}{end}"] = rows
    return found


def _without_gates(weights: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """Qwen3-Next: of queries, keys, values and gates by key head, first three, each of all heads, and then gates."""
    found: dict[str, Array] = {}
    for name, values in weights.items():
        if "in_proj_qkvz" not in name:
            found[name] = values
            continue
        heads = config["linear_num_key_heads"]
        parts = np.split(values.reshape(heads, -1, values.shape[1]), _ends(config), axis=1)
        *others, gates = [part.reshape(-1, values.shape[1]) for part in parts]
        found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = np.concatenate(others), gates
    return found


def _by_key_heads(weights: Mapping[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """What `_without_gates` does undone."""
    if config["model_type"] != "qwen3_next":
        return dict(weights)
    found: dict[str, Array] = {}
    heads = config["linear_num_key_heads"]
    for name, values in weights.items():
        if "in_proj_qkv." in name:
            rows = np.split(values, [heads * end for end in _ends(config)[:2]])
            parts = [*rows, weights[name.replace("qkv", "z")]]
            grouped = np.concatenate([part.reshape(heads, -1, values.shape[1]) for part in parts], axis=1)
            found[name.replace("qkv", "qkvz")] = grouped.reshape(-1, values.shape[1])
        elif "in_proj_z." not in name:
            found[name] = values
    return found


def _ends(config: Mapping[str, Any]) -> list[int]:
    """Where a key head's queries, keys and values end."""
    size, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
    each = values * config["linear_num_value_heads"] // config["linear_num_key_heads"]
    return [size, 2 * size, 2 * size + each]


def _whole_experts(weights: Mapping[str, Array]) -> dict[str, Array]:
    """What `_apart` does undone."""
    found: dict[str, Array] = {}
    for name, values in weights.items():
        layer, experts, part = name.partition(".experts.")
        kind, _, end = part.partition(".")
        if name.endswith("sinks.weight"):
            found[name.removesuffix(".weight")] = values
        elif not experts or part[0].isdigit():
            found[name] = values
        elif kind != "up_proj":
            if kind == "gate_proj":
                ups = weights[name.replace("gate_proj", "up_proj")]
                values = np.stack((values, ups), axis=2).reshape(len(values), -1, *values.shape[2:])
                kind = "gate_up_proj"
            values = np.ascontiguousarray(values.swapaxes(-1, -2)) if end == "weight" else values
            found[f"{layer}{experts}{kind}{'_bias' if end == 'bias' else ''}"] = values
    return found


def _name(names: Any, name: str) -> str:
    name = name.replace("dt_bias", "dt_proj.bias").replace("correction_bias", "correction.bias")
    name = name.replace(".language_model.", ".")
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _converted(values: Array, name: str, architecture: str, config: Mapping[str, Any]) -> Array:
    heads = _rotated_heads(name, architecture, config)
    if heads:
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    if "query_key_value" in name:
        parts = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = np.ascontiguousarray(parts.swapaxes(0, 1).reshape(values.shape))
    if _is_norm_from_one(name, architecture):
        values = values + np.float32(1)
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        values = values.squeeze(1)
    return _with_value_heads(values, name, config, (0, 1))


def _restore(values: Array, name: str, architecture: str, config: Mapping[str, Any]) -> Array:
    heads = _rotated_heads(name, architecture, config)
    if heads:
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    if _is_norm_from_one(name, architecture):
        values = values - np.float32(1)
    if name.endswith("A_log"):
        values = np.log(-values)
    values = _with_value_heads(values, name, config, (1, 0))
    return values[:, None] if name.endswith(("conv1d.weight", "conv.conv.weight")) else values


def _is_norm_from_one(name: str, architecture: str) -> bool:
    is_norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return architecture in WITH_NORMS_FROM_ONE and is_norm


def _with_value_heads(values: Array, name: str, config: Mapping[str, Any], order: tuple[int, int]) -> Array:
    """Qwen 3.5: value heads by key head and number become value heads by number and key head, or back with (1, 0)."""
    _, _, part = name.partition(".linear_attn." if config["model_type"] != "qwen3_next" else "no name has this")
    part = part.removesuffix(".weight")
    if not part or part == "norm":
        return values
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = 1 if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else config["linear_value_head_dim"]
    start = 2 * groups * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    counts = (groups, heads // groups)
    moved = values.T if part == "out_proj" else values
    shape = (counts[order[0]], counts[order[1]], size, *moved.shape[1:])
    own = moved[start:].reshape(shape).swapaxes(0, 1).reshape(moved[start:].shape)
    whole = np.concatenate((moved[:start], own))
    return np.ascontiguousarray(whole.T if part == "out_proj" else whole)


def _rotated_heads(name: str, architecture: str, config: Mapping[str, Any]) -> int:
    """The heads of queries and keys whose rows the converter permutes; 0 for other tensors."""
    if architecture not in WITH_PERMUTED_ROWS:
        return 0
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0
