"""DeepEP's second interface on GPUs, bit for bit: the programs and the oracle of the conformance
tests, calls that no CPU waits for, graphs, streams, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.deep_ep import ElasticBuffer, EPHandle
from fanfold.errors import ArgumentError, PeerRefused
from fanfold.group import as_group
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_elastic as conformance
from tests.conformance.deep_ep_reference import Case, Inputs, arrivals, inputs
from tests.conformance.test_deep_ep_elastic import Expanded
from tests.conformance.test_deep_ep_elastic_refusals import BAD_DISPATCHES, BAD_REUSES
from tests.distributed.layers import caught
from tests.environment import environment
from tests.gpu.conftest import GpuPools
from tests.gpu.from_host import FromHost
from tests.gpu.one_gpu import OneGpu, capture, meet, wait
from tests.gpu.support import assert_same, check_kernels, own_device
from tests.gpu.test_deep_ep_high_throughput_cuda import case_of, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_each, pytest.mark.timeout(300)]

MOST = 64  # tokens of a rank
ALIGNMENT = 16
LATE_CYCLES = 20_000_000  # ten milliseconds
THREADS = [2, 3, 4]

EXPANDS = pytest.mark.parametrize("expands", [False, True], ids=["plain", "expanded"])


def open_buffer(group: Any, **changes: Any) -> ElasticBuffer:
    """An ElasticBuffer of the ranks' GPUs, without few tokens unless the variable has some."""
    options: dict[str, Any] = {"num_max_tokens_per_rank": MOST, "explicitly_destroy": True}
    chosen = {"FANFOLD_TIMEOUT_S": "30", "FANFOLD_FEW_TOKENS": "0"}
    chosen = {name: os.environ.get(name, default) for name, default in chosen.items()}
    with environment(FANFOLD_BACKEND="cuda", **chosen):
        buffer = ElasticBuffer(group, **{**options, **changes})
    assert isinstance(buffer._backend, CudaHighThroughput)
    return buffer


def open_from_host(group: Any, **changes: Any) -> FromHost:
    # The programs count on the room that they ask for.
    return FromHost(open_buffer(group, num_max_tokens_per_rank=conformance.MOST, **changes))


# ---- the programs of the conformance tests ------------------------------------------------------


def _conformance(group: Any, program: str, case: Case, *args: Any) -> Any:
    """``program`` with ``case`` for its own; ranks may be threads, of which the first patches."""
    ranks = as_group(group)
    patches: Any = {"open_buffer": open_from_host, "CASE": case}
    if program == "_overwrites":  # that has to be on the tensors of the GPU
        patches |= {"open_buffer": open_buffer, "arguments": _arguments_on_gpu}
    with contextlib.ExitStack() as stack:
        if ranks.rank == 0 or isinstance(group, dist.ProcessGroup):
            stack.enter_context(mock.patch.multiple(conformance, **patches))
        ranks.all_gather(None)
        result = getattr(conformance, program)(group, *args)
        ranks.all_gather(None)
    return result


def _arguments_on_gpu(case: Case, rank: int) -> dict[str, Any]:
    mine = on_gpu(inputs(case, rank))
    return {**vars(mine), "num_experts": case.experts}


def small_case(ranks: int) -> Case:
    tokens = conformance.CASE.tokens[:ranks]
    return dataclasses.replace(conformance.CASE, experts=4 * ranks, tokens=tokens)


def _random_case(numbers: random.Random, ranks: int, seed: int) -> Case:
    experts = ranks * numbers.randint(1, 6)
    duplicates = numbers.random() < 0.5
    return Case(
        experts=experts,
        top_k=numbers.randint(1, 32 if duplicates else min(experts, 32)),
        hidden=8 * numbers.choice([2, 3, 16, 17, 130]),
        tokens=tuple(numbers.choice([0, numbers.randint(1, 24)]) for _ in range(ranks)),
        seed=seed,
        duplicates=duplicates,
        unrouted=numbers.choice([0.0, 0.3, 1.0]),
    )


def _against_torch(pool: Any, ranks: int, seed: int) -> None:
    numbers = random.Random(seed)
    case = _random_case(numbers, ranks, seed)
    sync, alignment = numbers.choice([True, False, None]), numbers.choice([1, 8, 128])
    for program in ("_plain", "_expanded"):
        pool.run(ranks, _conformance, program, case, case, sync, alignment)


@pytest.mark.parametrize("seed", range(6))
def test_against_torch(gpus: GpuPools, ranks: int, seed: int) -> None:
    _against_torch(gpus, ranks, seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", THREADS)
def test_threads_against_torch(one_gpu: OneGpu, ranks: int, seed: int) -> None:
    _against_torch(one_gpu, ranks, 100 + seed)


@EXPANDS
@pytest.mark.parametrize("sync", [False, True])
def test_fp8(gpus: GpuPools, one_gpu: OneGpu, ranks: int, expands: bool, sync: bool) -> None:
    gpus.run(ranks, _conformance, "_fp8", small_case(ranks), expands, sync)
    one_gpu.run(3, _conformance, "_fp8", small_case(3), expands, sync)


def test_biases_and_events(gpus: GpuPools, one_gpu: OneGpu, ranks: int) -> None:
    gpus.run(ranks, _conformance, "_biases", small_case(ranks))
    one_gpu.run(3, _conformance, "_biases", small_case(3))


@EXPANDS
def test_what_a_caller_overwrites_changes_nothing(
    gpus: GpuPools, one_gpu: OneGpu, ranks: int, expands: bool
) -> None:
    for pool, count in ((gpus, ranks), (one_gpu, 3)):
        case = small_case(count)
        assert pool.run(count, _conformance, "_overwrites", case, expands) == [[True] * 3] * count


# ---- layers of real size, against the host ------------------------------------------------------


def _against_the_host(group: Any, case: Case, expands: bool, fp8: bool) -> None:
    rank, most = as_group(group).rank, max(*case.tokens, 1)
    mine = inputs(case, rank)
    x: Any = reference.fp8(mine.x, power_of_two=False) if fp8 else mine.x
    options = {"num_experts": case.experts, "do_expand": expands, "expert_alignment": 128,
               "do_zero_padding": True}  # fmt: skip
    with environment(FANFOLD_TIMEOUT_S="60", FANFOLD_BACKEND="host"):
        host = ElasticBuffer(group, num_max_tokens_per_rank=most, explicitly_destroy=True)
    buffer = FromHost(open_buffer(group, num_max_tokens_per_rank=most))
    made, wanted = (
        each.dispatch(x, mine.topk_idx, mine.topk_weights, **options) for each in (buffer, host)
    )
    again = buffer.dispatch(x, handle=made[3], do_expand=expands, do_zero_padding=True)
    for rows in (made[0], again[0]):
        _assert_rows(rows, wanted[0])
    for name, found, want in zip(("idx", "weights"), made[1:3], wanted[1:3], strict=True):
        assert (found is None) == (want is None)
        if want is not None:
            assert_same(name, found, want)
    assert made[3].num_recv_tokens_per_expert_list == wanted[3].num_recv_tokens_per_expert_list
    assert_same("metadata", made[3].recv_src_metadata, wanted[3].recv_src_metadata)
    generator = torch.Generator().manual_seed(rank)
    shape = (made[3].num_expanded_tokens if expands else made[3].num_recv_tokens, case.hidden)
    y = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    bias = torch.randn(
        mine.x.shape, generator=generator, dtype=torch.float32, device="cpu"
    ).bfloat16()
    sums, wanted_sums = (
        each.combine(y, result[3], result[2], (bias, bias))
        for each, result in ((buffer, made), (host, wanted))
    )
    assert_same("combined", sums[0], wanted_sums[0])
    assert_same("weights back", sums[1], wanted_sums[1])
    buffer.destroy()
    host.destroy()


def _assert_rows(got: Any, want: Any) -> None:
    if isinstance(want, tuple):
        assert_same("scales", got[1], want[1])
        got, want = got[0].view(torch.uint8), want[0].view(torch.uint8)
    assert_same("rows", got, want)


@EXPANDS
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_layers_against_the_host(gpus: GpuPools, ranks: int, expands: bool, fp8: bool) -> None:
    tokens = (2048, 1000, 0, 1531)[:ranks]
    case = Case(experts=32 * ranks, top_k=8, hidden=7168, tokens=tokens, duplicates=fp8)
    gpus.run(ranks, _against_the_host, case, expands, fp8)


# ---- no CPU waits: eager and in graphs ----------------------------------------------------------


def _round(
    buffer: ElasticBuffer, case: Case, rank: int, mine: Inputs, expands: bool, **options: Any
) -> tuple[torch.Tensor, ...]:
    """A dispatch that no CPU waits for, another by its handle, and a combine of rows that the rank
    made of them; what came of it, and the handle's tensors."""

    def waited(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if options.get("async_with_compute_stream"):
            result[-1].current_stream_wait()
        return result

    routed = waited(
        buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.experts, do_expand=expands,
            do_cpu_sync=False, expert_alignment=ALIGNMENT, do_zero_padding=True, **options,
        )
    )  # fmt: skip
    rows, idx, weights, handle, _ = routed
    again = waited(
        buffer.dispatch(
            mine.x,
            handle=handle,
            topk_weights=mine.topk_weights,
            do_expand=expands,
            do_zero_padding=True,
            **options,
        )
    )
    combined = waited(buffer.combine(_outputs(again[0], rank), handle, again[2] * 2, **options))
    return (
        rows, again[0], weights, again[2], *combined[:2],
        *(() if idx is None else (idx,)), *_of_handle(handle),
    )  # fmt: skip


def _of_handle(handle: EPHandle) -> tuple[torch.Tensor, ...]:
    return (
        handle.recv_src_metadata,
        handle.psum_num_recv_tokens_per_scaleup_rank,
        handle.psum_num_recv_tokens_per_expert,
        handle.num_unaligned_recv_tokens_per_expert,
    )


def _outputs(rows: torch.Tensor, rank: int) -> torch.Tensor:
    return (rows.float() * (0.5 + 0.25 * rank)).to(torch.bfloat16)


def _check_round(case: Case, rank: int, expands: bool, found: list[torch.Tensor]) -> None:
    """``found`` as :func:`_round` gives it, on the CPU."""
    everybody = range(case.ranks)
    rows, again, weights, weights_again, combined, back, *more = found
    metadata, per_rank, per_expert, unaligned = more[-4:]
    xs = [each.x for each in reference.everybody(case)]
    given = [each.topk_weights for each in reference.everybody(case)]
    arrived = arrivals(case, rank)
    count = len(arrived.source_rank)
    if expands:
        expanded = Expanded(case, rank, ALIGNMENT)
        wanted, count = expanded.gather(xs), expanded.rows
        wanted_weights = expanded.weights(given)
        sums = [
            each.sums(_outputs(each.gather(xs), peer))
            for peer, each in ((p, Expanded(case, p, ALIGNMENT)) for p in everybody)
        ]
        ends = [begin + own for begin, own in zip(expanded.begins, expanded.counts, strict=True)]
        assert per_expert.tolist() == ends
    else:
        wanted = arrived.gather(xs)
        wanted_weights = torch.where(more[0][:count] >= 0, arrived.gather(given), 0.0)
        sums = [_outputs(arrivals(case, peer).gather(xs), peer) for peer in everybody]
    for each in (rows, again):
        assert_same("rows", each[:count], wanted)
    for each in (weights, weights_again):
        assert_same("weights", each[:count], wanted_weights)
        if expands:
            assert not each[count:].any()
    assert_same("combined", combined, reference.combined(case, rank, sums))
    assert_same("weights back", back, _twice_what_was_sent(case, rank, expands))
    assert unaligned.tolist() == Expanded(case, rank, 1).counts
    assert int(per_rank[-1]) == len(arrived.source_rank)
    places = zip(arrived.source_rank, arrived.source_token, strict=True)
    places_there = [MOST * source + token for source, token in places]
    assert metadata[: len(places_there), 0].tolist() == places_there
    assert bool((metadata[len(places_there) :] == -1).all())


def _twice_what_was_sent(case: Case, rank: int, expands: bool) -> torch.Tensor:
    """The weights that come back: of an expanded row the sum over all entries that named it."""
    mine = inputs(case, rank)
    wanted = torch.where(mine.topk_idx >= 0, mine.topk_weights * 2, 0.0)
    if not expands:
        return wanted
    for token, chosen in enumerate(mine.topk_idx.tolist()):
        of_expert: dict[int, float] = {}
        for k, expert in enumerate(chosen):
            of_expert[expert] = of_expert.get(expert, 0.0) + float(mine.topk_weights[token, k])
        for k, expert in enumerate(chosen):
            wanted[token, k] = 2 * of_expert[expert] if expert >= 0 else 0.0
    return wanted


def _without_the_cpu(group: Any, case: Case, expands: bool) -> None:
    rank = as_group(group).rank
    buffer, mine = open_buffer(group), on_gpu(inputs(case, rank))
    _round(buffer, case, rank, mine, expands)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = _round(buffer, case, rank, mine, expands)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _check_round(case, rank, expands, [each.cpu() for each in found])
    buffer.destroy()


@EXPANDS
def test_without_waiting_for_the_cpu(gpus: GpuPools, ranks: int, expands: bool) -> None:
    gpus.run(ranks, _without_the_cpu, case_of(ranks), expands)


def _graph(group: Any, cases: list[Case], expands: bool, asynchronous: bool) -> None:
    """A whole round in a graph, replayed with other tokens and routings."""
    ranks = as_group(group)
    brought = [on_gpu(inputs(case, ranks.rank)) for case in cases]
    static = Inputs(*(value.clone() for value in vars(brought[0]).values()))
    buffer = open_buffer(group)
    results: list[tuple[torch.Tensor, ...]] = []

    def calls() -> torch.Tensor:
        results.append(
            _round(
                buffer, cases[0], ranks.rank, static, expands,
                async_with_compute_stream=asynchronous,
            )
        )  # fmt: skip
        return results[-1][0]

    calls()
    wait()
    graph, _ = capture(ranks, calls)
    result = results[-1]
    for replay in range(2 * len(cases)):
        chosen = (3 * replay + 1) % len(cases)
        for place, value in vars(static).items():
            value.copy_(vars(brought[chosen])[place])
        if replay % ranks.size == ranks.rank:
            torch.cuda._sleep(LATE_CYCLES // 10)
        graph.replay()
        found = [each.clone() for each in result]
        if replay % 2:
            calls()
        wait()
        _check_round(cases[chosen], ranks.rank, expands, [each.cpu() for each in found])
    meet(ranks)
    del graph
    buffer.destroy()


@EXPANDS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_graphs(
    gpus: GpuPools, one_gpu: OneGpu, ranks: int, expands: bool, asynchronous: bool
) -> None:
    for pool, count in ((gpus, ranks), (one_gpu, 3)):
        cases = [
            case_of(count, seed=seed, unrouted=unrouted)
            for seed, unrouted in enumerate((0.2, 0.9, 0.0, 1.0))
        ]
        pool.run(count, _graph, cases, expands, asynchronous)


# ---- streams and events -------------------------------------------------------------------------


def _delayed_streams(group: Any, case: Case, expands: bool, sync: bool) -> None:
    """The communication stream is behind, then the caller's is; inputs are dropped at once."""
    ranks, device = as_group(group), own_device()
    source = on_gpu(inputs(case, ranks.rank))
    buffer = open_buffer(group)
    comm, results = buffer.get_comm_stream(), []
    for turn in range(6):
        if turn % 2:
            with torch.cuda.stream(comm):
                torch.cuda._sleep(LATE_CYCLES)
        elif turn % 3 == ranks.rank % 3:
            torch.cuda._sleep(LATE_CYCLES)
        mine = Inputs(*(value.clone() for value in vars(source).values()))
        names = ("previous_event", "previous_event_before_epilogue")
        options = {
            names[turn % 2]: ElasticBuffer.capture(), "async_with_compute_stream": True,
            "allocate_on_comm_stream": True,
        }  # fmt: skip
        rows, _, weights, handle, event = buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.experts, do_expand=expands,
            do_cpu_sync=sync, expert_alignment=ALIGNMENT, do_zero_padding=True, **options,
        )  # fmt: skip
        del mine
        torch.full_like(source.x, torch.nan)  # takes the memory if it is free
        torch.full_like(source.topk_idx, -1)
        event.current_stream_wait()
        y = _outputs(rows, ranks.rank)
        options[names[turn % 2]] = ElasticBuffer.capture()
        combined, back, done = buffer.combine(y, handle, weights * 2, **options)
        shape = y.shape
        del y
        torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
        done.current_stream_wait()
        torch.cuda._sleep(1000)
        results.append([each.clone() for each in (rows, rows, weights, weights, combined, back)])
        handles = _of_handle(handle)
        idx = () if expands else (reference_idx(case, ranks.rank, len(rows)).to(device),)
        results[-1].extend((*idx, *(each.clone() for each in handles)))
        wait()
    torch.cuda.synchronize(device)
    buffer.destroy()
    for found in results:
        _check_round(case, ranks.rank, expands, [each.cpu() for each in found])


def reference_idx(case: Case, rank: int, rows: int) -> torch.Tensor:
    """Local expert numbers of the received rows, -1 for the rest."""
    gathered = arrivals(case, rank).gather([each.topk_idx for each in reference.everybody(case)])
    local = gathered - rank * case.local
    idx = torch.full((rows, case.top_k), -1, dtype=torch.int64, device="cpu")
    idx[: len(local)] = torch.where((local >= 0) & (local < case.local), local, -1)
    return idx


@EXPANDS
@pytest.mark.parametrize("sync", [False, True])
def test_events_order_delayed_streams(
    gpus: GpuPools, ranks: int, expands: bool, sync: bool
) -> None:
    gpus.run(ranks, _delayed_streams, case_of(ranks), expands, sync)


def _barrier(group: Any) -> None:
    """A barrier keeps the stream until the last rank's stream has come to its own."""
    ranks = as_group(group)
    buffer = open_buffer(group)
    for use_comm_stream in (True, False):
        buffer.barrier(use_comm_stream)
    wait()
    late, passed = torch.cuda.Event(), torch.cuda.Event()
    ranks.all_gather(None)
    if ranks.rank == ranks.size - 1:
        torch.cuda._sleep(10 * LATE_CYCLES)
        late.record()
        ranks.all_gather(None)
        buffer.barrier()
    else:
        buffer.barrier()
        passed.record()
        ranks.all_gather(None)
        assert not passed.query()  # the last rank still sleeps, and has not called
    wait()
    ranks.all_gather(None)
    buffer.destroy()


def _barrier_of_cpus(group: Any) -> None:
    """The CPU waits for all streams, which ranks that are threads of one GPU must not."""
    buffer, late = open_buffer(group), torch.cuda.Event()
    for use_comm_stream in (True, False):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(LATE_CYCLES)
            late.record()
        buffer.barrier(use_comm_stream, with_cpu_sync=True)
        assert late.query()
    buffer.destroy()


def test_barrier_of_cpus(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _barrier_of_cpus)


@pytest.mark.parametrize("ranks", THREADS)
def test_barrier(one_gpu: OneGpu, ranks: int) -> None:
    one_gpu.run(ranks, _barrier)


# ---- refusals -----------------------------------------------------------------------------------


def _works(buffer: ElasticBuffer, case: Case, rank: int) -> None:
    mine = on_gpu(inputs(case, rank))
    for expands in (False, True):
        found = _round(buffer, case, rank, mine, expands)
        wait()
        check_kernels(buffer)  # a call that was given up is none with wrong results
        _check_round(case, rank, expands, [each.cpu() for each in found])


def _there(changes: dict[str, Any]) -> dict[str, Any]:
    device = own_device()
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in changes.items()
    }


def _said(call: Callable[[], object]) -> str:
    error = caught(call)
    return "" if error is None else f"{type(error).__name__}: {error}"


def _refused(group: Any, case: Case, kinds: list[tuple[dict[str, Any], str]]) -> list[str]:
    """What rank 0's bad dispatches are found to be, by it and by others; calls work after each."""
    ranks = as_group(group)
    buffer, mine = open_buffer(group), on_gpu(inputs(case, ranks.rank))
    good = {**vars(mine), "num_experts": case.experts}
    # Kernels are loaded while none waits for another thread's rank.
    buffer.dispatch(**good)
    wait()
    said = []
    for changes, _ in kinds:
        mine_now = {**good, **(_there(changes) if ranks.rank == 0 else {})}
        said.append(_said(partial(buffer.dispatch, **mine_now)))
    wait()
    _works(buffer, case, ranks.rank)
    buffer.destroy()
    return said


def _check_said(said: list[list[str]], kinds: list[tuple[dict[str, Any], str]]) -> None:
    for number, (_, wanted) in enumerate(kinds):
        assert said[0][number].startswith(f"{ArgumentError.__name__}: {wanted}"), said[0][number]
        for other in said[1:]:
            assert other[number].startswith(f"{PeerRefused.__name__}: rank 0 refused")


def test_bad_dispatches(one_gpu: OneGpu) -> None:
    kinds = list(BAD_DISPATCHES.values())
    _check_said(one_gpu.run(4, _refused, case_of(4), kinds), kinds)


def _bad_reuses(group: Any, case: Case, changes: dict[str, Any], combines: bool) -> str:
    ranks = as_group(group)
    buffer, mine = open_buffer(group), on_gpu(inputs(case, ranks.rank))
    rows, _, _, handle, _ = buffer.dispatch(**vars(mine), num_experts=case.experts)
    given = {"x": rows if combines else mine.x, "handle": handle}
    method = buffer.combine if combines else buffer.dispatch
    method(**given)  # kernels are loaded while none waits for another thread's rank
    wait()
    given |= _there(changes) if ranks.rank == 0 else {}

    def call() -> None:
        method(**given)
        wait()
        check_kernels(buffer)  # what kernels have found

    said = _said(call)
    wait()
    _works(buffer, case, ranks.rank)
    buffer.destroy()
    return said


@pytest.mark.parametrize("bad", BAD_REUSES)
def test_bad_reuses(one_gpu: OneGpu, bad: str) -> None:
    case, (changes, wanted) = conformance.CASE, BAD_REUSES[bad]
    said = one_gpu.run(case.ranks, _bad_reuses, case, changes, False)
    assert said[0].startswith(f"{ArgumentError.__name__}: {wanted}"), said[0]
    assert all(other.startswith(PeerRefused.__name__) for other in said[1:]), said


@pytest.mark.parametrize("changes", [{"handle": None}, {"num_sms": -3}, {"bias": 4}])
def test_bad_combines(one_gpu: OneGpu, changes: dict[str, Any]) -> None:
    case = conformance.CASE
    said = one_gpu.run(case.ranks, _bad_reuses, case, changes, True)
    assert said[0].startswith(ArgumentError.__name__), said[0]
    assert all(other.startswith(PeerRefused.__name__) for other in said[1:]), said


def _bad_index(group: Any, case: Case, expands: bool) -> str:
    """Only the kernels look at entries, so a combine that comes after raises it."""
    rank = as_group(group).rank
    buffer, mine = open_buffer(group), on_gpu(inputs(case, rank))
    bad = mine.topk_idx.clone()
    if rank == 0:
        bad[5, 1] = case.experts
    rows, _, _, handle, _ = buffer.dispatch(
        mine.x, bad, num_experts=case.experts, do_cpu_sync=False, do_expand=expands
    )
    wait()
    said = _said(partial(buffer.combine, rows, handle))
    wait()
    _works(buffer, case, rank)
    buffer.destroy()
    return said


@EXPANDS
def test_an_index_out_of_range(gpus: GpuPools, one_gpu: OneGpu, ranks: int, expands: bool) -> None:
    for pool, count in ((gpus, ranks), (one_gpu, 3)):
        said = pool.run(count, _bad_index, case_of(count), expands)
        assert said[0].startswith("ArgumentError: topk_idx[5, 1] of call 1"), said
        assert f"is {4 * count}, but must be" in said[0]
