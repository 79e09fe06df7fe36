"""What the tests of checkpoints share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_cases import Case, save_model


@pytest.fixture
def make_model(tmp_path: Path, model_directory: Callable[[str], Path]) -> Callable[[Case], Path]:
    """Write the directory of a tiny random model with the tokenizer of another one."""

    def make(case: Case) -> Path:
        save_model(case, tmp_path / "model")
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(model_directory("llama") / name, tmp_path / "model")
        return tmp_path / "model"

    return make
