"""High-throughput calls of the DeepEP face on GPUs, bit for bit: the programs and the oracle of the
conformance tests, the host's answers to layers of real size, streams, graphs, gradients, refusals.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.deep_ep import Buffer
from fanfold.deep_ep.handles import GpuHandle
from fanfold.errors import ArgumentError, PeerRefused
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_high_throughput as conformance
from tests.conformance.deep_ep_reference import Case, Inputs, arrivals, inputs
from tests.conformance.test_deep_ep_high_throughput import check_received, lanes, outputs
from tests.gpu.conftest import GpuPools
from tests.gpu.from_host import FromHost, moved
from tests.gpu.support import assert_same, own_device

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]

LATE_CYCLES = 20_000_000  # ten milliseconds


def open_buffer(group: dist.ProcessGroup, nvl_bytes: int = 16 << 20, **changes: Any) -> Buffer:
    """A Buffer whose high throughput runs on the ranks' GPUs."""
    settings = {"FANFOLD_TIMEOUT_S": "30", "FANFOLD_BACKEND": "cuda"}
    with mock.patch.dict(os.environ, settings):
        buffer = Buffer(group, nvl_bytes, explicitly_destroy=True, **changes)
    assert buffer.runtime is not None
    assert isinstance(buffer.runtime.high_throughput, CudaHighThroughput)
    return buffer


def case_of(ranks: int, **changes: Any) -> Case:
    """Other numbers of tokens on each rank, none on one of several."""
    tokens = tuple((60, 33, 0, 47)[rank % 4] for rank in range(ranks))
    sizes = {"experts": 4 * ranks, "top_k": 3, "hidden": 256, "seed": 3}
    return Case(tokens=tokens, **{**sizes, **changes})


def on_gpu(mine: Inputs) -> Inputs:
    device = own_device()
    return Inputs(mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device))


def routing(layout: tuple[Any, ...]) -> dict[str, Any]:
    """What get_dispatch_layout says, as arguments of dispatch."""
    names = (
        "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert",
        "is_token_in_rank",
    )  # fmt: skip
    return dict(zip(names, layout[:4], strict=True))


def dispatch(buffer: Buffer, case: Case, mine: Inputs, **options: Any) -> tuple[Any, ...]:
    """A new routing."""
    layout = buffer.get_dispatch_layout(mine.topk_idx, case.experts)
    return buffer.dispatch(
        mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, **routing(layout), **options
    )


def expert_side(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """What ``outputs`` makes of the rows of ``rank``."""
    return (rows.float() * (0.5 + 0.25 * rank)).to(torch.bfloat16)


def check_combined(
    case: Case, rank: int, combined: torch.Tensor, weights: torch.Tensor | None
) -> None:
    everybody = range(case.ranks)
    y_of = [outputs(case, peer) for peer in everybody]
    assert_same("combined", combined, reference.combined(case, rank, y_of))
    if weights is not None:
        lanes_of = [lanes(case, peer) for peer in everybody]
        assert_same("lanes", weights, reference.combined_lanes(case, rank, lanes_of))


# ---- the programs of the conformance tests ------------------------------------------------------


def open_from_host(*args: Any, **options: Any) -> FromHost:
    return FromHost(open_buffer(*args, **options))


def _conformance(group: dist.ProcessGroup, program: str, *args: Any) -> None:
    ranks = dist.get_world_size(group)
    tokens = conformance.CASE.tokens[:ranks]
    case = dataclasses.replace(conformance.CASE, experts=4 * ranks, tokens=tokens)
    patches = {"open_buffer": open_from_host, "CASE": case}
    with mock.patch.multiple(conformance, **patches):  # type: ignore[arg-type]
        getattr(conformance, program)(group, *args)


@pytest.mark.parametrize("seed", range(8))
def test_against_torch(gpus: GpuPools, ranks: int, seed: int) -> None:
    numbers = random.Random(seed)
    experts = ranks * numbers.randint(1, 6)
    duplicates = numbers.random() < 0.5
    case = Case(
        experts=experts,
        top_k=numbers.randint(1, 32 if duplicates else min(experts, 32)),
        hidden=8 * numbers.choice([2, 3, 16, 17, 130]),
        tokens=tuple(numbers.choice([0, numbers.randint(1, 80)]) for _ in range(ranks)),
        seed=seed,
        duplicates=duplicates,
        unrouted=numbers.choice([0.0, 0.3, 1.0]),
    )
    channels, alignment = numbers.choice([1, 3, 10]), numbers.choice([1, 8, 128])
    gpus.run(ranks, _conformance, "_round_trip", case, 4 << 20, channels, alignment)


@pytest.mark.parametrize("program", ["_without_top_k", "_bias", "_asynchronous"])
def test_conformance(gpus: GpuPools, ranks: int, program: str) -> None:
    gpus.run(ranks, _conformance, program)


@pytest.mark.parametrize("scales", [torch.float32, torch.int32])
@pytest.mark.parametrize("one_byte", [torch.float8_e4m3fn, torch.uint8])
def test_fp8(gpus: GpuPools, ranks: int, scales: torch.dtype, one_byte: torch.dtype) -> None:
    gpus.run(ranks, _conformance, "_fp8", scales, one_byte)


# ---- layers of real size, against the host ------------------------------------------------------


def _against_the_host(group: dist.ProcessGroup, case: Case, fp8: bool) -> None:
    rank, device = dist.get_rank(group), own_device()
    mine = inputs(case, rank)
    x: Any = mine.x
    if fp8:
        values, scales = reference.fp8(mine.x, power_of_two=False)
        x = values, scales if rank % 2 else scales.T.contiguous().T
    with mock.patch.dict(os.environ, {"FANFOLD_BACKEND": "host", "FANFOLD_TIMEOUT_S": "60"}):
        host = Buffer(group, 8 << 20, explicitly_destroy=True)
    buffer = open_buffer(group, 64 << 20)
    want_layout = host.get_dispatch_layout(mine.topk_idx, case.experts)
    layout = buffer.get_dispatch_layout(mine.topk_idx.to(device), case.experts)
    for name, value in routing(want_layout).items():
        if value is not None:
            assert_same(name, routing(layout)[name], value)
    topk = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights, "expert_alignment": 64}
    there = {name: moved(value, device) for name, value in topk.items()}
    want = host.dispatch(x, **routing(want_layout), **topk)
    got = buffer.dispatch(moved(x, device), **routing(layout), **there)
    again = buffer.dispatch(moved(x, device), handle=got[4])
    _assert_rows(got[0], want[0])
    _assert_rows(again[0], want[0])
    assert_same("topk_idx", got[1], want[1])
    assert_same("topk_weights", got[2], want[2])
    assert got[3] == want[3]
    for place, (tensor, wanted) in enumerate(zip(got[4], want[4], strict=True)):
        assert_same(f"handle[{place}]", tensor, wanted)
    generator = torch.Generator().manual_seed(rank)
    y = torch.randn((len(want[1]), case.hidden), generator=generator).bfloat16()
    bias = torch.randn((case.tokens[rank], case.hidden), generator=generator).bfloat16()
    wanted_sums = host.combine(y, want[4], want[2], (bias, bias))
    sums = buffer.combine(y.to(device), got[4], got[2], (bias.to(device), bias.to(device)))
    assert_same("combined", sums[0], wanted_sums[0])
    assert_same("lanes", sums[1], wanted_sums[1])
    buffer.destroy()
    host.destroy()


def _assert_rows(got: Any, want: Any) -> None:
    if isinstance(want, tuple):
        assert got[1].is_contiguous()
        assert_same("scales", got[1], want[1])
        got, want = got[0].view(torch.uint8), want[0].view(torch.uint8)
    assert_same("rows", got, want)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("hidden", [2048, 7168])
def test_layers_against_the_host(gpus: GpuPools, ranks: int, hidden: int, fp8: bool) -> None:
    tokens = (2048, 1000, 0, 1531)[:ranks]
    case = Case(experts=32 * ranks, top_k=8, hidden=hidden, tokens=tokens, duplicates=fp8)
    gpus.run(ranks, _against_the_host, case, fp8)


# ---- a fixed number of rows: no synchronisation, graphs -----------------------------------------


def _worst(group: dist.ProcessGroup, case: Case) -> None:
    rank, worst = dist.get_rank(group), sum(case.tokens) + 5
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group)

    def calls() -> tuple[Any, ...]:
        result = dispatch(buffer, case, mine, num_worst_tokens=worst)
        again = buffer.dispatch(mine.x, handle=result[4])
        y, weights = expert_side(again[0], rank), result[2] * (1 + rank)
        return result, again, buffer.combine(y, result[4], weights)

    calls()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result, again, combined = calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    count = len(arrivals(case, rank).source_rank)
    assert result[3] == []
    assert_same("again", again[0][:count], result[0][:count].cpu())
    check_received(case, rank, moved(result, torch.device("cpu")), worst)
    check_combined(case, rank, *combined[:2])
    _check_worst_handle(case, rank, result[4], worst)
    buffer.destroy()


def _check_worst_handle(case: Case, rank: int, handle: GpuHandle, worst: int) -> None:
    """Of other ranks' rows nobody knows."""
    wanted = [*reference.handle(case, rank, Buffer.num_sms // 2)]
    wanted[0][:, [peer for peer in range(case.ranks) if peer != rank]] = -1
    wanted[2].fill_(-1)
    wanted[3] = torch.nn.functional.pad(wanted[3], (0, worst - len(wanted[3])), value=-1)
    for place, tensor in enumerate(wanted):
        assert_same(f"handle[{place}]", handle[place], tensor)


@pytest.mark.parametrize("duplicates", [False, True])
def test_num_worst_tokens(gpus: GpuPools, ranks: int, duplicates: bool) -> None:
    gpus.run(ranks, _worst, case_of(ranks, duplicates=duplicates))


def _graph(group: dist.ProcessGroup, cases: list[Case], asynchronous: bool) -> None:
    """A whole round in a graph, replayed with other tokens and routings."""
    rank, worst = dist.get_rank(group), sum(cases[0].tokens)
    brought = [on_gpu(inputs(case, rank)) for case in cases]
    static = Inputs(*(value.clone() for value in vars(brought[0]).values()))
    buffer = open_buffer(group)
    options = {"async_finish": asynchronous}

    def waited(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if asynchronous:
            result[-1].current_stream_wait()
        return result

    def calls() -> tuple[Any, ...]:
        layout = waited(
            buffer.get_dispatch_layout(static.topk_idx, cases[0].experts, **options)  # type: ignore[arg-type]
        )
        result = waited(buffer.dispatch(
            static.x, topk_idx=static.topk_idx, topk_weights=static.topk_weights,
            num_worst_tokens=worst, **routing(layout), **options,
        ))  # fmt: skip
        again = waited(buffer.dispatch(static.x, handle=result[4], **options))  # type: ignore[arg-type]
        y, weights = expert_side(again[0], rank), result[2] * (1 + rank)
        return result, again, waited(buffer.combine(y, result[4], weights, **options))  # type: ignore[arg-type]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, _, combined = calls()
    for replay in range(2 * len(cases)):
        chosen = (3 * replay + 1) % len(cases)
        for place, value in vars(static).items():
            value.copy_(vars(brought[chosen])[place])
        if replay % 3 == rank % 3:
            torch.cuda._sleep(LATE_CYCLES // 10)
        graph.replay()
        if replay % 2:
            calls()
        torch.cuda.synchronize()
        check_received(cases[chosen], rank, moved(result, torch.device("cpu")), worst)
        check_combined(cases[chosen], rank, *combined[:2])
        _check_worst_handle(cases[chosen], rank, result[4], worst)
    del graph
    buffer.destroy()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graphs(gpus: GpuPools, ranks: int, asynchronous: bool) -> None:
    cases = [
        case_of(ranks, seed=seed, unrouted=unrouted)
        for seed, unrouted in enumerate((0.2, 0.9, 0.0, 1.0))
    ]
    gpus.run(ranks, _graph, cases, asynchronous)


# ---- streams and events -------------------------------------------------------------------------


def _delayed_streams(group: dist.ProcessGroup, case: Case, worst: int) -> None:
    """The communication stream is behind, then the caller's is; inputs are dropped at once."""
    rank, device = dist.get_rank(group), own_device()
    source = on_gpu(inputs(case, rank))
    buffer = open_buffer(group)
    comm = buffer.get_comm_stream()
    results = []
    for turn in range(6):
        if turn % 2:
            with torch.cuda.stream(comm):
                torch.cuda._sleep(LATE_CYCLES)
        elif turn % 3 == rank % 3:
            torch.cuda._sleep(LATE_CYCLES)
        mine = Inputs(*(value.clone() for value in vars(source).values()))
        previous = Buffer.capture()
        *layout, event = buffer.get_dispatch_layout(
            mine.topk_idx, case.experts, previous, True, turn % 2 == 0
        )
        result = buffer.dispatch(
            mine.x, None, layout[0], layout[1], layout[3], layout[2], mine.topk_idx,
            mine.topk_weights, 1, worst, None, event, True, True,
        )  # fmt: skip
        del mine, layout
        torch.full_like(source.x, torch.nan)  # takes the memory if it is free
        torch.full_like(source.topk_idx, -1)
        result[5].current_stream_wait()
        y, weights = expert_side(result[0], rank), result[2] * (1 + rank)
        combined, summed, done = buffer.combine(
            y, result[4], weights, None, None, Buffer.capture(), True, True
        )
        shape = y.shape
        del y, weights
        torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        with done:  # waits at its end
            torch.cuda._sleep(1000)
        # Ordered behind the wait, on this stream.
        results.append((moved(result[:3], torch.device("cpu")), combined.cpu(), summed.cpu()))
    torch.cuda.synchronize(device)
    buffer.destroy()
    for received, combined, summed in results:
        check_received(case, rank, received, worst)
        check_combined(case, rank, combined, summed)


@pytest.mark.parametrize("fixed", [False, True])
def test_events_order_delayed_streams(gpus: GpuPools, ranks: int, fixed: bool) -> None:
    case = case_of(ranks)
    gpus.run(ranks, _delayed_streams, case, sum(case.tokens) if fixed else 0)


def _beside(group: dist.ProcessGroup, case: Case) -> None:
    """What the caller's stream is given after the event does not keep the call waiting."""
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group)
    # On the communication stream from the first, as each call comes after the one before.
    _, _, _, _, handle, event = dispatch(buffer, case, mine, async_finish=True)
    buffer.dispatch(mine.x, handle=handle, async_finish=True)
    event.current_stream_wait()
    torch.cuda.synchronize()
    dist.barrier(group)
    previous, late = Buffer.capture(), torch.cuda.Event()
    torch.cuda._sleep(100 * LATE_CYCLES)
    late.record()
    event = buffer.dispatch(mine.x, handle=handle, previous_event=previous, async_finish=True)[5]
    buffer.get_comm_stream().synchronize()
    beside = not late.query()
    torch.cuda.synchronize()
    event.current_stream_wait()
    buffer.destroy()
    assert beside


def test_calls_run_beside_later_work(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _beside, case_of(ranks))


# ---- gradients ----------------------------------------------------------------------------------


class _Dispatch(torch.autograd.Function):
    """As Megatron-LM does it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weights: Any, buffer: Buffer, case: Case, idx: Any) -> Any:
        result = dispatch(buffer, case, Inputs(x, idx, weights))
        ctx.buffer, ctx.handle = buffer, result[4]
        ctx.mark_non_differentiable(result[1])
        return result[0], result[1], result[2], result[4]

    @staticmethod
    def backward(ctx: Any, grad_rows: Any, _: Any, grad_weights: Any, __: Any) -> Any:
        grad, weights, _ = ctx.buffer.combine(
            grad_rows.contiguous(), ctx.handle, topk_weights=grad_weights.contiguous()
        )
        return grad, weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Any, buffer: Buffer, handle: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


def _gradients(group: dist.ProcessGroup, case: Case) -> None:
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group)
    x, weights = mine.x.requires_grad_(), mine.topk_weights.requires_grad_()
    rows, lane_idx, row_weights, handle = _Dispatch.apply(x, weights, buffer, case, mine.topk_idx)
    assert isinstance(handle, GpuHandle)
    factors = torch.where(lane_idx >= 0, row_weights, 0.0).sum(1, keepdim=True)
    out = _Combine.apply(rows * factors.bfloat16(), buffer, handle)
    out.float().sum().backward()
    torch.cuda.synchronize()
    buffer.destroy()
    # With y = x * w summed over ranks, dx is the sum of each rank's share of the weights, and dw of
    # a chosen lane the sum of x over columns.
    share = torch.zeros(case.tokens[rank], case.ranks)
    for token, chosen in enumerate(mine.topk_idx.tolist()):
        for place, expert in enumerate(chosen):
            if expert >= 0:
                share[token, expert // case.local] += weights[token, place].item()
    assert x.grad is not None
    assert weights.grad is not None
    wanted = share.bfloat16().float().sum(1, keepdim=True).expand(-1, case.hidden)
    assert torch.allclose(x.grad.cpu().float(), wanted, rtol=2**-6, atol=1e-6)
    sums = mine.x.detach().cpu().float().sum(1, keepdim=True).expand(-1, case.top_k)
    chosen = mine.topk_idx.cpu() >= 0
    scale = mine.x.detach().cpu().float().abs().sum(1, keepdim=True).expand(-1, case.top_k)
    error = (weights.grad.cpu() - torch.where(chosen, sums, 0.0)).abs()
    assert bool((error <= scale * 2**-6).all())


def test_gradients(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _gradients, case_of(ranks))


# ---- refusals, and both modes in one Buffer -----------------------------------------------------


def _works(buffer: Buffer, case: Case, rank: int) -> None:
    mine = on_gpu(inputs(case, rank))
    result = dispatch(buffer, case, mine)
    combined = buffer.combine(
        expert_side(result[0], rank), result[4], topk_weights=result[2] * (1 + rank)
    )
    torch.cuda.synchronize()
    check_received(case, rank, moved(result, torch.device("cpu")))
    check_combined(case, rank, *combined[:2])


def _refused(group: dist.ProcessGroup, case: Case) -> None:
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group)
    for options in ({"expert_alignment": 0}, {"config": 20}, {"previous_event": 3}):
        if rank == 0:
            with pytest.raises(ArgumentError):
                dispatch(buffer, case, mine, **options)
        else:
            with pytest.raises(PeerRefused, match="rank 0"):
                dispatch(buffer, case, mine)
        _works(buffer, case, rank)
    layout = routing(buffer.get_dispatch_layout(mine.topk_idx, case.experts))
    if rank == 0:
        near = mine.topk_weights.cpu()
        with pytest.raises(ArgumentError, match=r"topk_weights.device is cpu, .* cuda"):
            buffer.dispatch(mine.x, topk_idx=mine.topk_idx, topk_weights=near, **layout)
    else:
        with pytest.raises(PeerRefused, match="rank 0"):
            dispatch(buffer, case, mine)
    handle = dispatch(buffer, case, mine)[4]
    y = torch.zeros((handle.rows, case.hidden), dtype=torch.bfloat16, device=mine.x.device)
    if rank == 0:
        with pytest.raises(ArgumentError, match="the very object that dispatch returned"):
            buffer.combine(y, tuple(handle))  # type: ignore[arg-type]
        torch.cuda.synchronize()
    else:
        with pytest.raises(PeerRefused, match="rank 0"):
            _combine_and_wait(buffer, y, handle)
    _works(buffer, case, rank)
    buffer.destroy()


def _combine_and_wait(buffer: Buffer, y: torch.Tensor, handle: GpuHandle) -> None:
    """Raises what kernels have found by the end of a combine."""
    buffer.combine(y, handle)
    torch.cuda.synchronize()
    assert buffer.runtime is not None
    mode = buffer.runtime.high_throughput
    assert isinstance(mode, CudaHighThroughput)
    mode.check()


def test_refusals(gpus: GpuPools, most_ranks: int) -> None:
    gpus.run(most_ranks, _refused, case_of(most_ranks))


def _bad_index(group: dist.ProcessGroup, case: Case) -> None:
    """Only the kernels look at entries, so a combine that comes after raises it."""
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group)
    if rank == 0:
        mine.topk_idx[5, 1] = case.experts
    result = dispatch(buffer, case, mine, num_worst_tokens=sum(case.tokens))
    torch.cuda.synchronize()
    if rank == 0:
        with pytest.raises(ArgumentError, match=rf"topk_idx\[5, 1\].* is {case.experts}"):
            buffer.combine(result[0], result[4])
    else:
        buffer.combine(result[0], result[4])
    _works(buffer, case, rank)
    buffer.destroy()


def test_an_index_out_of_range_is_raised_by_a_combine(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _bad_index, case_of(ranks))


def _both_modes(group: dist.ProcessGroup, case: Case, shrink: bool) -> None:
    """One Buffer for prefill and decoding, as SGLang makes it; scratch in between."""
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    low_latency = case.max_tokens, case.hidden, case.experts
    size = Buffer.get_low_latency_rdma_size_hint(
        case.max_tokens, case.hidden, case.ranks, case.experts
    )
    buffer = open_buffer(group, num_rdma_bytes=size, low_latency_mode=True, enable_shrink=shrink)
    for turn in range(3):
        _works(buffer, case, rank)
        for use_rdma_buffer in (False, True):
            scratch = buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=use_rdma_buffer)
            assert scratch.is_cuda
            scratch.fill_(0xA5 + turn)
        if turn == 2:
            buffer.clean_low_latency_buffer(*low_latency)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, case.max_tokens, case.experts, use_fp8=False
        )
        assert isinstance(rows, torch.Tensor)
        buffer.low_latency_combine(rows, mine.topk_idx, mine.topk_weights, handle)
        torch.cuda.synchronize()
    _works(buffer, case, rank)
    buffer.destroy()


def _staged(group: dist.ProcessGroup, case: Case) -> None:
    """Where the ranks work on the host, tensors of GPUs are copied there and back."""
    with mock.patch.dict(os.environ, {"FANFOLD_BACKEND": "host", "FANFOLD_TIMEOUT_S": "30"}):
        buffer = Buffer(group, 8 << 20, explicitly_destroy=True)
    _works(buffer, case, dist.get_rank(group))
    buffer.destroy()


def test_staged_through_the_host(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _staged, case_of(ranks))


@pytest.mark.parametrize("shrink", [False, True])
def test_both_modes_in_one_buffer(gpus: GpuPools, ranks: int, shrink: bool) -> None:
    gpus.run(ranks, _both_modes, case_of(ranks), shrink)
