"""The kernels of layers, experts and running states compile for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine import paged

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

root, capability, numbers = sys.argv[1:4]
sys.path[:0] = [f"{root}/state", f"{root}/cuda"]
import expert_kernels
import layer_kernels
import kernels as state_kernels

P, F, I = "*" + numbers, "*fp32", "*i32"
TYPES = {name: P for name in ("x", "update", "total", "normed", "heads", "cosines", "sines", "gates", "ups", "out")}
TYPES |= {name: P for name in ("found", "weight", "shares", "before", "after", "rates", "decays", "steps")}
TYPES |= {name: F for name in ("taps", "given", "decay", "dt_bias", "rate", "direct", "states", "weights")}
TYPES |= {name: I for name in ("order", "bounds")}
TYPES |= {name: "*i64" for name in ("chosen", "starts", "ends", "sources", "targets", "tokens", "owners")}
TYPES |= {name: "fp32" for name in ("epsilon", "after_epsilon", "factor", "scalar", "alpha", "limit", "scale")}
TYPES |= {name: "fp32" for name in ("least", "most")}
STATE = {"size": 128, "padded": 128, "block": 16}
SIZES = {"padded": 128, "rows": 16, "columns": 32, "depth": 128 if numbers == "bf16" else 32}
IN = {"inputs": P, "bias": F}
LARGE = SIZES | ({"rows": 64, "columns": 128, "depth": 64} if numbers == "bf16" else {})
TAPS = {"num_taps": 4, "block": 256}
WHOLE = {"head_dim": 128, "size": 128, "padded": 64, "rest": 1}
NORM = {"size": 128, "padded": 128}
CASES = [
    (layer_kernels.add_norm, {"padded": 4096}, {}),
    (layer_kernels.add_norm, {"padded": 4096, "update": None, "after": None, "after_epsilon": None, "total": None}, {}),
    (layer_kernels.rotate, {"norms": True, "head_dim": 256, "size": 64, "padded": 32, "rest": 256}, {}),
    (layer_kernels.rotate, WHOLE | {"norms": False, "weights": None}, {}),
    (layer_kernels.gate, {"kind": 1, "block": 1024}, {}),
    (layer_kernels.open_gates, {"padded": 256}, {}),
    (expert_kernels.place, {"own": 64, "others": 128}, {}),
    *((expert_kernels.inner, SIZES | {"kind": kind, "bias": None}, {}) for kind in range(3)),
    (expert_kernels.inner, LARGE | {"kind": 0, "bias": None}, {}),
    (expert_kernels.outer, SIZES, {"bias": P}),
    (state_kernels.convolve, TAPS | {"has_silu": True, "before": None, "after": None}, IN | {"out": F}),
    (state_kernels.convolve, TAPS | {"has_silu": False, "bias": None}, IN),
    (state_kernels.delta, STATE | {"width": 128, "keys": 16, "shared": 2}, {"out": F}),
    (state_kernels.mamba, STATE | {"width": 64, "groups": 1}, {"out": F, "rate": F}),
    (state_kernels.gated_norm, NORM | {"is_gated_first": False}, {"x": F}),
    (state_kernels.gated_norm, NORM | {"is_gated_first": True, "weight": None}, {"x": F}),
]
for kernel, fixed, own in CASES:
    names = kernel.arg_names
    types = {name: "constexpr" if name in fixed else (TYPES | own).get(name, "i64") for name in names}
    places = {(names.index(name),): value for name, value in fixed.items()}
    warps = 1 if kernel in (state_kernels.delta, state_kernels.mamba) else 4
    target = GPUTarget("cuda", int(capability), 32)
    compiled = triton.compile(ASTSource(kernel, types, places), target, options={"num_warps": warps})
    assert compiled.asm["cubin"] and compiled.metadata.shared < 99 << 10, kernel
"""


@pytest.mark.parametrize(("capability", "numbers"), [("80", "bf16"), ("90", "bf16"), ("90", "fp32")])
def test_kernels_compile(capability: str, numbers: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    words = [sys.executable, "-c", COMPILE, str(Path(paged.__file__).parent), capability, numbers]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
