"""The checks of a bench see what is wrong, and the rival does its work."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.bench import cuda_run, oracle
from fanfold.bench.baseline import AllToAll
from fanfold.bench.calls import Given
from fanfold.bench.check import CheckFailed, Expectation, packed_fp8
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.bench.layouts import open_calls
from fanfold.bench.run import bench_rank
from fanfold.bench.settings import FACES_OF_BOTH_MODES, MODES, BenchSettings
from fanfold.bench.workload import Workload
from fanfold.cli.main import main
from fanfold.results import DispatchResult
from tests.distributed.blind_clock import standing_in

pytestmark = pytest.mark.one_host  # the tests say themselves on how many hosts they run

SIZES = {"tokens": 13, "hidden": 144, "top_k": 3, "experts": 6}

# What to spoil of a received dispatch, and which check must see it.
SPOILED = {
    "tokens": lambda r: r.tokens.view(torch.uint8).flatten(0, -2)[int(r.offsets[1])].add_(1),
    "weights": lambda r: r.weights.flatten()[int(r.offsets[1])].mul_(2),
    "tokens_per_expert": lambda r: r.tokens_per_expert[1].sub_(1),
    "scales": lambda r: r.scales.mul_(2),  # its flattened form may be a copy
}

# What a DispatchResult computes for who asks.
COMPUTED = ("source_token", "source_rank")


def findings(group, mode, dtype):
    """For each kind of damage what the check says."""
    ranks = dist.get_world_size(group)
    workload = Workload(ranks=ranks, seed=3, **SIZES)
    batches = [workload.batch(rank) for rank in range(ranks)]
    own = batches[dist.get_rank(group)]
    expectation = Expectation(batches, dist.get_rank(group), SIZES["experts"], dtype == "fp8")
    x = own.x
    if mode == "high_throughput" and dtype == "fp8":
        quantized = oracle.quantize_fp8(x)
        x = (quantized.values, quantized.scales)
    said = {}
    with open_dispatcher(
        mode, group, num_experts=SIZES["experts"], top_k=3, hidden=144, max_tokens=13,
        dispatch_dtype=dtype,
    ) as ep:  # fmt: skip
        for name, spoil in SPOILED.items():
            received = ep.dispatch(x, own.topk_idx, own.topk_weights)
            expectation.received(received)
            if name == "scales" and received.scales is None:
                continue
            spoil(received)
            said[name] = _said(expectation.received, received)
        for name in COMPUTED:
            received = ep.dispatch(x, own.topk_idx, own.topk_weights)
            values = getattr(received, name).clone()
            values.flatten()[int(received.offsets[1])].add_(1)
            with mock.patch.object(DispatchResult, name, values):
                said[name] = _said(expectation.received, received)
        received = ep.dispatch(x, own.topk_idx, own.topk_weights)
        out = ep.combine(expectation.outputs(received), received)
        expectation.combined(out)
        out.view(torch.int16)[5, 7] += 1
        said["combined"] = _said(expectation.combined, out)
    return said


def _said(check, value):
    try:
        check(value)
    except CheckFailed as failed:
        return str(failed)
    return "nothing"


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("mode", MODES)
def test_checks_see_damage(pools, mode, dtype):
    for said in pools(2).run(findings, mode, dtype):
        assert set(said) == {*SPOILED, *COMPUTED, "combined"} - (
            {"scales"} if dtype == "bf16" else set()
        )
        for name, message in said.items():
            assert message.startswith(f"{name}"), (name, message)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("routing", ["skewed", "one_expert"])
def test_bench_rank_with_baseline(pools, mode, routing):
    settings = BenchSettings(
        mode, ranks=3, tokens=9, hidden=32, top_k=4, experts=6, distribution=routing, iterations=2,
        warmup=1, baseline=True,
    )  # fmt: skip
    reports = pools(3).run(bench_rank, settings)
    for report in reports:
        assert {n: tuple(t.shape) for n, t in report.microseconds.items()} == {
            "fanfold": (2, 3),
            "baseline": (2, 3),
        }
        assert 0 <= report.rows.remote <= report.rows.total <= 27
    if routing == "one_expert":  # expert 0 is on rank 0
        assert [r.rows.total for r in reports] == [9, 9, 9]
        assert [r.rows.remote for r in reports] == [0, 9, 9]


# ---- the calls of either face --------------------------------------------------------------------

SMALL = BenchSettings(
    "low_latency", ranks=3, tokens=13, hidden=144, top_k=4, experts=6, iterations=2, warmup=1,
    calls=2, backend="host",
)  # fmt: skip


def expectation_of(group, settings):
    batches = [settings.workload().batch(rank) for rank in range(settings.ranks)]
    rank = dist.get_rank(group)
    return Expectation(batches, rank, settings.experts, settings.dtype == "fp8")


def findings_of_weights(group, settings):
    """What the check says of a combine, then of one before which the caller's weights have
    changed."""
    expectation = expectation_of(group, settings)
    with closing(open_calls(group, settings)) as calls:
        given = Given.of(expectation, calls.device, quantized=False)
        brought = calls.dispatch(given)
        calls.check(brought, expectation)
        y, out = calls.outputs(brought, expectation), torch.empty_like(given.x)
        said = []
        for scale in (1, 2):
            given.topk_weights.mul_(scale)
            assert calls.combine(y, brought, out) is out
            said.append(_said(expectation.combined, out))
        return said


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("face", FACES_OF_BOTH_MODES)
def test_weights_come_with_combine_through_deep_ep(pools, face, dtype):
    settings = dataclasses.replace(SMALL, face=face, dtype=dtype)
    for right, changed in pools(3).run(findings_of_weights, settings):
        assert right == "nothing"
        assert changed.startswith("combined tokens" if face == "deep_ep" else "nothing")


# What to spoil of what the DeepEP face brings, and which check must see it.
SPOILED_THERE = {
    "tokens_per_expert": lambda brought: brought[1][1].sub_(1),
    "source_rank": lambda brought: brought[2][1][0].copy_(brought[2][1][0].flip(0)),
    "source_token": lambda brought: brought[2][0].add_(1),
    "tokens": lambda brought: brought[0][0].view(torch.uint8).add_(1),
    "scales": lambda brought: brought[0][1].mul_(2),
}


def findings_through_deep_ep(group, settings):
    expectation, said = expectation_of(group, settings), {}
    with closing(open_calls(group, settings)) as calls:
        given = Given.of(expectation, calls.device, quantized=False)
        for name, spoiler in SPOILED_THERE.items():
            brought = calls.dispatch(given)
            calls.check(brought, expectation)
            spoiler(brought)
            said[name] = _said(lambda spoilt: calls.check(spoilt, expectation), brought)
    return said


def test_checks_see_damage_through_deep_ep(pools):
    settings = dataclasses.replace(SMALL, face="deep_ep", dtype="fp8")
    for said in pools(3).run(findings_through_deep_ep, settings):
        for name, message in said.items():
            assert message.startswith(name), (name, message)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_bench_through_deep_ep(pools, dtype):
    settings = dataclasses.replace(SMALL, face="deep_ep", dtype=dtype, baseline=True)
    for report in pools(3).run(bench_rank, settings):
        assert {n: tuple(t.shape) for n, t in report.microseconds.items()} == {
            "fanfold": (2, 3),
            "baseline": (2, 3),
        }


def test_a_line_says_whose_calls_it_is_of(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    arguments = (
        "bench low-latency --backend host --ranks 2 --tokens 5 --hidden 64 --experts 4 --top-k 2 "
        f"--iterations 2 --warmup 0 --json {path}"
    ).split()
    assert main(arguments) == main([*arguments, "--face", "deep_ep"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["face"] for line in lines] == ["native", "deep_ep"]
    assert all(line["checked"] for line in lines)
    assert capsys.readouterr().out.count(", through deep_ep") == 1


def as_on_gpus(group, settings):
    """What ``time_on_gpu`` reports of calls on the host."""
    expectation = expectation_of(group, settings)
    with standing_in(cuda_run), closing(open_calls(group, settings)) as calls:
        return cuda_run.time_on_gpu(calls, group, expectation, settings)


@pytest.mark.parametrize("face", FACES_OF_BOTH_MODES)
def test_the_program_of_the_gpus(pools, face):
    settings = dataclasses.replace(SMALL, face=face, dtype="fp8")
    reports = pools(3).run(as_on_gpus, settings)
    for report in reports:
        for operation in cuda_run.OPERATIONS:
            timed = {n.partition(".")[2] for n in report.samples if n.startswith(f"{operation}.")}
            halves = set() if operation == "round" else {"send", "receive", "hook_host"}
            assert timed == {"graph", "alone", "l2_flushed", "single", "host"} | halves
        assert {tuple(t.shape) for t in report.samples.values()} == {(2,)}
    assert cuda_run.timings(reports, "{}.graph").microseconds.shape == (3, 2, 3)
    assert cuda_run.summary(reports)["combine"]["send_us"] == 1.0


# ---- the rival ----------------------------------------------------------------------------------


def rival(group, workload, fp8):
    ranks = dist.get_world_size(group)
    batches = [workload.batch(rank) for rank in range(ranks)]
    own = batches[dist.get_rank(group)]
    expectation = Expectation(batches, dist.get_rank(group), workload.experts, fp8)
    all_to_all = AllToAll(group, workload.experts, workload.top_k)
    rows = packed_fp8(oracle.quantize_fp8(own.x)) if fp8 else own.x
    for _ in range(2):  # the second time with the buffers of the first
        routed = all_to_all.dispatch(rows, own.topk_idx)
        expectation.routed(routed)
        y = expectation.rival_outputs(routed)
        out = all_to_all.combine(y, routed, own.topk_weights)
        expectation.rival_combined(out)
    spoiled = out.clone()
    if len(spoiled):
        spoiled[0, 0] += 100
    return _said(expectation.rival_combined, spoiled)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("none_share", [0.0, 0.4, 1.0])
def test_rival_agrees_with_the_oracle(pools, none_share, fp8):
    workload = Workload(
        ranks=3, tokens=17, hidden=144, top_k=3, experts=6, seed=1, none_share=none_share,
        uneven=True,
    )  # fmt: skip
    for rank, said in enumerate(pools(3).run(rival, workload, fp8)):
        empty = len(workload.batch(rank).x) == 0
        assert said.startswith("nothing" if empty else "combined tokens of the baseline are off")
