"""Chats about pictures with a real server whose model is a pair of GGUF files."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from gguf_pairs import write_pair
from pydantic import ByteSize
from serving import Served, serving
from vision_models import make_vision_model, picture

from penstock import EngineConfig, InferenceEngine, OpenAIAdapter
from penstock.api.serve.declaring import with_model
from penstock.config.sources import load
from penstock.stages.loading import early_card

WORDS = "What do you see here?"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeing")
    return write_pair(make_vision_model(root / "smolvlm", "smolvlm"), root / "files", "smolvlm")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[Served]:
    """By the folder that holds both."""
    arguments = str(pair.parent), "--dtype", "float32", "--kv-cache-memory", "64MiB"
    with serving(tmp_path_factory.mktemp("serve") / "state", *arguments) as served:
        yield served


def test_a_flag_says_which_projector_is_used(pair: Path) -> None:
    """What the parts of a deployment learn of the model: its name is still that of its file."""
    projector = pair.with_name("mmproj-model.gguf")
    for given, used, holds in (
        ({}, projector, ("text", "image")),
        ({"mmproj": str(projector)}, projector, ("text", "image")),
        ({"mmproj": "none"}, "none", ("text",)),
    ):
        settings = with_model(load({"model": str(pair), **given}).settings)
        card = early_card(with_model(settings))
        assert card is not None and card.source == f"{pair},{used}"
        assert card.name == "model" and card.modalities == holds


def messages(data: bytes) -> list[Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "text", "text": WORDS}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def test_the_openai_client_asks_about_pictures(served: Served, pair: Path) -> None:
    (card,) = httpx2.get(f"{served.url}/v1/models").json()["data"]
    assert card["id"] == "model" and card["architecture"]["input_modalities"] == ["text", "image"]
    config = EngineConfig(model=str(pair), dtype="float32", device="cpu", kv_cache_memory=ByteSize(64 << 20))
    extra = {"ignore_eos": True}
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        answers = []
        with InferenceEngine(config) as engine:
            library = OpenAIAdapter(engine)
            for salt in (0, 1, 0):
                sent = messages(picture(60, 40, salt))
                answer = client.chat.completions.create(model="model", messages=sent, extra_body=extra, **asked)
                wanted = library.create({"messages": sent, **asked, **extra})
                assert answer.choices[0].message.content == wanted["choices"][0]["message"]["content"]
                answers.append(answer.choices[0].message.content)
        assert answers[0] == answers[2] != answers[1], "the picture matters"
