"""Loads a model for the runner: plain decoders by Penstock's own code, all others by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...schemas.errors import ModelLoadError
from ..backend import ProgressCallback
from ..checkpoints.lazy import reading
from ..checkpoints.rounded import TABLE, TakesLevels, is_absent
from ..config import EngineConfig
from ..cpu.machine import computes_bfloat16
from ..cpu.process import return_memory
from ..plain.loading import load_plain
from ..plain.model import PlainModel
from ..vision.processor import VisionProcessor
from .decoding.experts import packing_experts
from .decoding.linear import HELD
from .decoding.llama4 import replace_mixtures
from .decoding.rows import hold_rows
from .quantization.blocks import rows_of
from .quantization.quantize import ProductMaker
from .routing import is_routed, route

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..vision.tower import LanguageModel


def load_model(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: torch.device,
    make: ProductMaker,
    progress: ProgressCallback | None,
) -> PreTrainedModel | PlainModel | LanguageModel:
    """The model at `path`, whose attention is the runner's; see `load_causal_lm` for the arguments and errors.

    What its files hold as levels is packed by `make` at once, and its numbers are in no memory.
    """
    model = _load(config, path, architecture, device, make.takes_levels, progress)
    replace_mixtures(model)
    with reading(config.model, config.dtype, device):
        _hold(model, make, progress)
    return model


def _load(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: torch.device,
    keep_levels: TakesLevels | None,
    progress: ProgressCallback | None,
) -> PreTrainedModel | PlainModel | LanguageModel:
    processor = VisionProcessor.of(path)
    if processor is None and (plain := load_plain(config, path, device, progress, keep_levels=keep_levels)) is not None:
        return plain
    keep_levels = keep_levels if device.type == "cpu" else None  # moving what is absent would give it memory
    if processor is not None:
        return _load_seeing(config, path, architecture, device, progress, processor, keep_levels)
    from ..loading import load_causal_lm, takes_images  # it imports transformers, which takes seconds
    from .attention_hook import ATTENTION

    if takes_images(path, architecture):
        return _load_blind(config, path, architecture, device, progress, keep_levels)
    if is_routed(architecture):
        model = load_causal_lm(config, path, architecture, device, progress, "eager", keep_levels=keep_levels)
        route(model, ATTENTION)
        return model
    try:
        return load_causal_lm(config, path, architecture, device, progress, ATTENTION, keep_levels=keep_levels)
    except ModelLoadError as error:
        if isinstance(error.__cause__, KeyError) and error.__cause__.args == (ATTENTION,):  # it chooses among its own
            raise ModelLoadError(
                f"{architecture} does not support another attention function; use --backend hf"
            ) from error
        raise


def _load_seeing(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: torch.device,
    progress: ProgressCallback | None,
    processor: VisionProcessor,
    keep_levels: TakesLevels | None,
) -> LanguageModel:
    """The language model of one that sees images; only its own attention is the runner's, and not the tower's."""
    from ..loading import load_causal_lm
    from ..vision.splitting import split
    from .attention_hook import ATTENTION

    loaded = load_causal_lm(config, path, architecture, device, progress, None, keep_levels=keep_levels, sees=True)
    model = split(loaded, processor)
    if model.vision is not None and device.type == "cpu" and not computes_bfloat16():
        model.vision.widen()
    model.config._attn_implementation = ATTENTION
    return model


def _load_blind(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: torch.device,
    progress: ProgressCallback | None,
    keep_levels: TakesLevels | None,
) -> PreTrainedModel | LanguageModel:
    """What takes text in a model that sees images in a way that is not supported."""
    from ..loading import load_causal_lm
    from ..vision.blind import split_text
    from .attention_hook import ATTENTION

    loaded = load_causal_lm(config, path, architecture, device, progress, None, keep_levels=keep_levels, sees=True)
    model = split_text(loaded)
    model.config._attn_implementation = ATTENTION
    return model


def _hold(model: nn.Module, make: ProductMaker, progress: ProgressCallback | None) -> None:
    """Modules whose weights are absent compute with products of their levels from now on, in bfloat16 or float32, and
    embeddings with what their tokens need of them."""
    for module in list(model.modules()):
        if (table := vars(module).pop(TABLE, None)) is not None:
            assert make.kernels is not None  # without them no weight is absent
            hold_rows(module, rows_of(table, make.kernels))
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    waiting = [(name, module) for name, module in found if is_absent(module.weight)]
    experts = [module for module in model.modules() if _has_levels(module)]
    total, done = len(waiting) + len(experts), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    for name, module in waiting:
        vars(module)[HELD] = vars(module)["forward"] = make([module], name, False)
        advance()
    for _ in packing_experts(model, make, make.kernels, _has_levels):
        return_memory()  # one layer's
        advance()


def _has_levels(module: nn.Module) -> bool:
    """Whether it is experts whose weights are absent."""
    return isinstance(vars(module).get("rounded"), dict)
