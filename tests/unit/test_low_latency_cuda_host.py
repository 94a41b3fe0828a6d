"""The CPU's side of low latency on GPUs: what it allocates, refuses and launches, with tensors of
the CPU and kernels that only write down their arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fanfold import _core
from fanfold.backends.allocator import Allocator
from fanfold.backends.low_latency import CudaRouting, LateRouting, Statistics
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import RowFormat, ScaleFormat
from tests.emulation.launches import (
    CAPACITY,
    CPU,
    GEOMETRY,
    LOCAL,
    WHOLE,
    Gpu,
    open_mode,
    outputs,
    stand_in,
    tokens,
)


@pytest.fixture(params=[True, False], ids=["fast path", "no fast path"])
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gpu:
    return stand_in(monkeypatch, fast_path=request.param)


# ---- what is allocated --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row_format", "scale_format", "dtype", "columns"),
    [
        (RowFormat.BF16, ScaleFormat.FLOAT32, torch.bfloat16, 0),
        (RowFormat.FP8, ScaleFormat.FLOAT32, torch.float8_e4m3fn, 2),
        (RowFormat.FP8, ScaleFormat.UE8M0, torch.float8_e4m3fn, 1),
    ],
)
def test_outputs(
    gpu: Gpu, row_format: RowFormat, scale_format: ScaleFormat, dtype: torch.dtype, columns: int
) -> None:
    mode = open_mode()
    got, hook = mode.dispatch(GEOMETRY, *tokens(), formats=(row_format, scale_format))
    assert hook is None
    assert (got.tokens.shape, got.tokens.dtype) == ((LOCAL, CAPACITY, 256), dtype)
    assert got.tokens.is_contiguous()
    assert (got.counts.shape, got.counts.dtype) == ((LOCAL,), torch.int32)
    assert got.row_weights is not None
    assert (got.row_weights.shape, got.row_weights.dtype) == ((LOCAL, CAPACITY), torch.float32)
    if columns:
        assert got.scales is not None
        assert got.scales.shape == (LOCAL, CAPACITY, columns)
        assert got.scales.stride() == (columns * CAPACITY, 1, CAPACITY)
        assert got.scales.dtype == scale_format.dtype
        assert gpu.last.scales == got.scales.data_ptr()
    else:
        assert got.scales is None
    assert (gpu.last.rows, gpu.last.tokens) == (got.tokens.data_ptr(), 5)
    assert gpu.last.counts == got.counts.data_ptr()
    assert gpu.last.row_weights == got.row_weights.data_ptr()


def test_nvfp4_outputs(gpu: Gpu) -> None:
    mode = open_mode()
    formats = (RowFormat.NVFP4, ScaleFormat.FLOAT32)
    for shape in ((), (1,)):
        scale = torch.full(shape, 3.0)
        got, _ = mode.dispatch(GEOMETRY, *tokens(), formats=formats, global_scale=scale)
        assert (got.tokens.shape, got.tokens.dtype) == ((LOCAL, CAPACITY, 128), torch.uint8)
        assert got.scales is not None
        assert got.scales.shape == (LOCAL, -(-CAPACITY // 128), 4, 32, 4, 4)
        assert got.scales.is_contiguous()
        assert got.scales.dtype == torch.float8_e4m3fn
        assert gpu.last.rows == got.tokens.data_ptr()
        assert gpu.last.scales == got.scales.data_ptr()
        assert gpu.last.global_scale == scale.data_ptr()


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (None, "global_scale"),
        (torch.ones(2), "global_scale.shape"),
        (torch.ones(0), "global_scale.shape"),
        (torch.ones((), dtype=torch.float64), "global_scale.dtype"),
        (torch.ones((), device="meta"), "global_scale.device"),
        (3.0, "global_scale"),
    ],
    ids=str,
)
def test_bad_global_scales(gpu: Gpu, scale: Any, name: str) -> None:
    mode = open_mode()
    with pytest.raises(ArgumentError) as raised:
        mode.dispatch(
            GEOMETRY, *tokens(), formats=(RowFormat.NVFP4, ScaleFormat.FLOAT32), global_scale=scale
        )
    assert raised.value.argument == name
    assert gpu.last.refused


def test_a_global_scale_of_other_rows(gpu: Gpu) -> None:
    mode = open_mode()
    with pytest.raises(ArgumentError, match="only nvfp4 rows"):
        mode.dispatch(GEOMETRY, *tokens(), global_scale=torch.ones(1))
    assert gpu.last.refused


def test_views_of_the_routing_are_where_the_kernel_writes(gpu: Gpu) -> None:
    got, _ = open_mode().dispatch(GEOMETRY, *tokens())
    routing = got.routing
    assert isinstance(routing, CudaRouting)
    assert (routing.ranges.shape, routing.ranges.dtype) == ((LOCAL, 4), torch.int64)
    assert (routing.source_tokens.shape, routing.source_tokens.dtype) == (
        (LOCAL, CAPACITY),
        torch.int32,
    )
    args = gpu.last
    assert args.ranges == routing.ranges.data_ptr()
    assert args.source_tokens == routing.source_tokens.data_ptr()
    table = args.table - routing.block.data_ptr()
    core = _core.LowLatencyGeometry(4, 8, 2, 256, 6)
    assert args.table % 256 == routing.block.data_ptr() % 256
    assert routing.ranges.nbytes <= table
    assert table + _core.cuda_table_bytes(core) <= args.source_tokens - routing.block.data_ptr()
    assert got.row_weights is not None
    assert args.source_tokens + routing.source_tokens.nbytes <= args.row_weights
    assert args.row_weights == got.row_weights.data_ptr()
    assert args.row_weights % 256 == routing.block.data_ptr() % 256
    end = args.row_weights + got.row_weights.nbytes
    assert end == routing.block.data_ptr() + routing.block.nbytes
    assert got.row_weights is got.row_weights
    got.row_weights.fill_(9.0)
    routing.source_tokens.fill_(8)
    routing.ranges.fill_(7)
    assert bool((routing.ranges == 7).all())
    assert bool((routing.source_tokens == 8).all())
    assert bool((got.row_weights == 9.0).all())
    plain = routing.unweighted()
    assert (plain.weighted, plain.block is routing.block) == (False, True)


def test_weights_that_did_not_come_take_no_room(gpu: Gpu) -> None:
    mode = open_mode()
    weighted, plain = (mode.dispatch(GEOMETRY, *tokens()[:count])[0] for count in (3, 2))
    assert isinstance(weighted.routing, CudaRouting)
    assert isinstance(plain.routing, CudaRouting)
    assert plain.row_weights is None
    assert gpu.last.row_weights == 0
    end = plain.routing.block.data_ptr() + plain.routing.block.nbytes
    assert plain.routing.source_tokens.data_ptr() + plain.routing.source_tokens.nbytes <= end
    assert plain.routing.block.nbytes + 4 * LOCAL * CAPACITY == weighted.routing.block.nbytes
    late, _ = open_mode(late=True).dispatch(GEOMETRY, *tokens())
    assert late.row_weights is not None
    assert gpu.last.row_weights == late.row_weights.data_ptr()


def test_with_late_weights_the_routing_is_the_handle(gpu: Gpu) -> None:
    got, _ = open_mode(late=True).dispatch(GEOMETRY, *tokens()[:2])
    assert isinstance(got.routing, LateRouting)
    assert got.row_weights is None
    assert got.routing.ranges.shape == (LOCAL, 4)
    assert got.routing.source_tokens.shape == (LOCAL, CAPACITY)
    assert gpu.last.ranges == got.routing.ranges.data_ptr()
    assert gpu.last.source_tokens == got.routing.source_tokens.data_ptr()
    assert gpu.last.table == 0


def test_every_call_has_tensors_of_its_own(gpu: Gpu) -> None:
    mode = open_mode()
    first, second = (mode.dispatch(GEOMETRY, *tokens())[0] for _ in range(2))
    assert isinstance(first.routing, CudaRouting)
    assert isinstance(second.routing, CudaRouting)
    for name in ("tokens", "counts", "row_weights"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()
    assert first.routing.block.data_ptr() != second.routing.block.data_ptr()


@pytest.mark.parametrize("shape", [(3, 0, 8), (1, 4, 1), (1, 1, 1), (2, 5, 3)])
def test_both_ways_to_allocate(gpu: Gpu, shape: tuple[int, int, int]) -> None:
    allocator = Allocator(CPU)
    strides = (shape[1] * shape[2], 1, max(shape[1], 1))
    made = []
    for gpu.device in (None, 1):
        made.append(allocator.empty()(shape, strides, torch.float32))
    short, long = made
    assert (short.shape, short.stride(), short.dtype) == (long.shape, long.stride(), long.dtype)
    gpu.device = None
    allocator._short = None
    assert allocator.empty()(shape, strides, torch.int64).stride() == long.stride()


# ---- what is refused ----------------------------------------------------------------------------


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins 2 bytes behind a 16-byte boundary."""
    room = torch.zeros(tensor.numel() + 16, dtype=torch.bfloat16)
    begin = -room.data_ptr() % 16 // 2 + 1
    return room[begin : begin + tensor.numel()].view(tensor.shape)


SHARED = outputs()
WIDE = torch.zeros((LOCAL, CAPACITY, 264), dtype=torch.bfloat16)
UNEVEN = torch.zeros((LOCAL, CAPACITY, 260), dtype=torch.bfloat16)[..., :256]
IN_WIDE = WIDE[1].flatten()[: 5 * 256].view(5, 256)


def _wrong_dispatches() -> list[tuple[str, Any]]:
    x, idx, weights = tokens()
    return [
        ("x is a list", ([], idx, weights)),
        ("x is None", (None, idx, weights)),
        ("x.dtype", (x.float(), idx, weights)),
        ("x.shape", (x[:, :128].contiguous(), idx, weights)),
        ("x.shape", (x[0], idx, weights)),
        ("x.shape", (x[:4, :2].contiguous(), idx[:4], weights[:4])),
        ("topk_idx.shape", (x, idx.repeat(1, 128), weights)),
        ("x.stride", (x.t().contiguous().t(), idx, weights)),
        (r"x.shape\[0\] is 7, .* at most max_tokens = 6", tokens(7)),
        ("topk_idx is None", (x, None, weights)),
        ("topk_idx.dtype", (x, idx.int(), weights)),
        ("topk_idx.shape", (x, idx[:4], weights)),
        ("topk_weights.shape", (x, idx, weights[:4])),
        ("topk_weights.dtype", (x, idx, weights.double())),
        ("x.device is meta", (x.to("meta"), idx, weights)),
        ("x.layout is torch.sparse_coo", (x.to_sparse(), idx, weights)),
        ("topk_idx.layout", (x, idx.to_sparse(), weights)),
    ]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("message", "call"), _wrong_dispatches())
def test_a_bad_dispatch_is_refused_and_told(gpu: Gpu, message: str, call: Any, late: bool) -> None:
    mode = open_mode(late=late)
    for _ in range(2):
        mode.dispatch(GEOMETRY, *tokens())
        with pytest.raises(ArgumentError, match=message):
            mode.dispatch(GEOMETRY, *call)
        assert (gpu.last.refused, gpu.last.tokens, gpu.last.rows) == (True, 0, 0)
        assert gpu.last.phases == WHOLE
    mode.dispatch(GEOMETRY, *tokens())
    assert not gpu.last.refused


def test_statistics_are_checked_told_and_forgotten(gpu: Gpu) -> None:
    mode, totals = open_mode(), torch.zeros(LOCAL, dtype=torch.int32)
    waits = torch.zeros(4, dtype=torch.int64)
    mode.dispatch(GEOMETRY, *tokens(), statistics=Statistics(totals, waits))
    assert (gpu.last.expert_totals, gpu.last.wait_ns) == (totals.data_ptr(), waits.data_ptr())
    mode.dispatch(GEOMETRY, *tokens())
    assert (gpu.last.expert_totals, gpu.last.wait_ns) == (0, 0)
    with pytest.raises(ArgumentError, match=r"wait_ns.shape"):
        mode.dispatch(GEOMETRY, *tokens(), statistics=Statistics(totals, waits[:2]))
    assert gpu.last.refused


def test_a_refusal_adds_to_nothing(gpu: Gpu) -> None:
    mode, waits = open_mode(), torch.zeros(4, dtype=torch.int64)
    x, idx, _ = tokens()
    got, _ = mode.dispatch(GEOMETRY, x, idx, statistics=Statistics(wait_ns=waits))
    mode.refuse_dispatch(ValueError())
    assert (gpu.last.refused, gpu.last.expert_totals, gpu.last.wait_ns) == (True, 0, 0)
    mode.combine(GEOMETRY, outputs(), got.routing, None, wait_ns=waits)
    assert gpu.last.wait_ns == waits.data_ptr()
    for logfmt in (False, True):
        mode.combine(GEOMETRY, outputs(), got.routing, None, wait_ns=waits, logfmt=logfmt)
        mode.refuse_combine(ValueError())
        assert (gpu.last.refused, gpu.last.wait_ns) == (True, 0)


def test_a_refusal_after_a_hook_is_a_whole_call(gpu: Gpu) -> None:
    mode = open_mode()
    _, hook = mode.dispatch(GEOMETRY, *tokens()[:2], return_hook=True)
    assert hook is not None
    hook()
    mode.refuse_dispatch(ValueError())
    assert gpu.last.phases == WHOLE


@pytest.mark.parametrize(
    ("message", "y", "rest"),
    [
        ("y.dtype", outputs().float(), {}),
        ("y.shape", outputs()[:, :4], {}),
        (r"y.stride\(\)", outputs().mT.contiguous().mT, {}),
        ("16-byte", torch.zeros((LOCAL, CAPACITY, 257), dtype=torch.bfloat16)[..., 1:], {}),
        ("out.shape", outputs(), {"out": torch.zeros((4, 256), dtype=torch.bfloat16)}),
        ("out.dtype", outputs(), {"out": torch.zeros((5, 256))}),
        ("wait_ns.dtype", outputs(), {"wait_ns": torch.zeros(4, dtype=torch.int32)}),
        (r"y.data_ptr\(\)", _shifted(outputs()), {}),
        (r"y.stride\(\)", UNEVEN, {}),
        (r"out.data_ptr\(\)", outputs(), {"out": _shifted(outputs()[0, :5])}),
        ("out is .* y has row 3 of expert 1", SHARED, {"out": SHARED[1, 3:8]}),
        ("out is .* y has row 0 of expert 1", WIDE[..., :256], {"out": IN_WIDE}),
    ],
)
def test_a_bad_combine_is_refused_and_told(
    gpu: Gpu, message: str, y: torch.Tensor, rest: dict[str, Any]
) -> None:
    mode = open_mode()
    got, _ = mode.dispatch(GEOMETRY, *tokens())
    with pytest.raises(ArgumentError, match=message):
        mode.combine(GEOMETRY, y, got.routing, None, **rest)
    assert (gpu.last.refused, gpu.last.tokens, gpu.last.out) == (True, 5, 0)
    assert isinstance(got.routing, CudaRouting)
    assert gpu.last.table > got.routing.block.data_ptr()


def test_a_routing_of_another_mode_is_refused(gpu: Gpu) -> None:
    mode, late = open_mode(), open_mode(late=True)
    (x, idx, weights), y = tokens(), outputs()
    got, _ = mode.dispatch(GEOMETRY, x, idx, weights)
    left, _ = late.dispatch(GEOMETRY, x, idx)
    assert isinstance(got.routing, CudaRouting)
    for routing, brought in ((left.routing, None), (got.routing, weights), (None, None)):
        with pytest.raises(UsageError, match="weights come with dispatch"):
            mode.combine(GEOMETRY, y, routing, idx, late_weights=brought)  # type: ignore[arg-type]
        # Somebody must take the rows that the peers send.
        assert (gpu.last.refused, gpu.last.tokens, gpu.last.ranges) == (True, 5, 0)
        assert gpu.last.table > got.routing.block.data_ptr()
    layout = dataclasses.replace(got.routing.layout, table_at=0)
    with pytest.raises(ArgumentError, match="of another geometry"):
        mode.combine(GEOMETRY, y, dataclasses.replace(got.routing, layout=layout), None)
    assert gpu.last.refused
    with pytest.raises(ArgumentError, match="of a dispatch with weights"):
        late.combine(GEOMETRY, y, got.routing, idx, late_weights=weights)
    assert (gpu.last.refused, gpu.last.tokens) == (True, 0)


def test_where_tensors_must_be_is_said_first(gpu: Gpu) -> None:
    asked = []

    def check_devices(**tensors: object) -> None:
        asked.append(sorted(tensors))
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in tensors.values()):
            raise ArgumentError("x.device", "elsewhere", "here")

    mode = open_mode(check_devices=check_devices)
    x, idx, weights = tokens()
    mode.dispatch(GEOMETRY, x, idx, weights)
    asked.clear()
    with pytest.raises(ArgumentError, match="elsewhere"):
        mode.dispatch(GEOMETRY, x.to("meta"), idx, weights)
    assert asked == [["topk_idx", "topk_weights", "x"]]
    assert gpu.last.refused


# ---- what is taken ------------------------------------------------------------------------------


def test_what_the_fast_path_does_not_accept_is_taken_all_the_same(gpu: Gpu) -> None:
    mode = open_mode()
    x, idx, weights = tokens()
    parameter = torch.nn.Parameter(x)
    for given in (parameter, x.clone().requires_grad_(), x[:0], x[:1].expand(1, 256)):
        count = given.shape[0]
        got, _ = mode.dispatch(GEOMETRY, given, idx[:count], weights[:count])
        assert (gpu.last.x, gpu.last.tokens) == (given.data_ptr(), count)
        assert not got.tokens.requires_grad
        out, _ = mode.combine(GEOMETRY, outputs(), got.routing, None)
        assert (out.shape, out.dtype, gpu.last.tokens) == ((count, 256), torch.bfloat16, count)


def test_outputs_with_gaps_between_rows(gpu: Gpu) -> None:
    mode = open_mode()
    got, _ = mode.dispatch(GEOMETRY, *tokens())
    wide = torch.zeros((LOCAL, CAPACITY, 264), dtype=torch.bfloat16)[..., :256]
    for y, row in ((wide, 528), (outputs(), 512)):
        out = torch.zeros((5, 256), dtype=torch.bfloat16)
        result, _ = mode.combine(GEOMETRY, y, got.routing, None, out=out)
        assert result is out
        assert (gpu.last.expert_stride, gpu.last.row_stride) == (row * CAPACITY, row)
        assert (gpu.last.y, gpu.last.out) == (y.data_ptr(), out.data_ptr())


def test_a_result_between_rows_of_outputs(gpu: Gpu) -> None:
    mode = open_mode()
    got, _ = mode.dispatch(GEOMETRY, *tokens(1))
    room = torch.zeros((LOCAL, CAPACITY, 512), dtype=torch.bfloat16)
    out, _ = mode.combine(
        GEOMETRY, room[..., :256], got.routing, None, out=room[1, 2, 256:].view(1, 256)
    )
    assert (gpu.last.refused, gpu.last.out, gpu.last.tokens) == (False, out.data_ptr(), 1)


def test_ranges_are_looked_at(gpu: Gpu) -> None:
    mode = open_mode(late=True)
    _, idx, weights = tokens()
    got, _ = mode.dispatch(GEOMETRY, *tokens()[:2])
    wrong, info = torch.zeros((LOCAL, 4), dtype=torch.int32), got.routing.source_tokens
    with pytest.raises(ArgumentError, match=r"ranges.dtype"):
        mode.combine(GEOMETRY, outputs(), LateRouting(wrong, info), idx, late_weights=weights)
    for ranges in (got.routing.ranges, torch.nn.Parameter(got.routing.ranges, False)):
        routing = LateRouting(ranges, info)
        mode.combine(GEOMETRY, outputs(), routing, idx, late_weights=weights)
        assert gpu.last.ranges == got.routing.ranges.data_ptr()


def test_weights_with_combine(gpu: Gpu) -> None:
    mode = open_mode(late=True)
    x, idx, weights = tokens()
    got, _ = mode.dispatch(GEOMETRY, x, idx)
    for count in (5, 0, 3):
        own = idx[:count], weights[:count]
        out, _ = mode.combine(GEOMETRY, outputs(), got.routing, own[0], late_weights=own[1])
        assert (out.shape, gpu.last.tokens) == ((count, 256), count)
        assert gpu.last.topk_weights == own[1].data_ptr()
    for wrong, message in (
        ((idx, None), "topk_weights is None"),
        ((idx, weights[:2]), "topk_weights.shape"),
        ((tokens(7)[1], tokens(7)[2]), "at most max_tokens"),
        ((torch.zeros((2, 256), dtype=torch.int64), weights[:2]), "topk_idx.shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            mode.combine(GEOMETRY, outputs(), got.routing, wrong[0], late_weights=wrong[1])
        assert gpu.last.refused


def test_each_kind_of_call_has_its_own_arguments(gpu: Gpu) -> None:
    mode = open_mode()
    x, idx, weights = tokens()
    for row_format in (RowFormat.BF16, RowFormat.FP8, RowFormat.BF16):
        for given in (weights, None):
            got, _ = mode.dispatch(
                GEOMETRY, x, idx, given, formats=(row_format, ScaleFormat.FLOAT32)
            )
            assert (gpu.last.scales != 0) == (row_format is RowFormat.FP8)
            assert gpu.last.topk_weights == (0 if given is None else given.data_ptr())
            assert (gpu.last.row_weights != 0) == (given is not None)
            for routing in (got.routing, got.routing.unweighted()):
                mode.combine(GEOMETRY, outputs(), routing, None)
                wanted = given is not None and routing is got.routing
                assert bool(gpu.last.weighted) == wanted
