"""A low-latency combine that begins before the experts' outputs are written, as SGLang calls it for
its single-batch overlap: rows are read only once their signal has come."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer
from fanfold.errors import PeerTimeout, SignalTimeout, UsageError
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.conformance import deep_ep_reference as reference
from tests.conformance.deep_ep_reference import Case, inputs
from tests.conformance.test_deep_ep_low_latency import arguments_of, finish, open_buffer, outputs
from tests.conformance.test_deep_ep_refusals import BAD_RANK, Spoil, check_refusals, refused

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]

BLOCK_M, N_TILES, COMPUTE_SMS = 64, 7, 5
# Some experts have rows in two blocks, and one rank has no tokens.
CASE = Case(experts=8, top_k=3, hidden=64, tokens=(96, 60, 0, 90), seed=5)


class Combine:
    """The combines of one rank with its outputs, which ``y`` has not yet: NaN, until ``write``.

    Args:
        buffer: the rank's.
        case: whose inputs it dispatches.
        rank: which.
    """

    def __init__(self, buffer: Buffer, case: Case, rank: int) -> None:
        self.buffer, self.case, self.rank = buffer, case, rank
        self.mine = inputs(case, rank)
        _, self.counts, self.handle, _, _ = buffer.low_latency_dispatch(
            self.mine.x, self.mine.topk_idx, case.max_tokens, case.experts, use_fp8=False
        )
        self.outputs = outputs(case, rank, "bf16")
        self.y = torch.full_like(self.outputs, torch.nan)
        self.stop = threading.Event()

    def arguments(self) -> dict[str, Any]:
        return {
            "x": self.y,
            "topk_idx": self.mine.topk_idx,
            "topk_weights": self.mine.topk_weights,
            "handle": self.handle,
        }

    def down_gemm(self, signal: torch.Tensor, block_m: int, tiles: int) -> threading.Thread:
        """Starts a thread that does as SGLang's masked grouped GEMMs: it adds 1 to the signal of a
        block for each tile of it that it has written, with blocks in any order."""
        blocks = signal.numel() // self.case.local
        order = [
            (expert, block, tile)
            for expert, count in enumerate(self.counts.tolist())
            for block in range(-(-count // block_m))
            for tile in range(tiles)
        ]
        random.Random(self.rank).shuffle(order)

        def run() -> None:
            for expert, block, tile in order:
                if self.stop.is_set():
                    return
                rows = slice(block * block_m, min((block + 1) * block_m, self.counts[expert]))
                columns = slice(tile, None, tiles)
                time.sleep(0.0005)
                self.y[expert, rows, columns] = self.outputs[expert, rows, columns]
                signal.view(-1)[expert * blocks + block] += 1

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def check(self, out: torch.Tensor) -> None:
        y_of = [outputs(self.case, peer, "bf16") for peer in range(self.case.ranks)]
        assert torch.equal(out, reference.weighted_sum(self.case, self.rank, y_of))


# ---- SGLang -------------------------------------------------------------------------------------


def _signals(case: Case, kind: str) -> tuple[torch.Tensor, dict[str, Any], int, int]:
    """The signals that SGLang makes on either kind of GPU, what it passes to the combine, and what
    its GEMM does: rows of a block, and what it adds in all."""
    capacity = case.ranks * case.max_tokens
    if kind == "src_signals":  # Blackwell: each SM adds 1 to every expert's
        signal = torch.zeros(case.local, dtype=torch.uint32, device="cpu")
        passed = {"src_signals": signal, "src_signal_expect_value": COMPUTE_SMS}
        return signal.view(torch.int32), passed, capacity, COMPUTE_SMS
    # Hopper: 64 is the least block_m that the GEMM may choose, and it says which it has.
    signal = torch.zeros(case.local * -(-capacity // 64), dtype=torch.int32, device="cpu")
    passed = {
        "comp_signal": signal,
        "block_m": BLOCK_M,
        "threshold": N_TILES,
        "num_sms": 3,
    }
    return signal, passed, BLOCK_M, N_TILES


def _sglang(group: dist.ProcessGroup, kind: str, mode: str) -> None:
    rank = as_group(group).rank
    buffer = open_buffer(group, CASE)
    for round_ in range(2):
        call = Combine(buffer, CASE, rank)
        signal, passed, block_m, tiles = _signals(CASE, kind)
        if kind == "comp_signal":
            passed["packed_recv_count"] = call.counts
            assert rank != 0 or call.counts.max() > BLOCK_M
        gemm = call.down_gemm(signal, block_m, tiles)
        out, event, hook = buffer.low_latency_combine(
            **call.arguments(), **arguments_of(mode), overlap=True, **passed
        )
        gemm.join()
        finish(mode, event, hook)
        call.check(out)
        # The next layer may overlap nothing, and then passes signals that nobody adds to.
        call.y.copy_(call.outputs)
        passed |= {} if round_ else {"comp_signal": None, "src_signals": None}
        out, event, hook = buffer.low_latency_combine(
            **call.arguments(), **arguments_of(mode), overlap=False, **passed
        )
        finish(mode, event, hook)
        call.check(out)
    buffer.destroy()


@pytest.mark.parametrize("mode", ["plain", "async", "hook"])
@pytest.mark.parametrize("kind", ["comp_signal", "src_signals"])
def test_sglang_single_batch_overlap(pools: Pools, kind: str, mode: str) -> None:
    pools(4).run(_sglang, kind, mode)


def _zero_copy(group: dist.ProcessGroup) -> None:
    """Small blocks of signals of any shape; rank 2 has written its outputs before and says so."""
    rank = as_group(group).rank
    buffer = open_buffer(group, CASE)
    call = Combine(buffer, CASE, rank)
    given, call.y = call.y, buffer.get_next_low_latency_combine_buffer(call.handle)
    call.y.fill_(torch.nan)
    blocks = -(-call.y.shape[1] // 24)
    signal = torch.zeros((CASE.local, blocks), dtype=torch.int32, device="cpu")
    options = {"overlap": True, "comp_signal": signal, "block_m": 24, "threshold": 2}
    if rank == 2:
        call.y.copy_(call.outputs)
        signal.fill_(2)
    else:
        call.down_gemm(signal, 24, 2)
    arguments = call.arguments() | {"x": given}
    out, _, _ = buffer.low_latency_combine(**arguments, zero_copy=True, **options)
    call.check(out)
    buffer.destroy()


def test_zero_copy_and_small_blocks(pools: Pools) -> None:
    pools(4).run(_zero_copy)


# ---- refusals and timeouts ----------------------------------------------------------------------


def _set(**changes: Any) -> Spoil:
    return lambda arguments: arguments.update(changes)


def _int32(count: int, **options: Any) -> torch.Tensor:
    return torch.zeros(count, **{"dtype": torch.int32, "device": "cpu", **options})


_BY_EXPERT: dict[str, Any] = {"comp_signal": None, "src_signal_expect_value": 1}
# 2 local experts with 384 rows of room each, in blocks of 64.
BAD: dict[str, tuple[Spoil, str]] = {
    "no signals": (_set(comp_signal=None), "overlap"),
    "both": (_set(src_signals=_int32(2), src_signal_expect_value=1), "overlap"),
    "float": (_set(comp_signal=_int32(12, dtype=torch.float32)), "comp_signal.dtype"),
    "unsigned": (_set(comp_signal=_int32(12, dtype=torch.uint32)), "comp_signal.dtype"),
    "meta": (_set(comp_signal=_int32(12, device="meta")), "comp_signal.device"),
    "strided": (_set(comp_signal=_int32(24)[::2]), "comp_signal.stride()"),
    "few": (_set(comp_signal=_int32(11)), "comp_signal.numel()"),
    "few for the block": (_set(block_m=32), "comp_signal.numel()"),
    "list": (_set(comp_signal=[0] * 12), "comp_signal"),
    "no block": (_set(block_m=0), "block_m"),
    "block of -1": (_set(block_m=-1), "block_m"),
    "no threshold": (_set(threshold=0), "threshold"),
    "threshold": (_set(threshold=1 << 31), "threshold"),
    "half a threshold": (_set(threshold=1.5), "threshold"),
    "no SMs": (_set(num_sms=0), "num_sms"),
    "counts": (_set(packed_recv_count=_int32(3)), "packed_recv_count.shape"),
    "long counts": (_set(packed_recv_count=_int32(2).long()), "packed_recv_count.dtype"),
    "int64 by expert": (_set(**_BY_EXPERT, src_signals=_int32(2).long()), "src_signals.dtype"),
    "few by expert": (_set(**_BY_EXPERT, src_signals=_int32(1)), "src_signals.numel()"),
    "no value": (_set(comp_signal=None, src_signals=_int32(2)), "src_signal_expect_value"),
}


def _refused(group: dist.ProcessGroup) -> dict[str, Exception]:
    rank, errors = as_group(group).rank, {}
    buffer = open_buffer(group, CASE)
    call = Combine(buffer, CASE, rank)
    call.y.copy_(call.outputs)
    good = {
        **call.arguments(),
        "overlap": True,
        "comp_signal": torch.full((12,), 2, dtype=torch.int32, device="cpu"),
        "threshold": 2,
    }
    for name, (spoil, _) in BAD.items():
        arguments = dict(good)
        if rank == BAD_RANK:
            spoil(arguments)
        errors[name] = refused(buffer.low_latency_combine, arguments)
    call.check(buffer.low_latency_combine(**good)[0])
    buffer.destroy()
    return errors


def test_bad_arguments_are_refused(pools: Pools) -> None:
    check_refusals(pools(4).run(_refused), BAD)


def _ignored(group: dist.ProcessGroup) -> None:
    """Without overlap nothing of it is looked at."""
    rank = as_group(group).rank
    buffer = open_buffer(group, CASE)
    call = Combine(buffer, CASE, rank)
    call.y.copy_(call.outputs)
    nonsense = {"comp_signal": 3, "block_m": 0, "threshold": None, "num_sms": -1}
    call.check(buffer.low_latency_combine(**call.arguments(), **nonsense)[0])
    buffer.destroy()


def test_arguments_without_overlap_are_ignored(pools: Pools) -> None:
    pools(4).run(_ignored)


def _late(group: dist.ProcessGroup) -> Exception | None:
    rank = as_group(group).rank
    buffer = open_buffer(group, CASE, timeout_s="1")
    call = Combine(buffer, CASE, rank)
    call.y.copy_(call.outputs)
    signal = torch.full((12,), 4, dtype=torch.int32, device="cpu")
    if rank == 1:
        signal[6:] = 3  # of the second expert
    options = {"overlap": True, "comp_signal": signal, "threshold": 4}
    error = None
    try:
        buffer.low_latency_combine(**call.arguments(), **options)
    except (SignalTimeout, PeerTimeout) as failure:
        error = failure
    if rank == 1:
        with pytest.raises(UsageError, match="waiting for a signal of this rank's own"):
            buffer.low_latency_combine(**call.arguments())
    buffer.destroy()
    return error


def test_a_signal_that_does_not_come_is_named(pools: Pools) -> None:
    errors = pools(4).run(_late)
    late = errors[1]
    assert isinstance(late, SignalTimeout)
    assert isinstance(late, TimeoutError)
    assert (late.rank, late.expert, late.block) == (1, 1, 0)
    assert (late.value, late.expected) == (3, 4)
    assert 1.0 <= late.seconds < 20.0
    assert "block 0 of its local expert 1: expected 4 or more, have 3" in str(late)
    # Rank 2 has no tokens, so nothing is missing there.
    others = [errors[rank] for rank in (0, 3)]
    assert all(isinstance(error, PeerTimeout) and error.peer == 1 for error in others)
