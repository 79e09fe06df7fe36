"""Load a transformers model, with errors that say exactly what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from ..schemas.errors import ConfigurationError, ModelLoadError
from ..schemas.sources import is_gguf
from .backend import ProgressCallback
from .checkpoints.experts import Readers, fold_experts, whole_weights
from .checkpoints.gguf.file import read_gguf
from .checkpoints.gguf.models import rope_factors
from .checkpoints.gguf.pairs import config_of
from .checkpoints.gguf.weights import lazy_weights, level_readers
from .checkpoints.lazy import reading
from .checkpoints.packed_weights import lazy_packed_weights, packed_level_readers
from .checkpoints.rounded import TakesLevels, attach, lazy_rounded_weights, rounded_readers, without_numbers
from .config import EngineConfig
from .models import packed_files, read_config, read_quantized, read_shapes
from .vision.families.names import body_of, is_of_tower, is_unused, language_model_of
from .vision.towers.mobilenet import provide_tower
from .vision.towers.timm_towers import provide_timm_towers


def load_config(path: Path) -> PreTrainedConfig:
    """The configuration of the model in a directory or a GGUF file, in transformers' class for it."""
    config: PreTrainedConfig
    if is_gguf(path):
        config = AutoConfig.for_model(**config_of(read_gguf(path)))
    else:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    return config


def load_causal_lm(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: torch.device,
    progress: ProgressCallback | None,
    attention: str | None,
    *,
    keep_levels: TakesLevels | None = None,
    sees: bool = False,
) -> PreTrainedModel:
    """Load the weights at `path` onto `device`; with `attention` None transformers chooses its implementation.

    `keep_levels` says for which weights the caller makes products of levels: those get no numbers, but their modules
    the levels, as `rounded`. Files of other programs have them in bfloat16.
    `sees`: it is a model for images and text, and is loaded as a whole.
    Call `count_parameters` first: it checks the files. Raises `ModelLoadError` and `ConfigurationError`.
    """
    if not sees and _read_as_text(path, architecture) not in {"unknown", *_causal_architectures()}:
        raise ModelLoadError(
            f"{config.model} is a {architecture}, which transformers does not know as a causal language model; "
            "serve a model for embeddings or rankings with --backend sentence_transformers"
        )
    quantized = read_quantized(path)
    if quantized and config.quantization:
        raise ConfigurationError(
            [f"quantization={config.quantization!r}: {config.model} is quantised as {quantized.method}; leave it out"]
        )
    with reading(config.model, config.dtype, device):
        options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        options |= {"local_files_only": True, "output_loading_info": True}
        keep_levels = keep_levels if config.quantization is None else None
        loaded = _load(path, config.dtype, keep_levels, sees, progress, **options)
        model: PreTrainedModel = loaded[0].to(device)
    if missing := sorted(name for name in loaded[1]["missing_keys"] if not (is_gguf(path) and is_unused(name))):
        raise ModelLoadError(
            f"the weight files of {path} lack {len(missing)} tensors, such as {missing[0]}: they are another "
            "model's or incomplete; download them again"
        )
    if is_gguf(path) and (left := sorted(name for name in loaded[1]["unexpected_keys"] if not _SHARED.search(name))):
        raise ModelLoadError(
            f"{path} has weights that a {type(model).__name__} has not, such as {left[0]}: it is a variant that is not "
            "supported; use the model's safetensors files"
        )
    return model


_SHARED = re.compile(r"\.self_attn\.(k_proj|v_proj|k_norm)\.weight$")  # of layers that take another one's keys


def _load(
    path: Path,
    name: str,
    keep_levels: TakesLevels | None,
    sees: bool,
    progress: ProgressCallback | None,
    **options: Any,
) -> Any:
    """transformers' model and its notes on the load; `name` is that of the dtype, or "auto". Raises `ModelLoadError`.

    Each module that Penstock has quantised reads its levels by `rounded`; with `keep_levels` so do those of a GGUF
    file, and the weights of both are `absent`; `progress` is not told of those.
    """
    gguf = read_gguf(path) if is_gguf(path) else None
    quantized = read_quantized(path)
    packed = None if gguf or quantized else packed_files(path)
    family = read_config(path).get("model_type")
    if family == "gemma3n":
        provide_tower()
    elif family in ("fast_vlm", "perception_lm"):
        provide_timm_towers()
    if not (gguf or quantized or packed):
        auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with counting_weights(progress):
            return auto.from_pretrained(path, dtype=name, **options)
    config = load_config(path)
    dtype: Any = (config.dtype or torch.bfloat16) if name == "auto" else getattr(torch, name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what follows is not quantised any more
    found = rounded_readers(path, quantized) if quantized else {}
    if gguf:
        weights = lazy_weights(gguf, dtype)
        found = level_readers(gguf) if keep_levels is not None and dtype == torch.bfloat16 else {}
    elif packed:
        weights = lazy_packed_weights(packed.files, packed.weights, packed.packing, dtype)
        if keep_levels is not None and dtype == torch.bfloat16:
            levels = packed_level_readers(packed.files, packed.weights, packed.packing)
            found = {name: read for name, read in levels.items() if not (is_of_tower(name) or _guesses(name))}
    else:
        assert quantized is not None
        weights = lazy_rounded_weights(path, quantized, found, dtype)
    experts: Readers = {}
    shapes = read_shapes(path) if gguf or quantized or keep_levels is not None else {}
    if keep_levels is not None:
        weights, found, experts = fold_experts(weights, found, shapes, dtype, keep_levels)
        weights = without_numbers(weights, found, shapes, dtype, keep_levels)
    if gguf or quantized:
        weights = whole_weights(weights, shapes, dtype)
    kind: Any = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    with counting_weights(None if keep_levels is not None and found else progress):
        loaded = kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options)
    if gguf and (factors := rope_factors(gguf)):
        body = body_of(loaded[0])
        (language_model_of(body) or body).rotary_emb.inv_freq /= torch.tensor(factors)
    if sees and packed:
        found, experts = (_by_module(loaded[0], each) for each in (found, experts))
    attach(loaded[0], found, experts)
    return loaded


def _by_module(model: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of one that sees has of its language model, by the names of modules: older checkpoints call
    what is around the layers otherwise, which transformers knows of weights alone."""
    names = {module: name for name, module in model.named_modules()}
    text, head = names[language_model_of(body_of(model))], names[model.get_output_embeddings()]
    return {
        f"{text}.{match[0]}" if (match := _IN_LAYER.search(name)) else head if name.endswith(_HEAD) else name: one
        for name, one in found.items()
    }


def _guesses(name: str) -> bool:
    """Whether a weight of this name is of layers beside the model that guess tokens, which are not read."""
    return "mtp" in name.split(".")


_IN_LAYER, _HEAD = re.compile(r"\blayers\.\d+\..+"), "lm_head"


@contextmanager
def counting_weights(progress: ProgressCallback | None) -> Iterator[None]:
    """Report loaded weights to `progress` instead of transformers' own progress bars."""
    previous = transformers_logging.set_tqdm_hook(
        lambda factory, args, kwargs: _Counted(args[0] if args else kwargs.get("iterable", ()), progress)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _read_as_text(path: Path, architecture: str) -> str:
    """The architecture of the language model in one that also sees, where transformers has it by itself."""
    text = architecture.replace("ForConditionalGeneration", "ForCausalLM")
    return text if "text_config" in read_config(path) and text in _causal_architectures() else architecture


def takes_images(path: Path, architecture: str) -> bool:
    """Whether transformers has the model at `path` for images and text, and not as a language model by itself."""
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(read_config(path).get("model_type", ""))
    return text in (None, architecture) and architecture in _names(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _causal_architectures() -> frozenset[str]:
    return _names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _names(mapping: Mapping[str, str | Sequence[str]]) -> frozenset[str]:
    return frozenset(name for entry in mapping.values() for name in ([entry] if isinstance(entry, str) else entry))


class _Counted:
    """Replaces transformers' tqdm bars and reports to `progress`."""

    def __init__(self, iterable: Iterable[Any], progress: ProgressCallback | None) -> None:
        self._iterable = list(iterable)
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._iterable, start=1):
            yield item
            if self._progress is not None:
                self._progress(done, len(self._iterable))

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to release."""
