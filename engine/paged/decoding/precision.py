"""Runs a model in float32, whatever the dtype of its weights, with extra memory for only one module at a time.

Modules whose weights are absent compute with levels, in the dtype of their inputs (`load`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoints.rounded import is_absent

_LOOKING = {"NemotronHBlock"}  # modules that ask for the dtype of their norm before they call it


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, each module has float32 parameters while it runs, so that differences are not due to rounding."""
    with ExitStack() as hooks:
        for module in model.modules():
            if any(parameter.dtype != torch.float32 for parameter in _present(module)):
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
    read = [module, module.norm] if type(module).__name__ in _LOOKING else [module]
    return [weight for one in read for weight in one.parameters(recurse=False) if not is_absent(weight)]
