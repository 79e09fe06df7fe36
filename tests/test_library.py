"""The library's face: its names, what importing it costs, and the module names of 0.1.0."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import penstock
from penstock import EngineConfig, GenerationParams, engine, streams
from penstock.streams import memory

LARGE = "('torch', 'nats', 'transformers', 'fastapi')"
LIGHT = f"import sys, penstock; print([name for name in {LARGE} if name in sys.modules])"


@pytest.mark.parametrize("package", [engine, streams, memory], ids=lambda package: package.__name__)
def test_packages_have_the_names_that_they_list(package: ModuleType) -> None:
    for name in package.__all__:
        found = getattr(package, name)
        assert found.__name__ == name and found.__module__.startswith("penstock.")


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(penstock, name) is not None
    assert name in dir(penstock)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'penstock' has no attribute 'Engine'"):
        _ = penstock.Engine


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (GenerationParams, "stop", ["\n"]),
        (GenerationParams, "stop_token_ids", [2]),
        (GenerationParams, "visible_token_ids", [2]),
        (GenerationParams, "clean_ups", ["no-digits"]),
        (GenerationParams, "stopping_criteria", [{"name": "sentences", "arguments": {"count": 1}}]),
        (EngineConfig, "model", Path("models/tiny")),
        (EngineConfig, "kv_cache_memory", "4GiB"),
        (EngineConfig, "kv_cache_memory", 4 << 30),
        (EngineConfig, "prefix_cache_limit", 4 << 30),
        (EngineConfig, "prefix_cache_dir", "prefixes"),
    ],
)
def test_type_checkers_take_what_a_field_takes(kind: type[BaseModel], field: str, value: object) -> None:
    kind.model_validate({"model": "m", field: value} if kind is EngineConfig else {field: value})
    hint = get_type_hints(kind)[field]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    assert any(one is Any or isinstance(value, get_origin(one) or one) for one in kinds)


def test_importing_it_loads_nothing_large() -> None:
    assert subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(("old", "new"), penstock._MOVED.items())
def test_names_of_the_first_release_still_work(old: str, new: str) -> None:
    sys.modules.pop(f"penstock.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"penstock.{old} is now penstock.{new};"):
        module = importlib.import_module(f"penstock.{old}")
    there = importlib.import_module(f"penstock.{new}")
    assert {name for name in vars(there) if name[0] != "_"} <= vars(module).keys()


@pytest.mark.parametrize("old", ["schemas.chat", "schemas.codec", "streams.jetstream"])
def test_what_applications_imported_is_among_them(old: str) -> None:
    assert old in penstock._MOVED


def test_the_warning_names_who_imports() -> None:
    code = "import warnings; warnings.simplefilter('always')\nfrom penstock.schemas.chat import ChatMessage"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert told.returncode == 0
    assert "<string>:2: DeprecationWarning: penstock.schemas.chat is now penstock.schemas.openai.chat" in told.stderr


def test_a_choice_of_the_first_release_is_a_choice_output() -> None:
    with pytest.warns(DeprecationWarning, match=r"penstock\.engine\.Choice is now penstock\.engine\.ChoiceOutput;"):
        choice = engine.Choice
    assert choice is engine.ChoiceOutput
    with pytest.raises(AttributeError, match=r"'penstock\.engine' has no attribute 'Sequence'"):
        _ = engine.Sequence
