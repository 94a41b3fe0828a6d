"""NCCL's own device headers, of several versions, through the run-time compiler.

``make test-frameworks`` fetches them, into ``build/nccl_headers``.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fanfold.backends.high_throughput import kernels
from fanfold.backends.low_latency.kernels import kernel_sources
from fanfold.formats import RowFormat, ScaleFormat
from fanfold.geometry import Geometry
from fanfold.jit import KernelSource
from fanfold.jit.kernel import KERNELS, Cache, compile_in
from fanfold.memory.gin import _between_calls, by_gin
from fanfold.nccl import headers
from tests.kernels.layouts import HOST, layouts_of, same_layouts
from tests.kernels.sources import PUTS, kernel_root

pytestmark = pytest.mark.frameworks

FOLDER = Path(__file__).parent.parent.parent / "build" / "nccl_headers"
VERSIONS = ["2.28.9", "2.30.7", "2.32.3"]
# What kernels share with NCCL's threads, and with NICs.
OF_NCCL = [
    "ncclDevComm", "ncclTeam", "ncclWindow_vidmem", "ncclGinProxyQword_t", "ncclGinProxyGfd_t",
    "ncclGinProxyGpuCtx_t",
]  # fmt: skip
GDAKI = "nccl_device/gin/gdaki/doca_gpunetio/common"


def include_of(version: str) -> Path:
    include = FOLDER / version / "nvidia" / "nccl" / "include"
    assert include.is_dir(), f"{include} is missing: `make test-frameworks` fetches it"
    return include


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_kernel_that_puts_and_waits(tmp_path: Path, version: str, arch: str) -> None:
    """Over a proxy and over GDAKI, which a context tells apart at run time."""
    source = dataclasses.replace(PUTS, foreign=headers.read(include_of(version)))
    binary = compile_in(kernel_root(tmp_path), Cache(tmp_path / "cache"), source, arch)
    assert binary.image
    assert 0 < binary.registers <= 80
    assert arch != "sm_90a" or binary.spill_bytes == 0


@pytest.mark.parametrize("ranks", [2, 72])
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_of_both_modes(tmp_path: Path, version: str, ranks: int) -> None:
    """With GIN between hosts. What spills is bounded: NCCL's newer code takes more registers."""
    gin = headers.read(include_of(version))
    cache = Cache(tmp_path / "cache")
    for source in sources_across_hosts(ranks):
        binary = compile_in(KERNELS, cache, by_gin(source, gin), "sm_90a")
        assert binary.registers <= 168
        assert binary.spill_bytes <= (40 if version == "2.28.9" else 400), source


def sources_across_hosts(ranks: int) -> list[KernelSource]:
    """Of one geometry and of one layer."""
    geometry = Geometry(ranks, 4 * ranks, 8, 7168, 128)
    formats = (RowFormat.FP8, ScaleFormat.FLOAT32)
    found = kernel_sources(geometry, *formats, late_weights=False, across_hosts=True)
    sizes = kernels.Sizes(ranks, 4 * ranks, 8, across_hosts=True)
    dispatch = kernels.DispatchKind(sizes, 7168, 56, True, True, True)
    combine = kernels.CombineKind(sizes, 14336, True, False, False)
    most = kernels.MOST_SHARED_BYTES
    found.append(kernels.plan_kernel(sizes).source)
    found.append(kernels.dispatch_kernel(dispatch, most).source)
    found.append(kernels.combine_kernel(combine, 24, most).source)
    return found


@pytest.mark.parametrize("entry", ["fence", "await_fences"])
@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_between_calls(tmp_path: Path, version: str, entry: str) -> None:
    source = _between_calls(entry, 72, headers.read(include_of(version)))
    binary = compile_in(KERNELS, Cache(tmp_path / "cache"), source, "sm_90a")
    assert binary.spill_bytes == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_structures_have_the_layout_of_the_host(tmp_path: Path, version: str) -> None:
    """All that GIN's backends declare, and those that come by value or by address."""
    include = include_of(version)
    files = sorted((include / GDAKI).glob("*.h"))
    assert len(files) == 2
    of_nics = {name for file in files for name in structures_in(file.read_text())}
    assert len(of_nics) >= 15
    text = "".join(
        f"#include <{name}>\n"
        for name in (
            "stdint.h", "stddef.h", "nccl_device/gin/proxy/gin_proxy_device_host_common.h",
            "nccl_device/impl/comm__types.h", *(f"{GDAKI}/{file.name}" for file in files),
        )
    )  # fmt: skip
    layouts = layouts_of(text, sorted(of_nics | set(OF_NCCL)), [include, HOST])
    same_layouts(tmp_path, headers.read(include), '#include "nccl/device.cuh"\n', layouts)


def structures_in(text: str) -> set[str]:
    """Names of the structures that a header defines at its outermost level."""
    tags = re.findall(r"^struct (\w+) \{", text, re.MULTILINE)
    types = re.findall(r"^\}[^;\n]*?\b(\w+_t);", text, re.MULTILINE)
    return {*tags, *types}
