"""Callers write zeros, ones and random bytes over everything that they were given, between calls
and while kernels run: results stay right bit for bit, and nobody waits in vain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.deep_ep_reference import Case, inputs
from tests.conformance.test_deep_ep_low_latency import check_dispatched, outputs
from tests.conformance.test_deep_ep_scratch import BYTES, Scribbler
from tests.distributed import test_functional as calls
from tests.gpu import test_deep_ep_high_throughput_cuda as high_throughput
from tests.gpu.conftest import GpuPools
from tests.gpu.support import (
    answers,
    assert_combined,
    assert_received,
    assert_same,
    open_layer,
    own_device,
    tokens_of,
)
from tests.gpu.support import case_of as native_case
from tests.gpu.test_deep_ep_cuda import (
    case_of,
    dispatch,
    expected_sums,
    in_host_memory,
    on_gpu,
    open_buffer,
)
from tests.unit.test_scribbles_emulated import high_throughput_rounds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROUNDS = 20
each_byte = pytest.mark.parametrize("byte", BYTES.values(), ids=BYTES)


# ---- the DeepEP face ----------------------------------------------------------------------------


class _Beside:
    """Writes over all scratch from a stream of its own, so also while kernels run."""

    def __init__(self, scribbler: Scribbler) -> None:
        self._scribbler, self._stream = scribbler, torch.cuda.Stream()

    def start(self, times: int = 8) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                self._scribbler.scratch()


def _low_latency(group: dist.ProcessGroup, case: Case, byte: int | None, hook: bool) -> None:
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, "bf16").to(own_device())
    wanted = expected_sums(case, rank, "bf16")
    buffer = open_buffer(group, case, num_nvl_bytes=16 << 20)
    scribbler = Scribbler(buffer, byte)
    beside = _Beside(scribbler)
    for turn in range(ROUNDS):
        beside.start()
        result = dispatch(buffer, case, mine, use_fp8=False, return_recv_hook=hook)
        scribbler.scratch()
        if hook:
            scribbler.show(*result[:3])
            scribbler.everything()
            result[4]()
            scribbler.forget()
        check_dispatched(case, rank, "bf16", in_host_memory(result))
        zero_copy, rows = bool(turn % 2), y
        if zero_copy:
            rows = result[0]
            place = buffer.get_next_low_latency_combine_buffer(result[2])
            scribbler.show(place)
            scribbler.everything()
            place.copy_(y)
        beside.start()
        combined, _, receive = buffer.low_latency_combine(
            rows, mine.topk_idx, mine.topk_weights, result[2], zero_copy=zero_copy,
            return_recv_hook=hook,
        )  # fmt: skip
        scribbler.show(*result[:3])
        scribbler.everything()
        if hook:
            scribbler.show(combined)
            scribbler.everything()
            receive()
        assert torch.equal(combined.cpu(), wanted), turn
        scribbler.show(combined)
        scribbler.everything()
        scribbler.forget()
    torch.cuda.synchronize()
    buffer.destroy()


@each_byte
@pytest.mark.parametrize("hook", [False, True])
def test_low_latency(gpus: GpuPools, ranks: int, byte: int | None, hook: bool) -> None:
    gpus.run(ranks, _low_latency, case_of(ranks), byte, hook)


def _handles(group: dist.ProcessGroup, case: Case, byte: int | None) -> None:
    """Handles written over before their combine give some sums; the next calls are right."""
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, "bf16").to(own_device())
    wanted = expected_sums(case, rank, "bf16")
    buffer = open_buffer(group, case)
    scribbler = Scribbler(buffer, byte)
    for turn in range(ROUNDS):
        result = dispatch(buffer, case, mine, use_fp8=False)
        spoilt = turn % 2 == 0
        if spoilt and rank == turn // 2 % case.ranks:
            scribbler.show(*result[:3])
            scribbler.everything()
            scribbler.forget()
        combined, _, _ = buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, result[2])
        if not spoilt:
            assert torch.equal(combined.cpu(), wanted), turn
    torch.cuda.synchronize()
    buffer.runtime.low_latency.check()
    buffer.destroy()


@each_byte
def test_handles_written_over(gpus: GpuPools, ranks: int, byte: int | None) -> None:
    gpus.run(ranks, _handles, case_of(ranks), byte)


def _captured(group: dist.ProcessGroup, case: Case, byte: int | None) -> None:
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, "bf16").to(own_device())
    wanted = expected_sums(case, rank, "bf16")
    buffer = open_buffer(group, case)
    scribbler = Scribbler(buffer, byte)
    scribbler.scratch()  # which a capture could not allocate

    def round_() -> tuple[Any, torch.Tensor]:
        result = dispatch(buffer, case, mine, use_fp8=False)
        scribbler.scratch()
        place = buffer.get_next_low_latency_combine_buffer(result[2])
        place.copy_(y)
        combined, _, _ = buffer.low_latency_combine(
            result[0], mine.topk_idx, mine.topk_weights, result[2], zero_copy=True
        )
        scribbler.scratch()
        return result, combined

    round_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result, combined = round_()
    for turn in range(ROUNDS):
        graph.replay()
        check_dispatched(case, rank, "bf16", in_host_memory(result))
        assert torch.equal(combined.cpu(), wanted), turn
        scribbler.show(*result[:3], combined)
        scribbler.everything()
        scribbler.forget()
        if turn % 5 == 4:  # calls between replays
            _, out = round_()
            assert torch.equal(out.cpu(), wanted), turn
    torch.cuda.synchronize()
    del graph
    buffer.destroy()


@each_byte
def test_low_latency_in_graphs(gpus: GpuPools, ranks: int, byte: int | None) -> None:
    gpus.run(ranks, _captured, case_of(ranks), byte)


def _zeroed_once(group: dist.ProcessGroup, case: Case) -> None:
    """As vLLM's fault recovery does: everything is zeroed, and nothing is called afterwards."""
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, "bf16").to(own_device())
    buffer = open_buffer(group, case, num_nvl_bytes=16 << 20, enable_shrink=True)
    for turn in range(6):
        result = dispatch(buffer, case, mine, use_fp8=False, return_recv_hook=True)
        if turn == 2 and rank == 0:  # on one rank, while the peers go on
            for rdma in (False, True):
                buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=rdma).zero_()
        result[4]()
        combined, _, _ = buffer.low_latency_combine(y, mine.topk_idx, mine.topk_weights, result[2])
        assert torch.equal(combined.cpu(), expected_sums(case, rank, "bf16")), turn
    status = torch.ones(case.ranks, dtype=torch.int32, device=own_device())
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    buffer.destroy()


def test_zeroed_by_one_rank_alone(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _zeroed_once, case_of(ranks))


def _prefill(group: dist.ProcessGroup, case: Case, byte: int | None) -> None:
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    buffer = high_throughput.open_buffer(group)
    scribbler = Scribbler(buffer, byte)
    beside = _Beside(scribbler)
    first: list[torch.Tensor] = []
    for turn in range(ROUNDS):
        beside.start()
        result = high_throughput.dispatch(buffer, case, mine)
        rows, handle = result[0], result[4]
        y = high_throughput.expert_side(rows, rank)
        scribbler.show(*result[:3], tuple(handle))
        scribbler.everything()
        again, *_ = buffer.dispatch(mine.x, handle=handle)
        combined, _, _ = buffer.combine(y, handle)
        found = [y.cpu(), again.cpu(), combined.cpu()]
        first = first or found
        for name, theirs, here in zip(("rows", "rows again", "sums"), first, found, strict=True):
            assert_same(f"{name} of turn {turn}", here, theirs)
        high_throughput.check_combined(case, rank, combined, None)
        scribbler.show(again, combined)
        scribbler.everything()
        scribbler.forget()
    torch.cuda.synchronize()
    buffer.destroy()


@each_byte
@pytest.mark.gpu_each
def test_high_throughput(gpus: GpuPools, ranks: int, byte: int | None) -> None:
    gpus.run(ranks, _prefill, high_throughput.case_of(ranks), byte)


# ---- the native face ----------------------------------------------------------------------------


def _scribble(byte: int | None, *tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None or not tensor.numel():
            continue
        raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        if byte is None:
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, device=raw.device))
        else:
            raw.fill_(byte)


def _everything(received: Any) -> tuple[torch.Tensor | None, ...]:
    return (
        received.tokens, received.scales, received.weights, received.tokens_per_expert,
        received.offsets, received.source_rank, received.source_token,
    )  # fmt: skip


def _native(group: dist.ProcessGroup, ranks: int, byte: int | None, graph: bool) -> None:
    case = native_case(ranks, dtype="fp8")
    rank = dist.get_rank(group)
    (answer,) = answers(group, [case])
    with open_layer(group, case) as ep:
        mine = tokens_of(case, rank).to(own_device())
        like = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = answer.spread(like.tokens, own_device())
        ep.combine(y, like)
        torch.cuda.synchronize()

        def calls() -> tuple[Any, torch.Tensor]:
            received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            return received, ep.combine(y, received)

        captured = None
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                received, out = calls()
        for _ in range(ROUNDS):
            if captured is not None:
                captured.replay()
            else:
                received, out = calls()
            assert_received(received, answer)
            assert_combined(out, answer)
            _scribble(byte, *_everything(received), out)
        torch.cuda.synchronize()
        ep.check()
        del captured


@each_byte
@pytest.mark.parametrize("graph", [False, True])
def test_native_low_latency(gpus: GpuPools, ranks: int, byte: int | None, graph: bool) -> None:
    gpus.run(ranks, _native, ranks, byte, graph)


def _native_high_throughput(
    group: dist.ProcessGroup, case: calls.Case, byte: int | None, bounded: bool, in_place: bool
) -> None:
    device = own_device()
    mine = case.inputs()[dist.get_rank(group)]
    mine = {name: part.to(device) for name, part in mine.items() if torch.is_tensor(part)}
    capacity = calls.room_for(case) if bounded else None
    rows = calls.room_for(case) if in_place else 0
    found = []
    for write in (lambda *_: None, lambda *all_: _scribble(byte, *all_)):
        with calls.open_ep(group, case, in_place_rows=rows) as ep:
            assert ep.device == device
            found.append(high_throughput_rounds(ep, mine, capacity, write, in_place))
            ep.check()
    for place, (theirs, here) in enumerate(zip(*found, strict=True)):
        assert_same(f"result {place}", here, theirs.cpu())


@each_byte
@pytest.mark.gpu_each
@pytest.mark.parametrize(("bounded", "in_place"), [(False, False), (True, False), (False, True)])
def test_native_high_throughput(
    gpus: GpuPools, ranks: int, byte: int | None, bounded: bool, in_place: bool
) -> None:
    case = calls.Case(seed=3, top_k=2, tokens=(9, 4, 0, 7)[:ranks])
    gpus.run(ranks, _native_high_throughput, case, byte, bounded, in_place)
