"""The model of a GGUF file, or of a pair of them: one for the language, and a projector for what it sees.

Everything about a pair is checked here, from the headers alone. Needs no torch.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from ....schemas.errors import ModelLoadError
from ....schemas.sources import NO_PROJECTOR, gguf_model, is_projector, join_pair
from . import models
from .file import Gguf, GgufTensor, GgufWeight, read_gguf
from .keys import Keys
from .projectors.table import PROJECTORS, projector_of, projector_type
from .projectors.vision import Names, Projector, Vision

_TOKENS = "tokenizer.ggml.tokens"
_LAYER = "v.blk."
_IN_TURNS: dict[str, Any] = {"mrope_interleaved": True}  # numbers rotate by time, row and column in turns
_IN_DIMENSIONS: dict[str, dict[str, Any]] = {
    "qwen2vl": {},
    "qwen3vl": _IN_TURNS,
    "qwen3vlmoe": _IN_TURNS,
    "qwen35": {},
    "qwen35moe": {},
    "paddleocr": {},
    "glm4": {},
    "glm4moe": {},
    "hunyuan_vl": {},
}
"""How positions rotate, of language models that have them in several dimensions, besides what their families say."""


class _Unsupported(ModelLoadError):
    """A projector is of a kind that is not supported."""


def config_of(gguf: Gguf) -> dict[str, Any]:
    """The content that the model's config.json would have. Raises `ModelLoadError`."""
    if gguf.metadata.get("general.architecture") == "clip":
        raise ModelLoadError(
            f"{gguf.path} is a projector, the vision part of a model; name the model's own file, and this one behind a "
            f"comma: MODEL.gguf,{gguf.path.name}"
        )
    text = models.config_of(gguf)
    if gguf.projector is None:
        return text
    kind, vision, tokens = _check(gguf, gguf.projector, text)
    architecture = gguf.metadata["general.architecture"]
    text["model_type"] = kind.texts[architecture] or text["model_type"]
    if architecture in _IN_DIMENSIONS:
        if (sections := Keys(gguf).sections) is None:
            raise ModelLoadError(f"{gguf.path} has no {architecture}.rope.dimension_sections; convert the model again")
        text["rope_parameters"] |= {"mrope_section": sections} | _IN_DIMENSIONS[architecture]
    model_type, class_name = kind.models.get(architecture, (kind.model_type, kind.class_name))
    return kind.config(vision) | {
        "model_type": model_type,
        "architectures": [class_name],
        "dtype": text["dtype"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        **tokens,
    }


def weights_of(gguf: Gguf) -> dict[str, GgufWeight]:
    """All weights by transformers' names. Raises `ModelLoadError` naming a tensor that has none."""
    found = models.weights_of(gguf)
    if gguf.projector is None:
        return found
    kind = _kind(gguf.projector)
    text, head = f"{kind.language_model}.", kind.head
    moved = {
        text + name.removeprefix("model.") if name.startswith("model.") else head + name: weight
        for name, weight in found.items()
    }
    return moved | _vision_weights(gguf.projector, kind)


def processor_of(gguf: Gguf) -> dict[str, Any]:
    """The content that preprocessor_config.json would have. Raises `ModelLoadError`."""
    assert gguf.projector is not None
    return _kind(gguf.projector).processor(Vision(gguf.projector))


def find_projector(path: Path) -> Path:
    """The GGUF file `path`, with the projector that lies beside it and fits, if there is one.

    Raises `ModelLoadError` where several fit, and where one beside this model alone does not.
    """
    fitting, faults = _beside(path)
    if len(fitting) > 1:
        names = ", ".join(each.name for each in fitting)
        raise ModelLoadError(
            f"beside {path} lie several projectors: {names}; name one by --mmproj, or behind a comma as in "
            f"{join_pair(path, fitting[0])}, or {NO_PROJECTOR} for text alone"
        )
    if fitting:
        return join_pair(path, fitting[0])
    others = [other for other in path.parent.iterdir() if gguf_model(other.name) and other != path] if faults else []
    wrong = [fault for fault in faults if not isinstance(fault, _Unsupported)]
    if wrong and not others:
        raise ModelLoadError(f"{wrong[0]}; for text alone name {join_pair(path, NO_PROJECTOR)}")
    return path


def why_alone(path: Path) -> str:
    """Why the projector beside a GGUF file is not used; empty if there is none."""
    return next(map(str, _beside(path)[1]), "")


def _beside(path: Path) -> tuple[list[Path], list[ModelLoadError]]:
    """The projectors in the directory of a model that fit it, and why others do not."""
    try:
        found = sorted(other for other in path.parent.iterdir() if is_projector(other.name) and other.is_file())
    except OSError:  # it may be read, though its directory may not
        return [], []
    if not found or is_projector(path.name):
        return [], []
    text = read_gguf(path)
    config = models.config_of(text)
    fitting, faults = [], list[ModelLoadError]()
    for other in found:
        try:
            _check(text, read_gguf(other), config)
        except ModelLoadError as fault:
            faults.append(fault)
        else:
            fitting.append(other)
    return fitting, faults


def _check(gguf: Gguf, projector: Gguf, text: dict[str, Any]) -> tuple[Projector, Vision, dict[str, int]]:
    """The kind of a projector, and the ids of tokens for images by config.json's names for them. Raises
    `ModelLoadError` if it does not fit `text`."""
    kind, vision = _kind(projector), Vision(projector)
    architecture = gguf.metadata["general.architecture"]
    if architecture not in kind.texts:
        raise ModelLoadError(
            f"{projector.path} goes with models of the architecture {' or '.join(kind.texts)}, and {gguf.path} has "
            f"{architecture}; name the projector that was made with this model"
        )
    kind.config(vision)
    kind.processor(vision)
    _vision_weights(projector, kind)
    if (size := vision.size(kind.output, kind.output_axis)) != text["hidden_size"]:
        raise ModelLoadError(
            f"{projector.path} makes tokens of {size} numbers, and those of {gguf.path} have {text['hidden_size']}; "
            "name the projector that was made with this model"
        )
    return kind, vision, _token_ids(gguf, kind)


def _token_ids(gguf: Gguf, kind: Projector) -> dict[str, int]:
    tokens, mark = gguf.strings(_TOKENS), kind.mark
    if mark not in tokens and kind.spare is not None:
        mark = next((token for token in reversed(tokens) if token.startswith(kind.spare)), mark)
    for text in (mark, *kind.tokens.values()):
        if text not in tokens:
            raise ModelLoadError(
                f"the tokenizer of {gguf.path} has no token {text}, which stands for an image; use a file that was "
                "converted from the model's Hugging Face version"
            )
    texts = {"image_token_id": mark, "image_token_index": mark, **kind.tokens}
    return {name: tokens.index(text) for name, text in texts.items()}


def _kind(projector: Gguf) -> Projector:
    if projector.metadata.get("general.architecture") != "clip":
        raise ModelLoadError(f"{projector.path} is no projector; name a file such as mmproj-model.gguf")
    if (kind := projector_of(projector)) is None:
        raise _Unsupported(
            f"{projector.path} is a projector of the kind {projector_type(projector)}, which is not supported; "
            f"supported: {', '.join(PROJECTORS)}"
        )
    return kind


def _vision_weights(projector: Gguf, kind: Projector) -> dict[str, GgufWeight]:
    """The weights of the vision part. Raises `ModelLoadError` for tensors that are missing or unknown."""
    vision, tensors = Vision(projector), projector.tensors
    layer = kind.layer
    if kind.layers and vision.size(f"{_LAYER}0.ffn_up.weight", 1) != vision.width:
        layer = {_swapped(name): own for name, own in layer.items()}  # older converters mixed them up
    names: dict[str, str] = {}
    parts: dict[str, list[GgufTensor]] = {}

    def place(own_names: Names, before: str, ours: str) -> None:
        for name, own in own_names.items():
            names[before + name] = own
            if (tensor := tensors.get(before + name)) is not None:
                parts.setdefault(ours + own, []).append(tensor)
            elif name not in kind.optional:
                raise ModelLoadError(
                    f"{projector.path} lacks the tensor {before}{name}: it is incomplete; download it again"
                )

    place({**kind.names, **kind.names_of(vision)}, "", "")
    for number in range(vision.need("block_count") if kind.layers else 0):
        place(layer, f"{_LAYER}{number}.", f"{kind.layers}.{number}.")
    left = tensors.keys() - names.keys() - kind.ignored
    if unknown := sorted(name for name in left if not name.startswith(kind.ignored_parts)):
        raise ModelLoadError(
            f"{projector.path}: the tensor {unknown[0]} is unknown in a projector of the kind "
            f"{projector_type(projector)}; use the model's safetensors files instead"
        )
    parts |= {own: [tensors[name]] for own, name in kind.unused.items()}
    heads = vision.need("attention.head_count") if kind.layers else 1
    return {own: _joined(found, kind, heads)._replace(sees=True) for own, found in parts.items()}


def _swapped(name: str) -> str:
    if name.startswith("ffn_up"):
        return name.replace("ffn_up", "ffn_down")
    return name.replace("ffn_down", "ffn_up")


def _joined(parts: list[GgufTensor], kind: Projector, heads: int) -> GgufWeight:
    """One weight of tensors with its rows, or with its frames."""
    first, *more = parts
    name, shape = first.name, first.shape
    own = name.removeprefix(_LAYER).partition(".")[2] if name.startswith(_LAYER) else name
    if more and len(shape) == 4:
        return GgufWeight(first, (*shape[:2], len(parts), *shape[2:]), more=tuple(more), is_split_in_time=True)
    if more:
        return GgufWeight(first, (sum(part.shape[0] for part in parts), *shape[1:]), more=tuple(more))
    if own in kind.permuted:
        return GgufWeight(first, shape, heads)
    if name in kind.by_pixels:
        return GgufWeight(first, (shape[0], prod(shape[1:])) if len(shape) > 1 else shape, is_by_colour=True)
    if (leading := kind.leading.get(name)) is not None:
        return GgufWeight(first, (shape[0] + leading, *shape[1:]), leading=leading)
    if name in kind.by_axis:
        return GgufWeight(first, (shape[1], shape[0], *shape[2:]), is_by_axis=True)
    while (count := kind.dimensions.get(own)) is not None and len(shape) != count:
        shape = shape[1:] if len(shape) > count else (1, *shape)
    return GgufWeight(first, shape, offset=kind.offsets.get(name, 0))
