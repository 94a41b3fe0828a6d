"""Whether NVRTC lays structures of a foreign header out as the host's compiler does."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from fanfold.jit import ForeignHeaders, KernelSource
from fanfold.jit.kernel import Cache, compile_in
from tests.kernels.sources import kernel_root

HOST = Path(__file__).parent / "host"
"""CUDA's headers for the host's compiler, as far as NCCL's ask for them."""


def layouts_of(
    text: str, names: Iterable[str], folders: Sequence[Path]
) -> dict[str, tuple[int, int]]:
    """Size and alignment of types by name, as the host's compiler has them; ``text`` includes what
    declares them, from ``folders``."""
    prints = "".join(
        f'  printf("{name} %zu %zu\\n", sizeof({name}), alignof({name}));\n' for name in names
    )
    program = f"{text}#include <cstdio>\nint main() {{\n{prints}}}\n"
    compiler = os.environ.get("CXX") or shutil.which("c++") or "c++"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "layouts")
        subprocess.run(
            [compiler, "-std=c++20", "-w", "-fpermissive", "-x", "c++", "-",
             *(f"-I{include}" for include in folders), "-o", str(binary)],
            input=program, text=True, check=True,
        )  # fmt: skip
        lines = subprocess.run([binary], capture_output=True, text=True, check=True).stdout
    found = (line.rsplit(" ", 2) for line in lines.splitlines())
    return {name: (int(size), int(alignment)) for name, size, alignment in found}


def same_layouts(
    folder: Path,
    foreign: ForeignHeaders | None,
    text: str,
    layouts: dict[str, tuple[int, int]],
) -> None:
    """Raises CompileError, naming the types, unless NVRTC has the same layouts behind ``text``."""
    asserts = "".join(
        f'static_assert(sizeof({name}) == {size}, "size of {name}");\n'
        f'static_assert(alignof({name}) == {alignment}, "alignment of {name}");\n'
        for name, (size, alignment) in layouts.items()
    )
    root = kernel_root(Path(tempfile.mkdtemp(dir=folder)))
    (root / "layouts.cu").write_text(f"{text}{asserts}__global__ void nothing() {{}}\n")
    source = KernelSource("layouts.cu", "nothing", foreign=foreign)
    compile_in(root, Cache(root / "cache"), source, "sm_90a")
