"""Rows quantised on a GPU: the CPU's bytes for any shape, on any stream, in graphs."""

from __future__ import annotations

import functools

import pytest
import torch

from fanfold import formats, quantizing
from fanfold.errors import UsageError
from fanfold.formats import ScaleFormat, quantize
from tests.gpu.conftest import gpu_count
from tests.kernels.rows import HIDDEN, every_bf16, unusual_rows

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
FORMS = list(ScaleFormat)


@pytest.fixture(autouse=True)
def kernel(needs_gpu: None) -> None:
    if torch.cuda.get_device_capability(DEVICE) < (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")


@functools.cache
def has_kernel(hidden: int, form: ScaleFormat) -> bool:
    rows = torch.zeros((1, hidden), dtype=torch.bfloat16, device=DEVICE)
    power_of_two, packed = form is not ScaleFormat.FLOAT32, form is ScaleFormat.UE8M0
    return quantizing.quantizer_of(rows, power_of_two=power_of_two, packed=packed) is not None


def assert_same_bytes(
    ours: tuple[torch.Tensor, torch.Tensor], of_cpu: tuple[torch.Tensor, torch.Tensor]
) -> None:
    for what, got, wanted in zip(("values", "scales"), ours, of_cpu, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        mine, theirs = got.cpu().view(torch.uint8), wanted.view(torch.uint8)
        wrong = (mine != theirs).nonzero()
        shown = [(at.tolist(), int(mine[tuple(at)]), int(theirs[tuple(at)])) for at in wrong[:4]]
        assert len(wrong) == 0, f"{what}: {len(wrong)} bytes, such as (place, GPU, CPU) {shown}"


def check(x: torch.Tensor, form: ScaleFormat) -> None:
    on_gpu = x.to(DEVICE)
    before = on_gpu.clone()
    ours = quantize(on_gpu, form)
    assert ours[0].device == ours[1].device == DEVICE
    assert_same_bytes(ours, quantize(x, form))
    assert torch.equal(on_gpu.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("rows", [0, 1, 7, 130, 4099])
def test_as_on_the_cpu(rows: int, hidden: int, form: ScaleFormat) -> None:
    assert has_kernel(hidden, form)
    check(unusual_rows(rows, hidden, seed=rows), form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", [8, 136, 512, 7168])
def test_every_bf16(hidden: int, form: ScaleFormat) -> None:
    x = every_bf16(hidden)
    check(x, form)
    order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(1))
    mixed = x.flatten()[order]
    check(torch.where(mixed.isfinite(), mixed, torch.zeros_like(mixed)).view_as(x), form)


@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: ScaleFormat) -> None:
    """Every warp takes many segments."""
    check(torch.randn((20011, 2048)).bfloat16(), form)
    check(torch.randn((300007, 24)).bfloat16(), form)


def test_more_than_2_to_the_31_values() -> None:
    hidden, rows, times = 7168, 10_000, 31
    assert rows * times * hidden > 1 << 31
    x = torch.randn((rows, hidden), generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = quantize(x)
    values, scales = quantize(x.to(DEVICE).repeat(times, 1))
    for first in (0, 13 * rows, (times - 1) * rows):
        part = slice(first, first + rows)
        assert_same_bytes((values[part], scales[part]), wanted)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_no_kernel_takes(form: ScaleFormat) -> None:
    """Other numbers of columns, rows with gaps or on another boundary: the same bytes."""
    check(unusual_rows(40, 4), form)
    check(unusual_rows(40, 1020), form)
    x = unusual_rows(40, 1024)
    wide = torch.zeros((40, 1040), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :1024] = x.to(DEVICE)
    assert_same_bytes(quantize(wide[:, :1024], form), quantize(x, form))
    shifted = torch.zeros(40 * 1024 + 1, dtype=torch.bfloat16, device=DEVICE)
    shifted[1:] = x.to(DEVICE).flatten()
    assert_same_bytes(quantize(shifted[1:].view(40, 1024), form), quantize(x, form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", [136, 2880, 7168])
def test_nothing_else_is_written(hidden: int, form: ScaleFormat) -> None:
    assert has_kernel(hidden, form)
    rows, guard = 37, 256
    x = unusual_rows(rows, hidden)
    values, scales = quantize(x, form)
    rooms = [
        torch.full((like.numel() * like.element_size() + guard,), 0xA5, dtype=torch.uint8,
                   device=DEVICE)
        for like in (values, scales)
    ]  # fmt: skip
    power_of_two, packed = form is not ScaleFormat.FLOAT32, form is ScaleFormat.UE8M0
    on_gpu = x.to(DEVICE)
    kernel = quantizing.quantizer_of(on_gpu, power_of_two=power_of_two, packed=packed)
    assert kernel is not None
    kernel.run(on_gpu, *rooms)
    for room, wanted in zip(rooms, (values, scales), strict=True):
        assert torch.equal(room[:-guard].cpu(), wanted.flatten().view(torch.uint8))
        assert (room[-guard:] == 0xA5).all()


def test_rows_that_are_not_there_yet() -> None:
    """The kernel is launched while what makes its input runs, and what reads its results is
    launched while it runs itself."""
    batches = [unusual_rows(500, 1024, seed=seed) for seed in range(8)]
    wanted = [quantize(x) for x in batches]
    given = [x.to(DEVICE) for x in batches]
    quantize(given[0])
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            x = torch.zeros_like(given[0])
            results = []
            for number, rows in enumerate(given):
                if number % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                x.copy_(rows)
                values, scales = quantize(x)
                # The next launch may come early, too, and overwrites nothing that is read here.
                again = quantize(x)
                x.zero_()
                results += [(values, scales), again]
        torch.cuda.synchronize()
        for number, result in enumerate(results):
            assert_same_bytes(result, wanted[number // 2])


@pytest.mark.parametrize("form", FORMS)
def test_graphs(form: ScaleFormat) -> None:
    x = torch.zeros((300, 2880), dtype=torch.bfloat16, device=DEVICE)
    quantize(x, form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = quantize(x, form)
    for seed in range(4):
        rows = unusual_rows(300, 2880, seed=seed)
        x.copy_(rows)
        graph.replay()
        assert_same_bytes(result, quantize(rows, form))


def _quantize_in_a_graph(x: torch.Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.zero_()
        quantize(x)


def test_a_capture_needs_a_loaded_kernel() -> None:
    x = torch.zeros((3, 424), dtype=torch.bfloat16, device=DEVICE)  # as in no other test
    with pytest.raises(UsageError, match="not loaded yet"):
        _quantize_in_a_graph(x)
    check(unusual_rows(3, 424), ScaleFormat.FLOAT32)


def test_another_gpu_than_the_current_one() -> None:
    if gpu_count() < 2:
        pytest.skip("needs two GPUs")
    x = unusual_rows(50, 1024)
    with torch.cuda.device(0):
        assert_same_bytes(quantize(x.to("cuda:1")), quantize(x))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_way_without_a_kernel(power_of_two: bool) -> None:
    x = unusual_rows(60, 1024)
    form = ScaleFormat.POWER_OF_TWO if power_of_two else ScaleFormat.FLOAT32
    ours = formats._quantize_anywhere(x.to(DEVICE), power_of_two)
    assert_same_bytes(ours, quantize(x, form))
