"""A GGUF file's model in transformers' terms: its configuration, and the name and layout of each weight there.

Source of the differences: llama.cpp's converters (its folder `conversion`), each of which is undone here. Needs no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ....schemas.errors import ModelLoadError
from .families.architecture import LAYER_NORM, NAMES, RMS_NORM, Architecture, rope_of
from .families.gemma import ROPE_FACTORS
from .families.table import architecture_of
from .file import Gguf, GgufTensor, GgufWeight
from .fused import with_parts
from .keys import HEADS, Keys
from .scales import with_scales
from .tokens import end_ids

_FACTORS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
_OF_RMS_NORMS = ("rms_norm_eps", "norm_eps")  # what configurations call their epsilon
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias|)")
_NUMBER = re.compile(r"blk\.(\d+)\.")
_OUTSIDE = re.compile(r"(\w+)(\.weight|\.bias)")


def config_of(gguf: Gguf) -> dict[str, Any]:
    """The content that the model's config.json would have. Raises `ModelLoadError`."""
    architecture = architecture_of(gguf)
    keys = Keys(gguf := with_parts(gguf, {*architecture.names, *architecture.forms}))
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{gguf.path} has no token_embd.weight: it is not a language model; choose one that is")
    kinds = {one.type for one in gguf.tensors.values() if len(one.shape) > 1 and not one.name.endswith(".bias")}
    norms = [RMS_NORM, LAYER_NORM] if architecture.epsilon in _OF_RMS_NORMS else [LAYER_NORM, RMS_NORM]
    norm = next((name for name in norms if keys.find(name) is not None), norms[0])
    ends, own = end_ids(gguf), architecture.extra(keys)
    if "intermediate_size" not in own:
        length = keys.find("feed_forward_length") or keys.find("expert_feed_forward_length")
        own["intermediate_size"] = length or keys.need("feed_forward_length")
    if "num_attention_heads" not in own:
        own["num_attention_heads"] = keys.need(HEADS)
    if "num_key_value_heads" not in own:
        own["num_key_value_heads"] = keys.kv_heads
    found = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "dtype": "float32" if kinds == {"F32"} else "float16" if kinds == {"F16"} else "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "num_hidden_layers": keys.num_layers,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.need("context_length"),
        architecture.epsilon: keys.need(norm),
        "rope_parameters": rope_of(keys),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": keys.has("attn_q.bias"),
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(ends) or None,
        "pad_token_id": gguf.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in found.items() if name not in architecture.left_out} | own


def weights_of(gguf: Gguf) -> dict[str, GgufWeight]:
    """All weights by transformers' names. Raises `ModelLoadError` naming a tensor that has none."""
    architecture = architecture_of(gguf)
    keys = Keys(gguf := with_parts(with_scales(gguf), {*architecture.names, *architecture.forms}))
    found: dict[str, GgufWeight] = {}
    for tensor in gguf.tensors.values():
        layer = _NUMBER.match(tensor.name)
        if tensor.name not in _FACTORS and not (layer and int(layer[1]) >= keys.num_layers):
            found.update(_weights(tensor, architecture, keys))
    return found


def constants_of(gguf: Gguf) -> dict[str, Any]:
    """The weights that are in the metadata, by transformers' names: numbers, or lists of them."""
    return architecture_of(gguf).constants(Keys(gguf))


def rope_factors(gguf: Gguf) -> list[float] | None:
    """What divides the frequencies of rotations, if the file says that in a tensor and its configuration does not."""
    is_given = ROPE_FACTORS in gguf.tensors and architecture_of(gguf).has_factors
    return gguf.floats(ROPE_FACTORS) if is_given else None


def _weights(tensor: GgufTensor, architecture: Architecture, keys: Keys) -> Iterator[tuple[str, GgufWeight]]:
    match = _LAYER.fullmatch(tensor.name)
    stem, suffix = match.groups()[1:] if match else _split(tensor.name)
    place = f"{architecture.layers}.{match[1]}." if match else ""
    if form := architecture.forms.get(stem):
        for own, weight in form(tensor, keys):
            yield f"{place}{own}", weight
        return
    name = architecture.names.get(stem) or NAMES.get(stem)
    if name is None:
        raise ModelLoadError(
            f"{keys.gguf.path}: the tensor {tensor.name} is unknown in a model of the architecture "
            f"{keys.gguf.metadata['general.architecture']}; use the model's safetensors files instead"
        )
    whole = f"{place}{name}".removesuffix(".") if name.endswith(".") else f"{place}{name}{suffix or '.weight'}"
    if "{}" in name:
        for index in range(tensor.shape[0]):
            yield whole.format(index), GgufWeight(tensor, tensor.shape[1:], expert=index)
        return
    shape = (1, *tensor.shape) if stem == "ffn_gate_inp_shexp" and len(tensor.shape) == 1 else tensor.shape
    heads, apart = None, 0
    if (architecture.interleaved or architecture.apart) and stem in ("attn_q", "attn_k"):
        heads = keys.need(HEADS) if stem == "attn_q" else keys.kv_heads
        if shape[0] % (2 * heads):
            raise ModelLoadError(
                f"{keys.gguf.path}: {tensor.name} has {shape[0]} rows for {heads} heads; convert it again"
            )
        apart = keys.find("rope.dimension_count", keys.head_dim) if architecture.apart else 0
    is_norm = stem.endswith("norm") and stem != "ssm_norm" and suffix == ".weight"
    yield whole, GgufWeight(tensor, shape, heads, -architecture.norm_offset if is_norm else 0, apart)


def _split(name: str) -> tuple[str, str]:
    match = _OUTSIDE.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")
