"""Rounds of the high-throughput mode on GPUs, checked bit for bit; with its kernels emulated, too.

What must come is worked out by :mod:`tests.distributed.routings`, which knows nothing of GPUs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fanfold.backends.high_throughput import kernels
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.in_place import bytes_for_results
from fanfold.backends.high_throughput.kernels import DispatchKind, Kernel
from fanfold.backends.high_throughput.plan import CudaDispatched, CudaPlan
from tests.distributed.routings import Case, Round, distinct, expected_combine
from tests.distributed.test_high_throughput import (
    check_rows,
    expected_lanes,
    lanes_of,
    outputs_of,
    same_bits,
)


@contextmanager
def dispatch_kinds() -> Iterator[list[DispatchKind]]:
    """Of the kernels that are made for dispatches within it, by all ranks of this process."""
    make, kinds = kernels.dispatch_kernel, []

    def made(kind: DispatchKind, *rest: Any) -> Kernel:
        kinds.append(kind)
        return make(kind, *rest)

    with mock.patch.object(kernels, "dispatch_kernel", made):
        yield kinds


def settle(device: torch.device) -> None:
    """Waits for what the current stream of a GPU does. A copy between a GPU and pageable memory
    waits for it too, but may keep other threads from launching meanwhile: where ranks are threads,
    the very kernels for which the stream waits."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; of a tensor of the CPU itself."""
    settle(tensor.device)
    return tensor.cpu()


def sent(expect: Round, device: torch.device) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The own rows on a device; scales keep their strides."""
    own = expect.own
    if own.scales is None:
        return own.x.to(device)
    scales = own.scales
    if device.type != "cpu":
        held = torch.empty_strided(scales.shape, scales.stride(), device=device)
        scales = held.copy_(scales)
    return own.x.to(device), scales


def dispatch(
    mode: CudaHighThroughput,
    expect: Round,
    layout: str,
    capacity: int | None,
    in_place: bool = False,
) -> CudaDispatched:
    """The dispatch of a round."""
    own, device = expect.own, mode.device
    weights = None if own.topk_weights is None else own.topk_weights.to(device)
    return mode.dispatch(
        sent(expect, device),
        own.topk_idx.to(device),
        weights,
        num_experts=expect.case.experts,
        layout=layout,  # type: ignore[arg-type]
        expert_alignment=expect.case.alignment,
        capacity=capacity,
        in_place=in_place,
    )


def check_plan(expect: Round, plan: CudaPlan, layout: str) -> None:
    """What the plan of a new routing says; ``layout`` of the dispatch that made it."""
    case, rows = expect.case, expect.rows
    assert (plan.ranks, plan.num_experts, plan.top_k) == (case.ranks, case.experts, case.top_k)
    assert plan.tokens == case.tokens[expect.rank]
    sources = [row.source for row in rows]
    prefix = [sum(source <= rank for source in sources) for rank in range(case.ranks)]
    assert plan.source_prefix.tolist() == prefix
    assert plan.tokens_per_expert.tolist() == expect.counts
    assert plan.offsets.tolist() == expect.offsets
    if plan.capacity is None:
        assert (plan.received, plan.expert_rows) == (len(rows), expect.offsets[-1])
    count = len(rows)
    assert plan.source_token[:count].tolist() == [row.token for row in rows]
    assert bool((plan.source_token[count:] == -1).all())
    to = [
        [any(r.source == expect.rank and r.token == t for r in theirs) for theirs in
         expect.rows_by_rank]
        for t in range(plan.tokens)
    ]  # fmt: skip
    assert plan.is_token_in_rank.tolist() == to
    if layout == "expert_major":
        assert plan.rows_of is not None
        check_rows_of(expect, plan)
        return
    assert plan.topk_idx is not None
    assert plan.topk_idx[:count].tolist() == [row.lanes for row in rows]
    assert bool((plan.topk_idx[count:] == -1).all())
    if case.weighted:
        assert plan.topk_weights is not None
        weights = torch.tensor([row.weights for row in rows]).reshape(count, case.top_k)
        assert same_bits(on_cpu(plan.topk_weights[:count]), weights)
        assert not plan.topk_weights[count:].any()


def check_rows_of(expect: Round, plan: CudaPlan) -> None:
    """Where the lanes of the rows are in expert-major order."""
    assert plan.rows_of is not None
    assert plan.rows_of[: len(expect.rows)].tolist() == [
        [expect.place_of[n, lane] if lane >= 0 else -1 for lane in row.lanes]
        for n, row in enumerate(expect.rows)
    ]
    assert bool((plan.rows_of[len(expect.rows) :] == -1).all())


def check_brought(expect: Round, got: CudaDispatched, layout: str) -> None:
    """The rows of a dispatch. Behind those that came it has written nothing."""
    needed = len(expect.rows) if layout == "token_major" else expect.offsets[-1]
    on_host = CudaDispatched(
        tokens=on_cpu(got.tokens).clone(),
        scales=None if got.scales is None else on_cpu(got.scales).clone(),
        plan=got.plan,
        row_weights=None if got.row_weights is None else on_cpu(got.row_weights),
        sources=on_cpu(got.sources),
    )
    on_host.tokens.view(torch.uint8)[needed:] = 0
    if on_host.scales is not None:
        on_host.scales[needed:] = 0
    check_rows(expect, on_host, layout)  # type: ignore[arg-type]
    wanted = (expect.counts, expect.offsets) if layout == "expert_major" else (None, None)
    for copy, want in zip((got.tokens_per_expert, got.offsets), wanted, strict=True):
        assert (None if copy is None else on_cpu(copy).tolist()) == want


def expected_return(expect: Round, layout: str) -> torch.Tensor:
    """``[T, hidden]``: what combines without weights make of the rows as they were received: of
    each rank its copies of a row in fp32, rounded, then over ranks, rounded."""
    x = expect.own.x.float()
    total = torch.zeros_like(x)
    for rows in expect.rows_by_rank:
        for row in rows:
            if row.source != expect.rank:
                continue
            part = torch.zeros_like(x[row.token])
            for _ in distinct(row.lanes) if layout == "expert_major" else (0,):
                part = part + x[row.token]
            total[row.token] += part.bfloat16().float()
    return total.bfloat16()


def combined(expect: Round, weighted: bool) -> torch.Tensor:
    """The sums of all ranks. Kernels add them at the tokens' source, as on one host."""
    one_host = [0] * expect.case.ranks
    return expected_combine(
        expect.case, expect.inputs, expect.rows_by_rank, expect.rank, weighted, one_host
    )


def check_combine(
    mode: CudaHighThroughput, expect: Round, got: CudaDispatched, layout: str
) -> None:
    """Combines of all kinds."""
    case, device, plan = expect.case, mode.device, got.plan
    weighted, bias = case.weighted, tuple(each.to(device) for each in expect.own.bias)
    wanted = combined(expect, weighted)
    y, lanes_given = outputs_of(expect, layout, weighted), lanes_of(expect, layout)
    out, lanes = mode.combine(
        y.to(device),
        plan,
        layout=layout,  # type: ignore[arg-type]
        row_weights=got.row_weights,
        topk_weights=lanes_given.to(device),
        bias=bias[0] if len(bias) == 1 else bias or None,
    )
    assert same_bits(on_cpu(out), wanted)
    assert lanes is not None
    assert same_bits(on_cpu(lanes), expected_lanes(expect, layout))
    alone = mode.combine_weights(lanes_given.to(device), plan, layout=layout)  # type: ignore[arg-type]
    assert same_bits(on_cpu(alone), on_cpu(lanes))
    unweighted = combined(expect, False)
    into = torch.full_like(out, float("nan"))
    result, none = mode.combine(
        outputs_of(expect, layout, False).to(device),
        plan,
        layout=layout,  # type: ignore[arg-type]
        bias=bias or None,
        out=into,
    )
    assert result is into
    assert none is None
    assert same_bits(on_cpu(into), unweighted)


def run_case(
    mode: CudaHighThroughput, case: Case, rank: int, layout: str, in_place: bool = False
) -> None:
    """Dispatches, reuses and combines ``case``, and checks every bit of what this rank gets."""
    expect = Round(case, rank)
    mode._results.memory.fill_(0xA5)
    got = dispatch(mode, expect, layout, expect.capacity(layout), in_place)
    settle(mode.device)
    check_plan(expect, got.plan, layout)
    check_brought(expect, got, layout)
    check_combine(mode, expect, got, layout)
    mode._results.memory.fill_(0xA5)
    again = mode.dispatch_cached(
        sent(expect, mode.device),
        got.plan,
        layout=layout,  # type: ignore[arg-type]
        in_place=in_place,
    )
    check_brought(expect, again, layout)
    mode.quiesce()


WAYS = tuple(itertools.product(("token_major", "expert_major"), (False, True)))
"""Layouts, and whether in place."""


def soak(
    mode: CudaHighThroughput,
    cases: list[Case],
    rank: int,
    turns: int,
    pause: Callable[[int], None] = lambda turn: None,
) -> None:
    """Rounds by new plans and known ones, in all ways and with changing routings, and nobody waits
    between them. The first round of each routing and way is checked; later ones must bring the same
    sums. ``pause`` is called with the number of each turn."""
    device = mode.device
    rounds = [Round(case, rank) for case in cases]
    room = soak_room(cases)
    first = []
    for expect, (layout, in_place) in itertools.product(rounds, WAYS):
        got = dispatch(mode, expect, layout, room, in_place)
        mode.quiesce()
        expect.capacity = lambda _: room  # type: ignore[method-assign]
        check_brought(expect, got, layout)
        sums, _ = mode.combine(got.tokens, got.plan, layout=layout, row_weights=got.row_weights)  # type: ignore[arg-type]
        first.append((expect, layout, in_place, got.plan, sums.clone()))
    given = {}
    for expect in rounds:
        weights = expect.own.topk_weights
        assert weights is not None
        tensors = (sent(expect, device), expect.own.topk_idx.to(device), weights.to(device))
        given[id(expect)] = tensors
    mode.quiesce()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    numbers = random.Random(turns)  # the same on all ranks
    for turn in range(turns):
        expect, layout, in_place, plan, sums = numbers.choice(first)
        x, idx, weights = given[id(expect)]
        pause(turn)
        options: dict[str, Any] = {"layout": layout, "in_place": in_place}
        if numbers.random() < 0.5:
            got = mode.dispatch_cached(x, plan, **options)
        else:
            experts, alignment = expect.case.experts, expect.case.alignment
            got = mode.dispatch(
                x, idx, weights, num_experts=experts, expert_alignment=alignment, capacity=room,
                **options,
            )  # fmt: skip
        out, _ = mode.combine(got.tokens, got.plan, layout=layout, row_weights=got.row_weights)  # type: ignore[arg-type]
        wrong += (out.view(torch.int16) != sums.view(torch.int16)).any()
    mode.quiesce()
    assert int(wrong) == 0, f"{int(wrong)} of {turns} turns brought other sums"


def soak_room(cases: list[Case]) -> int:
    """Rows for which :func:`soak` has room, in both orders and on every rank."""
    rounds = [Round(case, rank) for case in cases for rank in range(case.ranks)]
    return max(max(len(each.rows), each.offsets[-1]) for each in rounds)


def soak_results(cases: list[Case]) -> int:
    """Bytes for the results in place of :func:`soak`."""
    hidden = max(case.hidden for case in cases)
    return bytes_for_results(soak_room(cases), hidden, torch.bfloat16.itemsize)
