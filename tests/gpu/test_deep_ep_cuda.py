"""Low-latency calls of the DeepEP face on CUDA tensors, against plain torch, bit for bit."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer
from fanfold.errors import ArgumentError, UsageError
from tests.conformance import deep_ep_reference as reference
from tests.conformance.deep_ep_reference import Case, Inputs, inputs, packed
from tests.conformance.test_deep_ep_low_latency import (
    FORMATS,
    arguments_of,
    check_dispatched,
    finish,
    outputs,
)
from tests.distributed.layers import caught
from tests.gpu.conftest import GpuPools
from tests.gpu.support import own_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LATE_CYCLES = 20_000_000  # ten milliseconds


def open_buffer(
    group: dist.ProcessGroup, case: Case, timeout_s: str = "20", **changes: Any
) -> Buffer:
    """A Buffer on the ranks' GPUs with exactly the memory that the hint names."""
    nbytes = Buffer.get_low_latency_rdma_size_hint(
        case.max_tokens, case.hidden, case.ranks, case.experts
    )
    arguments = {"num_rdma_bytes": nbytes, "low_latency_mode": True, "explicitly_destroy": True}
    settings = {"FANFOLD_TIMEOUT_S": timeout_s, "FANFOLD_BACKEND": "cuda"}
    with mock.patch.dict(os.environ, settings):
        return Buffer(group, **{**arguments, **changes})


def case_of(ranks: int, **changes: Any) -> Case:
    sizes = {"experts": 4 * ranks, "top_k": 3, "hidden": 256, "seed": 3}
    return Case(tokens=(6, 4, 0, 5)[:ranks], **{**sizes, **changes})


def on_gpu(mine: Inputs) -> Inputs:
    device = own_device()
    return Inputs(mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device))


def _options_of(form: str) -> dict[str, Any]:
    """A format's arguments of dispatch, its tensors on this rank's GPU."""
    device = own_device()
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in FORMATS[form].items()
    }


def dispatch(buffer: Buffer, case: Case, mine: Inputs, **options: Any) -> tuple[Any, ...]:
    return buffer.low_latency_dispatch(
        mine.x, mine.topk_idx, case.max_tokens, case.experts, **options
    )


def in_host_memory(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """A dispatch's result as check_dispatched takes it; strides stay as they are."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            assert value.is_cuda
            return value.cpu()
        return tuple(moved(each) for each in value) if isinstance(value, tuple) else value

    return tuple(moved(value) for value in result[:3])


def expected_sums(case: Case, rank: int, form: str) -> torch.Tensor:
    y_of = [outputs(case, peer, form) for peer in range(case.ranks)]
    return reference.weighted_sum(case, rank, y_of)


# ---- every format and way to call ---------------------------------------------------------------


def _round_trip(group: dist.ProcessGroup, case: Case, form: str, mode: str) -> None:
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, form).to(device)
    buffer = open_buffer(group, case)
    result = dispatch(buffer, case, mine, **_options_of(form), **arguments_of(mode))
    finish(mode, *result[3:])
    combined, *rest = buffer.low_latency_combine(
        y, mine.topk_idx, mine.topk_weights, result[2], **arguments_of(mode)
    )
    finish(mode, *rest)
    torch.cuda.synchronize(device)
    buffer.destroy()
    check_dispatched(case, rank, form, in_host_memory(result))
    assert torch.equal(combined.cpu(), expected_sums(case, rank, form))


@pytest.mark.parametrize("mode", ["", "async", "hook"])
@pytest.mark.parametrize("form", FORMATS)
def test_formats_and_ways_to_call(gpus: GpuPools, ranks: int, form: str, mode: str) -> None:
    gpus.run(ranks, _round_trip, case_of(ranks), form, mode)


@pytest.mark.parametrize("number", range(8))
def test_against_torch(gpus: GpuPools, ranks: int, number: int) -> None:
    numbers = random.Random(number)
    experts = ranks * numbers.randint(1, 6)
    form, mode = numbers.choice(list(FORMATS)), numbers.choice(["", "async", "hook"])
    case = Case(
        experts=experts,
        top_k=min(numbers.choice([1, 2, 5, 8, 11]), experts),
        hidden=16 * numbers.choice([8, 9, 33, 65, 180]) * (1 + (form == "nvfp4")),
        tokens=tuple(numbers.randint(0, 9) for _ in range(ranks)),
        seed=number,
        duplicates=numbers.random() < 0.5,
        unrouted=numbers.choice([0.0, 0.2, 1.0]),
    )
    gpus.run(ranks, _round_trip, case, form, mode)


def test_top_k_of_32(gpus: GpuPools, ranks: int) -> None:
    case = case_of(ranks, experts=32 * ranks, top_k=32)
    gpus.run(ranks, _round_trip, case, "fp8", "hook")


# ---- every argument -----------------------------------------------------------------------------


def _statistics(group: dist.ProcessGroup, case: Case) -> list[int]:
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group, case)
    totals = torch.full((case.local,), 100, dtype=torch.int32, device=device)
    waits = [torch.zeros(case.ranks, dtype=torch.int64, device=device) for _ in range(2)]
    for turn in range(2 * case.ranks):
        late_cycles = LATE_CYCLES // 10 if turn % case.ranks == rank else 0
        torch.cuda._sleep(late_cycles)
        received, counts, handle, _, _ = dispatch(
            buffer, case, mine, cumulative_local_expert_recv_stats=totals,
            dispatch_wait_recv_cost_stats=waits[0], use_fp8=False,
        )  # fmt: skip
        torch.cuda._sleep(late_cycles)
        buffer.low_latency_combine(
            received, mine.topk_idx, mine.topk_weights, handle,
            combine_wait_recv_cost_stats=waits[1],
        )  # fmt: skip
    torch.cuda.synchronize(device)
    buffer.destroy()
    assert torch.equal(totals, 100 + 2 * case.ranks * counts)
    assert all(int(wait.min()) >= 0 for wait in waits)
    return [int(wait.sum()) for wait in waits]


def test_statistics_are_added_to(gpus: GpuPools, ranks: int) -> None:
    waited = gpus.run(ranks, _statistics, case_of(ranks))
    # Each rank was late in its turn, a millisecond, and the others waited for it.
    if ranks > 1:
        assert all(100_000 < each < 10**10 for both in waited for each in both), waited


def _zero_copy(group: dist.ProcessGroup, case: Case) -> None:
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, "fp8").to(device)
    buffer = open_buffer(group, case)
    outs = []
    for turn in range(3):
        handle = dispatch(buffer, case, mine)[2]
        room = buffer.get_next_low_latency_combine_buffer(handle)
        assert room.is_cuda
        assert room.shape == y.shape
        room[:, :, :] = y
        out = torch.full((case.tokens[rank], case.hidden), torch.nan, device=device).bfloat16()
        combined, _, hook = buffer.low_latency_combine(
            torch.zeros_like(room), mine.topk_idx, mine.topk_weights, handle,
            zero_copy=True, out=out, return_recv_hook=turn == 1,
        )  # fmt: skip
        if hook is not None:
            room.fill_(torch.nan)  # the send half has read it
            hook()
        assert combined is out
        outs.append(out)
    torch.cuda.synchronize(device)
    buffer.destroy()
    wanted = expected_sums(case, rank, "fp8")
    for out in outs:
        assert torch.equal(out.cpu(), wanted)


def test_zero_copy_and_out(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _zero_copy, case_of(ranks))


def _logfmt(group: dist.ProcessGroup, case: Case) -> None:
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    y = outputs(case, rank, "fp8").to(device)
    buffer = open_buffer(group, case)
    handle = dispatch(buffer, case, mine)[2]
    results = [
        buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle, use_logfmt=logfmt
        )[0].cpu().float()
        for logfmt in (False, True)
    ]  # fmt: skip
    buffer.destroy()
    y_of = [outputs(case, peer, "fp8").abs() for peer in range(case.ranks)]
    size = reference.weighted_sum(case, rank, y_of).float()
    assert bool(((results[0] - results[1]).abs() <= 0.03 * size + 1e-6).all())
    assert case.tokens[rank] == 0 or not torch.equal(*results)


def test_logfmt(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _logfmt, case_of(ranks, hidden=512))


def _two_open_calls(group: dist.ProcessGroup, case: Case) -> None:
    """Two batches overlapped, as SGLang does: the second is sent before the first is received."""
    rank, device = dist.get_rank(group), own_device()
    batches = [case, Case(**{**vars(case), "seed": 9})]
    brought = [on_gpu(inputs(each, rank)) for each in batches]
    ys = [outputs(each, rank, "fp8").to(device) for each in batches]
    wanted = [expected_sums(each, rank, "fp8") for each in batches]
    buffer = open_buffer(group, case)
    said = []
    for _ in range(3):
        sent = [
            dispatch(buffer, each, mine, return_recv_hook=True)
            for each, mine in zip(batches, brought, strict=True)
        ]
        said.append(caught(sent[1][4]))
        results = []
        for mine, y, result in zip(brought, ys, sent, strict=True):
            result[4]()
            said.append(caught(result[4]))
            results.append(buffer.low_latency_combine(
                y, mine.topk_idx, mine.topk_weights, result[2], return_recv_hook=True
            ))  # fmt: skip
        for _, _, hook in results:
            hook()
        for each, result in zip(batches, sent, strict=True):
            check_dispatched(each, rank, "fp8", in_host_memory(result))
        for (combined, _, _), sums in zip(results, wanted, strict=True):
            assert torch.equal(combined.cpu(), sums)
    buffer.destroy()
    assert all(isinstance(error, UsageError) for error in said), said


def test_two_open_calls(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _two_open_calls, case_of(ranks))


def _rebuilt_handle(group: dist.ProcessGroup, case: Case) -> None:
    """Narrow rows out, wide rows back: the caller writes handle[3], as TensorRT-LLM does."""
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    narrow = on_gpu(inputs(Case(**{**vars(case), "hidden": 128}), rank)).x
    y = outputs(case, rank, "bf16").to(device)
    buffer = open_buffer(group, case)
    sums = []
    for _ in range(2):
        handle = list(buffer.low_latency_dispatch(
            narrow, mine.topk_idx, case.max_tokens, case.experts, use_fp8=False
        )[2])  # fmt: skip
        handle[0], handle[1], handle[3] = handle[0].clone(), handle[1].clone(), case.hidden
        sums.append(buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, handle
        )[0])  # fmt: skip
    torch.cuda.synchronize(device)
    buffer.destroy()
    wanted = expected_sums(case, rank, "bf16")
    for combined in sums:
        assert torch.equal(combined.cpu(), wanted)


def test_combine_works_from_the_tuple_alone(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _rebuilt_handle, case_of(ranks))


def _overwritten(group: dist.ProcessGroup, case: Case) -> None:
    """Callers write over scratch at any time, and call nothing afterwards."""
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group, case)
    y = outputs(case, rank, "fp8").to(device)
    results, sums = [], []

    def overwrite(value: int) -> None:
        buffer.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).fill_(value)

    for value in (0, 0xFF, 0xA5, 0):
        overwrite(value)
        result = dispatch(buffer, case, mine, return_recv_hook=True)
        overwrite(value)
        result[4]()
        overwrite(value)
        out, _, hook = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, result[2], return_recv_hook=True
        )
        overwrite(value)
        hook()
        results.append(result)
        sums.append(out)
    torch.cuda.synchronize(device)
    buffer.destroy()
    for result, out in zip(results, sums, strict=True):
        check_dispatched(case, rank, "fp8", in_host_memory(result))
        assert torch.equal(out.cpu(), expected_sums(case, rank, "fp8"))


def test_memory_as_scratch(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _overwritten, case_of(ranks))


def _wrong_arguments(group: dist.ProcessGroup, case: Case) -> None:
    rank = dist.get_rank(group)
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group, case)
    for options, argument in (
        ({"use_ue8m0": True}, "use_ue8m0"),
        ({"round_scale": True, "use_fp8": False}, "round_scale"),
        ({"async_finish": True, "return_recv_hook": True}, "async_finish"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(1)}, "cumulative"),
    ):
        error = caught(lambda options=options: dispatch(buffer, case, mine, **options))
        assert isinstance(error, ArgumentError), error
        assert error.argument.startswith(argument)
        torch.cuda.synchronize()
        dist.barrier(group)
        # The mistake is all ranks', so each may be told that another refused.
        assert buffer.runtime is not None
        caught(buffer.runtime.low_latency.check)
    result = dispatch(buffer, case, mine)
    torch.cuda.synchronize()
    buffer.destroy()
    check_dispatched(case, rank, "fp8", in_host_memory(result))


def test_wrong_arguments_do_no_harm(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _wrong_arguments, case_of(ranks))


# ---- streams, events and memory -----------------------------------------------------------------


def _delayed_streams(group: dist.ProcessGroup, case: Case) -> None:
    """The communication stream is behind, then the caller's is; inputs are dropped at once."""
    rank, device = dist.get_rank(group), own_device()
    brought, y_host = inputs(case, rank), outputs(case, rank, "fp8")
    buffer = open_buffer(group, case)
    comm = buffer.get_comm_stream()
    results = []
    for turn in range(6):
        source, y = on_gpu(brought), y_host.to(device)
        if turn % 2:
            with torch.cuda.stream(comm):
                torch.cuda._sleep(LATE_CYCLES)
        elif turn % 3 == rank % 3:
            torch.cuda._sleep(LATE_CYCLES)
        mine = Inputs(
            source.x.clone(), source.topk_idx.clone(), source.topk_weights.clone()
        )  # fmt: skip
        result = dispatch(buffer, case, mine, async_finish=True)
        event = result[3]
        del mine
        torch.full_like(source.x, torch.nan)  # takes the memory if it is free
        torch.full_like(source.topk_idx, -1)
        event.current_stream_wait(release_handle=True)
        y = y.clone()
        combined, event, _ = buffer.low_latency_combine(
            y, source.topk_idx, source.topk_weights, result[2], async_finish=True
        )
        shape = y.shape
        del y
        torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        with event:  # waits at its end
            torch.cuda._sleep(1000)
        copies = in_host_memory(result)  # ordered behind the wait, on this stream
        results.append((copies, combined.cpu()))
    torch.cuda.synchronize(device)
    buffer.destroy()
    wanted = expected_sums(case, rank, "fp8")
    for result, sums in results:
        check_dispatched(case, rank, "fp8", result)
        assert torch.equal(sums, wanted)


def test_events_order_delayed_streams(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _delayed_streams, case_of(ranks))


def _captured(group: dist.ProcessGroup, case: Case, mode: str) -> None:
    """Three rounds in a graph, replayed with other inputs of the same size."""
    rank, device = dist.get_rank(group), own_device()
    cases = [Case(**{**vars(case), "seed": seed}) for seed in range(4)]
    brought = [on_gpu(inputs(each, rank)) for each in cases]
    ys = [outputs(each, rank, "fp8").to(device) for each in cases]
    wanted = [expected_sums(each, rank, "fp8") for each in cases]
    statics = [on_gpu(inputs(case, rank)) for _ in range(3)]
    outputs_of = [ys[0].clone() for _ in range(3)]
    buffer = open_buffer(group, case)

    def round_(place: int) -> tuple[Any, torch.Tensor]:
        mine = statics[place]
        result = dispatch(buffer, case, mine, **arguments_of(mode))
        finish(mode, *result[3:])
        combined, *rest = buffer.low_latency_combine(
            outputs_of[place], mine.topk_idx, mine.topk_weights, result[2], **arguments_of(mode)
        )
        finish(mode, *rest)
        return result, combined

    round_(0)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [round_(place) for place in range(3)]
    for replay in range(4):
        for place, mine in enumerate(statics):
            chosen = (replay + place) % len(cases)
            mine.x.copy_(brought[chosen].x)
            mine.topk_idx.copy_(brought[chosen].topk_idx)
            mine.topk_weights.copy_(brought[chosen].topk_weights)
            outputs_of[place].copy_(ys[chosen])
        graph.replay()
        torch.cuda.synchronize(device)
        for place, (result, combined) in enumerate(captured):
            chosen = (replay + place) % len(cases)
            check_dispatched(cases[chosen], rank, "fp8", in_host_memory(result))
            assert torch.equal(combined.cpu(), wanted[chosen])
    del graph
    buffer.destroy()


@pytest.mark.parametrize("mode", ["", "async", "hook"])
def test_captured_rounds(gpus: GpuPools, ranks: int, mode: str) -> None:
    gpus.run(ranks, _captured, case_of(ranks), mode)


def _captured_beside(group: dist.ProcessGroup, case: Case) -> None:
    """In one graph a dispatch on the communication stream, and before its event is waited for the
    combine of an earlier one on the caller's stream. Nothing but the library orders the two, and
    both would have all SMs."""
    rank, device = dist.get_rank(group), own_device()
    cases = [Case(**{**vars(case), "seed": seed}) for seed in range(4)]
    brought = [on_gpu(inputs(each, rank)) for each in cases]
    ys = [outputs(each, rank, "fp8").to(device) for each in cases]
    wanted = [expected_sums(each, rank, "fp8") for each in cases]
    statics = [on_gpu(inputs(case, rank)) for _ in range(2)]
    rows = [ys[0].clone() for _ in statics]
    buffer = open_buffer(group, case)

    def combine(place: int, handle: Any) -> torch.Tensor:
        mine = statics[place]
        return buffer.low_latency_combine(
            rows[place], mine.topk_idx, mine.topk_weights, handle
        )[0]  # fmt: skip

    def calls() -> tuple[list[tuple[Any, ...]], list[torch.Tensor]]:
        first = dispatch(buffer, case, statics[0])
        second = dispatch(buffer, case, statics[1], async_finish=True)
        combined = combine(0, first[2])
        second[3].current_stream_wait()
        return [first, second], [combined, combine(1, second[2])]

    calls()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results, sums = calls()
    for replay in range(8):
        places = [(replay + place) % len(cases) for place in range(len(statics))]
        for mine, y, chosen in zip(statics, rows, places, strict=True):
            for name, value in vars(mine).items():
                value.copy_(vars(brought[chosen])[name])
            y.copy_(ys[chosen])
        if replay % 3 == rank % 3:
            torch.cuda._sleep(LATE_CYCLES // 10)
        graph.replay()
        torch.cuda.synchronize(device)
        assert buffer.runtime is not None
        buffer.runtime.low_latency.check()
        for chosen, result, combined in zip(places, results, sums, strict=True):
            check_dispatched(cases[chosen], rank, "fp8", in_host_memory(result))
            assert torch.equal(combined.cpu(), wanted[chosen])
    del graph
    buffer.destroy()


def test_a_captured_dispatch_beside_a_combine(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _captured_beside, case_of(ranks))


# ---- masks --------------------------------------------------------------------------------------


def _masked(group: dist.ProcessGroup, case: Case, masked: int) -> None:
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group, case, enable_shrink=True)
    status = torch.full((case.ranks,), 7, dtype=torch.int32, device=device)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * case.ranks
    dispatch(buffer, case, mine, use_fp8=False)
    for peer in range(case.ranks):  # it knows nobody any more either, and so stays in step
        if rank == masked or peer == masked:
            buffer.low_latency_update_mask_buffer(peer, True)
    received, counts, handle, _, _ = dispatch(buffer, case, mine, use_fp8=False)
    combined, _, _ = buffer.low_latency_combine(received, mine.topk_idx, mine.topk_weights, handle)
    torch.cuda.synchronize(device)
    if rank != masked:
        ranges = handle[1].cpu()
        for e, pack in enumerate(packed(case, rank)):
            assert counts[e] == len([r for r in pack.source_rank if r != masked])
            assert ranges[e, masked] & 0xFFFFFFFF == 0
        chosen = mine.topk_idx
        elsewhere = (chosen >= 0) & (chosen // case.local != masked)
        assert not combined[~elsewhere.any(1)].any()
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    dist.barrier(group)
    # The rank that was masked counts other calls than its peers, so all begin anew.
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
    result = dispatch(buffer, case, mine, use_fp8=False)
    torch.cuda.synchronize(device)
    buffer.destroy()
    check_dispatched(case, rank, "bf16", in_host_memory(result))


def test_masked_rank_and_back(gpus: GpuPools, most_ranks: int) -> None:
    gpus.run(most_ranks, _masked, case_of(most_ranks), 1)


def _shrink(group: dist.ProcessGroup, case: Case) -> list[int]:
    """A rank that never comes is masked after the time bound, and the others go on."""
    rank, device = dist.get_rank(group), own_device()
    mine = on_gpu(inputs(case, rank))
    buffer = open_buffer(group, case)  # compiles, which may take longer than the bound below
    received, _, handle, _, _ = dispatch(buffer, case, mine, use_fp8=False)
    buffer.low_latency_combine(received, mine.topk_idx, mine.topk_weights, handle)
    torch.cuda.synchronize(device)
    buffer.destroy()
    buffer = open_buffer(group, case, "0.5", enable_shrink=True)
    status = torch.zeros(case.ranks, dtype=torch.int32, device=device)
    dispatch(buffer, case, mine, use_fp8=False)  # the first call readies the memory of all ranks
    torch.cuda.synchronize(device)
    dist.barrier(group)
    if rank != 1:
        for _ in range(2):
            received, _, handle, _, _ = dispatch(buffer, case, mine, use_fp8=False)
            buffer.low_latency_combine(received, mine.topk_idx, mine.topk_weights, handle)
            torch.cuda.synchronize(device)
        buffer.low_latency_query_mask_buffer(status)
    found = status.tolist()
    dist.barrier(group)
    buffer.destroy()
    return found


def test_late_rank_is_masked(gpus: GpuPools, most_ranks: int) -> None:
    found = gpus.run(most_ranks, _shrink, case_of(most_ranks))
    for rank, status in enumerate(found):
        assert status == [int(peer == 1 and rank != 1) for peer in range(most_ranks)]
