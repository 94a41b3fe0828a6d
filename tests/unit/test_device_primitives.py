"""What ``fanfold/kernels/device`` names compiles for every GPU that it is meant for; what it does
is tried on a GPU, in tests/gpu.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fanfold.jit import KernelSource
from fanfold.jit.cache import Cache
from fanfold.jit.kernel import KERNELS, compile_in
from tests.kernels.sources import BOXES, BULK_COPY, CONVERT, PRODUCTS, QUANTISE, kernel_root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_root(tmp_path_factory.mktemp("primitives"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("source", [BULK_COPY, CONVERT, QUANTISE], ids=lambda one: one.entry)
def test_compiles(root: Path, tmp_path: Path, source: KernelSource, arch: str) -> None:
    binary = compile_in(root, Cache(tmp_path), source, arch)
    assert binary.spill_bytes == 0
    assert 0 < binary.registers <= source.register_limit
    if source is BULK_COPY and arch != "sm_80":
        # Two slots and their barriers: the kernel does have its body.
        assert binary.shared_bytes >= 2 * 4096 + 2 * 8


@pytest.mark.parametrize("source", [*PRODUCTS, BOXES], ids=str)
def test_compiles_for_hopper(root: Path, tmp_path: Path, source: KernelSource) -> None:
    """The accumulators stay in registers, though their wrappers take arrays."""
    binary = compile_in(root, Cache(tmp_path), source, "sm_90a")
    assert binary.spill_bytes == 0
    assert binary.stack_bytes == 0
    sums = dict(source.pairs).get("kColumns", 0) // 2
    assert sums < binary.registers <= source.register_limit


@pytest.mark.parametrize("header", sorted(path.name for path in KERNELS.glob("device/*.cuh")))
def test_header_needs_no_other(tmp_path: Path, header: str) -> None:
    """Each header of the folder can be the only one that a kernel includes."""
    root = kernel_root(tmp_path)
    text = (
        f'#include "device/{header}"\nextern "C" __global__ void alone(int* out) {{ *out = 1; }}\n'
    )
    (root / "alone.cu").write_text(text)
    for arch in ("sm_80", "sm_90a"):
        assert compile_in(root, Cache(tmp_path), KernelSource("alone.cu", "alone"), arch).image
