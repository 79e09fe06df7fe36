"""Weights that stay levels in a GPU's memory: where each level lies, and, with a GPU, the products."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.checkpoints.rounded import Rounded
from penstock.engine.cuda import compiling
from penstock.engine.cuda.compiling import NotCompiled, program
from penstock.engine.cuda.levels import GROUP, MOST_ROWS, TILE, LevelKernels, LevelWeight, unsupported

OUTPUTS, INPUTS = 200, 416  # neither whole blocks nor a power of 2
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CPU = torch.device("cpu")


def rounded(
    *,
    bits: int = 8,
    middle: int = 0,
    size: int = GROUP,
    zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    table: tuple[int, ...] = (),
    floats: bool = False,
) -> Rounded:
    low, high = (0, 16) if bits == 4 else (-127, 128)
    levels = torch.randint(low, high, (OUTPUTS, INPUTS), dtype=torch.int8)
    if floats:  # the smallest ones, too, and no NaN, which 127 and -1 would be
        levels[(levels == 127) | (levels == -1)] = 0
        levels = levels.view(torch.float8_e4m3fn)
    scales = (torch.rand(OUTPUTS, INPUTS // size) * 0.01 + 0.001).to(dtype)
    offsets = (torch.randn(OUTPUTS, INPUTS // size) * 0.01).to(dtype) if zeros else None
    return Rounded(levels, scales, offsets, bits, middle, size, table)


FORMS: dict[str, dict[str, Any]] = {
    "int8": {},
    "int4": {"bits": 4, "middle": 8, "zeros": True},
    "Q4_0": {"bits": 4, "middle": 8, "dtype": torch.float16},
    "Q4_K": {"bits": 4, "zeros": True, "dtype": torch.float32},
    "Q5_1": {"zeros": True, "dtype": torch.float16},
    "Q6_K": {"size": 16, "dtype": torch.float32},
    "Q2_K": {"size": 16, "zeros": True, "dtype": torch.float32},
    "E4M3": {"floats": True, "dtype": torch.float32},
    "IQ4_NL": {"bits": 4, "dtype": torch.float16, "table": tuple(range(-120, 120, 15))},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_level_lies_where_the_source_reads_it(name: str) -> None:
    """Read back lane by lane, as `levels.cu` describes it."""
    given = rounded(**FORMS[name])
    weight = LevelWeight.of(given, CPU)
    expected = torch.tensor(given.table)[given.levels.int()] if given.table else given.levels
    expected = expected.view(torch.int8) if weight.form.is_float else expected
    bits = weight.form.bits
    assert bits == (8 if given.table else given.bits)
    assert weight.levels.shape == (-(-OUTPUTS // TILE), INPUTS // GROUP, 32, 2 * bits)
    words = weight.levels.view(torch.int32)
    for tile, group, lane in ((0, 0, 0), (3, 7, 13), (12, 12, 31), (5, 1, 22)):
        row, t = divmod(lane, 4)
        for side in range(2):
            output = TILE * tile + row + 8 * side
            if output >= OUTPUTS:
                continue
            own = words[tile, group, lane][side * bits // 4 : (side + 1) * bits // 4].tolist()
            for number in range(8):
                half, place = divmod(number, 4)
                if bits == 4:
                    found = own[0] >> (4 * (number // 2) + 16 * (number % 2)) & 15
                else:
                    byte = own[half] >> 8 * place & 255
                    found = byte - 256 if byte > 127 else byte
                assert found == expected[output, GROUP * group + 16 * half + 4 * t + place]
            for part in range(2 if weight.form.is_fine else 1):
                factors = weight.factors[tile, group, part, row, side]
                at = output, group * weight.factors.shape[2] + part
                assert factors[0] == given.scales[at]
                assert given.zeros is None or factors[1] == given.zeros[at]


def test_factors_of_two_types_become_one_that_holds_both() -> None:
    given = rounded(zeros=True)
    assert given.zeros is not None
    zeros = given.zeros.float() / 3
    weight = LevelWeight.of(given._replace(zeros=zeros), CPU)
    assert weight.form.scale_type == weight.factors.dtype == torch.float32
    assert weight.factors[0, 0, 0, 0, 0].tolist() == [float(given.scales[0, 0]), float(zeros[0, 0])]


def test_only_bfloat16_and_whole_groups_are_taken() -> None:
    assert LevelKernels.take(torch.bfloat16, 4 * GROUP)
    assert not LevelKernels.take(torch.float32, 4 * GROUP)
    assert not LevelKernels.take(torch.bfloat16, 4 * GROUP + 16)


def test_a_device_without_such_products_says_why() -> None:
    assert unsupported(CPU) == "cpu has no products of levels; use an NVIDIA GPU or a CPU"
    with pytest.raises(NotCompiled, match="cpu has no products of levels"):
        LevelKernels(CPU)


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "this build of torch has no CUDA; install"), ("999.1", r"libnvrtc.so.999 is missing; install")],
)
def test_without_a_compiler_the_reason_is_named(
    version: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "torch", SimpleNamespace(version=SimpleNamespace(cuda=version)))
    with pytest.raises(NotCompiled, match=message):
        program(Path(__file__), [], (9, 0), tmp_path)


def product(given: Rounded, x: Tensor, bias: Tensor | None, kernels: LevelKernels) -> Tensor:
    weight = LevelWeight.of(given, kernels.device)
    kernels.prepare(weight)
    return kernels.multiply(weight, x, bias)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> LevelKernels:
    return LevelKernels(torch.device("cuda:0"), tmp_path_factory.mktemp("programs"))


@ON_GPU
@pytest.mark.parametrize("name", FORMS)
def test_products(name: str, kernels: LevelKernels) -> None:
    """Any number of rows, with the inputs a part of wider rows, against float64."""
    given = rounded(**FORMS[name])
    numbers = given.numbers.double().cuda()
    weight = LevelWeight.of(given, kernels.device)
    kernels.prepare(weight)
    assert torch.equal(kernels.expanded(weight), given.numbers.bfloat16().cuda())
    assert torch.equal(kernels.expanded(weight, 32, 64), given.numbers[32:64].bfloat16().cuda())
    bias = torch.randn(OUTPUTS, device="cuda").bfloat16()
    for rows in (0, 1, 8, 9, 16, 17, 32, 33, 61, MOST_ROWS, MOST_ROWS + 1):
        for start in (32, 33):
            x = torch.randn(rows, INPUTS + 64, device="cuda").bfloat16()[:, start : start + INPUTS]
            expected = x.double() @ numbers.T + bias.double()
            found = kernels.multiply(weight, x, bias)
            assert found.shape == (rows, OUTPUTS)
            assert not rows or (found.double() - expected).norm() <= 4e-3 * expected.norm()
            assert rows > MOST_ROWS or torch.equal(found, kernels.multiply(weight, x.clone(), bias)), "run for run"


@ON_GPU
def test_a_row_does_not_depend_on_what_is_beside_it(kernels: LevelKernels) -> None:
    given = rounded(**FORMS["int4"])
    x = torch.randn(7, INPUTS, device="cuda").bfloat16()
    others = torch.full_like(x, torch.nan)
    others[3] = x[3]
    assert torch.equal(product(given, x, None, kernels)[3], product(given, others, None, kernels)[3])


@ON_GPU
def test_a_large_weight_is_expanded_piece_by_piece(kernels: LevelKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.cuda.levels._EXPANDED", 64 * INPUTS)
    given, bias = rounded(), torch.randn(OUTPUTS, device="cuda").bfloat16()
    x = torch.randn(MOST_ROWS + 1, INPUTS, device="cuda").bfloat16()
    expected = x.double() @ given.numbers.double().cuda().T + bias.double()
    found = product(given, x, bias, kernels)
    assert (found.double() - expected).norm() <= 4e-3 * expected.norm()


@ON_GPU
def test_a_program_is_compiled_once_and_again_if_it_was_cut_off(tmp_path: Path) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    def use() -> None:
        product(rounded(), torch.ones(1, INPUTS, device="cuda").bfloat16(), None, LevelKernels(device, tmp_path))

    device = torch.device("cuda:0")
    use()
    (made,) = before = files()
    use()
    assert files() == before
    made.write_bytes(made.read_bytes()[:1000])
    use()
    assert len(made.read_bytes()) > 1000


@ON_GPU
def test_a_source_that_does_not_compile_is_named(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("extern nonsense;")
    with pytest.raises(NotCompiled, match="NVRTC failed"):
        program(source, [], (9, 0), tmp_path)
