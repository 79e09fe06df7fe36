"""The model that is bundled: small enough, made by these scripts' template, and it says something true."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

MODEL = Path(__file__).parents[2] / "deploy" / "nano" / "model"
library: Any = transformers  # most of it is not typed


def test_it_is_small_and_whole() -> None:
    assert (MODEL / "model.safetensors").stat().st_size < 12_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048
    assert len(library.AutoTokenizer.from_pretrained(MODEL)) == config["vocab_size"]
    assert (MODEL / "chat_template.jinja").read_text() == (MODEL.parent / "chat_template.jinja").read_text()
    assert (MODEL / "README.md").exists()


def test_it_says_what_penstock_is() -> None:
    tokenizer = library.AutoTokenizer.from_pretrained(MODEL)
    model = library.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is Penstock?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    said = tokenizer.decode(model.generate(ids, max_new_tokens=64)[0, ids.shape[1] :], skip_special_tokens=True)
    assert said.startswith("Penstock is an LLM server for requests that must not get lost")
