"""What ``fanfold/kernels/device`` names, run on a GPU: bulk copies, and conversions against the
host's, bit for bit except in what NaNs look like.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import pytest
import torch

from fanfold import _core
from fanfold.formats import BLOCK, ScaleFormat, quantize
from fanfold.jit import KernelSource, architecture_of
from fanfold.jit.cache import Cache
from fanfold.jit.kernel import compile_in
from tests.gpu.conftest import gpu_count
from tests.kernels.sources import BULK_COPY, CONVERT, PRODUCTS, QUANTISE, kernel_root

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
Launch = Callable[..., None]
"""``launch(source, ctas, format, *fields)``: runs a kernel on one struct of arguments and waits."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    if gpu_count() == 0:
        pytest.skip("no GPU")  # before the folder's own fixture says so
    folder = tmp_path_factory.mktemp("primitives")
    root, cache = kernel_root(folder), Cache(folder / "cache")
    torch.empty(1, device=DEVICE)
    arch = architecture_of(torch.cuda.get_device_capability(DEVICE))

    def run(source: KernelSource, ctas: int, form: str, *fields: int | float) -> None:
        with torch.cuda.device(DEVICE):
            binary = compile_in(root, cache, source, arch)
            kernel = _core.CudaKernel(binary.image, source.entry, binary.symbol)
            packed = struct.pack(form, *fields)
            arguments = ctypes.create_string_buffer(packed, len(packed))
            stream = torch.cuda.current_stream().cuda_stream
            address = ctypes.addressof(arguments)
            kernel.launch(address, len(packed), ctas, source.threads, stream=stream)
            torch.cuda.synchronize()

    return run


# ---- bulk copies --------------------------------------------------------------------------------

CHUNK = dict(BULK_COPY.pairs)["kChunkBytes"]
SECOND = 1_000_000_000


@pytest.fixture
def report() -> torch.Tensor:
    """ArrivalReport: what, CTA, parity, microseconds waited."""
    return torch.zeros(4, dtype=torch.int32, pin_memory=True)


@pytest.fixture
def bulk(launch: Launch) -> Launch:
    if torch.cuda.get_device_capability(DEVICE) < (9, 0):
        pytest.skip("bulk copies need compute capability 9.0")

    def run(
        ctas: int,
        chunks: torch.Tensor,
        out: torch.Tensor,
        report: torch.Tensor,
        missing: int = 0,
        limit_ns: int = 5 * SECOND,
    ) -> None:
        pointers = (chunks.data_ptr(), out.data_ptr(), report.data_ptr())
        launch(BULK_COPY, ctas, "PPPqiI", *pointers, limit_ns, chunks.shape[0], missing)

    return run


# No chunk for a CTA, one, as many as slots, and rings that turn often enough for both parities.
@pytest.mark.parametrize(("ctas", "chunks"), [(4, 1), (1, 1), (1, 2), (1, 3), (1, 37), (132, 5000)])
def test_bulk_copies(bulk: Launch, report: torch.Tensor, ctas: int, chunks: int) -> None:
    generator = torch.Generator().manual_seed(chunks)
    data = torch.randint(0, 256, (chunks, CHUNK), dtype=torch.uint8, generator=generator)
    source = data.to(DEVICE)
    beyond = torch.full((chunks + 1, CHUNK), 7, dtype=torch.uint8, device=DEVICE)
    bulk(ctas, source, beyond[:chunks], report)
    assert report.tolist() == [0, 0, 0, 0]
    assert torch.equal(beyond[:chunks].cpu(), ~data)
    assert (beyond[chunks] == 7).all()
    assert torch.equal(source.cpu(), data)


def test_bytes_that_never_come_are_reported(bulk: Launch, report: torch.Tensor) -> None:
    """The wait ends after its bound, says what it waited for, and the GPU works on."""
    source = torch.zeros((3, CHUNK), dtype=torch.uint8, device=DEVICE)
    out = torch.full((3, CHUNK), 7, dtype=torch.uint8, device=DEVICE)
    bulk(1, source, out, report, missing=16, limit_ns=20_000_000)
    what, cta, parity, waited_us = report.tolist()
    assert (what, cta, parity) == (1, 0, 0)
    assert 20_000 <= waited_us < 2_000_000
    assert (out == 7).all()
    report.zero_()
    bulk(1, source, out, report)
    assert report[0] == 0
    assert (out == 255).all()


# ---- tensor cores -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", PRODUCTS, ids=str)
def test_products(launch: Launch, source: KernelSource) -> None:
    """Every element is where the layout of the accumulators says; the values allow no rounding."""
    if torch.cuda.get_device_capability(DEVICE)[0] != 9:
        pytest.skip("products by warpgroup are Hopper's")
    columns = dict(source.pairs)["kColumns"]
    generator = torch.Generator().manual_seed(columns)
    a, b = (
        torch.randint(-8, 9, (rows, 128), generator=generator).float() for rows in (64, columns)
    )
    operands = [one.to(DEVICE).to(torch.float8_e4m3fn) for one in (a, b)]
    out = torch.full((64, columns), float("nan"), device=DEVICE)
    launch(source, 1, "PPP", *(one.data_ptr() for one in operands), out.data_ptr())
    assert torch.equal(out.cpu(), a @ b.T)


# ---- conversions --------------------------------------------------------------------------------


def _floats() -> torch.Tensor:
    """float32 of every sign and exponent, with fractions around every place where a conversion to
    bfloat16 or e4m3 rounds; the rest drawn."""
    fractions = {0, 1, (1 << 23) - 1}
    for bit in range(23):  # ties of subnormal results are at any bit, after an even or an odd one
        for place in (1 << bit, 3 << bit, 5 << bit):
            fractions |= {place - 1, place, place + 1}
    for kept in (16, 20):  # bits of a fraction that bfloat16 and e4m3 drop
        half = 1 << (kept - 1)
        for high in range(0, 1 << 23, 1 << kept):
            fractions |= {high + low for low in (0, 1, half - 1, half, half + 1, 2 * half - 1)}
    inside = torch.tensor(sorted(one for one in fractions if one < 1 << 23), dtype=torch.int64)
    words = (torch.arange(512).unsqueeze(1) << 23 | inside).flatten()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 1 << 32, (1 << 20,), generator=generator)
    every = torch.cat([words, drawn])
    every = every[: every.numel() // 8 * 8]
    return (every - (every >> 31 << 32)).to(torch.int32).view(torch.float32)


def _assert_same(what: str, ours: torch.Tensor, host: torch.Tensor, of: torch.Tensor) -> None:
    """Equal bits, except that any NaN equals any."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[host.element_size()]
    nan = host.float().isnan()
    wrong = (ours.view(bits) != host.view(bits)) & ~(nan & ours.float().isnan())
    places = wrong.flatten().nonzero().flatten()[:4].tolist()
    shown = [(of.flatten()[i].item(), ours.flatten()[i].item(), host.flatten()[i].item())
             for i in places]  # fmt: skip
    assert not places, f"{what} of {int(wrong.sum())} values, such as (value, GPU, host) {shown}"


class _Converted:
    """What the kernel makes of some values, on the CPU."""

    def __init__(self, launch: Launch, values: torch.Tensor, weight: float) -> None:
        count = values.numel()
        given = values.to(DEVICE)

        def room(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=DEVICE)

        outputs = (room(torch.bfloat16), room(torch.uint8), room(torch.uint8), room(torch.float32),
                   room(torch.bfloat16), room(torch.bfloat16))  # fmt: skip
        pointers = [tensor.data_ptr() for tensor in (given, *outputs)]
        launch(CONVERT, 264, "PPPPPPPfi", *pointers, weight, count)
        self.bf16, self.e4m3, self.by_hand, self.powers, self.weighted, self.unweighted = (
            tensor.cpu() for tensor in outputs
        )


@pytest.fixture(scope="module")
def converted(launch: Launch) -> tuple[torch.Tensor, _Converted]:
    values = _floats()
    return values, _Converted(launch, values, 0.3)


def test_bf16(converted: tuple[torch.Tensor, _Converted]) -> None:
    values, ours = converted
    _assert_same("bfloat16", ours.bf16, values.bfloat16(), values)


def test_no_conversion_gives_an_absent_word(converted: tuple[torch.Tensor, _Converted]) -> None:
    """The kernels rest on it: NaNs that rounding makes are positive."""
    values, ours = converted
    nan = values.isnan()
    assert nan.any()
    assert (ours.bf16[nan].view(torch.int16) == 0x7FFF).all()
    assert (ours.e4m3[nan] == 0x7F).all()
    assert (ours.by_hand[nan] == 0x7F).all()


@pytest.mark.parametrize("way", ["e4m3", "by_hand"])
def test_e4m3(converted: tuple[torch.Tensor, _Converted], way: str) -> None:
    values, ours = converted
    host = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)  # saturating; NaN stays
    _assert_same(way, getattr(ours, way).view(torch.float8_e4m3fn), host, values)


def test_powers_of_two(converted: tuple[torch.Tensor, _Converted]) -> None:
    values, ours = converted
    normal = (values >= 2.0**-126) & (values <= 2.0**127)
    mantissa, exponent = torch.frexp(values[normal].double())
    exact = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).float()
    _assert_same("powers of two", ours.powers[normal], exact, values[normal])


@pytest.mark.parametrize("weight", [0.3, -1.0, 3e38, 1e-40])
def test_weighted_sums_round_their_products(launch: Launch, weight: float) -> None:
    """All bfloat16 values, each product rounded before it is added; subnormals are kept."""
    bits = torch.arange(65536)
    values = (bits - (bits >> 15 << 16)).to(torch.int16).view(torch.bfloat16).float()
    ours = _Converted(launch, values, weight)
    host = (1.0 + values * torch.tensor(weight)).bfloat16()
    _assert_same("1 + weight * value", ours.weighted, host, values)
    _assert_same("1 + value", ours.unweighted, (1.0 + values).bfloat16(), values)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
def test_quantised_rows(launch: Launch, power_of_two: bool, shuffled: bool) -> None:
    """All bfloat16 values: in order, so that a block has values of one size; and mixed."""
    bits = torch.arange(65536)
    if shuffled:
        finite = (bits & 0x7F80) != 0x7F80
        order = torch.randperm(65536, generator=torch.Generator().manual_seed(1))
        bits = torch.where(finite, bits, 0)[order]
    rows = (bits - (bits >> 15 << 16)).to(torch.int16).view(torch.bfloat16).view(-1, BLOCK)
    kind = ScaleFormat.POWER_OF_TWO if power_of_two else ScaleFormat.FLOAT32
    values, scales = quantize(rows.contiguous(), kind)
    given = rows.to(DEVICE)
    ours = torch.zeros(rows.shape, dtype=torch.uint8, device=DEVICE)
    our_scales = torch.zeros(scales.shape, device=DEVICE)
    exponents = torch.zeros(scales.shape, dtype=torch.int32, device=DEVICE)
    pointers = [tensor.data_ptr() for tensor in (given, ours, our_scales, exponents)]
    launch(QUANTISE, 32, "PPPPii", *pointers, rows.shape[0], int(power_of_two))
    _assert_same("scales", our_scales.cpu(), scales, scales)
    _assert_same("values", ours.cpu().view(torch.float8_e4m3fn), values, rows)
    if power_of_two:
        assert torch.equal(exponents.cpu(), scales.view(torch.int32) >> 23)
