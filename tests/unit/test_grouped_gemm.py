"""Grouped FP8 products under DeepGEMM's names, on CPUs; that their kernels can be compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fanfold import ArgumentError, deep_gemm, jit
from fanfold.formats import dequantize, quantize
from fanfold.grouped_gemm import MOST_DEPTH, Kind
from fanfold.jit.yields import with_yields
from tests.grouped_gemms import Case, call_of, check, difference, random_case, run

CPU = torch.device("cpu")
ROUNDING = 3e-6  # of results to bfloat16


@pytest.mark.parametrize("number", range(12))
def test_random_cases(number: int) -> None:
    assert check(random_case(number), CPU) < ROUNDING


def test_a_wrong_scale_is_seen() -> None:
    """The measure that all rests on tells a scale of the neighbouring block from the right one."""
    case = Case((130, 5), columns=192, depth=256)
    assert check(case, CPU) < ROUNDING
    right = torch.Tensor.repeat_interleave

    def wrong(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return right(self.roll(1, -1) if self.dtype is torch.float32 else self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "repeat_interleave", wrong)
        assert check(case, CPU) > 1e-3


def test_rows_that_quantize_has_made() -> None:
    x = torch.randn(128, 256, dtype=torch.float32).bfloat16()
    weights = torch.ones(1, 64, 256).to(torch.float8_e4m3fn), torch.ones(1, 1, 2)
    d = torch.empty(128, 64, dtype=torch.bfloat16)
    groups = torch.zeros(128, dtype=torch.int32)
    rows = quantize(x)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(rows, weights, d, groups)
    sums = dequantize(*rows).sum(1, keepdim=True).expand(128, 64)
    assert difference(d.double(), sums.double()) < ROUNDING


@pytest.mark.parametrize("masked", [False, True])
def test_compiled(masked: bool) -> None:
    case = Case((3, 64), 64, 128, masked=masked, most=64)
    call = call_of(case, CPU)
    d = torch.zeros((*call.used.shape, 64), dtype=torch.bfloat16)

    def doubled(d: torch.Tensor) -> torch.Tensor:
        run(case, call, d)
        return 2 * d

    compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)(d)
    assert difference(d[call.used].double(), call.exact) < ROUNDING
    assert torch.equal(compiled, 2 * d)


def _contiguous(**changes: Any) -> None:
    given: dict[str, Any] = {
        "rows": torch.zeros(128, 256).to(torch.float8_e4m3fn),
        "scales": torch.zeros(128, 2),
        "weights": torch.zeros(2, 64, 256).to(torch.float8_e4m3fn),
        "weight_scales": torch.zeros(2, 1, 2),
        "d": torch.zeros(128, 64, dtype=torch.bfloat16),
        "m_indices": torch.zeros(128, dtype=torch.int32),
        "options": {},
    }
    assert changes.keys() <= given.keys()
    given |= changes
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (given["rows"], given["scales"]), (given["weights"], given["weight_scales"]),
        given["d"], given["m_indices"], **given["options"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(128, 256)}, r"a\[0\].dtype is torch.float32"),
        ({"rows": torch.zeros(128, 128).to(torch.float8_e4m3fn)}, r"must be \(M, 256\)"),
        ({"scales": torch.zeros(128, 3)}, r"a\[1\].shape is \(128, 3\), but must be \(128, 2\)"),
        ({"weights": torch.zeros(2, 60, 256).to(torch.float8_e4m3fn)}, "60, but must be a mult"),
        ({"weights": torch.zeros(2, 64, 200).to(torch.float8_e4m3fn)}, "200, but must be a mult"),
        ({"weights": torch.zeros(2, 64, 16512).to(torch.float8_e4m3fn)}, "up to 16384"),
        ({"weights": torch.zeros(0, 64, 256).to(torch.float8_e4m3fn)}, "at least 1 group"),
        ({"weight_scales": torch.zeros(2, 2, 2)}, r"b\[1\].shape is \(2, 2, 2\)"),
        ({"d": torch.zeros(128, 64)}, "d.dtype is torch.float32"),
        ({"d": torch.zeros(127, 64, dtype=torch.bfloat16)}, r"d.shape is \(127, 64\)"),
        ({"m_indices": torch.zeros(128, dtype=torch.int64)}, "m_indices.dtype is torch.int64"),
        ({"options": {"recipe": (1, 1, 128)}}, "recipe is"),
        ({"options": {"compiled_dims": "x"}}, "compiled_dims is 'x'"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    _contiguous()
    with pytest.raises(ArgumentError, match=message):
        _contiguous(**changes)


def test_refused_in_the_masked_form() -> None:
    rows = torch.zeros(2, 4, 128).to(torch.float8_e4m3fn), torch.zeros(2, 4, 1)
    weights = torch.zeros(2, 64, 128).to(torch.float8_e4m3fn), torch.zeros(2, 1, 1)
    d, counts = torch.zeros(2, 4, 64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    call = deep_gemm.m_grouped_fp8_gemm_nt_masked
    call(rows, weights, d, counts, 1)
    with pytest.raises(ArgumentError, match="expected_m is -1"):
        call(rows, weights, d, counts, -1)
    with pytest.raises(ArgumentError, match=r"masked_m.shape is \(1,\), but must be \(2,\)"):
        call(rows, weights, d, counts[:1], 1)
    with pytest.raises(ArgumentError, match=r"a\[0\].shape is \(1, 4, 128\)"):
        call((rows[0][:1], rows[1]), weights, d, counts, 1)
    with pytest.raises(ArgumentError, match="a pair of e4m3 values"):
        call(rows[0], weights, d, counts, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (8, 1), (1, 4), (3, 1, 2), (0, 2)])
def test_scales_as_kernels_read_them(shape: tuple[int, ...]) -> None:
    scales = torch.rand(shape, dtype=torch.float32)
    made = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    assert torch.equal(made, scales)
    assert deep_gemm.get_mn_major_tma_aligned_tensor(made).data_ptr() == made.data_ptr()
    if shape[-2] > 1:
        assert made.stride(-2) == 1
    if shape[-1] > 1:
        assert made.stride(-1) == deep_gemm.get_tma_aligned_size(shape[-2], 4)


SIZES = [
    (4096, 7168, 64),
    (7168, 2048, 64),
    (64, 128, 1),
    (320, 8192, 3),
    (2880, 2880 // 128 * 128, 5),
]


@pytest.mark.parametrize(
    ("masked", "few", "fast"),
    [
        (False, False, False),
        (False, False, True),
        (True, False, False),
        (True, False, True),
        (True, True, False),
    ],
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_compile_without_spills(
    sizes: tuple[int, int, int], masked: bool, few: bool, fast: bool
) -> None:
    source = Kind(*sizes, masked, few, fast).source
    binary = jit.compile(source)
    assert (binary.spill_bytes, binary.stack_bytes) == (0, 0)
    # ptxas says so where it has to wait for each product.
    assert "wgmma" not in binary.log.lower()
    plain = jit.compile(dataclasses.replace(source, yields=False))
    patched, changed = with_yields(plain.image)
    assert patched == binary.image
    assert changed > 60 if fast else changed == 0  # sums in two levels have no FMULs


@pytest.mark.parametrize(("few", "fast"), [(False, False), (False, True), (True, False)])
def test_the_deepest_kernels_wait_for_no_single_product(few: bool, fast: bool) -> None:
    """One of them spills 20 bytes, none of them accumulators."""
    binary = jit.compile(Kind(4096, MOST_DEPTH, 8, True, few, fast).source)
    assert binary.spill_bytes < 64
    assert "wgmma" not in binary.log.lower()


def test_multiplications_that_yield() -> None:
    """All but the first, the last and every second of a run, and nothing else, also in a file in
    which code begins on 8 bytes."""
    word = (0x7220).to_bytes(8, "little")
    hints = ((0xF << 58) | (1 << 45) | 0x123).to_bytes(8, "little")
    other = (0x7221).to_bytes(8, "little") + hints
    run = (word + hints) * 25
    image = other * 3 + run + other * 8 + (word + hints) * 23 + other
    for ahead in (b"", b"12345678"):
        patched, changed = with_yields(ahead + image)
        assert changed == 12
        expected = bytearray(ahead + image)
        for place in range(1, 24, 2):
            at = len(ahead) + 16 * (3 + place) + 8
            expected[at : at + 8] = (0x123).to_bytes(8, "little")
        assert patched == bytes(expected)
