"""The high-throughput mode on GPUs in CUDA graphs, on several streams that are behind at different
times, with memory that is given back early, and in many turns without a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.in_place import bytes_for_results
from fanfold.backends.high_throughput.plan import CudaDispatched
from fanfold.errors import UsageError
from tests.distributed.cuda_rounds import (
    check_brought,
    dispatch,
    expected_return,
    run_case,
    sent,
    soak,
    soak_results,
)
from tests.distributed.routings import Case, Round, expected_combine
from tests.distributed.test_high_throughput import outputs_of
from tests.gpu.conftest import GpuPools, gpu_count
from tests.gpu.support import assert_same, overwrite_free_memory
from tests.gpu.test_high_throughput_cuda import FEW_SLOTS, LAYOUTS, case_of, opened

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOM = 4096


def _in_room(case: Case, rank: int) -> Round:
    """A round whose dispatches have a capacity of ``ROOM``."""
    expect = Round(case, rank)
    expect.capacity = lambda _: ROOM  # type: ignore[assignment, method-assign]
    return expect


def _combined(expect: Round, weighted: bool) -> torch.Tensor:
    """What must come of ``outputs_of(expect, layout, weighted)`` in either layout."""
    return expected_combine(expect.case, expect.inputs, expect.rows_by_rank, expect.rank, weighted)


# ---- graphs -------------------------------------------------------------------------------------


def _graphs(
    group: dist.ProcessGroup, cases: list[Case], layout: Any, in_place: bool = False
) -> None:
    """New and cached dispatches in one graph, and combines of what they brought and of experts'
    outputs, replayed with other routings."""
    rank = dist.get_rank(group)
    rounds = [_in_room(case, rank) for case in cases]
    nbytes = bytes_for_results(ROOM, cases[0].hidden, 2) if in_place else 0
    with opened(group, result_bytes=nbytes) as mode:
        device = mode.device
        first = rounds[0].own
        x, idx = first.x.to(device), first.topk_idx.to(device)
        assert first.topk_weights is not None
        weights = first.topk_weights.to(device)
        y = torch.empty((ROOM, cases[0].hidden), dtype=torch.bfloat16, device=device)
        with pytest.raises(UsageError, match="capacity"):
            _captured(lambda: mode.dispatch(x, idx, num_experts=cases[0].experts, layout=layout))

        def calls() -> tuple[CudaDispatched, CudaDispatched, list[torch.Tensor]]:
            got = mode.dispatch(
                x, idx, weights, num_experts=cases[0].experts, layout=layout, capacity=ROOM,
                expert_alignment=cases[0].alignment, in_place=in_place,
            )  # fmt: skip
            again = mode.dispatch_cached(x, got.plan, layout=layout, in_place=in_place)
            back, _ = mode.combine(again.tokens, got.plan, layout=layout)
            out, _ = mode.combine(y, got.plan, layout=layout, row_weights=got.row_weights)
            return got, again, [back, out]

        y.copy_(outputs_of(rounds[0], layout, True))
        calls()
        graph, (got, again, sums) = _captured(calls)
        for number, expect in enumerate([*rounds, *rounds[::-1]]):
            x.copy_(expect.own.x)
            idx.copy_(expect.own.topk_idx)
            assert expect.own.topk_weights is not None
            weights.copy_(expect.own.topk_weights)
            y.copy_(outputs_of(expect, layout, True))
            for result in sums:
                result.fill_(torch.nan)
            if number % 3 == rank % 3:
                torch.cuda._sleep(2_000_000)
            graph.replay()
            if number % 2:
                calls()
            mode.quiesce()
            check_brought(expect, got, layout)
            check_brought(expect, again, layout)
            assert_same("rows come back", sums[0], expected_return(expect, layout))
            assert_same("combined", sums[1], _combined(expect, True))


def _captured(calls: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = calls()
    return graph, result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs(gpus: GpuPools, ranks: int, layout: str) -> None:
    styles = ("spread", "one_rank", "duplicates", "none")
    cases = [case_of(ranks, style=style, seed=n) for n, style in enumerate(styles)]
    gpus.run(ranks, _graphs, cases, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_of_dispatches_in_place(gpus: GpuPools, ranks: int, layout: str) -> None:
    styles = ("spread", "one_rank", "duplicates", "none")
    cases = [case_of(ranks, style=style, seed=n) for n, style in enumerate(styles)]
    gpus.run(ranks, _graphs, cases, layout, True)


# ---- streams ------------------------------------------------------------------------------------


def _delayed(group: dist.ProcessGroup, case: Case) -> None:
    """Calls change streams, and ranks fall behind at different times."""
    rank = dist.get_rank(group)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with opened(group) as mode:
        expect = _in_room(case, rank)
        rows, wanted = sent(expect, mode.device), expected_return(expect, "expert_major")
        if rank == 0:  # all ranks' first call lasts, and the next is on another stream
            torch.cuda._sleep(100_000_000)
        got = dispatch(mode, expect, "expert_major", ROOM)
        for number in range(12):
            if number % 4 == rank % 4:
                torch.cuda._sleep(3_000_000)
            with torch.cuda.stream(streams[number % 3]):
                again = mode.dispatch_cached(rows, got.plan, layout="expert_major")
                out, _ = mode.combine(again.tokens, got.plan, layout="expert_major")
                again.tokens.zero_()  # the combine has read it, as it comes before on its stream
                last = mode.dispatch_cached(rows, got.plan, layout="expert_major")
            mode.quiesce()
            assert_same("rows come back", out, wanted)
            check_brought(expect, last, "expert_major")


def test_delayed_streams(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _delayed, case_of(ranks))


# ---- memory given back early --------------------------------------------------------------------

Tensors = tuple[torch.Tensor, torch.Tensor]
LATE_CYCLES = 100_000_000  # 50 ms and more, in which the CPU enqueues a thousand small things


def _sizes(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def _dropped_before_combine(mode: CudaHighThroughput, expect: Round) -> Tensors:
    """A combine is still to begin on another stream than its plan was made on."""
    device, behind = mode.device, torch.cuda.Stream()
    got = dispatch(mode, expect, "expert_major", ROOM)
    y = outputs_of(expect, "expert_major", True).to(device)
    sizes = _sizes([y, *got.plan.tensors()])
    behind.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(behind):
        torch.cuda._sleep(LATE_CYCLES)
        weights = got.row_weights
        out, _ = mode.combine(y, got.plan, layout="expert_major", row_weights=weights)
    y.record_stream(behind)  # the caller's, who knows of it
    del got, y, weights
    overwrite_free_memory(sizes, device)
    return out, _combined(expect, True)


def _dropped_before_dispatch(mode: CudaHighThroughput, expect: Round) -> Tensors:
    """A cached dispatch is still to begin on another stream than its plan was made on."""
    device, behind = mode.device, torch.cuda.Stream()
    rows = sent(expect, device)
    got = dispatch(mode, expect, "expert_major", ROOM)
    check_brought(expect, got, "expert_major")
    needed = expect.offsets[-1]
    wanted = got.tokens[:needed].view(torch.int16).cpu()
    sizes = _sizes(got.plan.tensors())
    with torch.cuda.stream(behind):
        torch.cuda._sleep(LATE_CYCLES)
        again = mode.dispatch_cached(rows, got.plan, layout="expert_major")
    tokens = again.tokens
    del got, again
    overwrite_free_memory(sizes, device)
    behind.synchronize()
    return tokens[:needed].view(torch.int16), wanted


def _dropped_where_made_late(mode: CudaHighThroughput, expect: Round) -> Tensors:
    """A part of the plan was made later, on another stream than the plan, on which its combine is
    still to begin."""
    device, other = mode.device, torch.cuda.Stream()
    y = outputs_of(expect, "expert_major", False).to(device)
    got = dispatch(mode, expect, "token_major", ROOM)
    with torch.cuda.stream(other):
        mode.dispatch_cached(sent(expect, device), got.plan, layout="expert_major")
    assert got.plan.rows_of is not None
    sizes = _sizes([got.plan.rows_of])
    torch.cuda._sleep(LATE_CYCLES)
    out, _ = mode.combine(y, got.plan, layout="expert_major")
    del got
    with torch.cuda.stream(other):
        overwrite_free_memory(sizes, device)
    return out, _combined(expect, False)


DROPPED = {
    "combine": _dropped_before_combine,
    "dispatch": _dropped_before_dispatch,
    "made late": _dropped_where_made_late,
}


def _given_back(group: dist.ProcessGroup, case: Case, how: str) -> None:
    """What nobody keeps any more while a call that reads it waits on one stream is taken and
    overwritten on another. Of a plan the caller sees little, so the mode keeps it."""
    rank = dist.get_rank(group)
    with opened(group) as mode:
        run_case(mode, case, rank, "expert_major")  # loads the kernels
        run_case(mode, case, rank, "token_major")
        expect = _in_room(case, rank)
        for _ in range(3):
            torch.cuda.empty_cache()  # what is given back is then what is taken next
            got, wanted = DROPPED[how](mode, expect)
            mode.quiesce()
            assert_same(how, got, wanted)


@pytest.mark.parametrize("how", DROPPED)
def test_what_is_dropped_before_it_is_read(gpus: GpuPools, ranks: int, how: str) -> None:
    gpus.run(ranks, _given_back, case_of(ranks), how)


# ---- many turns ---------------------------------------------------------------------------------


def _soak(group: dist.ProcessGroup, cases: list[Case], turns: int) -> None:
    rank = dist.get_rank(group)

    def pause(turn: int) -> None:
        if turn % 16 == rank:
            torch.cuda._sleep(500_000)

    nbytes = soak_results(cases)
    with opened(group, ring_bytes=FEW_SLOTS, result_bytes=nbytes) as mode:
        soak(mode, cases, rank, turns, pause)


def test_many_turns_without_a_wait(gpus: GpuPools, ranks: int) -> None:
    styles = ("spread", "one_rank", "duplicates", "none", "holes")
    cases = [case_of(ranks, style=style, seed=n) for n, style in enumerate(styles)]
    # With a short ring there are many turns of the ranks in each of a call.
    gpus.run(ranks, _soak, cases, 5000 if ranks <= gpu_count() else 100)
