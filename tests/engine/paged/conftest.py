"""Triton's interpreter, in which the kernels of CUDA run where there is no GPU, made quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from triton_interpreter import make_quick


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter() -> Iterator[None]:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as patch:
        if interpreter is not None:
            make_quick(interpreter, patch)
        yield
