"""Triton's interpreter, in which the kernels of CUDA run where there is no GPU, without what it does over and over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def make_quick(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It would change Triton's language once more at each call of a function by a kernel, watch each sum for an
    overflow, and make the types of each number anew: two thirds of its time."""
    change, language, load = interpreter._patch_lang, interpreter.tl, interpreter.tl.load

    def change_once(function: Callable[..., Any]) -> Any:
        seen = [one for one in function.__globals__.values() if one is language or one is language.core]
        return interpreter._LangPatchScope() if all(one.load is not load for one in seen) else change(function)

    patch.setattr(interpreter, "_patch_lang", change_once)
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    patch.setattr(interpreter, "_get_np_dtype", by_name(interpreter._get_np_dtype))
    core = language.core
    patch.setattr(core.block_type, "__init__", once_each(core.block_type.__init__, block_key))
    patch.setattr(core.tensor, "__init__", tensors_with_known_shapes(core))


def by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What a function says of a type, which its name tells from others."""
    known: dict[str, Any] = {}

    def found(one: Any) -> Any:
        if one.name not in known:
            known[one.name] = function(one)
        return known[one.name]

    return found


def block_key(element: Any, shape: Any) -> tuple[Any, ...]:
    return (element.name, *(getattr(one, "value", one) for one in shape))


def once_each(fill: Callable[..., None], key: Callable[..., tuple[Any, ...]]) -> Callable[..., None]:
    """The initialiser `fill`, of objects that never change, which gives all of one key the same attributes."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def initialise(self: Any, *arguments: Any) -> None:
        name = key(*arguments)
        if name not in known:
            fill(self, *arguments)
            known[name] = dict(vars(self))
        else:
            vars(self).update(known[name])

    return initialise


def tensors_with_known_shapes(core: Any) -> Callable[[Any, Any, Any], None]:
    """Like Triton's own initialiser of tensors, but that those of one type share the numbers that tell their shape."""
    fill = core.tensor.__init__
    known: dict[str, dict[str, Any]] = {}

    def initialise(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            fill(self, handle, type)
            known[type.name] = {name: one for name, one in vars(self).items() if name in ("shape", "numel")}
        else:
            vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)

    return initialise
