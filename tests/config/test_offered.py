"""Which models `penstock serve` offers, from its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.catalogue import offered_models
from penstock.config.sources import load
from penstock.schemas.errors import ConfigurationError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three models: one says how it is quantised, one leaves its sizes to the engine."""
    path = tmp_path / "models.toml"
    path.write_text(
        '[models.a]\nsource = "x"\nbackend = "echo"\n[models.b]\nsource = "y"\nquantization = "int4"\n'
        '[models.c]\nsource = "z"\nmax_batch_size = "auto"\nkv_cache_memory = "auto"\n'
    )
    return path


def test_one_model_is_no_catalogue() -> None:
    assert offered_models(load({"model": "somewhere"})) is None


def test_a_flag_counts_for_each_model_that_does_not_say_otherwise(file: Path) -> None:
    found = offered_models(load({"models": str(file), "quantization": "int8", "max_batch_size": "3"}))
    assert found is not None
    assert [(model.name, model.quantization, model.max_batch_size) for model in found] == [
        ("a", "int8", 3),
        ("b", "int4", 3),
        ("c", "int8", None),
    ]
    assert [model.backend for model in found] == ["echo", "paged", "paged"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "c"}, "model is for a server of one model"),
        ({"workers": "2"}, "workers is for a server of one model"),
        ({"lora_modules": "x=y"}, "lora_modules is for a server of one model"),
        ({"served_model_name": "c"}, "served_model_name is for a server of one model"),
        ({"mmproj": "c"}, "mmproj is for a server of one model"),
        ({"max_models": "1"}, "3 models are offered, and max_models is 1"),
    ],
)
def test_what_does_not_go_with_several_models_is_refused(file: Path, given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        offered_models(load({"models": str(file)} | given))
