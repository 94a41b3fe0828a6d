"""What goes wrong on GPUs is told on the right ranks within the bound; who may go on, does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from tests.distributed.layers import caught
from tests.gpu.conftest import GpuPools
from tests.gpu.support import (
    Case,
    Tokens,
    answers,
    assert_combined,
    assert_received,
    case_of,
    open_layer,
    own_device,
    tokens_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BAD = 1
"""The rank that errs or is late."""


def _good_round(ep: fanfold.LowLatency, group: dist.ProcessGroup, case: Case) -> None:
    """Asserts that a round gives what it must."""
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case])
    mine = tokens_of(case, rank).to(device)
    received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    out = ep.combine(answer.spread(received.tokens, device), received)
    ep.synchronize()
    assert_received(received, answer)
    assert_combined(out, answer)


def _warm(group: dist.ProcessGroup, case: Case) -> None:
    """Has the kernels compiled, which may take longer than the bound of the test that follows."""
    with open_layer(group, case) as ep:
        _good_round(ep, group, case)


# ---- late ranks ---------------------------------------------------------------------------------


def _never_comes(group: dist.ProcessGroup, case: Case, phase: str) -> tuple[Any, float, Any]:
    """What the ranks that call see, after how long, and what the next call says."""
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    seen, seconds, after = None, 0.0, None
    _warm(group, case)
    with open_layer(group, case, timeout_s=1.0) as ep:
        _good_round(ep, group, case)
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        ep.synchronize()
        dist.barrier(group)
        if rank != BAD:
            start = time.monotonic()
            if phase == "dispatch":
                ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            else:
                ep.combine(torch.zeros_like(received.tokens), received)
            seen = caught(ep.synchronize)  # the call has only enqueued
            seconds = time.monotonic() - start
            after = caught(lambda: ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights))
        dist.barrier(group)  # its memory stays until nobody writes there
    return seen, seconds, after


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_never_calls(gpus: GpuPools, most_ranks: int, phase: str) -> None:
    outcomes = gpus.run(most_ranks, _never_comes, case_of(most_ranks), phase)
    for rank, (error, seconds, after) in enumerate(outcomes):
        if rank == BAD:
            continue
        assert isinstance(error, fanfold.PeerTimeout)
        assert error.rank == rank
        assert error.peer == BAD
        assert phase in error.phase
        assert "FANFOLD_TIMEOUT_S" in str(error)
        assert 0.5 < seconds < 10.0
        assert isinstance(after, fanfold.FanfoldError)


def _late_hook(group: dist.ProcessGroup, case: Case) -> Exception | None:
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    seen = None
    _warm(group, case)
    with open_layer(group, case, timeout_s=1.0) as ep:
        _good_round(ep, group, case)
        dist.barrier(group)
        if rank != BAD:
            _, hook = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)
            seen = caught(lambda: (hook(), ep.synchronize()))
        dist.barrier(group)
    return seen


def test_a_hook_that_waits_in_vain(gpus: GpuPools, most_ranks: int) -> None:
    for rank, error in enumerate(gpus.run(most_ranks, _late_hook, case_of(most_ranks))):
        if rank != BAD:
            assert isinstance(error, fanfold.PeerTimeout)
            assert error.peer == BAD


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
def test_a_stalled_rank_and_the_exit_of_the_others(
    most_ranks: int, tmp_path: Path, mode: str
) -> None:
    """Programs of their own: the handler of PeerTimeout ends the process with exit code 0."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    program = Path(__file__).with_name("stalled_rank.py")
    processes = []
    for rank in range(most_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": most_ranks, "MASTER_PORT": port}
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
        environment |= {name: str(value) for name, value in place.items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(program), str(tmp_path), mode], env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * most_ranks, said
    for rank, text in enumerate(said):
        assert ("stalled" if rank == BAD else f"PeerTimeout of rank {BAD}") in text
        assert rank == BAD or f"{mode} " in text


def _mask(group: dist.ProcessGroup, case: Case) -> tuple[bool, float]:
    """Whether the others' sums are right without the late rank, and how long that took."""
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    right, seconds = True, 0.0
    _warm(group, case)
    with open_layer(group, case, timeout_s=0.5, late_peers="mask") as ep:
        _good_round(ep, group, case)
        dist.barrier(group)
        if rank != BAD:
            # Without the late rank's experts each value is a sum over the remaining ones.
            kept = (mine.topk_idx // case.experts_per_rank != BAD) & (mine.topk_idx >= 0)
            wanted = mine.x.float() * kept.sum(1, keepdim=True)
            start = time.monotonic()
            for _ in range(4):
                received = ep.dispatch(mine.x, mine.topk_idx)
                out = ep.combine(received.tokens, received)
                ep.synchronize()
                right &= bool(((out.float() - wanted).abs() <= 2.0**-6 * wanted.abs()).all())
                right &= not bool((received.source_rank == BAD).any())
            seconds = time.monotonic() - start
            right &= ep.live_ranks() == tuple(r for r in range(ep.ranks) if r != BAD)
            missing = mine.topk_idx // case.experts_per_rank == BAD
            right &= torch.equal(ep.missing(mine.topk_idx), missing)
        dist.barrier(group)
    return right, seconds


def test_late_ranks_are_masked(gpus: GpuPools, most_ranks: int) -> None:
    for rank, (right, seconds) in enumerate(gpus.run(most_ranks, _mask, case_of(most_ranks))):
        assert right, rank
        assert seconds < 10.0  # one wait, not one in each call


# ---- bad input ----------------------------------------------------------------------------------


def _high(mine: Tokens, case: Case) -> Tokens:
    mine.topk_idx[-1, -1] = case.experts
    return mine


def _low(mine: Tokens, case: Case) -> Tokens:
    del case
    mine.topk_idx[0, 0] = -2
    return mine


def _dtype(mine: Tokens, case: Case) -> Tokens:
    del case
    return Tokens(mine.x.float(), mine.topk_idx, mine.topk_weights)


def _shape(mine: Tokens, case: Case) -> Tokens:
    return Tokens(mine.x[:, : case.hidden // 2].contiguous(), mine.topk_idx, mine.topk_weights)


def _device(mine: Tokens, case: Case) -> Tokens:
    del case
    return Tokens(mine.x, mine.topk_idx.cpu(), mine.topk_weights)


def _strides(mine: Tokens, case: Case) -> Tokens:
    del case
    return Tokens(mine.x.T.contiguous().T, mine.topk_idx, mine.topk_weights)


def _too_many(mine: Tokens, case: Case) -> Tokens:
    assert mine.topk_weights is not None
    times = case.max_tokens // len(mine.x) + 1
    parts = (mine.x, mine.topk_idx, mine.topk_weights)
    return Tokens(*(part.repeat(times, 1) for part in parts))


SPOILED: dict[str, tuple[Callable[[Tokens, Case], Tokens], str]] = {
    "expert too high": (_high, "topk_idx"),
    "expert too low": (_low, "topk_idx"),
    "dtype": (_dtype, "x.dtype"),
    "shape": (_shape, "x.shape"),
    "device": (_device, "topk_idx.device"),
    "strides": (_strides, "x.stride"),
    "too many tokens": (_too_many, "x.shape[0]"),
}


SEEN_BY_KERNELS = ("expert too high", "expert too low")
"""Reading these on the CPU would wait for the GPU; peers get the call without them."""


def _bad_dispatch(group: dist.ProcessGroup, case: Case, kind: str) -> Exception | None:
    """What each rank is told where one has bad input; afterwards all goes well again."""
    device, rank = own_device(), dist.get_rank(group)
    with open_layer(group, case) as ep:
        _good_round(ep, group, case)
        told = None
        for _ in range(2):
            mine = tokens_of(case, rank).to(device)
            if rank == BAD:
                mine = SPOILED[kind][0](mine, case)

            def call(mine: Tokens = mine) -> None:
                ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
                ep.synchronize()

            told = caught(call)
            dist.barrier(group)
            _good_round(ep, group, case)
    return told


@pytest.mark.parametrize("kind", SPOILED)
def test_bad_input_to_dispatch(gpus: GpuPools, most_ranks: int, kind: str) -> None:
    outcomes = gpus.run(most_ranks, _bad_dispatch, case_of(most_ranks), kind)
    for rank, error in enumerate(outcomes):
        if rank == BAD:
            assert isinstance(error, fanfold.ArgumentError), error
            assert error.argument.startswith(SPOILED[kind][1])
        elif kind in SEEN_BY_KERNELS:
            assert error is None
        else:
            assert isinstance(error, fanfold.PeerRefused), (rank, error)
            assert error.peer == BAD


def _index_taken_for_none(group: dist.ProcessGroup, case: Case) -> Exception | None:
    """An expert that does not exist is none: all else goes where it should, and the rank is told
    by its next call."""
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    elsewhere = case.experts * 64 + 17 if rank == BAD else -1
    wanted = mine.x.float() * (mine.topk_idx >= 0).sum(1, keepdim=True)
    with open_layer(group, case) as ep:
        holes = mine.topk_idx < 0
        received = ep.dispatch(mine.x, torch.where(holes, elsewhere, mine.topk_idx))
        torch.cuda.synchronize(device)
        told = caught(ep.check)
        out = ep.combine(received.tokens, received)
        ep.synchronize()
    assert bool(((out.float() - wanted).abs() <= 2.0**-6 * wanted.abs()).all())
    return told


def test_an_index_out_of_range_is_none(gpus: GpuPools, ranks: int) -> None:
    case = case_of(ranks, routing="holes", weighted=False)
    for rank, error in enumerate(gpus.run(ranks, _index_taken_for_none, case)):
        if rank == BAD:
            assert isinstance(error, fanfold.ArgumentError), error
            assert error.value == str(case.experts * 64 + 17)
        else:
            assert error is None


def _bad_combine(group: dist.ProcessGroup, case: Case) -> Exception | None:
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = torch.zeros_like(received.tokens)
        if rank == BAD:
            y = y.float()

        def call() -> None:
            ep.combine(y, received)
            ep.synchronize()

        told = caught(call)
        dist.barrier(group)
        _good_round(ep, group, case)
    return told


def test_bad_input_to_combine(gpus: GpuPools, most_ranks: int) -> None:
    for rank, error in enumerate(gpus.run(most_ranks, _bad_combine, case_of(most_ranks))):
        if rank == BAD:
            assert isinstance(error, fanfold.ArgumentError), error
            assert error.argument == "y.dtype"
        else:
            assert isinstance(error, fanfold.PeerRefused), (rank, error)


def _disagreeing(group: dist.ProcessGroup, case: Case) -> Exception | None:
    """One rank alone brings weights. What the ranks have sent then fits nothing, so the layer is
    over, for all of them."""
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:

        def call() -> None:
            ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights if rank == BAD else None)
            ep.synchronize()

        told = caught(call)
        dist.barrier(group)
    with open_layer(group, case) as ep:
        _good_round(ep, group, case)
    return told


def test_ranks_that_disagree(gpus: GpuPools, most_ranks: int) -> None:
    for error in gpus.run(most_ranks, _disagreeing, case_of(most_ranks)):
        assert isinstance(error, fanfold.ArgumentError | fanfold.PeerRefused), error


def _one_codes_its_rows(group: dist.ProcessGroup, case: Case) -> Exception | None:
    """One rank alone has its results travel as LogFMT, which the others' kernels do not read."""
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        _good_round(ep, group, case)
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = torch.ones_like(received.tokens)
        told = caught(lambda: (ep.combine(y, received, logfmt=rank == BAD), ep.synchronize()))
        dist.barrier(group)
    with open_layer(group, case) as ep:
        _good_round(ep, group, case)
    return told


def test_ranks_that_disagree_about_logfmt(gpus: GpuPools, most_ranks: int) -> None:
    case = case_of(most_ranks, hidden=768)
    for rank, error in enumerate(gpus.run(most_ranks, _one_codes_its_rows, case)):
        assert isinstance(error, fanfold.ArgumentError), (rank, error)
        assert "low_latency combine" in error.argument
        assert "the same on all ranks" in error.bound


def _alone(group: dist.ProcessGroup, case: Case) -> list[Exception | None]:
    """Bad input on the only rank; closed objects; results of another layer."""
    device = own_device()
    said = []
    with open_layer(group, case) as ep:
        for spoil, _ in SPOILED.values():
            mine = spoil(tokens_of(case, 0).to(device), case)

            def call(mine: Tokens = mine) -> None:
                ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
                ep.synchronize()

            said.append(caught(call))
            _good_round(ep, group, case)
    mine = tokens_of(case, 0).to(device)
    closed = caught(lambda: ep.dispatch(mine.x, mine.topk_idx))
    assert isinstance(closed, fanfold.UsageError)
    return said


def test_bad_input_alone(gpus: GpuPools) -> None:
    (said,) = gpus.run(1, _alone, case_of(1))
    for error, (_, argument) in zip(said, SPOILED.values(), strict=True):
        assert isinstance(error, fanfold.ArgumentError), error
        assert error.argument.startswith(argument)


# ---- lifetime -----------------------------------------------------------------------------------


def _opened_often(group: dist.ProcessGroup, case: Case, times: int) -> int:
    """Bytes of GPU memory that the last of many layers left taken and the first did not."""
    device = own_device()
    free = []
    for _ in range(times):
        with open_layer(group, case) as ep:
            _good_round(ep, group, case)
        torch.cuda.synchronize(device)
        dist.barrier(group)
        torch.cuda.empty_cache()
        # Ranks may share the GPU: all have freed theirs, and none makes more.
        dist.barrier(group)
        free.append(torch.cuda.mem_get_info(device)[0])
        dist.barrier(group)
    return free[1] - free[-1]


@pytest.mark.alone
def test_memory_is_released(gpus: GpuPools, ranks: int) -> None:
    taken = gpus.run(ranks, _opened_often, case_of(ranks, hidden=4096, max_tokens=128), 8)
    assert max(taken) < 16 << 20


def _two_layers(group: dist.ProcessGroup, case: Case) -> None:
    """Layers of several geometries side by side, called in turn."""
    other = case.but(hidden=1040, top_k=5, experts_per_rank=7, dtype="fp8")
    with open_layer(group, case) as first, open_layer(group, other) as second:
        for _ in range(3):
            _good_round(first, group, case)
            _good_round(second, group, other)


def test_layers_side_by_side(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _two_layers, case_of(ranks))
