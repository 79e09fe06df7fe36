"""Writes models that see as pairs of GGUF files: names by the reference package, changes as llama.cpp's converters
make them. The keys and tensors were compared with those that `convert_hf_to_gguf.py --mmproj` writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
from gguf_files import add_key, write_gguf
from safetensors.numpy import load_file, save_file

Array = npt.NDArray[Any]
Config = Mapping[str, Any]
Named = Iterator[tuple[str, Array]]
_TEXT = re.compile(
    r"(?:model\.|language_model\.model\.|model\.(?:text|language)_model\.)"
    r"(embed_tokens|embedding_norm|embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm|layers|norm)(\..*)"
)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


class Kind(NamedTuple):
    """`architecture` is that of the text; `keys` are those of the projector without the common ones, `tensors` makes
    those of one weight. Of so many first rows `apart` in each head of queries and keys, those in even places go first.
    """

    architecture: str
    projector: str
    keys: Callable[[Config, Config], dict[str, Any]]
    tensors: Callable[[str, Array, Config], Named]
    text_keys: Mapping[str, Any] = {}
    text_tensors: Mapping[str, Array] = {}
    apart: int = 0


def write_pair(
    directory: Path,
    to: Path,
    family: str,
    *,
    dtype: str = "F32",
    text_kind: Callable[[str, Array], str | None] = lambda name, values: None,
    keys: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, Array]], None] = lambda tensors: None,
) -> Path:
    """Write the model in `directory` into `to`, as model.gguf and mmproj-model.gguf, and return the former.

    `dtype` is that of the projector's matrices; `keys` replace some of its metadata, and `edit` changes its tensors.
    """
    to.mkdir(parents=True, exist_ok=True)
    kind, config = KINDS[family], json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    text = to / "text"
    _write_text(directory, text, config, weights, kind.apart)
    write_gguf(text, to / "model.gguf", kind.architecture, text_kind, kind.text_keys, extra=kind.text_tensors)
    shutil.rmtree(text)
    tensors: dict[str, Array] = {}
    for name, values in weights.items():
        if not _TEXT.fullmatch(name) and name not in _HEADS:
            tensors.update(kind.tensors(name, values, config))
    edit(tensors)
    writer: Any = gguf.GGUFWriter(to / "mmproj-model.gguf", "clip")
    for key, value in (_keys(kind, directory, config) | dict(keys or {})).items():
        if value is not None:
            add_key(writer, key, value)
    for name, values in tensors.items():
        chosen = gguf.GGMLQuantizationType[dtype if values.ndim == 2 and "position_embd" not in name else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to / "model.gguf"


def _write_text(directory: Path, to: Path, config: Config, weights: Mapping[str, Array], apart: int) -> None:
    """The language model as a directory of its own."""
    to.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(directory / file, to)
    (to / "config.json").write_text(json.dumps(config["text_config"]))
    found = {f"model.{match[1]}{match[2]}": weights[name] for name in weights if (match := _TEXT.fullmatch(name))}
    found |= {name.removeprefix("language_model."): weights[name] for name in _HEADS if name in weights}
    for name in [name for name in found if apart and re.search(r"\.[qk]_proj\.", name)]:
        heads = config["text_config"]["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        each = found[name].reshape(heads, -1, *found[name].shape[1:])
        rows = np.concatenate((each[:, :apart:2], each[:, 1:apart:2], each[:, apart:]), axis=1)
        found[name] = np.ascontiguousarray(rows.reshape(found[name].shape))
    for name in [name for name in found if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))]:
        found.update(_apart(name, found.pop(name)))
    save_file(found, to / "model.safetensors")


def _apart(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """The weights of each expert, of one of all of them [E, O, I]."""
    experts, _, kind = name.rpartition(".")
    for number, own in enumerate(values):
        parts = (
            {"down_proj": own}
            if kind == "down_proj"
            else dict(zip(("gate_proj", "up_proj"), np.split(own, 2), strict=True))
        )
        yield from ((f"{experts}.{number}.{part}.weight", np.ascontiguousarray(one)) for part, one in parts.items())


def _keys(kind: Kind, directory: Path, config: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    processor = json.loads((directory / "preprocessor_config.json").read_text())
    from transformers import AutoImageProcessor

    library: Any = AutoImageProcessor
    if kind.projector in _COLOURS:
        colours = dict(zip(("image_mean", "image_std"), ([one] * 3 for one in _COLOURS[kind.projector]), strict=True))
    else:
        whole = library.from_pretrained(directory, backend="pil")
        colours = {name: [*map(float, getattr(whole, name))] for name in ("image_mean", "image_std")}
    common = {
        "projection_dim": config["text_config"]["hidden_size"],
        "image_size": tower.get("image_size", 560),
        "patch_size": tower["patch_size"],
        "embedding_length": tower.get("hidden_size"),
        "feed_forward_length": tower.get("intermediate_size"),
        "block_count": tower.get("num_hidden_layers"),
        "attention.head_count": tower.get("num_attention_heads"),
        **colours,
        "attention.layer_norm_epsilon": tower.get("layer_norm_eps", 1e-5),
    }
    own = kind.keys(config, processor)
    general = {"clip.has_vision_encoder": True, "clip.projector_type": kind.projector}
    if "clip.audio.projector_type" in own:
        general = {"clip.has_vision_encoder": True, "clip.vision.projector_type": kind.projector}
    return general | {f"clip.vision.{name}": value for name, value in common.items()} | own


# Of those whose processors want torchvision.
_COLOURS = {"lfm2": (0.5, 0.5), "llama4": (0.5, 0.5), "gemma4uv": (0.0, 1.0)}
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)


def _named(name: str, values: Array, config: Config) -> Named:
    found = _NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    yield found, values


def _smolvlm(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": processor["size"]["longest_edge"],
    }


def _llava(config: Config, processor: Config) -> dict[str, Any]:
    """As by `convert_image_encoder_to_gguf.py`, which knows the width of CLIP's own text, and not of the model's."""
    layers = config["vision_config"]["num_hidden_layers"] + config["vision_feature_layer"] + 1
    return {
        "clip.has_text_encoder": False,
        "clip.has_llava_projector": True,
        "clip.use_gelu": False,
        "clip.vision.projection_dim": 768,
        "clip.vision.block_count": layers,
        "clip.vision.feature_layer": [layers],
    }


_LLAVA = (
    *(("vision_tower.", "v."), ("multi_modal_projector.linear_1", "mm.0"), ("multi_modal_projector.linear_2", "mm.2")),
    *(("encoder.layers", "blk"), ("embeddings.", ""), ("_proj", ""), ("self_attn.", "attn_"), ("layer_norm", "ln")),
    *(("layernorm", "ln"), ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up"), ("embedding", "embd"), ("layrnorm", "ln")),
)


def _llava_tensors(name: str, values: Array, config: Config) -> Named:
    """The names of that script, which mixes up the first and the second layer of each perceptron."""
    layers = config["vision_config"]["num_hidden_layers"] + config["vision_feature_layer"] + 1
    for theirs, own in _LLAVA:
        name = name.replace(theirs, own)
    match = re.match(r"v\.blk\.(\d+)", name)
    if not name.startswith("v.post_ln") and (match is None or int(match[1]) < layers):
        yield name, values


def _qwen2(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return {
        "clip.vision.embedding_length": tower["embed_dim"],
        "clip.vision.feed_forward_length": tower["hidden_size"],
        "clip.vision.block_count": tower["depth"],
        "clip.vision.attention.head_count": tower["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
    }


def _qwen2_5(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return {
        "clip.use_silu": True,
        "clip.vision.n_wa_pattern": tower["fullatt_block_indexes"][0] + 1,
        "clip.vision.block_count": tower["depth"],
        "clip.vision.attention.head_count": tower["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
    }


def _qwen_tensors(name: str, values: Array, config: Config) -> Named:
    if ".qkv." in name:
        for part, third in zip("qkv", np.split(values, 3), strict=True):
            yield from _named(name.replace("qkv", part), third, config)
    elif "patch_embed.proj.weight" in name:
        yield "v.patch_embd.weight", np.ascontiguousarray(values[:, :, 0])
        yield "v.patch_embd.weight.1", np.ascontiguousarray(values[:, :, 1])
    else:
        yield from _named(name, values, config)


def _omni(config: Config, processor: Config) -> dict[str, Any]:
    return _qwen2_5(config, processor) | {"clip.has_audio_encoder": True}


def _omni_tensors(name: str, values: Array, config: Config) -> Named:
    """Besides those of what sees two of what hears."""
    yield from _qwen_tensors(name, values, config)
    if name.endswith("merger.ln_q.weight"):
        yield from (("a.post_ln.weight", values), ("mm.a.fc.bias", values))


def _exaone(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return _qwen2_5(config, processor) | {
        "clip.vision.attention.head_count_kv": tower["num_key_value_heads"],
        "clip.vision.window_size": tower["window_size"],
        "clip.vision.image_min_pixels": processor["min_pixels"],
        "clip.vision.image_max_pixels": processor["max_pixels"],
    }


def _exaone_tensors(name: str, values: Array, config: Config) -> Named:
    """The qkv of a layer stay one tensor."""
    name = name.removeprefix("model.")
    yield from _named(name, values, config) if ".qkv." in name else _qwen_tensors(name, values, config)


def _qwen3(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return {
        "clip.use_gelu": True,
        "clip.vision.image_size": int(tower["num_position_embeddings"] ** 0.5 * tower["patch_size"]),
        "clip.vision.block_count": tower["depth"],
        "clip.vision.attention.head_count": tower["num_heads"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.spatial_merge_size": tower["spatial_merge_size"],
        "clip.vision.is_deepstack_layers": [
            layer in tower.get("deepstack_visual_indexes", ()) for layer in range(tower["depth"])
        ],
    }


def _qwen3_tensors(name: str, values: Array, config: Config) -> Named:
    """The qkv of a layer stay one tensor, and what is merged deep down goes by its layer."""
    name = name.removeprefix("model.")
    if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc[12])\.(\w+)", name):
        layer = config["vision_config"]["deepstack_visual_indexes"][int(match[1])]
        yield f"v.deepstack.{layer}.{match[2].removeprefix('linear_')}.{match[3]}", values
    elif match := re.fullmatch(r"visual\.merger\.(norm|linear_fc[12])\.(\w+)", name):
        own = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[match[1]]
        yield f"{own}.{match[2]}", values
    elif "patch_embed.proj.bias" in name:
        yield "v.patch_embd.bias", values
    elif "qkv" in name:
        yield from _named(name, values, config)
    else:
        yield from _qwen_tensors(name, values, config)


def _glm(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return {
        "clip.use_silu": True,
        "clip.vision.block_count": tower["depth"],
        "clip.vision.attention.head_count": tower["num_heads"],
    }


_GLM = (  # of what lies behind the tower, and around it
    *(
        ("downsample", "mm.patch_merger"),
        ("merger.proj", "mm.model.fc"),
        ("merger.post_projection_norm", "mm.post_norm"),
    ),
    *((f"merger.{part}_proj", f"mm.{part}") for part in ("gate", "up", "down")),
    *(("post_conv_layernorm", "v.norm_embd"), ("embeddings.position_embedding", "v.position_embd")),
    *(("post_layernorm", "v.post_ln"), ("patch_embed.proj.bias", "v.patch_embd.bias"), ("blocks.", "v.blk.")),
    *(("norm1", "ln1"), ("norm2", "ln2"), ("attn.qkv", "attn_qkv"), ("attn.proj", "attn_out")),
    *((f"attn.{part}_norm", f"attn_{part}_norm") for part in "qk"),
    *((f"mlp.{part}_proj", f"ffn_{part}") for part in ("gate", "up", "down")),
)


def _glm_tensors(name: str, values: Array, config: Config) -> Named:
    if "patch_embed.proj.weight" in name:
        yield from _qwen_tensors(name, values, config)
        return
    name = name.removeprefix("model.visual.")
    for theirs, own in _GLM:
        name = name.replace(theirs, own)
    yield name, values


def _internvl(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return {
        "clip.use_gelu": True,
        "clip.vision.image_size": tower["image_size"][0],
        "clip.vision.patch_size": tower["patch_size"][0],
        "clip.vision.projector.scale_factor": round(1 / config["downsample_ratio"]),
        "clip.vision.preproc_max_tiles": processor["max_patches"],
    }


_INTERNVL = (  # what transformers renamed of the models that the converter reads
    *(("vision_tower.", "vision_tower.vision_model."), ("cls_token", "class_embedding")),
    ("encoder.layer.", "encoder.layers."),
    *(("position_embeddings", "position_embedding"), ("patch_embeddings.projection", "patch_embedding")),
    *(("layernorm_before", "norm1"), ("layernorm_after", "norm2"), ("lambda_1", "ls1"), ("lambda_2", "ls2")),
    *(("attention.projection_layer", "attn.proj"), ("attention.", "self_attn.")),
    *(("multi_modal_projector.layer_norm", "mlp1.0"), ("multi_modal_projector.linear_1", "mlp1.1")),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)


def _internvl_tensors(name: str, values: Array, config: Config) -> Named:
    for theirs, own in _INTERNVL:
        name = name.replace(theirs, own)
    if name.endswith(("ls1", "ls2", "position_embedding")):
        name += ".weight"
    yield from _named(name, values, config)


def _mistral3(config: Config, processor: Config) -> dict[str, Any]:
    return {"clip.use_gelu": True, "clip.vision.spatial_merge_size": config["spatial_merge_size"]}


def _mistral3_tensors(name: str, values: Array, config: Config) -> Named:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        halves = values.reshape(config["vision_config"]["num_attention_heads"], 2, -1, values.shape[1])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    yield from _named(name, values, config)


def _lighton_tensors(name: str, values: Array, config: Config) -> Named:
    name = name.replace("model.vision_encoder.", "vision_tower.")
    yield from _mistral3_tensors(name.replace("model.vision_projection.", "multi_modal_projector."), values, config)


def _lfm2(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.image_size": 256,
        "clip.vision.projector.scale_factor": config["downsample_factor"],
        "clip.vision.attention.layer_norm_epsilon": config["vision_config"]["layer_norm_eps"],
    }


def _lfm2_tensors(name: str, values: Array, config: Config) -> Named:
    if "patch_embedding.weight" in name:
        side = config["vision_config"]["patch_size"]
        values = np.ascontiguousarray(values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2))
    name = name.replace("vision_tower.", "vision_tower.vision_model.")
    yield from _named(name.removeprefix("model."), values, config)


def _minicpm(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.image_size": processor["scale_resolution"],
        "clip.vision.projector.scale_factor": 4,
        "clip.vision.wa_layer_indexes": [config["insert_layer_id"]],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
    }


_MINICPM = (
    *(("model.vision_tower.", "v."), ("model.merger.mlp.0.", "mm."), ("embeddings.", ""), ("encoder.layers", "blk")),
    *(("mm.pre_norm", "mm.input_norm"), ("mm.linear_1", "mm.up"), ("mm.linear_2", "mm.down")),
    *(("pre_norm", "ds_ln"), ("linear_1", "ds_ffn_up"), ("linear_2", "ds_ffn_down")),
    *(("self_attn.out_proj", "attn_out"), ("self_attn.", "attn_"), ("_proj", ""), ("layer_norm", "ln")),
    *(("mlp.fc1", "ffn_up"), ("mlp.fc2", "ffn_down"), ("post_layernorm", "post_ln"), ("_embedding", "_embd")),
)


def _minicpm_tensors(name: str, values: Array, config: Config) -> Named:
    for theirs, own in _MINICPM:
        name = name.replace(theirs, own)
    yield name, values


def _paddle(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.image_size": 112,
        "clip.vision.image_min_pixels": processor["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": processor["size"]["longest_edge"],
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
    }


_PADDLE = (("visual.vision_model.", "model.vision_tower."), *((f"mlp_AR.linear_{one}", f"mm.{one}") for one in (1, 2)))


def _paddle_tensors(name: str, values: Array, config: Config) -> Named:
    for theirs, own in (*_PADDLE, ("mlp_AR.pre_norm", "mm.input_norm")):
        name = name.replace(theirs, own)
    yield from _minicpm_tensors(name, values, config)


def _hunyuan(config: Config, processor: Config) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.spatial_merge_size": config["vision_config"]["spatial_merge_size"],
        "clip.vision.image_min_pixels": processor["min_pixels"],
        "clip.vision.image_max_pixels": processor["max_pixels"],
        "clip.vision.attention.layer_norm_epsilon": config["vision_config"]["rms_norm_eps"],
    }


def _hunyuan_tensors(name: str, values: Array, config: Config) -> Named:
    yield from _named(name, values[1:] if "position_embedding" in name else values, config)


def _janus(config: Config, processor: Config) -> dict[str, Any]:
    return {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": 1e-6}


def _janus_tensors(name: str, values: Array, config: Config) -> Named:
    name = name.removeprefix("model.")
    if name.startswith("aligner."):
        part, _, last = name.removeprefix("aligner.").rpartition(".")
        yield f"mm.{0 if part == 'fc1' else int(part.rpartition('.')[2]) + 1}.{last}", values
    elif name.startswith("vision_model."):
        yield from _named(f"model.{name}", values, config)


def _llama4(config: Config, processor: Config) -> dict[str, Any]:
    scale = int(1 / config["vision_config"]["pixel_shuffle_ratio"])
    return {"clip.use_gelu": True, "clip.vision.projector.scale_factor": scale}


def _llama4_tensors(name: str, values: Array, config: Config) -> Named:
    """The reference package has the name of the second norm for Gemma 4, too, where it is another one."""
    if name == "multi_modal_projector.linear_1.weight":
        yield "mm.model.fc.weight", values
    elif match := re.fullmatch(r"vision_model\.model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)", name):
        yield f"v.blk.{match[1]}.ln2.{match[2]}", values
    else:
        yield from _named(f"{name}.weight" if name.endswith("positional_embedding_vlm") else name, values, config)


def _gemma3(config: Config, processor: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    scale = int(tower["image_size"] // tower["patch_size"] // config["mm_tokens_per_image"] ** 0.5)
    return {
        "clip.use_gelu": True,
        "clip.vision.projector.scale_factor": None if scale == 4 else scale,
        "clip.vision.attention.layer_norm_epsilon": tower.get("layer_norm_eps", 1e-6),
    }


def _gemma3_tensors(name: str, values: Array, config: Config) -> Named:
    for theirs, own in (("vision_tower.", "vision_tower.vision_model."), ("_projection_weight", "_projection.weight")):
        name = name.replace(theirs, own)
    yield from _named(name.removeprefix("model."), values + np.float32("soft_emb_norm" in name), config)


def _gemma4(config: Config, processor: Config) -> dict[str, Any]:
    own: dict[str, Any] = {
        "clip.vision.image_size": 224,
        "clip.vision.attention.layer_norm_epsilon": config["vision_config"]["rms_norm_eps"],
    }
    hears = {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"}
    return own | (hears if config.get("audio_config") else {})


def _gemma4_tensors(name: str, values: Array, config: Config) -> Named:
    """Those of sounds by names that begin as the converter's do."""
    if "audio_tower" in name:
        yield f"a.{name}", values.reshape(values.shape or (1,))
        return
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith("input_proj.weight"):
        side = config["vision_config"]["patch_size"]
        values = np.ascontiguousarray(values.reshape(len(values), side, side, 3).transpose(0, 3, 1, 2))
    suffixes = (".weight", ".input_min", ".input_max", ".output_min", ".output_max")
    found = _NAMES.get_name(f"{name}.weight" if name.endswith("table") else name, try_suffixes=suffixes)
    assert found is not None, name
    yield found, values.reshape(values.shape or (1,))


_UNIFIED = (
    *(("vision_embedder.patch_dense", "v.patch_embd"), ("vision_embedder.pos_embedding", "v.position_embd.weight")),
    *(("vision_embedder.patch_ln", "v.patch_norm."), ("vision_embedder.pos_norm", "v.patch_norm.3")),
    ("embed_vision.embedding_projection", "mm.input_projection"),
)


def _unified(config: Config, processor: Config) -> dict[str, Any]:
    """As of a model that also hears, as the published one."""
    return {
        "clip.has_audio_encoder": True,
        "clip.audio.projector_type": "gemma4ua",
        "clip.vision.image_size": 224,
        "clip.vision.embedding_length": config["vision_config"]["mm_embed_dim"],
        **{f"clip.vision.{name}": 0 for name in ("feed_forward_length", "block_count", "attention.head_count")},
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
    }


def _unified_tensors(name: str, values: Array, config: Config) -> Named:
    """Colours apart, as `Gemma4UnifiedVisionAudioModel` of the converter has them."""
    tower = config["vision_config"]
    side = tower["patch_size"] * tower["pooling_kernel_size"]
    if name.endswith(("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")):
        values = values.reshape(-1, side, side, 3).transpose(0, 3, 1, 2).reshape(values.shape)
    if name.endswith("pos_embedding"):
        values = values.swapaxes(0, 1)
    for theirs, own in _UNIFIED:
        name = name.replace(f"model.{theirs}", own)
    yield name, np.ascontiguousarray(values)


def _gemma4_keys(**more: Any) -> dict[str, Any]:
    return {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 10_000.0,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [True, False, True, False],
        "final_logit_softcapping": 5.0,
        **more,
    }


_SECTIONS = {"rope.dimension_sections": [2, 3, 3, 0]}
_GLM_SECTIONS = {"rope.dimension_sections": [1, 1, 2, 0], "rope.dimension_count": 8}
_YARN = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 16},
    **{"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.dimension_count": 16},
    **{"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
}
_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
_GLM_EXPERTS = _EXPERTS | {
    **{"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1},
    **{"expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 2},
}
_DELTA_NETS = {
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 96},
    **{"full_attention_interval": 2, "rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]},
}
_FACTORS = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, np.float32)}  # a quarter of a head rotates
KINDS = {
    "smolvlm": Kind("llama", "idefics3", _smolvlm, _named),
    "llava": Kind("llama", "mlp", _llava, _llava_tensors),
    "qwen2_vl": Kind("qwen2vl", "qwen2vl_merger", _qwen2, _qwen_tensors, _SECTIONS),
    "qwen2_5_vl": Kind("qwen2vl", "qwen2.5vl_merger", _qwen2_5, _qwen_tensors, _SECTIONS),
    "qwen2_5_omni": Kind("qwen2vl", "qwen2.5o", _omni, _omni_tensors, _SECTIONS),
    "exaone4_5": Kind(
        "exaone4",
        "exaone4_5",
        _exaone,
        _exaone_tensors,
        {"attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "qwen3_vl": Kind("qwen3vl", "qwen3vl_merger", _qwen3, _qwen3_tensors, _SECTIONS),
    "qwen3_vl_moe": Kind("qwen3vlmoe", "qwen3vl_merger", _qwen3, _qwen3_tensors, _SECTIONS | _EXPERTS),
    "qwen3_5": Kind("qwen35", "qwen3vl_merger", _qwen3, _qwen3_tensors, _DELTA_NETS),
    "qwen3_5_moe": Kind("qwen35moe", "qwen3vl_merger", _qwen3, _qwen3_tensors, _DELTA_NETS | _EXPERTS),
    "glm4v": Kind("glm4", "glm4v", _glm, _glm_tensors, _GLM_SECTIONS, apart=8),
    "glm4v_moe": Kind("glm4moe", "glm4v", _glm, _glm_tensors, _GLM_SECTIONS | _GLM_EXPERTS),
    "glm_ocr": Kind("glm4", "glm4v", _glm, _glm_tensors, _SECTIONS, apart=16),
    "internvl": Kind("qwen2", "internvl", _internvl, _internvl_tensors),
    "internvl_moe": Kind("qwen3moe", "internvl", _internvl, _internvl_tensors, _EXPERTS),
    "lfm2_vl": Kind(
        "lfm2",
        "lfm2",
        _lfm2,
        _lfm2_tensors,
        {"attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3},
    ),
    "minicpmv4_6": Kind("qwen35", "minicpmv4_6", _minicpm, _minicpm_tensors, _DELTA_NETS),
    "hunyuan_vl": Kind(
        "hunyuan_vl",
        "hunyuanvl",
        _hunyuan,
        _hunyuan_tensors,
        {
            **{"rope.scaling.alpha": 3.0, "rope.scaling.type": "none", "rope.scaling.factor": 1.0},
            "rope.dimension_sections": [2, 3, 1, 2],
        },
    ),
    "llama4": Kind(
        "llama4",
        "llama4",
        _llama4,
        _llama4_tensors,
        {
            **{"expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 128},
            **{"feed_forward_length": 96, "interleave_moe_layer_step": 2},
        },
    ),
    "janus": Kind("llama", "janus_pro", _janus, _janus_tensors),
    "paddleocr_vl": Kind("paddleocr", "paddleocr", _paddle, _paddle_tensors, _SECTIONS),
    "mistral3": Kind("llama", "pixtral", _mistral3, _mistral3_tensors),
    "ministral3": Kind("mistral3", "pixtral", _mistral3, _mistral3_tensors, _YARN),
    "lighton_ocr": Kind("qwen3", "lightonocr", _mistral3, _lighton_tensors),
    "gemma3": Kind(
        "gemma3",
        "gemma3",
        _gemma3,
        _gemma3_tensors,
        {"attention.sliding_window": 20, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "gemma4": Kind(
        "gemma4",
        "gemma4v",
        _gemma4,
        _gemma4_tensors,
        _gemma4_keys(**{"attention.head_count_kv": [2, 1, 2, 1]}),
        _FACTORS,
    ),
    "gemma4_unified": Kind(
        "gemma4",
        "gemma4uv",
        _unified,
        _unified_tensors,
        _gemma4_keys(**{"attention.head_count_kv": [2, 1, 2, 1]}),
        _FACTORS,
    ),
    "gemma4_e": Kind(
        "gemma4",
        "gemma4v",
        _gemma4,
        _gemma4_tensors,
        _gemma4_keys(
            **{
                "attention.shared_kv_layers": 2,
                "embedding_length_per_layer_input": 16,
                "feed_forward_length": [128, 128, 256, 256],
            }
        ),
        _FACTORS,
    ),
}
