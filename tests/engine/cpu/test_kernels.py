"""The compiled kernels against torch and against the plain decoder, and what happens where they cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import CDLL
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from threads import torch_threads
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from penstock.config.directories import user_cache
from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.checkpoints.gguf.types import BLOCKS
from penstock.engine.checkpoints.gguf.weights import rounded_of
from penstock.engine.checkpoints.rounded import Blocks, Rounded
from penstock.engine.cpu.compiling import NATIVE, compiled
from penstock.engine.cpu.layouts import numbers
from penstock.engine.cpu.library import MOST_ROWS, PLAIN, Kernels, NoKernels, Product, load_kernels
from penstock.engine.cpu.machine import ARCHITECTURE, KERNEL_FLAGS, cpu_flags
from penstock.engine.cpu.variants import VARIANTS
from penstock.engine.paged.attention_hook import ATTENTION
from penstock.engine.paged.decoding.linear import CompiledLinear, PackedLinear, PlainLinear, packs_bfloat16, reorder
from penstock.engine.paged.packing import Computed, Segment
from penstock.engine.paged.quantization.blocks import Packer
from penstock.engine.paged.quantization.quantize import ProductMaker, dequantized, linear_maker
from penstock.engine.paged.runner import Runner

pytestmark = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="the kernels need AVX2")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}  # of the result's norm
BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def small_machine() -> Iterator[None]:
    """Two threads share the work; more would only wait for each other."""
    with torch_threads(min(torch.get_num_threads(), 2)):
        yield


TESTED = {"avx512", "avxvnni", "avx2", "neon"}
# As a package has them; those between them differ in less.
OTHERS = {one.name: one for one in VARIANTS if one.architecture == ARCHITECTURE and one.name in TESTED}


@lru_cache
def compiled_for(name: str) -> Kernels:
    if name not in OTHERS:
        return load_kernels()
    return Kernels(CDLL(str(compiled("cc", user_cache(), OTHERS[name].options))))


current = "native"  # set by `processor`


def kernels() -> Kernels:
    return compiled_for(current)


@pytest.fixture(params=["native", "without tiles", *OTHERS])
def processor(request: pytest.FixtureRequest) -> Iterator[str]:
    """This one, one without AMX, which is the same where it has none, and older ones."""
    global current
    if request.param in OTHERS and not OTHERS[request.param].needs <= set(cpu_flags().split()):
        pytest.skip(f"the processor lacks what {request.param} has")
    current = request.param
    kernels().use_tiles(request.param == "native")
    yield request.param
    kernels().use_tiles(True)
    current = "native"


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-12))


TRIED = torch.arange(127.0, 112, -2)  # the levels that a group's largest input may get


def quantized_inputs(x: Tensor, tried: Tensor = TRIED) -> tuple[Tensor, Tensor]:
    """As the kernels quantise rows [R, I]: levels and scales, float32 [R, G, 32] and [R, G]."""
    grouped = nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 1, 32)
    most = grouped.abs().amax(-1)
    factors = torch.full_like(most, 127) / most  # torch would take 127 times the reciprocal, which rounds twice
    steps = grouped * (factors.nan_to_num(0, 0, 0) * (tried / torch.full_like(tried, 127)))[..., None]
    rests = (steps - steps.round()).square().sum(-1) * (127 / tried) ** 2
    best = rests.argmin(-1)
    levels = steps.round().gather(2, best[..., None, None].expand(-1, -1, 1, 32))
    return levels.squeeze(2), most.squeeze(2) / tried[best]


def rounded_inputs(x: Tensor) -> Tensor:
    levels, scales = quantized_inputs(x)
    return (levels.double() * scales[..., None].double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [None, "int8", "int4"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 300), st.integers(1, 100), st.integers(1, 40), st.booleans(), st.integers(0, 9))
@example(64, 64, 256, True, 0)
@example(100, 2304, 1, True, 0)  # more than one chunk of inputs
@example(100, 2304, 13, True, 0)
@example(128, 320, 300, True, 0)  # more than one item of rows
def test_products(
    processor: str,
    method: str | None,
    dtype: torch.dtype,
    outputs: int,
    pairs: int,
    rows: int,
    has_bias: bool,
    seed: int,
) -> None:
    """int8 stands in for int4 where the shape does not fit: `dequantized` knows. In bfloat16 they round the inputs."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn((outputs, 2 * pairs), generator=random).to(dtype)
    bias = torch.randn(outputs, generator=random).to(dtype) if has_bias else None
    x = torch.randn((rows, 2 * pairs), generator=random).to(dtype)
    linear = linear_maker(method, torch.device("cpu"), kernels())(weight, bias)
    assert linear.product is not None
    exact = weight if method is None else dequantized(weight, method)
    inputs = x.double() if method is None or dtype == torch.float32 else rounded_inputs(x)
    expected = inputs @ exact.double().T + (0 if bias is None else bias.double())
    assert distance(linear(x), expected) < TOLERANCE[dtype]
    assert distance(kernels().multiply(linear.product, x), expected) < TOLERANCE[dtype]
    known = numbers(linear.product, dtype, 0, -(-outputs // 64))[:outputs]
    assert torch.allclose(known, exact.float(), atol=1e-6, rtol=1e-6)


def test_inputs_are_rounded_by_the_best_of_several_scales(processor: str) -> None:
    """With a tenth less error than by the scale that the largest input has alone."""
    random = torch.Generator().manual_seed(0)
    x = (torch.randn((64, 576), generator=random) ** 3).bfloat16()  # few inputs are large, as in real models
    eye = torch.eye(576).to(torch.int8)
    linear = ProductMaker(None, torch.device("cpu"), kernels())(
        [_with(Rounded(eye, torch.ones(576, 18))).bfloat16()], "any", is_head=False
    )
    assert linear.product is not None
    found = kernels().multiply(linear.product, x)
    levels, scales = quantized_inputs(x, torch.tensor([127.0]))
    plain = (levels * scales[..., None]).flatten(1).bfloat16()
    assert distance(found, x) < 0.95 * distance(plain, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 40), st.integers(0, 9))
@example(100, 2304, 1, 0)  # more than one chunk of inputs
@example(128, 320, 300, 0)  # more than one item of rows
def test_levels_of_a_table_have_the_bits_of_what_they_stand_for(
    processor: str, scales: torch.dtype, dtype: torch.dtype, outputs: int, pairs: int, rows: int, seed: int
) -> None:
    """In half the memory, at any number of rows."""
    random = torch.Generator().manual_seed(seed)
    table = tuple(torch.randint(-127, 128, (16,), generator=random).tolist())
    levels = torch.randint(0, 16, (outputs, 2 * pairs), generator=random).to(torch.int8)
    factors = torch.rand((outputs, -(-pairs // 16)), generator=random).to(scales)
    given = Rounded(levels, factors, bits=4, table=table)
    whole = Rounded(torch.tensor(table)[levels.int()].to(torch.int8), factors)
    part = nn.Linear(2 * pairs, outputs, bias=False, dtype=dtype)
    products = []
    for rounded in (given, whole):
        vars(part)["rounded"] = lambda rounded=rounded: rounded
        products.append(ProductMaker(None, torch.device("cpu"), kernels())([part], "part", False))
    x = torch.randn((rows, 2 * pairs), generator=random).to(dtype)
    packed, unpacked = products
    assert torch.equal(packed(x), unpacked(x))
    assert packed.weight.nbytes * 2 == unpacked.weight.nbytes
    assert packed.product is not None
    assert torch.equal(numbers(packed.product, dtype, 0, -(-outputs // 64))[:outputs], whole.numbers)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [None, "int8", "int4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_row(method: str | None, dtype: torch.dtype, value: float) -> None:
    weight, x = torch.randn(112, 128).to(dtype), torch.randn(9, 128).to(dtype)
    linear = linear_maker(method, torch.device("cpu"), kernels())(weight, None)
    assert linear.product is not None
    expected = kernels().multiply(linear.product, x)
    x[4, 40:50] = value
    found = kernels().multiply(linear.product, x)
    assert not found[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], expected[others])


def test_a_layout_that_differs_is_noticed() -> None:
    weight, bias = torch.randn(70, 64), torch.randn(70)
    packed, plain = PackedLinear(weight, bias, kernels()), PlainLinear(weight, bias)
    layout = reorder(weight)
    assert packed.product is not None and kernels().agree(packed.product, layout, torch.float32, plain)
    other = Product.of(weight.shape, PLAIN, nn.functional.pad(weight, (0, 0, 0, 58)), None, bias)
    assert not kernels().agree(other, layout, torch.float32, plain)
    assert not kernels().agree(packed.product, reorder(weight[:64]), torch.float32, plain)


def test_a_layout_that_onednn_does_not_share_is_ours() -> None:
    """A single output's weight has no blocks with oneDNN."""
    weight, x = torch.randn(1, 64), torch.randn(3, 64)
    linear = linear_maker(None, torch.device("cpu"), kernels())(weight, None)
    assert isinstance(linear, CompiledLinear)
    assert distance(linear(x), x.double() @ weight.double().T) < 1e-5
    shared = linear_maker(None, torch.device("cpu"), kernels())(torch.randn(64, 64), None)
    assert isinstance(shared, PackedLinear)
    in_bfloat16 = linear_maker(None, torch.device("cpu"), kernels())(torch.randn(64, 64).bfloat16(), None)
    assert isinstance(in_bfloat16, CompiledLinear if kernels().has_tiles or not packs_bfloat16() else PackedLinear)


def test_onednn_is_not_asked_for_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 it packs no bfloat16."""

    def refuse(weight: Tensor) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support")

    monkeypatch.setattr("penstock.engine.paged.decoding.linear.packs_bfloat16", lambda: False)
    monkeypatch.setattr("penstock.engine.paged.decoding.linear.reorder", refuse)
    weight, x = torch.randn(70, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    for offered, kind in ((kernels(), CompiledLinear), (None, PlainLinear)):
        linear = linear_maker(None, torch.device("cpu"), offered)(weight, None)
        assert isinstance(linear, kind)
        assert distance(linear(x), x.double() @ weight.double().T) < TOLERANCE[torch.bfloat16]


def test_inputs_that_are_no_pairs_are_left_to_torch() -> None:
    for method in (None, "int8"):
        linear = linear_maker(method, torch.device("cpu"), kernels())(torch.randn(64, 33), None)
        assert linear.product is None
        assert linear(torch.randn(3, 33)).shape == (3, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [None, "int8", "int4"])
def test_a_row_has_the_same_bits_in_any_company(processor: str, method: str | None, dtype: torch.dtype) -> None:
    """Also with and without AMX, where the sums are whole numbers."""
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn((rows, 1024), generator=random).to(dtype) for rows in (192, 300))
    linear = linear_maker(method, torch.device("cpu"), kernels())(weight, None)
    assert linear.product is not None
    alone = torch.cat([kernels().multiply(linear.product, x[row : row + 1]) for row in range(40)])
    for count in (2, 7, 8, 9, 16, 17, 24, 25, 31, 300):
        together = kernels().multiply(linear.product, x[:count])[:40]
        assert torch.equal(together, alone[:count])
    if method is not None:
        kernels().use_tiles(not kernels().has_tiles)
        assert torch.equal(kernels().multiply(linear.product, x)[:40], alone)


FORMS = [
    ("ours, int8", 8, 0, torch.bfloat16, False, 32),
    ("ours, int4", 4, 8, torch.bfloat16, True, 32),
    ("Q8_0", 8, 0, torch.float16, False, 32),
    ("Q4_0", 4, 8, torch.float16, False, 32),
    ("Q4_1", 4, 0, torch.float16, True, 32),
    ("Q5_0", 8, 16, torch.float16, False, 32),
    ("Q5_1", 8, 0, torch.float16, True, 32),
    ("Q4_K", 4, 0, torch.float32, True, 32),
    ("Q5_K", 8, 0, torch.float32, True, 32),
    ("Q6_K", 8, 32, torch.float32, False, 16),
    ("Q6_K beside Q4_K", 8, 0, torch.float32, True, 16),
]


def group_by_group(x: Tensor, known: Rounded) -> Tensor:
    """Whole numbers within a group, then float32, [T, O]."""
    size, outputs = known.size, len(known.levels)
    levels, steps = quantized_inputs(x)
    levels, steps = levels.view(len(x), -1, size), steps.repeat_interleave(32 // size, dim=1)
    ours = known.levels.float().view(outputs, -1, size) - known.middle
    sums, totals = torch.zeros(len(x), outputs), steps * levels.sum(-1)

    def add(a: Tensor, b: Tensor) -> None:
        """One rounding for a product and its sum."""
        sums.copy_((a.double() * b.double() + sums.double()).float())

    for group in range(levels.shape[1]):
        dots = levels[:, group] @ ours[:, group].T
        add(dots * known.scales[:, group].float(), steps[:, group, None])
        if known.zeros is not None:
            add(known.zeros[:, group].float().expand(len(x), outputs), totals[:, group, None])
    return sums


def _with(known: Rounded) -> nn.Linear:
    """A module that was loaded with these levels."""
    module = nn.Linear(known.levels.shape[1], len(known.levels), bias=False)
    module.rounded = lambda: known  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    "bits, middle, dtype, has_zeros, size", [form[1:] for form in FORMS], ids=[form[0] for form in FORMS]
)
def test_products_of_levels_are_exact(
    processor: str, bits: int, middle: int, dtype: torch.dtype, has_zeros: bool, size: int
) -> None:
    """Whole numbers within a group, then float32, group by group, rounded once more to bfloat16 at the end."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn((37, 192), generator=random).bfloat16()
    x[3, 32:64] = 0
    x[4] *= 1e-20
    low, high = (0, 16) if bits == 4 else (-127, 128) if middle == 0 and not has_zeros else (0, 64)
    drawn = torch.randint(low, high, (80, 192), generator=random).to(torch.int8)
    scales, zeros = (torch.rand((80, 192 // size), generator=random).sub(0.3).to(dtype) for _ in range(2))
    known = Rounded(drawn, scales, zeros if has_zeros else None, bits, middle, size)
    linear = ProductMaker(None, torch.device("cpu"), kernels())([_with(known).bfloat16()], "any", is_head=False)
    assert linear.product is not None
    assert torch.allclose(numbers(linear.product, torch.bfloat16, 0, 2)[:80], known.numbers, atol=1e-6, rtol=1e-6)
    sums = group_by_group(x, known)
    assert torch.equal(kernels().multiply(linear.product, x), sums.bfloat16())
    for row in (0, 3, 36):
        assert torch.equal(kernels().multiply(linear.product, x[row : row + 1])[0], sums[row].bfloat16())
    floats = ProductMaker(None, torch.device("cpu"), kernels())([_with(known)], "any", is_head=False)
    assert floats.product is not None
    assert distance(kernels().multiply(floats.product, x.float()), x.double() @ known.numbers.double().T) < 1e-6


@pytest.mark.parametrize("kind, numbers_at", [("Q4_K", (0, 2)), ("Q5_K", (0, 2)), ("Q6_K", (208,))])
def test_products_of_a_files_blocks_are_exact(processor: str, kind: str, numbers_at: tuple[int, ...]) -> None:
    """Their scales stay whole numbers times one of the block, and multiply as their products in float32 do."""
    random = torch.Generator().manual_seed(0)
    data = torch.randint(256, (80 * 5, BLOCKS[kind][1]), dtype=torch.uint8, generator=random)
    for at in numbers_at:
        data[:, at : at + 2] = torch.randn((400, 1), generator=random).half().view(torch.uint8)
    data[:5] = 255  # the largest numbers
    for at in numbers_at:
        data[:5, at : at + 2] = torch.tensor([-2.5]).half().view(torch.uint8)
    known = rounded_of(data.flatten(), kind, 80)
    linear = Packer(kernels()).pack([Blocks(kind, data.view(80, -1), 1280)], None, torch.bfloat16)
    assert linear is not None
    assert torch.equal(numbers(linear.product, torch.bfloat16, 0, 2)[:80], known.numbers)
    x = torch.randn((256, 1280), generator=random).bfloat16()
    x[1], x[2] = 1, -1
    expected = group_by_group(x, known).bfloat16()
    for rows in (1, 2, 3, 5, 6, 7, 9, 16, 18, 19, 32, 100, 256):
        assert torch.equal(kernels().multiply(linear.product, x[:rows]), expected[:rows])


@pytest.mark.parametrize("bits, middle, size", [(4, 0, 32), (4, 8, 32), (8, 0, 32), (8, 0, 16)])
def test_the_largest_levels_do_not_overflow(processor: str, bits: int, middle: int, size: int) -> None:
    """Every product of a group has the same sign and the largest size: some processors add them up in 16 bits."""
    x = torch.ones(7, 64).bfloat16()
    x[1::2] = -1
    for level in (0, 15) if bits == 4 else (-128, -127, 127):
        levels = torch.full((80, 64), level, dtype=torch.int8)
        known = Rounded(levels, torch.ones(80, 64 // size).half(), None, bits, middle, size)
        linear = ProductMaker(None, torch.device("cpu"), kernels())([_with(known).bfloat16()], "any", is_head=False)
        assert linear.product is not None
        expected = x.float() @ known.numbers.float().T
        assert torch.allclose(kernels().multiply(linear.product, x).float(), expected, rtol=0.004)


@pytest.mark.parametrize("is_fine", [False, True])
def test_outputs_in_different_forms_are_one_product(processor: str, is_fine: bool) -> None:
    """As those of queries and values in a Q4_K_M file."""
    random = torch.Generator().manual_seed(0)
    scales = torch.rand((64, 2), generator=random)
    four = torch.randint(0, 16, (64, 64), generator=random).to(torch.int8)
    eight = torch.randint(-127, 128, (64, 64), generator=random).to(torch.int8)
    forms = [Rounded(four, scales, -scales, 4), Rounded(eight, scales.half()), Rounded(four, scales.half(), None, 4, 8)]
    if is_fine:
        six = torch.randint(0, 64, (64, 64), generator=random).to(torch.int8)
        forms.append(Rounded(six, torch.rand((64, 4), generator=random), None, 8, 32, 16))
    modules = [_with(form).bfloat16() for form in forms]
    linear = ProductMaker(None, torch.device("cpu"), kernels())(modules, "any", is_head=False)
    assert linear.product is not None
    x = torch.randn((20, 64), generator=random).bfloat16()
    expected = rounded_inputs(x) @ torch.cat([form.numbers for form in forms]).double().T
    assert distance(kernels().multiply(linear.product, x), expected) < 3e-3


CONFIGS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([LlamaConfig, MistralConfig, Qwen3Config]),
        "head_dim": st.sampled_from([16, 24, 64, 80, 128]),
        "num_key_value_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 7]),
        "hidden_size": st.sampled_from([42, 84, 126]),
        "intermediate_size": st.sampled_from([48, 130]),
        "sliding_window": st.sampled_from([10, 16, 40]),
    }
)


SMALL: dict[str, Any] = {"num_key_value_heads": 2, "hidden_size": 84, "intermediate_size": 48, "sliding_window": 40}


def make_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    fields = dict(config)
    kind, group = fields.pop("kind"), fields.pop("group")
    fields |= {"num_attention_heads": group * fields["num_key_value_heads"], "num_hidden_layers": 2, "vocab_size": 170}
    if kind is not MistralConfig:
        del fields["sliding_window"]
    if kind is LlamaConfig:  # it insists on a multiple
        fields["hidden_size"] += -fields["hidden_size"] % (2 * fields["num_attention_heads"])
        fields["attention_bias"] = fields["mlp_bias"] = True
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(kind(**fields), attn_implementation=ATTENTION, dtype=dtype).eval()
    for name, parameter in model.named_parameters():  # norms and biases are ones and zeros otherwise
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def rounds(lengths: list[int], more: list[int]) -> list[list[Segment]]:
    """Prompts side by side, in blocks that lie apart; then one token, or several, more of each."""
    tables = [[len(lengths) * index + row for index in range(12)] for row in range(len(lengths))]
    first = [
        Segment([(7 * row + i * i) % 170 for i in range(n)], 0, [tables[row]], True) for row, n in enumerate(lengths)
    ]
    second = [
        Segment([(5 * row + i) % 170 for i in range(n)], lengths[row], [tables[row]], True)
        for row, n in enumerate(more)
    ]
    return [first, second]


def of_segments(computed: Computed) -> Tensor:
    """A copy of the logits in the order of the segments, each of which wants some."""
    logits, sampled, best = computed
    if best is not None:
        assert list(best) == logits.argmax(-1).tolist()
    return logits[np.argsort(sampled)]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(CONFIGS, st.lists(st.tuples(st.integers(1, 70), st.sampled_from([1, 1, 3])), min_size=1, max_size=5))
def test_steps(dtype: torch.dtype, config: dict[str, Any], lengths: list[tuple[int, int]]) -> None:
    """Both decoders say the same, and leave the same keys and values behind: the second step reads them."""
    found = []
    for offered in (kernels(), None):
        runner = Runner(
            make_model(config, dtype), BLOCK, 256, ProductMaker(None, torch.device("cpu"), offered), offered
        )
        assert (runner._compiled is not None) is (offered is not None)
        runner.allocate([12 * len(lengths)])
        steps = rounds([n for n, _ in lengths], [n for _, n in lengths])
        logits = [of_segments(runner.forward(step)) for step in steps]
        found.append([*logits, *(pool.memory for pool in runner.pools(0))])
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    assert [distance(one, other) < bound for one, other in zip(*found, strict=True)] == [True] * len(found[0])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CONFIGS, st.lists(st.integers(1, 200), max_size=6), st.integers(0, 30))
@example({"kind": LlamaConfig, "head_dim": 64, "group": 3, **SMALL}, [300, 1], 0)
@example({"kind": MistralConfig, "head_dim": 16, "group": 1, **SMALL}, [17, 1, 1, 150], 5)
@example({"kind": Qwen3Config, "head_dim": 24, "group": 2, **SMALL}, [90], 7)  # no whole vectors
@example({"kind": MistralConfig, "head_dim": 96, "group": 4, **SMALL}, [100], 9)  # tiles, within a window
@example({"kind": Qwen3Config, "head_dim": 128, "group": 7, **SMALL}, [], 1)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    processor: str, dtype: torch.dtype, config: dict[str, Any], cuts: list[int], beside: int
) -> None:
    """In pieces, token by token, and beside others: its keys, its values and what follows."""
    length, model = 240, make_model(config, dtype)
    runner = Runner(model, BLOCK, 1024, ProductMaker(None, torch.device("cpu"), kernels()), kernels())
    assert runner._compiled is not None
    ids = [(11 * i + i * i) % 170 for i in range(length)]
    whole, cut = list(range(15)), [14 - i for i in range(15)]
    own = [Segment([i % 170 for i in range(beside)], 0, [[15, 16]], True)] if beside else []
    runner.allocate([17])
    expected = of_segments(runner.forward([Segment(ids, 0, [whole], True, scores=True)])).clone()
    left = [pool.memory.clone() for pool in runner.pools(0)]
    found, start = [], 0
    for count in [*cuts, length]:
        end = min(start + min(count, MOST_ROWS - beside), length - 20)
        if start < end:
            step = [*own, Segment(ids[start:end], start, [cut], True, scores=True)]
            logits, sampled, _ = runner.forward(step)
            found.append(logits[[row for row, index in enumerate(sampled) if index == len(own)]].clone())
        start = end
    for at in range(start, length):
        found.append(runner.forward([Segment(ids[at : at + 1], at, [cut], True)]).logits.clone())
    assert torch.equal(torch.cat(found), expected)
    for before, pool in zip(left, runner.pools(0), strict=True):
        assert torch.equal(pool.memory[:, cut], before[:, whole])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_no_numbers_reach_no_token_that_does_not_see_them(processor: str, dtype: torch.dtype) -> None:
    """Though the tokens of a step look at keys together, some of which are behind the windows of the last ones."""
    model = make_model({"kind": MistralConfig, "head_dim": 64, "group": 2, **SMALL}, dtype)
    runner = Runner(model, BLOCK, 256, ProductMaker(None, torch.device("cpu"), kernels()), kernels())
    assert runner._compiled is not None
    runner.allocate([5])
    ids, tables, found = [i * i % 170 for i in range(66)], [list(range(5))], []
    for value in (0, torch.inf):
        runner.forward([Segment(ids[:20], 0, tables, True)])
        with torch.inference_mode():
            list(runner.pools(0))[-1].memory[2:, 0, 5 * 64 : 6 * 64] = value  # of the last layer's two heads
        found.append(runner.forward([Segment(ids[20:], 20, tables, True, scores=True)]).logits.clone())
    seeing = 5 + SMALL["sliding_window"] - 20
    assert torch.equal(found[0][seeing:], found[1][seeing:])
    assert not found[1][:seeing].isfinite().any()


def test_steps_of_many_tokens_are_left_to_torch() -> None:
    """The kernels read their keys afterwards: both decoders share one memory."""
    config = {"kind": LlamaConfig, "head_dim": 16, "group": 2, **SMALL}
    found = []
    for offered in (kernels(), None):
        model = make_model(config, torch.float32)
        runner = Runner(model, BLOCK, 256, ProductMaker(None, torch.device("cpu"), offered), offered)
        runner.allocate([100])
        prompts = [Segment([i % 170 for i in range(n)], 0, [list(range(at, at + 80))], True) for n, at in ((300, 0),)]
        if runner._compiled is not None:
            assert not runner._compiled.takes(prompts)
            assert runner._compiled.takes([Segment([1, 2], 100_000, [[]], True)])
            assert runner._compiled.takes([Segment([1], 5000, [[]], True)] * 256)
            assert not runner._compiled.takes([Segment([1], 5000, [[]], True)] * 257)
        runner.forward(prompts)
        found.append(runner.forward([Segment([9], 300, [list(range(80))], True)])[0])
    assert distance(*found) < 1e-4


@pytest.mark.parametrize("has_tiles", [False, True])
def test_long_prompts_are_not_left_to_torch(monkeypatch: pytest.MonkeyPatch, has_tiles: bool) -> None:
    """Whose bits depend on how they are cut; also with AMX, where it is faster over many keys."""
    model = make_model({"kind": LlamaConfig, "head_dim": 16, "group": 2, **SMALL}, torch.bfloat16)
    monkeypatch.setattr(kernels(), "has_tiles", has_tiles)
    runner = Runner(model, BLOCK, 256, ProductMaker(None, torch.device("cpu"), kernels()), kernels())
    assert runner._compiled is not None
    assert runner._compiled.takes([Segment([1, 2], 5000, [[]], True), Segment([1], 9000, [[]], True)])


def test_a_token_without_an_embedding_or_a_block_is_an_error_and_no_reading_elsewhere() -> None:
    config = {"kind": LlamaConfig, "head_dim": 16, "num_key_value_heads": 2, "group": 2, "hidden_size": 64}
    config |= {"intermediate_size": 48, "sliding_window": None}
    for offered in (kernels(), None):
        model = make_model(config, torch.float32)
        vocabulary = model.config.vocab_size
        runner = Runner(model, BLOCK, 256, ProductMaker(None, torch.device("cpu"), offered), offered)
        runner.allocate([4])
        for token in (vocabulary, -1, 1 << 40):
            with pytest.raises(IndexError):
                runner.forward([Segment([3, token], 0, [[0]], True)])
        assert runner.forward([Segment([vocabulary - 1], 0, [[0]], True)])[0].isfinite().all()
        if runner._compiled is not None:
            with pytest.raises(IndexError):
                runner.forward([Segment([3] * (BLOCK + 1), 0, [[0]], True)])  # it has one


def test_the_best_token_is_the_first_of_equals_and_none_where_logits_are_no_numbers() -> None:
    config = {"kind": LlamaConfig, "head_dim": 16, "num_key_value_heads": 2, "group": 2, "hidden_size": 64}
    config |= {"intermediate_size": 48, "sliding_window": None}
    offered, found = kernels(), set()
    segments = [Segment([5, 7], 0, [[0]], True), Segment([9], 0, [[1]], False), Segment([11], 0, [[2]], True)]
    for sign in (1, -1):
        model = make_model(config, torch.float32)
        head = model.lm_head.weight
        nn.init.zeros_(head)
        head.data[[70, 150]] = sign * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(0))
        runner = Runner(model, BLOCK, 256, ProductMaker(None, torch.device("cpu"), offered), offered)
        runner.allocate([4])
        model.get_input_embeddings().weight.data[11] = torch.nan
        assert runner._compiled is not None
        logits, sampled, best = runner._compiled(segments)
        assert list(sampled) == [0, 2] and best is not None
        assert best[0] == logits[0].numpy().argmax() and logits[0].isfinite().all()
        assert best[1] == -1 and logits[1].isnan().all()
        found.add(best[0])
    assert found == {0, 70}


def test_rotations_are_known_wherever_a_context_ends() -> None:
    """A long prompt's last token, and one far behind it: the table of rotations grows, and stops at the context."""
    config = {"kind": LlamaConfig, "head_dim": 16, "num_key_value_heads": 2, "group": 2, "hidden_size": 64}
    config |= {"intermediate_size": 48, "sliding_window": None}
    table = list(range(110))
    found = []
    for offered in (kernels(), None):
        model = make_model(config, torch.float32)
        runner = Runner(model, BLOCK, 1500, ProductMaker(None, torch.device("cpu"), offered), offered)
        runner.allocate([110])
        runner.forward([Segment([1] * 10, 0, [table], True)])
        found.append(
            [runner.forward([Segment([2], at, [table], True)])[0].clone() for at in (10, 1020, 1023, 1024, 1499)]
        )
    assert [distance(one, other) < 1e-4 for one, other in zip(*found, strict=True)] == [True] * 5


class TestCompiling:
    @staticmethod
    def fail(compiler: str, cache: Path) -> str:
        """Why there are no kernels, where the package brings none."""
        with pytest.raises(NoKernels) as caught:
            load_kernels(compiler, cache, cache / "built")
        return str(caught.value)

    def test_without_a_compiler(self, tmp_path: Path) -> None:
        assert "/none/cc does not exist; install a C compiler" in self.fail("/none/cc", tmp_path)

    def test_without_the_source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.engine.cpu.variants.SOURCES", (tmp_path / "kernels.c",))
        line = self.fail("cc", tmp_path)
        assert f"{tmp_path}/kernels.c does not exist; reinstall Penstock" in line and "compiler" not in line

    def test_a_compiler_that_fails(self, tmp_path: Path) -> None:
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo "no such flag" >&2; exit 1; }\n')
        compiler.chmod(0o755)
        assert "cc failed (no such flag); install gcc" in self.fail(str(compiler), tmp_path / "cache")
        assert list((tmp_path / "cache").glob("kernels-*")) == []

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for cache in (tmp_path / "file" / "cache", Path("/proc/cache")):
            assert "set XDG_CACHE_HOME to a writable directory" in self.fail("cc", cache)

    def test_a_cache_from_which_no_program_may_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It compiled there for a minute, and then could not load what it had made."""
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
        compiler.chmod(0o755)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
        line = self.fail(str(compiler), tmp_path / "cache")
        assert line == (
            f"{tmp_path}/cache is on a file system from which no program may run (noexec); "
            "set XDG_CACHE_HOME to a directory from which programs may run"
        )

    @staticmethod
    def hasty(directory: Path) -> str:
        """A compiler that gives the library that there is: what is kept, and when, is the matter here."""
        library, compiler = compiled("cc", user_cache(), NATIVE), directory / "hasty-cc"
        to_output = '#!/bin/sh\nwhile [ "$#" -gt 1 ] && [ "$1" != -o ]; do shift; done\n'
        compiler.write_text(f'{to_output}[ "$#" = 1 ] || exec cp "{library}" "$2"\n')
        compiler.chmod(0o755)
        return str(compiler)

    def test_a_library_that_was_cut_off_is_built_again(self, tmp_path: Path) -> None:
        compiler, cache = self.hasty(tmp_path), tmp_path / "cache"
        load_kernels(compiler, cache)
        (path,) = cache.glob("kernels-*")
        whole = path.stat().st_size
        path.unlink()  # it is mapped: a new file
        path.write_bytes(b"\x7fELF" + bytes(1000))
        load_kernels(compiler, cache)
        assert path.stat().st_size == whole
        changed = path.stat().st_mtime_ns
        load_kernels(compiler, cache)
        assert path.stat().st_mtime_ns == changed, "kept"

    def test_two_processes_at_once(self, tmp_path: Path) -> None:
        code = "import sys; from pathlib import Path; from penstock.engine.cpu.library import load_kernels\n"
        code += "load_kernels(sys.argv[1], Path(sys.argv[2]))"
        command = [sys.executable, "-c", code, self.hasty(tmp_path), str(tmp_path / "cache")]
        processes = [subprocess.Popen(command) for _ in range(2)]
        assert [process.wait(120) for process in processes] == [0, 0]
        assert len(list((tmp_path / "cache").glob("kernels-*"))) == 1

    def test_the_threads_are_torchs(self) -> None:
        # In a process of its own: other libraries in this one may have brought an OpenMP of theirs.
        script = (
            "import torch, re, pathlib; from penstock.engine.cpu.library import PLAIN, Product, load_kernels\n"
            "kernels = load_kernels()\n"
            "torch.set_num_threads(2); torch.rand(1 << 20).sum(); started = pathlib.Path('/proc/self/task')\n"
            "tasks, weight = set(started.iterdir()), torch.zeros(4096, 64)\n"
            "kernels.multiply(Product.of((4096, 64), PLAIN, weight, None, None), torch.zeros(8, 64))\n"
            "libraries = set(re.findall(r'lib[gi]?omp', pathlib.Path('/proc/self/maps').read_text()))\n"
            "print(set(started.iterdir()) == tasks, len(libraries))"
        )
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert found.stdout == "True 1\n", found.stderr


def test_more_threads_than_cores(model_directory: Callable[[str], Path]) -> None:
    """Those that have no core are waited for asleep, and none sleeps on."""
    config = EngineConfig(model=str(model_directory("llama")), dtype="float32", device="cpu")
    params = GenerationParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for threads in (1, 4 * (os.cpu_count() or 1)):
        with torch_threads(threads), InferenceEngine(config) as engine:
            found.append([output.token_ids for output in engine.generate([[5, 9, 4], [7] * 9], params)])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "shape, quantization", [("mistral", None), ("qwen3", None), ("qwen2", "int8"), ("llama", "int4")]
)
def test_the_switch(shape: str, quantization: str | None, model_directory: Callable[[str], Path]) -> None:
    params = GenerationParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[3 + (7 * n + i * i) % 400 for i in range(n)] for n in (1, 16, 33, 60)]
    found = []
    for is_compiled in (True, False):
        config = EngineConfig(
            model=str(model_directory(shape)),
            dtype="float32",
            device="cpu",
            quantization=quantization,
            compile_kernels=is_compiled,
        )
        with InferenceEngine(config) as engine:
            backend: Any = engine._driver.backend
            assert (backend.runner._compiled is not None) is is_compiled
            assert engine.model_info().slow_paths == (
                () if is_compiled else ("decoding is not compiled: compile_kernels is false",)
            )
            found.append([output.token_ids for output in engine.generate(prompts, params)])
    assert found[0] == found[1]
