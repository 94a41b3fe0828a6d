"""Ranks as threads of one process on one GPU: both modes, bit for bit, with hooks, graphs, masks
and refusals, and thousands of rounds. Kernels of ranks wait for each other, so a round that ends at
all has run those of all ranks at the same time.

A thread waits for its own stream only, never for the GPU, and does that before it copies to or from
the CPU. Where a graph is captured no kernel of any rank runs (``meet``): the driver may wait for
all of them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import fanfold
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.plan import CudaDispatched
from fanfold.group import Group
from tests.distributed import routings
from tests.distributed.cuda_rounds import dispatch_kinds, on_cpu, run_case, sent, settle
from tests.distributed.layers import caught
from tests.distributed.test_high_throughput import outputs_of
from tests.gpu import sanitize
from tests.gpu.one_gpu import OneGpu, capture, meet, wait
from tests.gpu.support import (
    Case,
    answers,
    assert_combined,
    assert_received,
    case_of,
    open_layer,
    own_device,
    tokens_of,
)
from tests.gpu.test_high_throughput_cuda import (
    FEW_SLOTS,
    LAYOUTS,
    opened,
    rounds_with_few_slots,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("ranks", [2, 3, 4]),
]

ROUNDS = 10_000
AHEAD = 32
"""Rounds after which a rank waits for its stream, so that none is far ahead of the others."""

BAD = 1
"""The rank that errs or never calls."""


def _differ(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Whether bits differ, on the GPU."""
    return (found.view(torch.int16) != wanted.view(torch.int16)).any()


# ---- small rounds of all kinds, on every rank ---------------------------------------------------


@pytest.mark.parametrize("part", ["low-latency", "high-throughput"])
def test_rounds_of_all_kinds(one_gpu: OneGpu, ranks: int, part: str) -> None:
    one_gpu.run(ranks, sanitize.PARTS[part])


def _sms(group: Group) -> tuple[int, int, bool]:
    """CTAs of the kernels, SMs of the GPU, and whether the stream is this rank's own."""
    with open_layer(group, case_of(group.size)) as ep:
        ctas = ep._backend._loader._grid.ctas  # type: ignore[attr-defined]
    sms = torch.cuda.get_device_properties(own_device()).multi_processor_count
    streams = group.all_gather(torch.cuda.current_stream().cuda_stream)
    return ctas, sms, len({*streams, 0}) == group.size + 1


def test_each_rank_has_its_stream_and_its_share_of_the_sms(one_gpu: OneGpu, ranks: int) -> None:
    for ctas, sms, own_stream in one_gpu.run(ranks, _sms):
        assert ctas == sms // ranks
        assert own_stream


# ---- low latency --------------------------------------------------------------------------------


def _batches(case: Case) -> list[Case]:
    """Inputs of the same sizes with other routings."""
    routed = ("spread", "holes", "duplicates", "one_rank", "none")
    return [case.but(routing=routing, seed=n) for n, routing in enumerate(routed)]


class _Inputs:
    """The inputs of ``cases`` on one rank, and what must come of them; on the GPU."""

    def __init__(self, group: Group, cases: list[Case]) -> None:
        device = own_device()
        self.answers = answers(group, cases)
        self.tokens = [tokens_of(case, group.rank).to(device) for case in cases]
        self.ys: list[torch.Tensor] = []
        self.outs = [answer.out.to(device) for answer in self.answers]

    def first_rounds(self, ep: fanfold.LowLatency) -> None:
        """A round of each input; whatever a dispatch brings is checked."""
        for mine, answer in zip(self.tokens, self.answers, strict=True):
            received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            self.ys.append(answer.spread(received.tokens, own_device()))
            out = ep.combine(self.ys[-1], received)
            assert_received(received, answer)
            assert_combined(out, answer)

    def round(self, ep: fanfold.LowLatency, at: int, hooks: bool) -> torch.Tensor:
        """Whether the sums of a round of input ``at`` are wrong."""
        mine, y = self.tokens[at], self.ys[at]
        if not hooks:
            received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            return _differ(ep.combine(y, received), self.outs[at])
        received, receive = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)
        receive()
        out, receive = ep.combine(y, received, return_hook=True)
        receive()
        return _differ(out, self.outs[at])


def _many_low_latency(group: Group, case: Case, rounds: int) -> int:
    """How many of so many rounds are wrong."""
    inputs = _Inputs(group, _batches(case))
    wrong = torch.zeros((), dtype=torch.int64, device=own_device())
    with open_layer(group, case) as ep:
        inputs.first_rounds(ep)
        for number in range(rounds):
            wrong += inputs.round(ep, number % len(inputs.ys), hooks=number % 3 == 1)
            if number % AHEAD == 0:
                wait()
        ep.synchronize()
    return int(wrong)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_many_rounds_of_low_latency(one_gpu: OneGpu, ranks: int, dtype: str) -> None:
    case = case_of(ranks, hidden=256, dtype=dtype)
    assert one_gpu.run(ranks, _many_low_latency, case, ROUNDS) == [0] * ranks


def _captured_low_latency(group: Group, case: Case, rounds: int) -> int:
    """How many replays of a graph, and rounds in between, are wrong."""
    inputs = _Inputs(group, _batches(case))
    wrong = torch.zeros((), dtype=torch.int64, device=own_device())
    with open_layer(group, case) as ep:
        inputs.first_rounds(ep)
        inputs.round(ep, 0, hooks=True)
        own = inputs.tokens[0].to(own_device())
        x, topk_idx, weights = own.x.clone(), own.topk_idx.clone(), own.topk_weights
        assert weights is not None
        topk_weights, y = weights.clone(), inputs.ys[0].clone()

        def call() -> torch.Tensor:
            received = ep.dispatch(x, topk_idx, topk_weights)
            return ep.combine(y, received)

        graph, out = capture(group, call)
        for number in range(rounds):
            at = number % len(inputs.ys)
            mine = inputs.tokens[at]
            assert mine.topk_weights is not None
            x.copy_(mine.x)
            topk_idx.copy_(mine.topk_idx)
            topk_weights.copy_(mine.topk_weights)
            y.copy_(inputs.ys[at])
            graph.replay()
            wrong += _differ(out, inputs.outs[at])
            if number % 4 == 3:
                wrong += inputs.round(ep, at, hooks=number % 8 == 7)
            if number % AHEAD == 0:
                wait()
        ep.synchronize()
        meet(group)
        del graph
    return int(wrong)


def test_graphs_of_low_latency(one_gpu: OneGpu, ranks: int) -> None:
    case = case_of(ranks, hidden=256)
    assert one_gpu.run(ranks, _captured_low_latency, case, 500) == [0] * ranks


def _masked(group: Group, case: Case) -> tuple[bool, bool]:
    """Whether the others' rounds are right without a rank that never calls."""
    device, rank = own_device(), group.rank
    mine = tokens_of(case, rank).to(device)
    right, live = True, True
    with open_layer(group, case, timeout_s=1.0, late_peers="mask") as ep:
        received = ep.dispatch(mine.x, mine.topk_idx)
        ep.combine(received.tokens, received)
        meet(group)
        if rank != BAD:
            # Without the late rank's experts each value is a sum over the remaining ones.
            kept = (mine.topk_idx // case.experts_per_rank != BAD) & (mine.topk_idx >= 0)
            wanted = mine.x.float() * kept.sum(1, keepdim=True)
            for _ in range(8):
                received = ep.dispatch(mine.x, mine.topk_idx)
                out = ep.combine(received.tokens, received)
                ep.synchronize()
                right &= bool(((out.float() - wanted).abs() <= 2.0**-6 * wanted.abs()).all())
                right &= not bool((received.source_rank == BAD).any())
            live = ep.live_ranks() == tuple(r for r in range(ep.ranks) if r != BAD)
        meet(group)
    return right, live


def test_a_rank_that_never_calls_is_masked(one_gpu: OneGpu, ranks: int) -> None:
    assert one_gpu.run(ranks, _masked, case_of(ranks)) == [(True, True)] * ranks


def _never_calls(group: Group, case: Case) -> Exception | None:
    """What the others are told of a rank that never calls."""
    mine = tokens_of(case, group.rank).to(own_device())
    told = None
    with open_layer(group, case, timeout_s=1.0) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        ep.combine(received.tokens, received)
        meet(group)
        if group.rank != BAD:
            ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            told = caught(ep.synchronize)
        meet(group)
    return told


def test_a_rank_that_never_calls_is_named(one_gpu: OneGpu, ranks: int) -> None:
    for rank, error in enumerate(one_gpu.run(ranks, _never_calls, case_of(ranks))):
        if rank != BAD:
            assert isinstance(error, fanfold.PeerTimeout)
            assert (error.rank, error.peer) == (rank, BAD)


def _refused(group: Group, case: Case) -> tuple[str, bool]:
    """What a dispatch raises of which one rank's input is bad, and whether the next one works."""
    (answer,) = answers(group, [case])
    mine = tokens_of(case, group.rank).to(own_device())
    with open_layer(group, case) as ep:
        first = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = answer.spread(first.tokens, own_device())
        ep.combine(y, first)
        # A kernel's first launch may wait for the other ranks' kernels, which wait for nothing of
        # this rank before they meet.
        x = mine.x.float() if group.rank == BAD else mine.x
        meet(group)
        error = caught(lambda: ep.dispatch(x, mine.topk_idx, mine.topk_weights))
        error = error or caught(ep.synchronize)
        meet(group)
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        out = ep.combine(y, received)
        ep.synchronize()
        return type(error).__name__, not bool(_differ(out, answer.out.to(own_device())))


def test_a_refusal_reaches_all_ranks(one_gpu: OneGpu, ranks: int) -> None:
    for rank, (error, works) in enumerate(one_gpu.run(ranks, _refused, case_of(ranks))):
        assert error == ("ArgumentError" if rank == BAD else "PeerRefused")
        assert works


# ---- high throughput ----------------------------------------------------------------------------


class _Layer:
    """One routing in one order of rows, the rows of which have been checked once."""

    def __init__(self, mode: CudaHighThroughput, expect: routings.Round, layout: str) -> None:
        self._mode: Any = mode
        self._layout = layout
        self._experts = expect.case.experts
        self._x, self._topk_idx = sent(expect, mode.device), expect.own.topk_idx.to(mode.device)
        run_case(mode, expect.case, expect.rank, layout)
        got = self.dispatch(None)
        self.plan, self._rows = got.plan, got.tokens
        settle(mode.device)
        self._y = outputs_of(expect, layout, False).to(mode.device)
        self._out = self.combine(got)
        wanted = routings.expected_combine(
            expect.case, expect.inputs, expect.rows_by_rank, expect.rank, False
        )
        assert torch.equal(on_cpu(self._out).view(torch.int16), wanted.view(torch.int16))
        # The first launch of what rounds compare with may wait for kernels of other ranks. Here
        # those wait for nothing of this rank.
        wrong = torch.zeros((), dtype=torch.int64, device=mode.device)
        wrong += _differ(self._out, self._out) | _differ(self._rows, self._rows)
        assert int(on_cpu(wrong)) == 0

    def dispatch(self, capacity: int | None) -> CudaDispatched:
        """With a new routing; without a capacity the CPU waits."""
        return self._mode.dispatch(  # type: ignore[no-any-return]
            self._x, self._topk_idx, num_experts=self._experts, layout=self._layout,
            capacity=capacity,
        )  # fmt: skip

    def combine(self, got: CudaDispatched) -> torch.Tensor:
        """The sums of the rows' outputs."""
        out, _ = self._mode.combine(self._y, got.plan, layout=self._layout)
        return out  # type: ignore[no-any-return]

    def round(self, number: int) -> torch.Tensor:
        """A new routing with or without a capacity, or an earlier one; whether that is wrong."""
        if number % 2:
            got = self._mode.dispatch_cached(self._x, self.plan, layout=self._layout)
        else:
            got = self.dispatch(None if number % 16 == 0 else len(self._rows))
        return _differ(got.tokens, self._rows) | _differ(self.combine(got), self._out)

    def captured(self) -> torch.Tensor:
        """A new routing for a graph; whether that is wrong."""
        got = self.dispatch(len(self._rows))
        return _differ(got.tokens, self._rows) | _differ(self.combine(got), self._out)


def _routing(ranks: int) -> routings.Case:
    tokens = tuple((33, 0, 57, 18)[rank % 4] for rank in range(ranks))
    return routings.Case(tokens=tokens, experts_per_rank=4, top_k=3, hidden=256, weighted=False)


@contextmanager
def _opened(group: Group, ring_bytes: int, transfer: str) -> Iterator[CudaHighThroughput]:
    """The mode, whose dispatches must move rows as is asked for."""
    with dispatch_kinds() if group.rank == 0 else nullcontext() as kinds:
        meet(group)
        with opened(group, ring_bytes=ring_bytes, transfer=transfer) as mode:
            yield mode
            mode.quiesce()
            meet(group)
    if kinds is not None:
        assert {kind.pulls for kind in kinds} == {transfer == "pull"}


def _pulled(group: Group, cases: list[routings.Case]) -> None:
    with _opened(group, FEW_SLOTS, "pull") as mode:
        for number, case in enumerate(cases):
            run_case(mode, case, group.rank, LAYOUTS[number % 2])


@pytest.mark.parametrize("scales", [0, 7, 8])
@pytest.mark.parametrize("style", ["spread", "one_rank", "duplicates"])
def test_pulled_rounds(one_gpu: OneGpu, ranks: int, style: str, scales: int) -> None:
    """Each slot of a source is used several times."""
    one_gpu.run(ranks, _pulled, rounds_with_few_slots(ranks, style, scales))


def _many_high_throughput(group: Group, rounds: int, transfer: str) -> int:
    """How many of so many rounds are wrong."""
    expect = routings.Round(_routing(group.size), group.rank)
    with _opened(group, 1 << 20, transfer) as mode:
        layers = [_Layer(mode, expect, layout) for layout in LAYOUTS]
        wrong = torch.zeros((), dtype=torch.int64, device=mode.device)
        for number in range(rounds):
            wrong += layers[number // 2 % len(layers)].round(number)
            if number % AHEAD == 0:
                wait()
    return int(wrong)


TRANSFERS = pytest.mark.parametrize("transfer", ["push", "pull"])


@TRANSFERS
def test_many_rounds_of_high_throughput(one_gpu: OneGpu, ranks: int, transfer: str) -> None:
    assert one_gpu.run(ranks, _many_high_throughput, ROUNDS, transfer) == [0] * ranks


def _captured_high_throughput(group: Group, rounds: int, transfer: str) -> int:
    """How many replays of a graph, and rounds in between, are wrong."""
    expect = routings.Round(_routing(group.size), group.rank)
    with _opened(group, 1 << 20, transfer) as mode:
        layers = [_Layer(mode, expect, layout) for layout in LAYOUTS]
        for layer in layers:
            layer.captured()  # loads what capture may not
        wrong = torch.zeros((), dtype=torch.int64, device=mode.device)
        graph, now = capture(group, lambda: layers[0].captured() | layers[1].captured())
        for number in range(rounds):
            graph.replay()
            wrong += now
            if number % 4 == 3:
                wrong += layers[number % 2].round(number)
            if number % AHEAD == 0:
                wait()
        mode.quiesce()
        meet(group)
        del graph  # before the memory, and when no rank replays any more
    return int(wrong)


@TRANSFERS
def test_graphs_of_high_throughput(one_gpu: OneGpu, ranks: int, transfer: str) -> None:
    assert one_gpu.run(ranks, _captured_high_throughput, 500, transfer) == [0] * ranks
