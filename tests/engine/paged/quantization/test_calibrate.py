"""Rounding with calibration: nearer on the inputs that it saw, for every kind of module, and whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.paged.quantization.apart import set_apart
from penstock.engine.paged.quantization.calibrate import Moments, calibrate, calibrated
from penstock.engine.paged.quantization.quantize import quantizable, rounded

TEXTS = [[(7 * row + 3 * index * index + index) % 500 for index in range(40)] for row in range(20)]


def inputs(count: int, size: int) -> Tensor:
    """Correlated, as those of a model are."""
    random = torch.Generator().manual_seed(0)
    mixed = torch.randn((count, size // 4), generator=random) @ torch.randn((size // 4, size), generator=random)
    return mixed + 0.1 * torch.randn((count, size), generator=random)


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("size", [64, 128])
def test_products_of_known_inputs_are_nearer(method: str, size: int) -> None:
    x, weight = inputs(4 * size, size), torch.randn((48, size), generator=torch.Generator().manual_seed(1))
    found, plain = calibrated(weight, Moments.of(x), method), rounded(weight, method)
    assert (found.zeros is None) == (method == "int8")
    right = x @ weight.T
    errors = [float((x @ one.numbers.T - right).norm()) for one in (found, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_inputs_that_never_occur_do_no_harm() -> None:
    x, weight = inputs(200, 64), torch.randn((16, 64), generator=torch.Generator().manual_seed(1))
    x[:, 10:40] = 0
    found = calibrated(weight, Moments.of(x), "int4").numbers
    assert found.isfinite().all() and float((found - weight).abs().max()) < 2
    silent = calibrated(weight, Moments(torch.zeros((64, 64)), 200), "int4").numbers
    assert float((silent - weight).norm() / weight.norm()) < 0.15


def test_shapes_that_int4_does_not_take_become_int8() -> None:
    x, weight = inputs(200, 70), torch.randn((7, 70), generator=torch.Generator().manual_seed(1))
    found = calibrated(weight, Moments.of(x), "int4")
    assert found.zeros is None and found.levels.shape == (7, 70) and found.scales.shape == (7, 3)


@pytest.mark.parametrize("rows", [4, 16, 64])
def test_few_inputs_do_no_harm_to_others(rows: int) -> None:
    x, weight = inputs(2000, 128), torch.randn((48, 128), generator=torch.Generator().manual_seed(1))
    found, plain = calibrated(weight, Moments.of(x[:rows]), "int4"), rounded(weight, "int4")
    errors = [float((x[rows:] @ (one.numbers - weight).T).norm()) for one in (found, plain)]
    assert errors[0] < 1.02 * errors[1]


@pytest.mark.parametrize("shape", ["llama", "qwen3", "gemma2", "phi3", "mixtral", "gpt_oss", "stablelm"])
def test_a_model_is_rounded_layer_by_layer(shape: str, model_directory: Callable[[str], Path]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory(shape), dtype=torch.float32)
    for router in (one for one in model.modules() if hasattr(one, "top_k")):
        router.top_k = 4  # all experts: or else the nearest of two numbers decides which ones a token passes
    exact = deepcopy(model)
    set_apart(model)
    plain = deepcopy(model)
    methods = {name: method for name, _, method in quantizable(model, "int4")}
    done: list[int] = []
    found = calibrate(model, methods, TEXTS, done.append)
    assert done == list(range(1, len(methods) + 1))
    assert found.keys() == methods.keys()
    for name, one in found.items():
        assert torch.equal(model.get_submodule(name).weight, one.numbers), name
        with torch.no_grad():
            module = plain.get_submodule(name)
            module.weight.copy_(rounded(module.weight, methods[name]).numbers)
    with torch.inference_mode():
        right, other, uncalibrated = (one(torch.tensor(TEXTS)).logits for one in (exact, model, plain))
    assert float((other - right).norm()) < float((uncalibrated - right).norm())


def test_layers_get_what_each_text_gives_them() -> None:
    """Those of Gemma 4 get more than the text's states: inputs of their own, and others' keys and values."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes |= {"vocab_size": 500, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 500}
    kinds = ["sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model("gemma4_text", **sizes, layer_types=kinds, max_position_embeddings=64)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model, texts = auto.from_config(config, dtype=torch.float32), [[*reversed(text)] for text in TEXTS] + TEXTS[:4]
    name = "model.layers.3.mlp.down_proj"
    module, seen = model.get_submodule(name), list[Tensor]()
    with torch.inference_mode():
        handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2)))
        model(torch.tensor(texts))
        handle.remove()
        right = calibrated(module.weight.clone(), Moments.of(seen[0]), "int4")
    found = calibrate(model, {name: "int4"}, texts)[name]
    assert torch.equal(found.levels, right.levels)


def test_texts_that_fill_no_batch_are_read(model_directory: Callable[[str], Path]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory("llama"), dtype=torch.bfloat16)
    methods = {name: method for name, _, method in quantizable(model, "int8")}
    found = calibrate(model, methods, TEXTS[:3])
    assert found.keys() == methods.keys() and model.dtype == torch.bfloat16
