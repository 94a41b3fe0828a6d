"""The kernel that counts a routing: compiled for GPUs, run on the CPU against what the CPU itself
counts, and when it is chosen. NVRTC needs no GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold import _core
from fanfold.backends.high_throughput import dispatch_layout, kernels, layout, layout_kernel
from fanfold.backends.high_throughput.kernels import LAYOUT_CTAS, Sizes
from fanfold.backends.high_throughput.layout import Layout, layout_there
from fanfold.backends.high_throughput.layout_kernel import LayoutCounter, counter_of
from fanfold.errors import UnavailableError, UsageError
from fanfold.jit import KernelSource
from tests.emulation.optional import Gpu, answering
from tests.emulation.world import Builder
from tests.kernels.routings import routings
from tests.unit.conftest import Compiled
from tests.unit.test_kernels_compile import check, short

GUARD = 64  # bytes behind results, that nothing may write
FEW_WARPS = 2

# The layers that the mode is measured with, and the extremes of what a warp does at a step.
SIZES = [
    Sizes(4, 256, 8), Sizes(4, 512, 22), Sizes(1, 1, 1), Sizes(3, 9, 3), Sizes(6, 1020, 5),
    Sizes(5, 35, 31), Sizes(32, 2048, 1), Sizes(31, 62, 16), Sizes(33, 66, 5),
    Sizes(1024, 2048, 32),
]  # fmt: skip
MORE_SIZES = [
    Sizes(8, 128, 4), Sizes(2, 2, 2), Sizes(8, 1024, 7), Sizes(12, 24, 1), Sizes(32, 2048, 32),
    Sizes(32, 64, 2), Sizes(7, 7, 17), Sizes(72, 288, 8),
]  # fmt: skip


def sizes_id(sizes: Sizes) -> str:
    return f"{sizes.ranks} ranks, top {sizes.top_k} of {sizes.experts}"


# ---- compiling ----------------------------------------------------------------------------------


def sources_of(every: list[Sizes]) -> list[KernelSource]:
    return [kernels.layout_kernel(sizes).source for sizes in every]


@pytest.mark.parametrize(
    "source",
    [
        *sources_of(SIZES),
        *(pytest.param(source, marks=pytest.mark.long) for source in sources_of(MORE_SIZES)),
    ],
    ids=short,
)
def test_for_hopper(compiled: Compiled, source: KernelSource) -> None:
    check(source, compiled(source, "sm_90a"))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_for_other_gpus(compiled: Compiled, arch: str) -> None:
    for source in sources_of([Sizes(4, 256, 8), Sizes(32, 2048, 1)]):
        check(source, compiled(source, arch))


# ---- what it counts -----------------------------------------------------------------------------


def wanted_of(topk_idx: torch.Tensor, sizes: Sizes) -> Layout:
    is_expert = (topk_idx >= 0) & (topk_idx < sizes.experts)
    return dispatch_layout(topk_idx.where(is_expert, -1), sizes.experts, sizes.ranks)


def emulated(library: ctypes.CDLL, topk_idx: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Tokens of ranks, of experts, and of each rank, as bytes, by the kernel."""
    counts = (4 * sizes.ranks, 4 * sizes.experts, len(topk_idx) * sizes.ranks)
    rooms = [torch.full((count + GUARD,), 0xA5, dtype=torch.uint8) for count in counts]
    args = _core.CudaDispatchLayoutArgs()
    args.tokens, args.topk_idx = len(topk_idx), topk_idx.data_ptr()
    args.tokens_per_rank, args.tokens_per_expert, args.is_token_in_rank = (
        room.data_ptr() for room in rooms
    )
    library.emulate(args.address, LAYOUT_CTAS)
    for room, count in zip(rooms, counts, strict=True):
        assert (room[count:] == 0xA5).all(), "bytes behind the results have changed"
    return [room[:count] for room, count in zip(rooms, counts, strict=True)]


def assert_right(library: ctypes.CDLL, topk_idx: torch.Tensor, sizes: Sizes) -> None:
    wanted, got = wanted_of(topk_idx, sizes), emulated(library, topk_idx, sizes)
    for field, mine in zip(fields(wanted), got, strict=True):
        theirs = getattr(wanted, field.name).flatten().view(torch.uint8)
        assert torch.equal(mine, theirs), f"{field.name} of {tuple(topk_idx.shape)}"


@pytest.fixture
def few_warps() -> Iterator[None]:
    with mock.patch.object(kernels, "_LAYOUT_WARPS", FEW_WARPS):
        yield


@pytest.mark.parametrize(
    "sizes",
    [*SIZES, *(pytest.param(sizes, marks=pytest.mark.long) for sizes in MORE_SIZES)],
    ids=sizes_id,
)
def test_as_on_the_cpu(builder: Builder, few_warps: None, sizes: Sizes) -> None:
    kernel = kernels.layout_kernel(sizes)
    library = builder.load(kernel.source)
    # More than all warps take in one turn, by one token and by many.
    turn = 8 * LAYOUT_CTAS * FEW_WARPS * (32 // sizes.top_k)
    for topk_idx in routings(sizes, (0, 1, 7, 130, turn + 1, 3 * turn // 2)):
        assert_right(library, topk_idx, sizes)
    assert 0 < library.dynamic_shared_bytes() <= kernel.shared_bytes


def test_with_all_warps(builder: Builder) -> None:
    sizes = SIZES[0]
    library = builder.load(kernels.layout_kernel(sizes).source)
    for topk_idx in routings(sizes, (1, 1000)):
        assert_right(library, topk_idx, sizes)


@pytest.mark.parametrize("sizes", [*SIZES, *MORE_SIZES], ids=sizes_id)
def test_the_way_without_a_kernel(sizes: Sizes) -> None:
    for topk_idx in routings(sizes, (0, 1, 130)):
        wanted = wanted_of(topk_idx, sizes)
        ours = layout_there(topk_idx, sizes.experts, sizes.ranks)
        for field in fields(wanted):
            assert torch.equal(getattr(ours, field.name), getattr(wanted, field.name))


# ---- when it is chosen --------------------------------------------------------------------------


class Indices:
    """A tensor that says that it is on a GPU."""

    def __init__(self, top_k: int = 8, index: int = 0) -> None:
        self.is_cuda, self.shape, self.device = True, (3, top_k), torch.device("cuda", index)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with answering(layout_kernel._loaded) as gpu:
        yield gpu


def chosen(
    topk_idx: Indices | None = None, experts: int = 256, ranks: int = 4
) -> LayoutCounter | None:
    return counter_of(topk_idx or Indices(), experts, ranks)  # type: ignore[arg-type]


def test_a_kernel_is_loaded_once(gpu: Gpu) -> None:
    first = chosen()
    assert first is not None
    assert chosen() is first
    assert gpu.loaded == [kernels.layout_kernel(Sizes(4, 256, 8)).source]
    assert (first.shape.ctas, first.shape.threads, first.shape.shared_bytes) == (8, 512, 1152)
    others = [chosen(Indices(7)), chosen(experts=512), chosen(ranks=2), chosen(Indices(index=1))]
    assert len({id(one) for one in [first, *others]}) == 5


def test_no_kernel_for_more_than_the_mode_takes(gpu: Gpu) -> None:
    assert chosen(experts=2052) is None
    assert chosen(experts=1025, ranks=1025) is None
    assert counter_of(torch.zeros((3, 8), dtype=torch.int64), 256, 4) is None
    assert gpu.loaded == []
    assert chosen(experts=2048, ranks=1024) is not None


def test_no_kernel_without_compiler_or_hardware(gpu: Gpu) -> None:
    gpu.capturing = True  # the other way does not mind
    gpu.lacking = UnavailableError("no NVRTC")
    assert chosen() is None
    gpu.forget()
    layout_kernel._loaded.clear()
    gpu.lacking, gpu.capability = None, (8, 9)
    assert chosen() is None


def test_a_capture_needs_a_loaded_kernel(gpu: Gpu) -> None:
    gpu.capturing = True
    with pytest.raises(UsageError, match=r"high_throughput/layout\.cu.* not loaded yet"):
        chosen()
    gpu.capturing = False
    assert chosen() is not None
    gpu.capturing = True
    assert chosen() is not None


def test_results_of_a_kernel_are_what_it_fills() -> None:
    """On the CPU, with a kernel that says what it was given."""
    given: list[Any] = []

    class Args:
        def launch(self, *how: Any) -> None:
            given.append((vars(self), how))

    kernel: Any = object()
    shape = _core.CudaLaunch(LAYOUT_CTAS, 512, 1152, early=True)
    with (
        mock.patch.object(layout, "counter_of", return_value=LayoutCounter(kernel, shape)),
        mock.patch.object(_core, "CudaDispatchLayoutArgs", Args),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=77),
    ):
        topk_idx = torch.zeros((5, 2), dtype=torch.int64)
        found = dispatch_layout(topk_idx, 6, 3)
    shapes = [(tuple(value.shape), value.dtype) for value in vars(found).values()]
    assert shapes == [((3,), torch.int32), ((6,), torch.int32), ((5, 3), torch.bool)]
    addresses = {name: value.data_ptr() for name, value in vars(found).items()}
    addresses |= {"tokens": 5, "topk_idx": topk_idx.data_ptr()}
    assert given == [(addresses, (kernel, shape, 77))]
