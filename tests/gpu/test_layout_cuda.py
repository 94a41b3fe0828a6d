"""Layouts counted on a GPU: the CPU's bytes for any sizes, on any stream, in graphs."""

from __future__ import annotations

from dataclasses import fields
from unittest import mock

import pytest
import torch

from fanfold.backends.high_throughput import dispatch_layout, layout
from fanfold.backends.high_throughput.kernels import Sizes
from fanfold.backends.high_throughput.layout import Layout, layout_there
from fanfold.backends.high_throughput.layout_kernel import LayoutCounter, counter_of
from fanfold.errors import UsageError
from fanfold.geometry import MAX_TOKENS
from tests.gpu.conftest import gpu_count
from tests.kernels.routings import routings

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
NAMED = Sizes(4, 256, 8)
SIZES = [
    NAMED, Sizes(4, 512, 22), Sizes(8, 128, 4), Sizes(1, 1, 1), Sizes(3, 9, 3), Sizes(6, 1020, 5),
    Sizes(8, 1024, 7), Sizes(5, 35, 31), Sizes(32, 2048, 32), Sizes(32, 2048, 1),
    Sizes(64, 128, 8),
]  # fmt: skip


@pytest.fixture(autouse=True)
def kernel(needs_gpu: None) -> None:
    if torch.cuda.get_device_capability(DEVICE) < (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")


def counter(topk_idx: torch.Tensor, sizes: Sizes) -> LayoutCounter:
    found = counter_of(topk_idx, sizes.experts, sizes.ranks)
    assert found is not None
    return found


def wanted_of(topk_idx: torch.Tensor, sizes: Sizes) -> Layout:
    is_expert = (topk_idx >= 0) & (topk_idx < sizes.experts)
    return dispatch_layout(topk_idx.where(is_expert, -1), sizes.experts, sizes.ranks)


def assert_same(got: Layout, wanted: Layout, device: torch.device = DEVICE) -> None:
    for field in fields(wanted):
        mine, theirs = getattr(got, field.name), getattr(wanted, field.name)
        assert (mine.device, mine.dtype, mine.shape) == (device, theirs.dtype, theirs.shape)
        # As bytes: a bool is 1 or 0.
        wrong = (mine.cpu().view(torch.uint8) != theirs.view(torch.uint8)).nonzero()
        assert len(wrong) == 0, f"{field.name}: {len(wrong)} bytes, such as {wrong[:4].tolist()}"


def check(topk_idx: torch.Tensor, sizes: Sizes) -> None:
    on_gpu = topk_idx.to(DEVICE)
    # The memory of these results is given again: neither zeros nor counts stand there.
    first = dispatch_layout(on_gpu, sizes.experts, sizes.ranks)
    for result in vars(first).values():
        result.view(torch.uint8).fill_(0xA5)
    del first, result
    assert_same(dispatch_layout(on_gpu, sizes.experts, sizes.ranks), wanted_of(topk_idx, sizes))
    assert torch.equal(on_gpu.cpu(), topk_idx)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_as_on_the_cpu(sizes: Sizes) -> None:
    counter(torch.empty((0, sizes.top_k), dtype=torch.int64, device=DEVICE), sizes)
    for topk_idx in routings(sizes, (0, 1, 7, 130, 4096, 20011)):
        check(topk_idx, sizes)


def test_indices_on_no_boundary_of_16_bytes() -> None:
    every = torch.arange(8 * 300 + 1, device=DEVICE) % NAMED.experts
    topk_idx = every[1:].view(300, 8)
    assert topk_idx.data_ptr() % 16 == 8
    assert_same(dispatch_layout(topk_idx, 256, 4), wanted_of(topk_idx.cpu(), NAMED))


def test_as_many_tokens_as_there_may_be() -> None:
    """4 GiB of indices."""
    sizes, times, tokens = Sizes(4, 256, 32), 16, MAX_TOKENS // 16
    topk_idx = torch.randint(sizes.experts, (tokens, sizes.top_k))
    wanted = wanted_of(topk_idx, sizes)
    many = topk_idx.to(DEVICE).repeat(times, 1)
    assert many.nbytes == 1 << 32
    got = dispatch_layout(many, sizes.experts, sizes.ranks)
    assert torch.equal(got.tokens_per_rank.cpu(), times * wanted.tokens_per_rank)
    assert torch.equal(got.tokens_per_expert.cpu(), times * wanted.tokens_per_expert)
    for part in got.is_token_in_rank.cpu().split(tokens):
        assert torch.equal(part, wanted.is_token_in_rank)


def test_sizes_that_no_kernel_takes() -> None:
    for sizes in (Sizes(4, 4096, 8), Sizes(2048, 2048, 8)):
        for topk_idx in routings(sizes, (0, 130)):
            assert counter_of(topk_idx.to(DEVICE), sizes.experts, sizes.ranks) is None
            check(topk_idx, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_way_without_a_kernel(sizes: Sizes) -> None:
    for topk_idx in routings(sizes, (0, 1, 4096)):
        found = layout_there(topk_idx.to(DEVICE), sizes.experts, sizes.ranks)
        assert_same(found, wanted_of(topk_idx, sizes))


@pytest.mark.parametrize("sizes", [NAMED, Sizes(6, 1020, 5)], ids=str)
def test_nothing_else_is_written(sizes: Sizes) -> None:
    guard, tokens = 256, 1003
    (topk_idx, *_) = routings(sizes, (tokens,))
    on_gpu, wanted = topk_idx.to(DEVICE), wanted_of(topk_idx, sizes)
    counts = (4 * sizes.ranks, 4 * sizes.experts, tokens * sizes.ranks)
    rooms = [torch.full((n + guard,), 0xA5, dtype=torch.uint8, device=DEVICE) for n in counts]
    counter(on_gpu, sizes).run(on_gpu, *rooms)
    for room, field in zip(rooms, fields(wanted), strict=True):
        theirs = getattr(wanted, field.name).flatten().view(torch.uint8)
        assert torch.equal(room[:-guard].cpu(), theirs), field.name
        assert (room[-guard:] == 0xA5).all(), field.name


def test_indices_that_are_not_there_yet() -> None:
    """The kernel is launched while what makes its input runs, and what reads its results is
    launched while it runs itself."""
    batches = [next(routings(NAMED, (500 + seed,)))[:500].contiguous() for seed in range(8)]
    wanted = [wanted_of(topk_idx, NAMED) for topk_idx in batches]
    given = [topk_idx.to(DEVICE) for topk_idx in batches]
    dispatch_layout(given[0], 256, 4)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            static = torch.full_like(given[0], -1)
            results = []
            for number, topk_idx in enumerate(given):
                if number % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                static.copy_(topk_idx)
                first = dispatch_layout(static, 256, 4)
                # The next launch may come early, too, and overwrites nothing that is read here.
                again = dispatch_layout(static, 256, 4)
                static.fill_(-1)
                results += [first, again]
        torch.cuda.synchronize()
        for number, result in enumerate(results):
            assert_same(result, wanted[number // 2])


def test_graphs() -> None:
    batches = [next(routings(NAMED, (300 + seed,)))[:300].contiguous() for seed in range(4)]
    static = torch.full((300, 8), -1, device=DEVICE)
    dispatch_layout(static, 256, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), mock.patch.object(layout, "layout_there", None):
        result = dispatch_layout(static, 256, 4)
    for topk_idx in batches:
        static.copy_(topk_idx)
        graph.replay()
        assert_same(result, wanted_of(topk_idx, NAMED))


def _count_in_a_graph(topk_idx: torch.Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        topk_idx.zero_()
        dispatch_layout(topk_idx, 424, 4)


def test_a_capture_needs_a_loaded_kernel() -> None:
    topk_idx = torch.zeros((3, 9), dtype=torch.int64, device=DEVICE)  # as in no other test
    with pytest.raises(UsageError, match="not loaded yet"):
        _count_in_a_graph(topk_idx)
    check(topk_idx.cpu(), Sizes(4, 424, 9))


def test_another_gpu_than_the_current_one() -> None:
    if gpu_count() < 2:
        pytest.skip("needs two GPUs")
    device = torch.device("cuda", 1)
    (topk_idx, *_) = routings(NAMED, (300,))
    with torch.cuda.device(0):
        got = dispatch_layout(topk_idx.to(device), 256, 4)
        assert_same(got, wanted_of(topk_idx, NAMED), device)
        assert torch.cuda.current_device() == 0
