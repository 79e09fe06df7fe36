"""What the kernels pack from a file's blocks is, bit for bit, what torch's operations make of the same levels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.checkpoints.gguf.types import BLOCKS
from penstock.engine.checkpoints.gguf.weights import rounded_of
from penstock.engine.checkpoints.rounded import Blocks, Rounded
from penstock.engine.cpu.layouts import numbers
from penstock.engine.cpu.library import INT4, UNEVEN, Kernels, load_kernels
from penstock.engine.paged.decoding.linear import Linear
from penstock.engine.paged.quantization.blocks import Packer
from penstock.engine.paged.quantization.quantize import ProductMaker

KNOWN = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"]
OTHERS = [kind for kind, (weights, _) in BLOCKS.items() if weights > 1 and kind not in KNOWN]
IN_4_BITS = {"IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S", "TQ1_0", "TQ2_0"}
INPUTS = 512
_SCALES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
_SCALES |= {"IQ4_NL": [0], "Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108], "TQ1_0": [52], "TQ2_0": [64]}
_SCALES |= {kind: [0] for kind in OTHERS if kind.startswith("IQ") and kind != "IQ1_M"}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return load_kernels()


def some(kind: str, rows: int, seed: int = 0) -> Blocks:
    """Random blocks whose scales are numbers, the smallest of them subnormal."""
    weights, size = BLOCKS[kind]
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(256, (rows * INPUTS // weights, size), dtype=torch.uint8, generator=generator)
    if kind == "MXFP4":
        data[:, 0] = torch.randint(110, 140, (len(data),), generator=generator)
        data[0, 0], data[1, 0] = 0, 1
    if kind == "IQ1_M":  # 0.125, four bits at a time
        data[:, 49:57:2] = data[:, 49:57:2] & 15 | torch.tensor([0, 0, 0, 0x30], dtype=torch.uint8)
    for at in _SCALES.get(kind, []):
        powers = torch.randint(-22, 4, (len(data), 1), generator=generator).float().exp2()
        scales = (torch.randn(len(data), 1, generator=generator) * powers).half()
        data[:, at : at + 2] = scales.view(torch.uint8)
    return Blocks(kind, data.view(rows, -1), INPUTS)


def by_torch(parts: list[Blocks], kernels: Kernels, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The numbers that the kernels multiply by."""
    product = made_by_torch(parts, kernels, dtype, bias).product
    assert product is not None
    return numbers(product, dtype, 0, -(-product.outputs // 64))


def made_by_torch(parts: list[Blocks], kernels: Kernels, dtype: torch.dtype, bias: Tensor | None) -> Linear:
    """The product of the levels, with scales as numbers."""
    module = nn.Linear(INPUTS, sum(len(part.data) for part in parts), bias=bias is not None, dtype=dtype)
    if bias is not None:
        module.bias = nn.Parameter(bias)
    levels = Rounded.joined([rounded_of(part.data.flatten(), part.kind, len(part.data)) for part in parts])
    vars(module)["rounded"] = lambda: levels
    return ProductMaker(None, torch.device("cpu"), kernels)([module], "some.proj", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [64, 100, 256])
@pytest.mark.parametrize("kind", KNOWN)
def test_one_weight(kind: str, rows: int, dtype: torch.dtype, kernels: Kernels) -> None:
    part = some(kind, rows)
    found = Packer(kernels).pack([part], None, dtype)
    assert found is not None and (found.product.outputs, found.product.inputs) == (rows, INPUTS)
    assert torch.equal(numbers(found.product, dtype, 0, -(-rows // 64)), by_torch([part], kernels, dtype, None))
    x = torch.randn((3, INPUTS), generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = x.double() @ rounded_of(part.data.flatten(), kind, rows).numbers.double().T
    assert (found(x).double() - expected).norm() <= (1e-5 if dtype == torch.float32 else 0.02) * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_scales_of_a_file_compute_what_numbers_do(kind: str, dtype: torch.dtype, kernels: Kernels) -> None:
    """The bits of scales in float32, and a row those that it has alone, with any number of rows."""
    part = some(kind, 200)
    found, expected = Packer(kernels).pack([part], None, dtype), made_by_torch([part], kernels, dtype, None)
    assert found is not None and found.nbytes < expected.nbytes
    x = torch.randn((256, INPUTS), generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([found(row[None]) for row in x])
    for rows in (1, 2, 3, 6, 7, 13, 32, 100, 256):
        assert torch.equal(found(x[:rows]), expected(x[:rows]))
        assert torch.equal(found(x[:rows]), alone[:rows])


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4.625), ("Q5_K", 8.625), ("Q6_K", 6.5625), ("Q4_0", 4.5)])
def test_bits_of_a_weight(kind: str, bits: float, kernels: Kernels) -> None:
    found = Packer(kernels).pack([some(kind, 128)], None, torch.bfloat16)
    assert found is not None
    assert found.nbytes * 8 == bits * 128 * INPUTS


@pytest.mark.parametrize("kind", OTHERS)
def test_one_weight_that_torch_packs(kind: str, kernels: Kernels) -> None:
    """In 4 bits, where no more levels share a scale than one of the kernels' has."""
    part = some(kind, 100)
    levels = rounded_of(part.data.flatten(), kind, 100)
    module = nn.Linear(INPUTS, 100, bias=False, dtype=torch.bfloat16)
    vars(module)["rounded"] = lambda: levels
    linear = ProductMaker(None, torch.device("cpu"), kernels)([module], "some.proj", False)
    assert linear.product is not None and (linear.product.kind in (INT4, UNEVEN)) == (kind in IN_4_BITS)
    assert torch.equal(numbers(linear.product, torch.bfloat16, 0, 2)[:100], levels.numbers)
    x = torch.randn((3, INPUTS), generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ levels.numbers.double().T
    assert (linear(x).double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize(
    "kinds", [["Q4_K", "Q4_K"], ["Q4_K", "Q4_K", "Q6_K"], ["Q8_0", "Q5_0"], ["Q5_K", "Q4_1", "Q4_0"]]
)
def test_several_side_by_side(kinds: list[str], kernels: Kernels) -> None:
    """Of one type or of several, each in its own form; with a bias."""
    parts = [some(kind, 128 - 28 * (at == len(kinds) - 1), seed=at) for at, kind in enumerate(kinds)]
    bias = torch.arange(sum(len(part.data) for part in parts)).bfloat16()
    found = Packer(kernels).pack(parts, bias, torch.bfloat16)
    assert found is not None
    own = numbers(found.product, torch.bfloat16, 0, -(-len(bias) // 64))
    assert torch.equal(own, by_torch(parts, kernels, torch.bfloat16, bias))
    assert torch.equal(found(torch.zeros(1, INPUTS, dtype=torch.bfloat16))[0], bias)
    assert torch.equal(own[64:192], numbers(found.product, torch.bfloat16, 1, 3))
    x = torch.randn((40, INPUTS), generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = [Packer(kernels).pack([part], None, torch.bfloat16) for part in parts]
    for rows in (1, 7, 40):
        expected = torch.cat([one(x[:rows]) for one in alone if one is not None], dim=1)
        without = Packer(kernels).pack(parts, None, torch.bfloat16)
        assert without is not None and torch.equal(without(x[:rows]), expected)
    assert found.nbytes == sum(one.nbytes for one in alone if one is not None)


def test_neighbours_in_one_byte(kernels: Kernels) -> None:
    """MXFP4 as safetensors have it: the same product as of GGUF's order."""
    part = some("MXFP4", 64)
    blocks = part.data.view(64, -1, 17)
    levels = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), dim=-1).view(64, -1, 16, 2)
    pairs = torch.cat((blocks[..., :1], levels[..., 0] | levels[..., 1] << 4), dim=-1).flatten(1)
    packer = Packer(kernels)
    one = packer.pack([part], None, torch.bfloat16)
    other = packer.pack([Blocks("MXFP4_PAIRS", pairs, INPUTS)], None, torch.bfloat16)
    assert one is not None and other is not None
    assert torch.equal(one.weight, other.weight)
    own, others = (numbers(each.product, torch.bfloat16, 0, 1) for each in (one, other))
    assert torch.equal(own, others)


def test_what_the_kernels_cannot_pack_is_left_to_torch(kernels: Kernels) -> None:
    """Types without a reader, and weights that end inside a block of 64 outputs."""
    packer = Packer(kernels)
    data = torch.zeros((64, INPUTS // 256 * BLOCKS["Q2_K"][1]), dtype=torch.uint8)
    assert packer.pack([Blocks("Q2_K", data, INPUTS)], None, torch.bfloat16) is None
    assert packer.pack([some("Q4_K", 100), some("Q4_K", 64)], None, torch.bfloat16) is None


def test_small_weights_lie_side_by_side(kernels: Kernels) -> None:
    """Each keeps its numbers, whatever is packed after it, and no two pay for memory of their own."""
    packer = Packer(kernels)
    parts = [some("Q4_K", 192, seed) for seed in range(4)]
    made = [packer.pack([part], None, torch.bfloat16) for part in parts]
    storages = set()
    for part, found in zip(parts, made, strict=True):
        assert found is not None
        assert torch.equal(
            numbers(found.product, torch.bfloat16, 0, 3), by_torch([part], kernels, torch.bfloat16, None)
        )
        storages.add(found.weight.untyped_storage().data_ptr())
    assert len(storages) == 1


class OnlyBlocks:
    """Reads a weight that must not become levels in memory."""

    def __init__(self, part: Blocks) -> None:
        self.part = part

    def __call__(self) -> Rounded:
        raise AssertionError("the levels were asked for")

    def blocks(self) -> list[Blocks]:
        return [self.part]


def test_products_of_a_file_are_made_of_its_blocks(kernels: Kernels) -> None:
    parts = [some(kind, 64, seed) for seed, kind in enumerate(("Q4_K", "Q6_K"))]
    modules = [nn.Linear(INPUTS, 64, bias=False, dtype=torch.bfloat16) for _ in parts]
    for module, part in zip(modules, parts, strict=True):
        vars(module)["rounded"] = OnlyBlocks(part)
    maker = ProductMaker(None, torch.device("cpu"), kernels)
    product = maker(modules, "model.layers.0.mlp.gate_proj", False).product
    assert product is not None and maker.is_quantized
    expected = by_torch(parts, kernels, torch.bfloat16, None)
    assert torch.equal(numbers(product, torch.bfloat16, 0, 2), expected)
