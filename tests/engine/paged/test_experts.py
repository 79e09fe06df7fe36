"""Mixtures of experts: packed ones against transformers' own modules, and their answers against its `generate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.cpu.library import Kernels, load_kernels
from penstock.engine.paged.backend import PagedBackend
from penstock.engine.paged.decoding.experts import PackedExperts, pack_experts
from penstock.engine.paged.quantization.quantize import ProductMaker

COUNT = 12
_COMMON: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.15}
_COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_COMMON |= {"max_position_embeddings": 512, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 4, "moe_intermediate_size": 48, "first_k_dense_replace": 0, "n_group": 1}
    | {"topk_group": 1, "num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 0},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 48, "first_k_dense_replace": 0},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16},
    "granitemoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 4, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16},
    "qwen3_next": {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48},
}


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    library: Any = transformers
    torch.manual_seed(0)
    config = library.AutoConfig.for_model(family, **_COMMON | FAMILIES[family])
    model = library.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # some families start with zeros or noughts
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    return model


def find_experts(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("kernels", [None, load_kernels()], ids=["torch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_packed_experts_compute_what_transformers_computes(
    family: str, dtype: torch.dtype, kernels: Kernels | None
) -> None:
    """For 1 row, for 33, all of which one expert may miss, and for more than one call of the kernels; no weight stays
    in memory twice."""
    model = make(family, dtype)
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    steps = []
    for count in (1, 33, 300):
        index = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(count)])
        most = 10 if count == 33 else 1  # beyond what gpt-oss's gates allow
        x = torch.randn(count, 64, generator=generator) * most
        steps.append((x.to(dtype), index, torch.rand(count, 2).to(dtype)))
    expected = [[module(*step) for step in steps] for module in find_experts(model)]
    numbers = sum(one.numel() for module in find_experts(model) for one in module.parameters() if one.ndim == 3)
    assert expected and numbers
    packed = list(pack_experts(model, ProductMaker(None, torch.device("cpu"), kernels), kernels))
    assert packed == find_experts(model)
    assert sum(one.num_weights for one in packed) == numbers == 2 * sum(one.num_active_weights for one in packed)
    assert not [name for name, one in model.named_parameters() if one.ndim == 3 and one.shape[-1] > 4]
    for module, wanted in zip(packed, expected, strict=True):
        for step, result in zip(steps, wanted, strict=True):
            far = (module(*step).float() - result.float()).norm() / result.float().norm()
            assert far < (1e-5 if dtype == torch.float32 else 2e-2)
    assert all((one.compiled is not None) == (kernels is not None) for one in packed)


@pytest.mark.parametrize("method", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(method: str | None, dtype: torch.dtype) -> None:
    """Whichever rows are at its experts, too, and on however many threads."""
    kernels, model = load_kernels(), make("qwen3_moe", dtype)
    experts = pack_experts(model, ProductMaker(method, torch.device("cpu"), kernels), kernels)[0]
    assert experts.compiled is not None
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(40)])
    x, shares = torch.randn(40, 64, generator=generator).to(dtype), torch.rand(40, 2, generator=generator).to(dtype)
    together = experts(x, index, shares)
    for start, end in ((0, 1), (7, 8), (39, 40), (3, 20)):
        assert torch.equal(experts(x[start:end], index[start:end], shares[start:end]), together[start:end])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(experts(x, index, shares), together)
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_an_expert_that_is_not_there_is_refused() -> None:
    kernels = load_kernels()
    experts = pack_experts(make("qwen3_moe"), ProductMaker(None, torch.device("cpu"), kernels), kernels)[0]
    for wrong in (4, -1):
        with pytest.raises(IndexError, match="none of the 4"):
            experts(torch.zeros(2, 64), torch.tensor([[0, 1], [2, wrong]]), torch.ones(2, 2))


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe"])
def test_a_mixture_answers_like_transformers(
    family: str, model_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    for file in model_directory("llama").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model.generation_config.eos_token_id = None
    prompts = [[3 + (7 * row + index * index) % 500 for index in range(1 + 16 * row)] for row in range(4)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
        wanted.append(tuple(answer[0, len(prompt) :].tolist()))
    params = GenerationParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", kv_cache_memory=ByteSize(16 << 20))
    with InferenceEngine(config) as engine:
        assert [output.token_ids for output in engine.generate(prompts, params)] == wanted


def test_only_the_experts_that_a_token_passes_count(model_directory: Callable[[str], Path]) -> None:
    """What a step reads and computes, for the metrics: two of four experts, each layer's other products whole."""
    config = EngineConfig(model=str(model_directory("qwen3_moe")), dtype="float32", device="cpu")
    backend = PagedBackend(config.model_copy(update={"kv_cache_memory": ByteSize(16 << 20)}))
    experts = [one for one in find_experts(backend.runner._model) if isinstance(one, PackedExperts)]
    numbers = sum(one.num_weights for one in experts)
    assert numbers == 2 * 4 * 3 * 64 * 64
    attention = 2 * (64 * 128 + 2 * 64 * 64 + 128 * 64)
    assert backend.flops(1, 0, 0) == 2 * (attention + numbers // 2)
    assert backend.weight_bytes == 4 * (attention + numbers // 2 + 64 * 512)
    backend.close()
