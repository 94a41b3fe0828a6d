"""Grouped FP8 products on a GPU, against FP64 sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fanfold import UsageError, deep_gemm
from tests.grouped_gemms import Case, call_of, check, difference, random_case, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("hopper")]

# By whether the tensor cores keep sums; with the rounding to bfloat16. 1e-3 is the field's.
LIMIT = {False: 5e-6, True: 5e-5}


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_cases(gpu: torch.device, first: int) -> None:
    for number in range(first, first + 20):
        case = random_case(number)
        assert check(case, gpu) < LIMIT[case.fast], case


LARGE = [
    Case((130, 0, 1, 384, 256, 7, 129, 128) * 2, 4096, 7168),
    Case((512,) * 4, 7168, 2048),
    Case((3000, 0, 0, 1), 512, 8192),
    Case((200, 3), 320, 16384),
    Case((32,) * 16, 4096, 7168, masked=True, most=512),
    Case((130, 0, 1, 384, 256, 7, 129, 128) * 2, 7168, 2048, masked=True, most=384),
    Case((64,) * 32, 2880, 2944, masked=True, most=100),
]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_cases(gpu: torch.device, case: Case, fast: bool) -> None:
    assert check(dataclasses.replace(case, fast=fast), gpu) < LIMIT[fast]


@pytest.mark.parametrize("masked", [False, True])
def test_sums_of_one_sign(gpu: torch.device, masked: bool) -> None:
    """Of terms that all add up the tensor cores lose percents, if they keep the sums."""
    case = Case((128,) * 2, 256, 7168, masked=masked, most=128, seed=1)
    call = call_of(case, gpu)
    for values, _ in (call.a, call.b):
        values.view(torch.uint8).bitwise_and_(0x7F)
    left = call.a[0].double() * call.a[1].double().repeat_interleave(128, dim=-1)
    spread = call.b[1].double().repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    exact = left.view(2, 128, -1) @ (call.b[0].double() * spread).transpose(1, 2)
    found = {}
    for fast in (False, True):
        d = torch.zeros((2, 128, 256), dtype=torch.bfloat16, device=gpu)
        run(dataclasses.replace(case, fast=fast), call, d if masked else d.view(256, 256))
        found[fast] = difference(d.double(), exact)
    assert found[False] < LIMIT[False]
    assert found[True] > 1e-4


@pytest.mark.parametrize("fast", [False, True])
def test_scales_of_zero(gpu: torch.device, fast: bool) -> None:
    case = Case((100,), 256, 512, masked=True, most=128, fast=fast)
    call = call_of(case, gpu)
    call.a[1][:, 50:, 1] = 0
    call.b[1][:, 1] = 0
    left = call.a[0].double() * call.a[1].double().repeat_interleave(128, dim=-1)
    spread = call.b[1].double().repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    exact = left @ (call.b[0].double() * spread).transpose(1, 2)
    d = torch.zeros((1, 128, 256), dtype=torch.bfloat16, device=gpu)
    run(case, call, d)
    assert difference(d[:, :100].double(), exact[:, :100]) < LIMIT[fast]


def test_a_graph_reads_the_rows_of_each_replay(gpu: torch.device) -> None:
    case = Case((5, 70, 0, 128), 320, 512, masked=True, most=128)
    call = call_of(dataclasses.replace(case, rows=(128,) * 4), gpu)
    d = torch.zeros((4, 128, 320), dtype=torch.bfloat16, device=gpu)
    run(case, call, d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, call, d)
    exact = call.exact.view(4, 128, 320)
    for rows in (case.rows, (128, 0, 1, 64), (0,) * 4):
        call.groups.copy_(torch.tensor(rows, dtype=torch.int32))
        d.fill_(-7.0)
        graph.replay()
        for group, count in enumerate(rows):
            assert difference(d[group, :count].double(), exact[group, :count]) < LIMIT[False]
            assert count or bool((d[group] == -7.0).all())


def test_a_kernel_cannot_be_loaded_in_a_capture(gpu: torch.device) -> None:
    case = Case((3,), 704, 384, masked=True, most=3)
    call = call_of(case, gpu)
    d = torch.zeros((1, 3, 704), dtype=torch.bfloat16, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UsageError, match="before the capture"):
        run(case, call, d)


def test_another_current_device_and_stream(gpu: torch.device) -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    case = Case((130, 5), 256, 256)
    call = call_of(case, last)
    d = torch.zeros((*call.used.shape, 256), dtype=torch.bfloat16, device=last)
    torch.cuda.synchronize(last)
    with torch.cuda.stream(torch.cuda.Stream(last)), torch.cuda.device(gpu):
        run(case, call, d)
    torch.cuda.synchronize(last)
    assert difference(d[call.used].double(), call.exact) < LIMIT[False]


def test_indices_that_are_none_are_no_groups(gpu: torch.device) -> None:
    """A kernel reads no weights for them, and writes nothing."""
    call = call_of(Case((128, 128), 64, 128), gpu)
    d = torch.full((call.used.numel(), 64), -7.0, dtype=torch.bfloat16, device=gpu)
    wrong = torch.full_like(call.groups, 2)
    wrong[:128] = -(1 << 31)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(call.a, call.b, d, wrong)
    assert bool((d == -7.0).all())
