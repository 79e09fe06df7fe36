"""Triton's interpreter, in which the kernels of CUDA run where there is no GPU, without what it does over and over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """It would change Triton's language once more at each call of a function by a kernel, and watch each sum for an
    overflow: half of its time."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    change, language, load = interpreter._patch_lang, interpreter.tl, interpreter.tl.load

    def change_once(function: Callable[..., Any]) -> Any:
        seen = [one for one in function.__globals__.values() if one is language or one is language.core]
        return interpreter._LangPatchScope() if all(one.load is not load for one in seen) else change(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", change_once)
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        yield
