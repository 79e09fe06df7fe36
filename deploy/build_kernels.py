"""Build the compiled kernels for processors of all kinds into the package, for machines without a compiler.

    python deploy/build_kernels.py            # all that the compilers here can build
    python deploy/build_kernels.py linux-x86_64

gcc builds for this machine's architecture; gcc for another one (Debian's `gcc-aarch64-linux-gnu`) or zig
(`pip install ziglang`) builds for the others. A wheel that is built afterwards (`make wheel`) contains the libraries.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.engine.cpu.compiling import compile_to
from penstock.engine.cpu.machine import ARCHITECTURE
from penstock.engine.cpu.variants import BUILT, VARIANTS, Variant, file_name, sources_hash

TARGETS = ("linux-x86_64", "linux-aarch64", "darwin-aarch64")
OLDEST = (2, 28)
"""The oldest glibc on which torch runs."""

_ZIG = {"linux": "linux-gnu.{}.{}".format(*OLDEST), "darwin": "macos.11.0"}
_ZIG_OPTIONS = {"-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod", "-march=armv8-a": "-mcpu=generic"}


def compiler_for(system: str, variant: Variant) -> tuple[list[str], list[str]] | None:
    """The command of a compiler and its options; None where none is installed."""
    gcc = "gcc" if variant.architecture == ARCHITECTURE else f"{variant.architecture}-linux-gnu-gcc"
    if system == "linux" == sys.platform and shutil.which(gcc):
        return [gcc], [*variant.options, "-s"]
    if find_spec("ziglang") is None:
        return None
    options = [_ZIG_OPTIONS.get(option, option) for option in variant.options]
    target = f"{variant.architecture}-{_ZIG[system]}"
    return [sys.executable, "-m", "ziglang", "cc", "-target", target], [*options, "-fno-sanitize=undefined", "-s"]


def needed_glibc(library: Path) -> tuple[int, int]:
    """The newest version of glibc that a library asks for."""
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())
    return max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))


def build(targets: Sequence[str], to: Path = BUILT, names: Sequence[str] = ()) -> list[Path]:
    """Build the variants of `targets`, those called `names` if given, and remove libraries of other sources.

    Says what it cannot build. Raises `SystemExit` if a library would not run where torch does.
    """
    to.mkdir(parents=True, exist_ok=True)
    made = []
    wanted = [(target.split("-")[0], one) for target in targets for one in VARIANTS if _fits(target, one)]
    for system, variant in wanted:
        if names and variant.name not in names:
            continue
        path = to / file_name(variant, system)
        if (found := compiler_for(system, variant)) is None:
            print(f"{path.name}: no compiler; install ziglang, or gcc for {variant.architecture}")
            continue
        with tempfile.TemporaryDirectory(dir=to) as directory:
            compile_to(*found, library := Path(directory) / path.name, timeout=3600)
            if (needed := needed_glibc(library)) > OLDEST:
                raise SystemExit(f"{path.name} needs glibc {needed[0]}.{needed[1]}, newer than that of torch")
            library.replace(path)
        print(f"{path.name}: {path.stat().st_size >> 10} KiB by {Path(found[0][0]).name}")
        made.append(path)
    for old in to.iterdir():
        if sources_hash() not in old.name:
            old.unlink()
    return made


def _fits(target: str, variant: Variant) -> bool:
    """No Mac with an ARM processor lacks `dotprod`."""
    system, architecture = target.split("-", 1)
    return variant.architecture == architecture and (system != "darwin" or variant.name == "dotprod")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; all by default")
    targets = parser.parse_args().targets or TARGETS
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not build(targets):
        raise SystemExit("nothing was built")


if __name__ == "__main__":
    main()
