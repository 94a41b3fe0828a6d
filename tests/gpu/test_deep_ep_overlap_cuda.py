"""Low-latency combines of the DeepEP face that begin before the outputs are written, by kernels on
another stream, as SGLang's single-batch overlap makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.deep_ep import Buffer
from fanfold.errors import ArgumentError, PeerTimeout, SignalTimeout
from tests.conformance.deep_ep_reference import Case, inputs
from tests.conformance.test_deep_ep_low_latency import arguments_of, finish, outputs
from tests.gpu.conftest import GpuPools
from tests.gpu.support import own_device
from tests.gpu.test_deep_ep_cuda import case_of, dispatch, expected_sums, on_gpu, open_buffer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BLOCK_M, THRESHOLD = 4, 2
ABSENT = 2
"""The expert of rank 0 whose signal does not come; tokens of rank 1 name it."""
SLEEP_CYCLES = 200_000  # a tenth of a millisecond


class Layer:
    """The second half of a layer on one rank's GPU.

    Args:
        buffer: the rank's.
        case: whose inputs it dispatches.
        by_expert: whether there is one signal for each expert, not for each block.
    """

    def __init__(self, buffer: Buffer, case: Case, *, by_expert: bool = False) -> None:
        self.buffer, self.case, device = buffer, case, own_device()
        rank = dist.get_rank(buffer.group)
        self.mine = on_gpu(inputs(case, rank))
        self.outputs = outputs(case, rank, "bf16").to(device)
        self.y = torch.full_like(self.outputs, torch.nan)
        capacity = self.y.shape[1]
        self.block_m = capacity if by_expert else BLOCK_M
        blocks = -(-capacity // self.block_m)
        dtype = torch.uint32 if by_expert else torch.int32
        self.signals = torch.zeros(case.local * blocks, dtype=dtype, device=device)
        self.added = self.signals.view(torch.int32).view(case.local, blocks)
        self.options: dict[str, Any] = {"overlap": True, "num_sms": 3}
        if by_expert:
            self.options |= {"src_signals": self.signals, "src_signal_expect_value": THRESHOLD}
        else:
            self.options |= {"comp_signal": self.signals, "block_m": BLOCK_M}
            self.options |= {"threshold": THRESHOLD}
        self.produce()  # CUDA loads a kernel at its first use, and may wait for others then
        self.beside = torch.cuda.Stream(device)

    def clear(self) -> None:
        self.y.fill_(torch.nan)
        self.added.zero_()

    def produce(self) -> None:
        """Writes every block, the last first, and says so, with time in between."""
        for block in reversed(range(self.added.shape[1])):
            rows = slice(block * self.block_m, (block + 1) * self.block_m)
            for expert in reversed(range(self.case.local)):
                torch.cuda._sleep(SLEEP_CYCLES)
                self.y[expert, rows] = self.outputs[expert, rows]
                self.added[expert, block] += THRESHOLD

    def run(self, mode: str, *, combine_first: bool = False) -> torch.Tensor:
        """A dispatch, then the outputs on this stream and beside them the combine."""
        here = torch.cuda.current_stream()
        result = dispatch(self.buffer, self.case, self.mine, use_fp8=False)
        self.clear()
        begin = torch.cuda.Event()
        begin.record(here)
        if not combine_first:
            self.produce()
        self.beside.wait_event(begin)
        with torch.cuda.stream(self.beside):
            out, *rest = self.buffer.low_latency_combine(
                self.y, self.mine.topk_idx, self.mine.topk_weights, result[2],
                packed_recv_count=result[1], **self.options, **arguments_of(mode),
            )  # fmt: skip
        if combine_first:
            self.produce()
        self.beside.wait_stream(here)
        finish(mode, *rest)
        here.wait_stream(self.beside)
        return out


def _overlap(group: dist.ProcessGroup, case: Case, by_expert: bool, mode: str) -> None:
    buffer = open_buffer(group, case)
    layer = Layer(buffer, case, by_expert=by_expert)
    outs = [layer.run(mode, combine_first=turn % 2 == 0) for turn in range(4)]
    torch.cuda.synchronize()
    assert buffer.runtime is not None
    buffer.runtime.low_latency.check()
    buffer.destroy()
    wanted = expected_sums(case, dist.get_rank(group), "bf16")
    for out in outs:
        assert torch.equal(out.cpu(), wanted)


@pytest.mark.parametrize("mode", ["", "async", "hook"])
@pytest.mark.parametrize("by_expert", [False, True])
def test_rows_are_read_once_they_are_written(
    gpus: GpuPools, ranks: int, by_expert: bool, mode: str
) -> None:
    gpus.run(ranks, _overlap, case_of(ranks, hidden=1024), by_expert, mode)


def _captured(group: dist.ProcessGroup, case: Case) -> None:
    buffer = open_buffer(group, case)
    layer = Layer(buffer, case)
    layer.run("hook")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.run("hook")
    wanted = expected_sums(case, dist.get_rank(group), "bf16")
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), wanted)
    del graph
    buffer.destroy()


def test_in_a_cuda_graph(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _captured, case_of(ranks))


def _without_signals(group: dist.ProcessGroup, case: Case) -> Exception | None:
    buffer = open_buffer(group, case, timeout_s="1")
    layer = Layer(buffer, case)
    result = dispatch(buffer, case, layer.mine, use_fp8=False)
    layer.added.fill_(THRESHOLD)
    if dist.get_rank(group) == 0:
        layer.added[ABSENT] = THRESHOLD - 1
    buffer.low_latency_combine(
        layer.y, layer.mine.topk_idx, layer.mine.topk_weights, result[2], **layer.options
    )
    torch.cuda.synchronize()
    assert buffer.runtime is not None
    try:
        buffer.runtime.low_latency.check()
    except (SignalTimeout, PeerTimeout) as error:
        return error
    return None


def test_a_signal_that_does_not_come_is_named(gpus: GpuPools, ranks: int) -> None:
    case = case_of(ranks)
    error, *others = gpus.run(ranks, _without_signals, case)
    assert isinstance(error, SignalTimeout)
    assert (error.rank, error.expert, error.value) == (0, ABSENT, THRESHOLD - 1)
    assert error.expected == THRESHOLD
    for rank, other in enumerate(others, start=1):
        if bool((inputs(case, rank).topk_idx == ABSENT).any()):  # else it has all of its rows
            assert isinstance(other, PeerTimeout)
            assert other.peer == 0
        else:
            assert other is None


def _refused(group: dist.ProcessGroup, case: Case) -> None:
    buffer = open_buffer(group, case)
    layer = Layer(buffer, case)
    result = dispatch(buffer, case, layer.mine, use_fp8=False)
    call = (layer.y, layer.mine.topk_idx, layer.mine.topk_weights, result[2])
    with pytest.raises(ArgumentError, match=r"comp_signal\.device"):
        buffer.low_latency_combine(*call, **layer.options | {"comp_signal": layer.signals.cpu()})
    torch.cuda.synchronize()
    buffer.destroy()


def test_signals_elsewhere_are_refused(gpus: GpuPools) -> None:
    gpus.run(1, _refused, case_of(1))
