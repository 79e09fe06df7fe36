"""Runs a model in float32, whatever the dtype of its weights, with extra memory for only one module at a time.

Modules whose weights are absent compute with levels, in the dtype of their inputs (`load`). Of embeddings only the rows
are widened that are looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.rounded import is_absent
from .rows import hook_rows, is_table

_LOOKING = {  # modules that read weights of others, or ask for their dtype, before they call them
    "FalconMambaBlock": "norm",
    "FalconMambaForCausalLM": "lm_head",
    "FalconMambaMixer": "dt_proj",
    "HunYuanMoEV1Gate": "wg",
    "JambaMambaMixer": "dt_proj",
    "Mamba2Block": "norm",
    "Mamba2ForCausalLM": "lm_head",
    "MambaBlock": "norm",
    "MambaForCausalLM": "lm_head",
    "MambaMixer": "dt_proj",
    "NemotronHBlock": "norm",
}


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, each module has float32 parameters while it runs, so that differences are not due to rounding."""
    with ExitStack() as hooks:
        for module in model.modules():
            if is_table(module):
                if module.weight.dtype != torch.float32:
                    hooks.callback(hook_rows(module, lambda weight, ids: weight[ids].float()))
            elif any(parameter.dtype != torch.float32 for parameter in _present(module)):
                _widen(module, hooks)
        yield


def _widen(module: nn.Module, hooks: ExitStack) -> None:
    own: list[tuple[nn.Parameter, Tensor]] = []

    def before(*_: Any) -> None:
        for parameter in _present(module):
            own.append((parameter, parameter.data))
            parameter.data = parameter.data.float()

    def after(*_: Any) -> None:
        while own:
            parameter, data = own.pop()
            parameter.data = data

    hooks.callback(module.register_forward_pre_hook(before).remove)
    hooks.callback(module.register_forward_hook(after, always_call=True).remove)


def _present(module: Any) -> list[nn.Parameter]:
    """What a module reads: a layer passes the weights of its convolution to a function of its own."""
    read = [module, *(child for child in module.children() if type(child) is nn.Conv1d)]
    if (other := _LOOKING.get(type(module).__name__)) is not None:
        read.append(getattr(module, other))
    return [weight for one in read for weight in one.parameters(recurse=False) if not is_absent(weight)]
