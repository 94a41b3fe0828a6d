"""The kernel that quantises rows: compiled for GPUs, run on the CPU against what the CPU itself
makes of the same rows, bit for bit, and when it is chosen. NVRTC needs no GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from fanfold import _core, quantizing
from fanfold.errors import UnavailableError, UsageError
from fanfold.formats import ScaleFormat, quantize, scale_columns
from fanfold.jit import KernelSource
from fanfold.quantizing import Quantizer, kernel_source, quantizer_of
from tests.emulation.optional import Gpu, answering
from tests.emulation.world import Builder
from tests.kernels.rows import HIDDEN, every_bf16, unusual_rows
from tests.unit.conftest import Compiled
from tests.unit.test_kernels_compile import check, short

GUARD = 64  # bytes behind results, that nothing may write
EVERY_FORM = [512, 136]


def source_of(hidden: int, scale_format: ScaleFormat) -> KernelSource:
    return kernel_source(
        hidden,
        power_of_two=scale_format is not ScaleFormat.FLOAT32,
        packed=scale_format is ScaleFormat.UE8M0,
    )


# ---- compiling ----------------------------------------------------------------------------------

SOURCES = [source_of(hidden, form) for hidden in HIDDEN for form in ScaleFormat]


@pytest.mark.parametrize("source", SOURCES, ids=short)
def test_for_hopper(compiled: Compiled, source: KernelSource) -> None:
    binary = compiled(source, "sm_90a")
    check(source, binary)
    constants = dict(source.pairs)
    of_an_sm = constants["kWarps"] * 32 * constants["kCtasOfAnSm"]
    assert of_an_sm * -(-binary.registers // 8) * 8 <= 65536
    assert of_an_sm <= 1536  # threads of an SM of compute capability 12.0


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
def test_for_other_gpus(compiled: Compiled, arch: str) -> None:
    check(SOURCES[0], compiled(SOURCES[0], arch))


# ---- what it makes ------------------------------------------------------------------------------


def aligned(nbytes: int) -> torch.Tensor:
    """Bytes on a boundary of 16 and no better one, with a guard behind them."""
    room = torch.full((nbytes + GUARD + 32,), 0xA5, dtype=torch.uint8)
    begin = -room.data_ptr() % 32 + 16
    return room[begin : begin + nbytes + GUARD]


def emulated(
    library: ctypes.CDLL, x: torch.Tensor, scale_format: ScaleFormat, ctas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as bytes, by the kernel."""
    tokens, hidden = x.shape
    given = aligned(2 * x.numel())
    given[: 2 * x.numel()] = x.flatten().view(torch.uint8)
    counts = (x.numel(), 4 * tokens * scale_columns(hidden, scale_format))
    values, scales = (aligned(count) for count in counts)
    args = _core.CudaQuantizeArgs()
    args.tokens = tokens
    args.x, args.values, args.scales = given.data_ptr(), values.data_ptr(), scales.data_ptr()
    library.emulate(args.address, ctas)
    for room, count in zip((values, scales), counts, strict=True):
        assert (room[count:] == 0xA5).all(), "bytes behind the results have changed"
    return values[: counts[0]], scales[: counts[1]]


def assert_same_bits(library: ctypes.CDLL, x: torch.Tensor, form: ScaleFormat, ctas: int) -> None:
    values, scales = quantize(x, form)
    got_values, got_scales = emulated(library, x, form, ctas)
    assert torch.equal(got_scales, scales.flatten().view(torch.uint8))
    assert torch.equal(got_values, values.flatten().view(torch.uint8))


def sizes_and_forms() -> Iterator[Any]:
    """``hidden`` and ``form``: each hidden size in one format by default, in the others as long
    tests. Those of :func:`test_every_bf16` are in all."""
    for number, hidden in enumerate(HIDDEN):
        for place, form in enumerate(ScaleFormat):
            by_default = hidden in EVERY_FORM or place == number % len(ScaleFormat)
            yield pytest.param(hidden, form, marks=[] if by_default else [pytest.mark.long])


@pytest.mark.parametrize(("hidden", "form"), list(sizes_and_forms()))
def test_as_on_the_cpu(builder: Builder, hidden: int, form: ScaleFormat) -> None:
    library = builder.load(source_of(hidden, form))
    # With more warps than segments, and with so few that each takes many in turn.
    for rows, ctas in ((1, 2), (29, 1), (40, 3)):
        assert_same_bits(library, unusual_rows(rows, hidden, seed=rows), form, ctas)
    assert_same_bits(library, torch.empty((0, hidden), dtype=torch.bfloat16), form, 1)


@pytest.mark.parametrize("form", list(ScaleFormat))
@pytest.mark.parametrize("hidden", EVERY_FORM)
def test_every_bf16(builder: Builder, hidden: int, form: ScaleFormat) -> None:
    library = builder.load(source_of(hidden, form))
    x = every_bf16(hidden)
    assert_same_bits(library, x, form, 3)
    mixed = x.flatten()[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(2))]
    finite = torch.where(mixed.isfinite(), mixed, torch.zeros_like(mixed)).view_as(x)
    assert_same_bits(library, finite, form, 3)


# ---- when it is chosen --------------------------------------------------------------------------


class Rows:
    """A tensor that says that it is on a GPU."""

    def __init__(self, rows: int = 3, hidden: int = 512, **changes: Any) -> None:
        self.is_cuda, self.dtype, self.shape = True, torch.bfloat16, (rows, hidden)
        self.device = torch.device("cuda", 0)
        self.address, self.whole = 4096, True
        self.__dict__.update(changes)

    def is_contiguous(self) -> bool:
        return self.whole

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with answering(quantizing._loaded) as gpu:
        yield gpu


def chosen(x: Rows) -> Quantizer | None:
    return quantizer_of(x, power_of_two=False, packed=False)  # type: ignore[arg-type]


def test_a_kernel_is_loaded_once(gpu: Gpu) -> None:
    first = chosen(Rows())
    assert first is not None
    assert chosen(Rows(7)) is first
    assert gpu.loaded == [source_of(512, ScaleFormat.FLOAT32)]
    assert first.ctas == 132 * dict(gpu.loaded[0].pairs)["kCtasOfAnSm"]


@pytest.mark.parametrize(
    "rows",
    [
        Rows(hidden=0), Rows(hidden=1028), Rows(address=4104), Rows(whole=False),
        Rows(dtype=torch.float32), Rows(is_cuda=False),
    ],
)  # fmt: skip
def test_other_rows_have_no_kernel(gpu: Gpu, rows: Rows) -> None:
    assert chosen(rows) is None
    assert gpu.loaded == []


def test_no_kernel_without_compiler_or_hardware(gpu: Gpu) -> None:
    gpu.capturing = True  # the other way does not mind
    gpu.lacking = UnavailableError("no NVRTC")
    assert chosen(Rows()) is None
    gpu.forget()
    quantizing._loaded.clear()
    gpu.lacking, gpu.capability = None, (8, 9)
    assert chosen(Rows()) is None


def test_a_capture_needs_a_loaded_kernel(gpu: Gpu) -> None:
    gpu.capturing = True
    with pytest.raises(UsageError, match=r"formats/quantize\.cu.* not loaded yet"):
        chosen(Rows())
    gpu.capturing = False
    assert chosen(Rows()) is not None
    gpu.capturing = True
    assert chosen(Rows()) is not None


def launches_of(rows: int, hidden: int, most: int) -> list[tuple[int, int]]:
    launched: list[tuple[int, int]] = []

    class Args:
        def launch(self, kernel: Any, ctas: int, threads: int, stream: int, early: bool) -> None:
            launched.append((ctas, threads))

    x = torch.zeros((rows, hidden), dtype=torch.bfloat16)
    x_on_gpu: Any = mock.MagicMock(wraps=x, device=torch.device("cuda", 0))
    x_on_gpu.__len__.return_value = rows
    with (
        mock.patch.object(_core, "CudaQuantizeArgs", Args),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0),
    ):
        kernel: Any = None
        Quantizer(kernel, most, hidden).run(x_on_gpu, x, x)
    return launched


def test_no_more_ctas_than_there_is_work() -> None:
    assert launches_of(0, 512, 660) == []
    assert launches_of(1, 512, 660) == [(1, 256)]
    assert launches_of(9, 512, 660) == [(2, 256)]
    assert launches_of(128, 2880, 660) == [(96, 256)]
    assert launches_of(4096, 7168, 660) == [(660, 256)]
