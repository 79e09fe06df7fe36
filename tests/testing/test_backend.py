"""Penstock's own backends pass the suite that plug-ins are held to."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine import EngineConfig
from penstock.testing.backend import BackendConformance


class TestEcho(BackendConformance):
    config = EngineConfig(model="echo", backend="echo")


class TestHf(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_tiny_model(cls, tiny_model: Path) -> None:
        cls.config = EngineConfig(model=str(tiny_model), backend="hf", dtype="float32", device="cpu")


class TestPaged(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_tiny_model(cls, tiny_model: Path) -> None:
        cls.config = EngineConfig(model=str(tiny_model), backend="paged", dtype="float32", device="cpu")
