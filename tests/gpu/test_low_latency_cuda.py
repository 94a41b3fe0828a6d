"""Low latency on GPUs against the host backend, bit for bit, over the whole space of geometries."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.formats import dequantize
from tests import nvfp4
from tests.distributed.layers import caught
from tests.gpu.conftest import GpuPools
from tests.gpu.support import (
    FORMATS,
    ROUTINGS,
    Answer,
    Case,
    answers,
    assert_combined,
    assert_received,
    assert_same,
    case_of,
    open_layer,
    own_device,
    random_case,
    tokens_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


# ---- one round ----------------------------------------------------------------------------------


def _round(group: dist.ProcessGroup, case: Case) -> None:
    """One round on each backend, compared after both are over on this rank."""
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case])
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = answer.spread(received.tokens, device)
        out = torch.full((case.tokens[rank], case.hidden), torch.nan).bfloat16().to(device)
        returned = ep.combine(y, received, logfmt=case.logfmt, out=out)
        again = ep.combine(y, received, logfmt=case.logfmt)
        ep.synchronize()
    assert returned is out
    assert_received(received, answer)
    assert_combined(out, answer)
    assert_same("combined tokens, the second time", again, out.cpu())
    del received, y
    torch.cuda.empty_cache()


@pytest.mark.parametrize("number", range(16))
def test_any_geometry(gpus: GpuPools, ranks_at_most: int, number: int) -> None:
    case = random_case(number, ranks_at_most)
    gpus.run(case.ranks, _round, case)


@pytest.mark.long
@pytest.mark.parametrize("number", range(16, 300))
def test_many_geometries(gpus: GpuPools, ranks_at_most: int, number: int) -> None:
    case = random_case(number, ranks_at_most)
    gpus.run(case.ranks, _round, case)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("dtype", "scale_format"), FORMATS)
def test_formats_and_routings(
    gpus: GpuPools, ranks: int, dtype: str, scale_format: str, routing: str
) -> None:
    specials = routing in ("spread", "duplicates")
    gpus.run(ranks, _round, case_of(
        ranks, dtype=dtype, scale_format=scale_format, routing=routing, specials=specials,
        hidden=1040,
    ))  # fmt: skip


@pytest.mark.parametrize("routing", ["spread", "duplicates"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_number_of_ranks(gpus: GpuPools, every_ranks: int, dtype: str, routing: str) -> None:
    gpus.run(every_ranks, _round, case_of(every_ranks, dtype=dtype, routing=routing))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 16},
        {"hidden": 24},
        {"hidden": 128, "dtype": "fp8"},
        {"hidden": 16384},
        {"hidden": 16384, "dtype": "fp8", "scale_format": "ue8m0"},
        {"hidden": 2880, "dtype": "fp8"},
        {"hidden": 2880, "dtype": "fp8", "scale_format": "ue8m0"},
        {"hidden": 7168, "dtype": "fp8", "experts_per_rank": 64, "top_k": 8},
        {"hidden": 1024, "dtype": "fp8", "experts_per_rank": 128, "top_k": 22},
        {"hidden": 256, "experts_per_rank": 256, "top_k": 32},
        {"hidden": 256, "experts_per_rank": 1, "top_k": 1},
        {"hidden": 256, "experts_per_rank": 1, "top_k": 32, "routing": "duplicates"},
        {"hidden": 256, "weighted": False},
        {"hidden": 768, "logfmt": True},
        {"hidden": 1040, "logfmt": True, "dtype": "fp8", "weighted": False},
    ],
    ids=str,
)
def test_extremes(gpus: GpuPools, ranks: int, changes: dict[str, Any]) -> None:
    gpus.run(ranks, _round, case_of(ranks, **changes))


def _nvfp4(group: dist.ProcessGroup, hidden: int) -> None:
    """Rows of any values from every rank to expert 0 of each, against the formula."""
    device, rank, ranks = own_device(), dist.get_rank(group), dist.get_world_size(group)
    topk_idx = torch.arange(ranks, device=device).expand(44, ranks).contiguous()
    scale = torch.full((1,), 300.0, device=device)
    with fanfold.LowLatency(
        group,
        num_experts=ranks,
        top_k=ranks,
        hidden=hidden,
        max_tokens=150,
        dispatch_dtype="nvfp4",
        config=fanfold.Config.resolve(backend="cuda", timeout_s=20.0),
    ) as ep:
        x = nvfp4.awkward_rows(44, hidden, rank).to(device)
        for _ in range(3):  # the words of the rows are absent again
            received, hook = ep.dispatch(x, topk_idx, global_scale=scale, return_hook=True)
            hook()
        ep.synchronize()
        rows = [nvfp4.quantized(nvfp4.awkward_rows(44, hidden, each), 300.0)
                for each in range(ranks)]  # fmt: skip
        count = 44 * ranks
        assert received.tokens_per_expert.tolist() == [count]
        assert_same("rows", received.tokens[0, :count], torch.cat([row[0] for row in rows]))
        assert received.scales is not None
        tiles = nvfp4.by_row(received.scales.cpu(), 0, count, hidden // 16)
        assert_same("scales", tiles.float(), torch.cat([row[1].float() for row in rows]))


@pytest.mark.parametrize("hidden", [32, 96, 1312, 7168])
def test_nvfp4(gpus: GpuPools, ranks: int, hidden: int) -> None:
    gpus.run(ranks, _nvfp4, hidden)


@pytest.mark.parametrize("max_tokens", [0, 1, 1024])
@pytest.mark.parametrize("routing", ["spread", "one_expert", "one_rank"])
def test_sizes_of_calls(gpus: GpuPools, ranks: int, max_tokens: int, routing: str) -> None:
    full = case_of(ranks, max_tokens=max_tokens, routing=routing, hidden=256, top_k=6, dtype="fp8")
    for tokens in ((max_tokens,) * ranks, (max_tokens, *(0,) * (ranks - 1)), (0,) * ranks):
        gpus.run(ranks, _round, full.but(tokens=tokens))


def _unweighted(group: dist.ProcessGroup, case: Case) -> None:
    """Weights that came with dispatch are left out where combine is asked to."""
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case.but(weighted=False)])
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        out = ep.combine(answer.spread(received.tokens, device), received, weighted=False)
        ep.synchronize()
    assert received.weights is not None
    assert_combined(out, answer)


def test_combine_without_the_weights_of_dispatch(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _unweighted, case_of(ranks))


def _strided(group: dist.ProcessGroup, case: Case) -> None:
    """Outputs that are part of a larger tensor."""
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case])
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        locals_, capacity, hidden = received.tokens.shape
        wide = torch.full((locals_, capacity + 3, hidden + 8), torch.nan, device=device).bfloat16()
        y = wide[:, :capacity, :hidden]
        y.copy_(answer.spread(received.tokens, device))
        out = ep.combine(y, received)
        ep.synchronize()
    assert_combined(out, answer)


def test_strided_outputs(gpus: GpuPools, ranks: int) -> None:
    gpus.run(ranks, _strided, case_of(ranks))


# ---- many rounds --------------------------------------------------------------------------------

INPUTS = 16


def _varied(case: Case) -> list[Case]:
    """Sixteen inputs to one geometry: other tokens, numbers of them, and routings."""
    cases = []
    for number in range(INPUTS):
        numbers = random.Random(number)
        tokens = tuple(numbers.randint(0, case.max_tokens) for _ in case.tokens)
        routing = ROUTINGS[number % len(ROUTINGS)]
        cases.append(case.but(tokens=tokens, routing=routing, seed=number))
    return cases


class _Expected:
    """What one input must give, on the GPU, so that comparing waits for nothing."""

    def __init__(
        self, answer: Answer, like: fanfold.LowLatencyResult, device: torch.device
    ) -> None:
        self.places = answer.places.to(device)
        self.rows, self.counts = answer.rows.to(device), answer.counts.to(device)
        self.out = answer.out.to(device).view(torch.int16)
        self.y = answer.spread(like.tokens, device)

    def wrong(self, received: fanfold.LowLatencyResult, out: torch.Tensor) -> torch.Tensor:
        """How many values of a round are not as they must be."""
        rows = received.tokens.view(torch.uint8).flatten(0, 1).index_select(0, self.places)
        return (
            (rows != self.rows).sum()
            + (received.tokens_per_expert != self.counts).sum()
            + (out.view(torch.int16) != self.out).sum()
        )


def _many_rounds(group: dist.ProcessGroup, case: Case, rounds: int, every: int) -> int:
    """Rounds with changing routing and nothing between them that would wait; wrong values."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _varied(case)
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with open_layer(group, case) as ep:
        first = ep.dispatch(inputs[0].x, inputs[0].topk_idx, inputs[0].topk_weights)
        expected = [_Expected(answer, first, device) for answer in answered]
        for number in range(rounds):
            place = number * 5 % INPUTS
            mine, wanted = inputs[place], expected[place]
            if number % 97 == 13 * rank:  # who is late changes
                torch.cuda._sleep(200_000)
            received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            out = ep.combine(wanted.y, received)
            if number % every == 0:
                wrong += wanted.wrong(received, out)
        ep.synchronize()
    return int(wrong)


@pytest.mark.parametrize(
    ("dtype", "rounds", "every"), [("bf16", 10_000, 7), ("fp8", 10_000, 7), ("fp8", 3_000, 1)]
)
def test_many_rounds(gpus: GpuPools, ranks: int, dtype: str, rounds: int, every: int) -> None:
    case = case_of(ranks, hidden=512, max_tokens=24, experts_per_rank=8, top_k=6, dtype=dtype)
    assert gpus.run(ranks, _many_rounds, case, rounds, every) == [0] * ranks


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_rounds_of_full_size(gpus: GpuPools, ranks: int, dtype: str) -> None:
    case = case_of(ranks, hidden=7168, max_tokens=128, experts_per_rank=16, top_k=8, dtype=dtype)
    assert gpus.run(ranks, _many_rounds, case, 300, 3) == [0] * ranks


def _dispatches_and_combines_in_a_row(group: dist.ProcessGroup, case: Case) -> None:
    """Any number of dispatches may follow each other, and results are combined any number of times,
    in any order."""
    device, rank = own_device(), dist.get_rank(group)
    cases = _varied(case)[:5]
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    with open_layer(group, case) as ep:
        got = [ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights) for mine in inputs]
        order = (4, 0, 0, 2, 1, 3, 4)
        ys = [a.spread(r.tokens, device) for a, r in zip(answered, got, strict=True)]
        outs = [ep.combine(ys[place], got[place]) for place in order]
        ep.synchronize()
    for received, answer in zip(got, answered, strict=True):
        assert_received(received, answer)
    for place, out in zip(order, outs, strict=True):
        assert_combined(out, answered[place])


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_calls_of_one_kind_in_a_row(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _dispatches_and_combines_in_a_row, case_of(ranks, dtype=dtype))


# ---- hooks --------------------------------------------------------------------------------------


def _two_in_flight(group: dist.ProcessGroup, case: Case) -> None:
    device, rank = own_device(), dist.get_rank(group)
    cases = _varied(case)[:2]
    answered = answers(group, cases)
    inputs = [tokens_of(each, rank).to(device) for each in cases]
    said = []
    with open_layer(group, case) as ep:
        for _ in range(3):
            sent = [
                ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)
                for mine in inputs
            ]
            said.append(caught(sent[1][1]))  # not its turn
            outs = []
            for _, hook in sent:
                hook()
                said.append(caught(hook))  # a second time
            for (received, _), answer in zip(sent, answered, strict=True):
                y = answer.spread(received.tokens, device)
                outs.append(ep.combine(y, received, return_hook=True))
                del y  # read by the send half, which is enqueued
            said.append(caught(outs[1][1]))
            for _, hook in outs:
                hook()
                said.append(caught(hook))
            ep.synchronize()
            for (received, _), (out, _), answer in zip(sent, outs, answered, strict=True):
                assert_received(received, answer)
                assert_combined(out, answer)
    assert all(isinstance(error, fanfold.UsageError) for error in said), said


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_two_calls_in_flight(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _two_in_flight, case_of(ranks, dtype=dtype))


def _third_in_flight(group: dist.ProcessGroup, case: Case) -> Exception | None:
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case])
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:

        def send() -> Any:
            return ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)

        sent = [send(), send()]
        error = caught(send)
        for _, hook in sent:
            hook()
        ep.synchronize()
        for received, _ in sent:
            assert_received(received, answer)
    return error


def test_a_third_call_in_flight_is_refused(gpus: GpuPools, ranks: int) -> None:
    for error in gpus.run(ranks, _third_in_flight, case_of(ranks)):
        assert isinstance(error, fanfold.UsageError)


def _work_between(group: dist.ProcessGroup, case: Case) -> None:
    """Inputs may be overwritten by work that follows the send half; nothing waits for receive."""
    device, rank = own_device(), dist.get_rank(group)
    (answer,) = answers(group, [case])
    a = torch.randn((1024, 1024), device=device)
    with open_layer(group, case) as ep:
        for late in range(case.ranks):
            mine = tokens_of(case, rank).to(device)
            if rank == late:
                torch.cuda._sleep(4_000_000)
            received, hook = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)
            mine.x.fill_(torch.nan)
            mine.topk_idx.fill_(0)
            for _ in range(3):
                a = (a @ a).tanh()
            hook()
            y = answer.spread(received.tokens, device)
            out, hook = ep.combine(y, received, return_hook=True)
            y.fill_(torch.nan)
            hook()
            ep.synchronize()
            assert_received(received, answer)
            assert_combined(out, answer)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_work_between_the_halves(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _work_between, case_of(ranks, dtype=dtype))


# ---- through experts ----------------------------------------------------------------------------


def _real_experts(group: dist.ProcessGroup, case: Case) -> None:
    """Rows through matrix products on the GPU and back, without the host's rows in between."""
    device, rank = own_device(), dist.get_rank(group)
    mine = tokens_of(case, rank).to(device)
    with open_layer(group, case) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        rows = received.tokens.float()
        if received.scales is not None:
            rows = dequantize(received.tokens, received.scales)
        for e in range(ep.experts_per_rank):
            assert received.expert(e).shape[0] == int(received.tokens_per_expert[e])
        out = ep.combine((rows * 2.0).bfloat16(), received)
        ep.synchronize()
    assert mine.topk_weights is not None
    x = mine.x.float()
    wanted = 2.0 * x * torch.where(mine.topk_idx < 0, 0.0, mine.topk_weights).sum(1, keepdim=True)
    size = 2.0 * x.abs() * mine.topk_weights.abs().sum(1, keepdim=True)
    # e4m3 has three bits behind the point; the rest is bfloat16's.
    bound = 2.0**-3 if received.scales is not None else 2.0**-6
    assert bool(((out.float() - wanted).abs() <= bound * size + 1e-3).all())


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_rows_through_experts(gpus: GpuPools, ranks: int, dtype: str) -> None:
    gpus.run(ranks, _real_experts, case_of(ranks, dtype=dtype))
