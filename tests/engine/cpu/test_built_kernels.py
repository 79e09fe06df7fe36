"""Kernels built ahead: chosen for the processor, loaded without a compiler, the same bits; and those of AArch64."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import build_kernels
import pytest
import torch

from penstock.engine import EngineConfig, GenerationParams, InferenceEngine
from penstock.engine.cpu import machine, variants
from penstock.engine.cpu.layouts import fours, grouped, nibbles, paired
from penstock.engine.cpu.library import FINE, INT4, INT8, PLAIN, SIX, UNEVEN, Kernels, NoKernels, Product, load_kernels
from penstock.engine.cpu.machine import ARCHITECTURE, KERNEL_FLAGS, cpu_flags
from penstock.engine.cpu.variants import SOURCES, VARIANTS, file_name, find

has_kernels = pytest.mark.skipif(not set(cpu_flags().split()) >= KERNEL_FLAGS, reason="this processor has no kernels")
PLAINEST = {"x86_64": "avx2", "aarch64": "neon"}.get(ARCHITECTURE, "")
# In a tenth of the time: without the attribute, a compiler that does not optimise repeats no function in its callers.
QUICK = ["-O0", "-Dalways_inline=unused"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plainest variant for this processor, not optimised."""
    root = tmp_path_factory.mktemp("built")
    compiler = root / "bin" / "gcc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} "$@" {" ".join(QUICK)}\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(compiler.parent), prepend=":")
        (path,) = build_kernels.build([f"linux-{ARCHITECTURE}"], root / "built", [PLAINEST])
    assert path.name == file_name(next(one for one in VARIANTS if one.name == PLAINEST))
    return path.parent


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: Path) -> None:
    """A machine without a compiler, and a package with a built library."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("penstock.engine.cpu.library.BUILT", built)


def products(dtype: torch.dtype) -> list[tuple[Product, int]]:
    """One of each kind and the bytes of its weight, [100, 130]."""
    random = torch.Generator().manual_seed(0)
    eight = torch.randint(-127, 128, (100, 130), generator=random).to(torch.int8)
    four = torch.randint(0, 16, (100, 130), generator=random).to(torch.int8)
    scales = torch.rand((100, 10, 2), generator=random)
    plain = torch.randn((100, 130), generator=random).to(dtype)
    table = torch.randint(-127, 128, (16,), generator=random).tolist()
    given: list[tuple[int, torch.Tensor, torch.Tensor | None, int]] = [
        (PLAIN, paired(plain), None, 0),
        (INT8, fours(eight), grouped(scales[:, :5, :1].half()), 0),
        (INT4, nibbles(four), grouped(scales[:, :5].bfloat16()), 8),
        (FINE, fours(eight), grouped(scales), 0),
        (UNEVEN, nibbles(four), grouped(scales[:, :5, :1].bfloat16()), 0),
    ]
    made = [
        (Product.of((100, 130), kind, weight, factors, None, middle, table), weight.nbytes)
        for kind, weight, factors, middle in given
    ]
    for kind, count in ((INT4, 2), (INT8, 2), (SIX, 1)):  # with the scales of a file's blocks
        wide = (four if kind == INT4 else eight).repeat(1, 4)[:, :512]
        weight = nibbles(wide) if kind == INT4 else fours(wide)
        if kind == SIX:
            weight = torch.randint(256, (2, 128, 3, 64), dtype=torch.uint8, generator=random)
        halves = torch.rand((2, 2, count, 64), generator=random).half().view(torch.uint8)
        numbers = torch.randint(256, (2, 2, count, 64 * (16 if kind == SIX else 8)), generator=random)
        factors = torch.cat((halves, numbers.to(torch.uint8)), dim=-1)
        made.append((Product.of((100, 512), kind, weight, factors, None), weight.nbytes))
    return made


def inputs(product: Product, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((rows, product.inputs), generator=torch.Generator().manual_seed(1)).to(dtype)


class TestChoosing:
    @staticmethod
    def best(directory: Path, flags: str) -> str | None:
        path = find(set(flags.split()), directory)
        return path.name.split("-")[2] if path else None

    @pytest.mark.parametrize(
        "architecture, flags, best",
        [
            ("x86_64", "sse4_2 avx", None),
            ("x86_64", "avx2 bmi2 f16c fma", "avx2"),
            ("x86_64", "avx2 bmi2 f16c fma avx_vnni", "avxvnni"),
            ("x86_64", "avx2 bmi2 f16c fma avx512f avx512bw avx512dq avx512vl", "avx512"),
            ("x86_64", "avx2 bmi2 f16c fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", "avx512bf16"),
            ("aarch64", "asimd", "neon"),
            ("aarch64", "asimd asimddp atomics", "dotprod"),
        ],
    )
    def test_the_best_that_the_processor_can_run(
        self, architecture: str, flags: str, best: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(variants, "ARCHITECTURE", architecture)
        for variant in VARIANTS:
            (tmp_path / file_name(variant)).touch()
        assert self.best(tmp_path, flags) == best

    def test_none_of_other_sources(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for variant in VARIANTS:
            (tmp_path / file_name(variant).replace(variants.sources_hash(), "0123456789ab")).touch()
        assert find(KERNEL_FLAGS, tmp_path) is None

    def test_what_linux_says_of_an_arm_processor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd atomics asimddp\nCPU part\t: 0xd0c\n")
        monkeypatch.setattr(machine, "ARCHITECTURE", "aarch64")
        monkeypatch.setattr(sys, "platform", "linux")
        assert cpu_flags(tmp_path).split() == ["fp", "asimd", "atomics", "asimddp"]


@has_kernels
class TestWithoutACompiler:
    def test_the_library_needs_no_more_than_torch_does(self, built: Path) -> None:
        (path,) = built.iterdir()
        assert build_kernels.needed_glibc(path) <= build_kernels.OLDEST
        assert b"omp.so" not in path.read_bytes()

    def test_products_have_the_same_bits(self, bare: None, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = load_kernels()
        assert kernels.name == next(built.iterdir()).name
        monkeypatch.undo()
        native = load_kernels()
        assert native.name != kernels.name
        for product, _ in products(torch.bfloat16)[1:]:
            x = inputs(product, 37, torch.bfloat16)
            assert torch.equal(kernels.multiply(product, x), native.multiply(product, x))

    def test_nothing_is_compiled_beside_a_library_of_the_package(self, built: Path, tmp_path: Path) -> None:
        """A first start waits for no compiler; what an earlier one has compiled is used on."""
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
        compiler.chmod(0o755)
        name = next(built.iterdir()).name
        assert load_kernels(str(compiler), tmp_path / "cache", built).name == name
        assert not (tmp_path / "cache").exists()
        assert load_kernels().name == load_kernels(built=built).name != name

    def test_an_engine_is_as_fast_and_says_nothing(
        self, bare: None, built: Path, model_directory: Callable[[str], Path]
    ) -> None:
        config = EngineConfig(model=str(model_directory("llama")), dtype="bfloat16", device="cpu", quantization="int8")
        with InferenceEngine(config) as engine:
            backend: Any = engine._driver.backend
            assert backend._kernels.name == next(built.iterdir()).name
            assert backend.runner._compiled is not None
            assert engine.model_info().slow_paths == ()
            (output,) = engine.generate([[5, 6, 7]], GenerationParams(temperature=0, max_tokens=4, ignore_eos=True))
            assert len(output.token_ids) == 4

    def test_a_package_without_libraries_says_what_to_install(
        self, bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("penstock.engine.cpu.library.BUILT", tmp_path / "none")
        with pytest.raises(NoKernels, match="cc does not exist; install a C compiler"):
            load_kernels()


@has_kernels
def test_without_onednn_the_kernels_multiply_everything(
    model_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Macs, whose torch has no such operations."""
    params = GenerationParams(temperature=0, max_tokens=6, ignore_eos=True)
    config = EngineConfig(model=str(model_directory("llama")), dtype="float32", device="cpu")
    found = []
    for is_missing in (False, True):
        if is_missing:
            monkeypatch.setattr("penstock.engine.paged.decoding.linear._HAS_ONEDNN", False)
            for name in ("reorder", "_POINTWISE", "_BINARY"):
                monkeypatch.delattr(f"penstock.engine.paged.decoding.linear.{name}")
        with InferenceEngine(config) as engine:
            assert engine.model_info().slow_paths == ()
            found.append([one.token_ids for one in engine.generate([[3] * 300, [4, 5]], params)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("target", "variant"), [("linux-aarch64", "neon"), ("darwin-aarch64", "dotprod")])
def test_a_wheel_has_libraries_for_other_systems(
    target: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody could run here must compile at least: a name that is taken there alone would go unnoticed."""
    # zig would also describe them for debuggers.
    options = [*(option for option in variants.OPTIONS if not option.startswith("-O")), *QUICK, "-g0"]
    monkeypatch.setattr("penstock.engine.cpu.compiling.OPTIONS", options)
    (path,) = build_kernels.build([target], tmp_path, [variant])
    content = path.read_bytes()
    assert all(symbol.encode() in content for symbol in ("multiply_rows", "step", "pack_blocks"))


CROSS = ["aarch64-linux-gnu-gcc", "qemu-aarch64"]


@has_kernels
@pytest.mark.skipif(ARCHITECTURE != "x86_64", reason="compares x86 with AArch64")
@pytest.mark.skipif(not all(map(shutil.which, CROSS)), reason=f"needs {' and '.join(CROSS)}")
@pytest.mark.parametrize(
    "variant", [one for one in VARIANTS if one.architecture == "aarch64"], ids=lambda one: one.name
)
def test_aarch64_has_the_same_bits(variant: variants.Variant, tmp_path: Path, built: Path) -> None:
    """Emulated; also without quantisation, where AVX2 rounds as NEON does."""
    driver = Path(__file__).parents[2] / "support" / "kernels_driver.c"
    sources = [driver, *(source for source in SOURCES if source.suffix == ".c")]
    command = [
        CROSS[0],
        *variant.options,
        "-O1",
        "-std=gnu11",
        "-ffp-contract=off",
        "-static",
        f"-I{variants.SOURCE}",
    ]
    subprocess.run([*command, "-o", tmp_path / "driver", *sources, "-lm"], check=True, timeout=300)
    kernels = Kernels(CDLL(str(next(built.iterdir()))))
    for dtype in (torch.bfloat16, torch.float32):
        for product, nbytes in products(dtype):
            x = inputs(product, 9, dtype)
            _, scales, _ = product.tensors
            factors = b"" if scales is None else scales.view(torch.uint8).numpy().tobytes()
            weight = product.tensors[0]
            assert weight is not None
            sizes = torch.tensor([len(x), dtype == torch.bfloat16, nbytes, len(factors)]).numpy().tobytes()
            data = [sizes, bytes(product), weight.view(torch.uint8).numpy().tobytes(), factors]
            given = b"".join([*data, x.view(torch.uint8).numpy().tobytes()])
            done = subprocess.run(
                [CROSS[1], tmp_path / "driver"], input=given, capture_output=True, check=True, timeout=120
            )
            found = torch.frombuffer(bytearray(done.stdout), dtype=dtype).view(9, 100)
            assert torch.equal(found, kernels.multiply(product, x)), product.kind
