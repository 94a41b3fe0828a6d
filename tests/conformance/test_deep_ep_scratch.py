"""Whatever a caller writes into memory that it was given, whenever it does: the calls are right.

vLLM's fault recovery zeroes all of the local buffer tensor and calls nothing afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer
from fanfold.errors import FanfoldError, PeerTimeout
from fanfold.group import as_group
from fanfold.launch import RankPool
from tests.conformance import deep_ep_reference as reference
from tests.conformance import test_deep_ep_high_throughput as high_throughput
from tests.conformance.deep_ep_reference import Case, inputs
from tests.conformance.test_deep_ep_low_latency import check_dispatched, outputs
from tests.environment import environment

pytestmark = pytest.mark.placements("threads")

Pools = Callable[[int], RankPool]
CASE = Case(experts=8, top_k=3, hidden=256, tokens=(6, 4, 0, 5), seed=3)
ROUNDS = 6
BYTES = {"zeros": 0x00, "ones": 0xFF, "random": None}


class Scribbler:
    """Writes over everything that it was shown, and over all scratch of a Buffer.

    Args:
        buffer: whose.
        byte: written everywhere; None for random ones.
    """

    def __init__(self, buffer: Buffer, byte: int | None) -> None:
        self._buffer, self._byte = buffer, byte
        self._shown: list[torch.Tensor] = []

    def show(self, *values: Any) -> None:
        """Remembers the tensors in ``values``."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._shown.append(value)
            elif isinstance(value, tuple | list):
                self.show(*value)

    def scratch(self) -> None:
        """Writes over all scratch."""
        for use_rdma_buffer in (False, True):
            tensor = self._buffer.get_local_buffer_tensor(
                torch.uint8, use_rdma_buffer=use_rdma_buffer
            )
            self._write(tensor)

    def everything(self) -> None:
        """Writes over scratch and all that was shown, of which the last call is done."""
        self.scratch()
        for tensor in self._shown:
            self._write(tensor)

    def forget(self) -> None:
        """Lets go of what was shown."""
        self._shown.clear()

    def _write(self, tensor: torch.Tensor) -> None:
        # Of tensors that are stored transposed, too, by their bytes.
        size, stride = tensor.shape, tensor.stride()
        flat = tensor.as_strided((tensor.numel(),), (1,)) if tensor.numel() else tensor.flatten()
        assert sum((n - 1) * s for n, s in zip(size, stride, strict=True)) < max(1, tensor.numel())
        raw = flat.view(torch.uint8)
        if self._byte is None:
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, device=raw.device))
        else:
            raw.fill_(self._byte)


def open_buffer(group: dist.ProcessGroup, **changes: Any) -> Buffer:
    nbytes = Buffer.get_low_latency_rdma_size_hint(
        CASE.max_tokens, CASE.hidden, CASE.ranks, CASE.experts
    )
    arguments = {"num_nvl_bytes": 1 << 20, "num_rdma_bytes": nbytes, "low_latency_mode": True}
    with environment(FANFOLD_TIMEOUT_S="20"):
        return Buffer(group, **{**arguments, "explicitly_destroy": True, **changes})


# ---- low latency --------------------------------------------------------------------------------


def _low_latency(group: dist.ProcessGroup, byte: int | None, hook: bool) -> None:
    rank = as_group(group).rank
    mine = inputs(CASE, rank)
    buffer = open_buffer(group)
    scribbler = Scribbler(buffer, byte)
    expected = reference.weighted_sum(
        CASE, rank, [outputs(CASE, peer, "bf16") for peer in range(CASE.ranks)]
    )
    for turn in range(ROUNDS):
        result = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, CASE.max_tokens, CASE.experts, use_fp8=False,
            return_recv_hook=hook,
        )  # fmt: skip
        scribbler.scratch()
        if hook:
            scribbler.show(*result[:3])
            scribbler.everything()
            result[4]()
            scribbler.forget()
            scribbler.scratch()
        check_dispatched(CASE, rank, "bf16", result)
        y = outputs(CASE, rank, "bf16")
        zero_copy = bool(turn % 2)
        if zero_copy:
            place = buffer.get_next_low_latency_combine_buffer(result[2])
            scribbler.show(place)
            scribbler.everything()
            place.copy_(y)
            y = result[0]
        combined, _, receive = buffer.low_latency_combine(
            y, mine.topk_idx, mine.topk_weights, result[2], return_recv_hook=hook,
            zero_copy=zero_copy,
        )  # fmt: skip
        scribbler.show(*result[:3])
        if hook:
            scribbler.show(combined)
            scribbler.everything()
            receive()
        assert torch.equal(combined, expected), turn
        scribbler.show(combined)
        scribbler.everything()
        scribbler.forget()
    buffer.destroy()


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("byte", BYTES.values(), ids=BYTES)
def test_low_latency(pools: Pools, byte: int | None, hook: bool) -> None:
    pools(4).run(_low_latency, byte, hook)


# ---- high throughput ----------------------------------------------------------------------------


def _high_throughput(group: dist.ProcessGroup, byte: int | None) -> None:
    rank = as_group(group).rank
    buffer = open_buffer(group)
    scribbler = Scribbler(buffer, byte)
    case = high_throughput.CASE
    expected = reference.combined(
        case, rank, [high_throughput.outputs(case, peer) for peer in range(case.ranks)]
    )
    for _ in range(ROUNDS):
        arguments = high_throughput.good_dispatch(buffer, case, rank)
        result = buffer.dispatch(**arguments)
        scribbler.scratch()
        high_throughput.check_received(case, rank, result)
        combined, _, _ = buffer.combine(high_throughput.outputs(case, rank), result[4])
        assert torch.equal(combined, expected)
        scribbler.show(*result[:3], tuple(result[4]), combined)
        scribbler.everything()
        scribbler.forget()
    buffer.destroy()


@pytest.mark.parametrize("byte", BYTES.values(), ids=BYTES)
def test_high_throughput(pools: Pools, byte: int | None) -> None:
    pools(4).run(_high_throughput, byte)


# ---- handles that were written over -------------------------------------------------------------


def _attempt(call: Callable[[], Any]) -> None:
    """A call with a handle that was written over: refused, or with whatever result."""
    with contextlib.suppress(FanfoldError):
        try:
            call()
        except PeerTimeout as late:
            raise AssertionError("a rank waited in vain") from late


def _spoilt(group: dist.ProcessGroup, byte: int | None, everywhere: bool) -> None:
    rank = as_group(group).rank
    mine = inputs(CASE, rank)
    buffer = open_buffer(group)
    scribbler = Scribbler(buffer, byte)
    case = high_throughput.CASE
    arguments = high_throughput.good_dispatch(buffer, case, rank)
    y, wide = outputs(CASE, rank, "bf16"), high_throughput.outputs(case, rank)
    for turn in range(ROUNDS):
        spoils = everywhere or turn % CASE.ranks == rank
        result = buffer.low_latency_dispatch(
            mine.x, mine.topk_idx, CASE.max_tokens, CASE.experts, use_fp8=False
        )
        check_dispatched(CASE, rank, "bf16", result)
        if spoils:
            scribbler.show(*result[:3])
            scribbler.everything()
        _attempt(
            partial(buffer.low_latency_combine, y, mine.topk_idx, mine.topk_weights, result[2])
        )
        scribbler.forget()
        received = buffer.dispatch(**arguments)
        high_throughput.check_received(case, rank, received)
        if spoils:
            scribbler.show(*received[:3], tuple(received[4]))
            scribbler.everything()
        _attempt(partial(buffer.combine, wide, received[4]))
        _attempt(partial(buffer.dispatch, arguments["x"], handle=received[4]))
        scribbler.forget()
    buffer.destroy()


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("byte", BYTES.values(), ids=BYTES)
def test_handles_written_over(pools: Pools, byte: int | None, everywhere: bool) -> None:
    pools(4).run(_spoilt, byte, everywhere)
