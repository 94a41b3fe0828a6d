"""Benches of high throughput in both orders of rows: what is timed passes the oracle, and the
program of the GPUs runs, with a clock that does not look."""

from __future__ import annotations

import argparse
import dataclasses
import json
from contextlib import closing
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.bench import cuda_high_throughput, cuda_run, layouts
from fanfold.bench.calls import Given, spoil
from fanfold.bench.check import CheckFailed, Expectation
from fanfold.bench.layouts import open_calls
from fanfold.bench.run import bench_rank, bench_ranks
from fanfold.bench.settings import FACES_OF_BOTH_MODES, LAYOUTS, REUSES, BenchSettings
from fanfold.cli import bench
from fanfold.deep_ep import Buffer
from tests.distributed.blind_clock import standing_in

SETTINGS = BenchSettings(
    "high_throughput", ranks=2, tokens=13, hidden=144, top_k=3, experts=6, iterations=2, warmup=1,
    calls=2, backend="host",
)  # fmt: skip


def of(layout, routing="new", **changes):
    return dataclasses.replace(SETTINGS, layout=layout, routing=routing, **changes).on("host")


def expectation_of(group, settings):
    batches = [settings.workload().batch(rank) for rank in range(settings.ranks)]
    rank = dist.get_rank(group)
    return Expectation(batches, rank, settings.experts, settings.dtype == "fp8")


KINDS = [
    ("expert_major", "native"),
    ("token_major", "native"),
    ("token_major", "deep_ep"),
    ("token_major", "elastic"),
    ("expert_major", "elastic"),
    ("expert_major", "hybridep"),
]
"""Orders of rows, and whose calls."""


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("routing", REUSES)
@pytest.mark.parametrize(("layout", "face"), KINDS)
def test_bench_on_the_host(pools, layout, face, routing, dtype):
    alignment = 8 if layout == "expert_major" else None
    settings = of(layout, routing, face=face, dtype=dtype, alignment=alignment, baseline=True)
    for report in pools(2).run(bench_rank, settings):
        assert {n: tuple(t.shape) for n, t in report.microseconds.items()} == {
            "fanfold": (2, 3),
            "baseline": (2, 3),
        }


def test_a_sweep_has_a_report_for_each_point(pools):
    points = [of(layout, routing) for layout in LAYOUTS for routing in REUSES]
    points.append(of("token_major", tokens=7))
    for reports in pools(2).run(bench_ranks, points):
        assert len(reports) == len(points)
        assert len({report.rows.total for report in reports[:-1]}) == 1
        assert reports[-1].rows.total <= 14


def test_a_line_and_a_table_for_each_point(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    path = tmp_path / "r.jsonl"
    arguments = (
        "high-throughput --backend host --ranks 2 --tokens 5 --hidden 64 --experts 4 --top-k 2 "
        "--iterations 2 --warmup 0 --layout token-major,expert-major --routing cached,new"
    )
    assert bench.run(parser.parse_args([*arguments.split(), "--json", str(path)])) == 0
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(f["layout"], f["routing"], f["alignment"], f["sms"]) for f in found] == [
        ("token_major", "cached", None, None),
        ("token_major", "new", None, None),
        ("expert_major", "cached", 1, None),
        ("expert_major", "new", 1, None),
    ]
    assert {(f["backend"], f["backend_asked"], f["distribution"]) for f in found} == {
        ("host", "host", "uniform")
    }
    said = capsys.readouterr().out
    assert said.count("Checked against the oracle.") == 4
    assert "token-major, cached routing" in said
    assert "µs of the slowest rank" in said


# What to spoil of a token-major dispatch, and which check must see it.
SPOILED = {
    "tokens": lambda brought: brought.tokens.view(torch.uint8)[1].add_(1),
    "tokens_per_expert": lambda brought: brought.plan.tokens_per_expert[1].sub_(1),
    "source_rank": lambda brought: brought.row_source_rank[1].add_(1),
    "source_token": lambda brought: brought.row_source_token[1].add_(1),
    "topk_idx": lambda brought: brought.plan.topk_idx[1].add_(1),
    "topk_weights": lambda brought: brought.plan.topk_weights.add_(1),
    "scales": lambda brought: brought.scales[1].mul_(2),
}


SPOILED_THERE = {
    "tokens": SPOILED["tokens"],
    "tokens_per_expert": lambda brought: brought.counts.__setitem__(1, -1),
    "source_rank": lambda brought: brought.handle[0][0].add_(1),
    "source_token": lambda brought: brought.handle[3][1].add_(1),
    "topk_idx": lambda brought: brought.topk_idx[1].add_(1),
    "topk_weights": lambda brought: brought.topk_weights.add_(1),
    "scales": SPOILED["scales"],
}
"""The same of what the DeepEP face brings."""


def findings(group, settings, spoiled):
    expectation = expectation_of(group, settings)
    said = {}
    with closing(open_calls(group, settings)) as calls:
        given = Given.of(expectation, calls.device, quantized=True)
        for name, spoiler in (SPOILED_THERE if spoiled else SPOILED).items():
            brought = calls.dispatch(given)
            calls.check(brought, expectation)
            spoiler(brought)
            said[name] = _said(calls.check, brought, expectation)
        brought = calls.dispatch(given)
        out = torch.empty(expectation.own.x.shape, dtype=torch.bfloat16)
        out = calls.combine(calls.outputs(brought, expectation), brought, out)
        calls.check_combined(out, expectation)
        out.view(torch.int16)[5, 7] += 1
        said["combined"] = _said(calls.check_combined, out, expectation)
        spoil(brought)
        said["poison"] = _said(calls.check, brought, expectation)
    return said


def _said(check, *arguments):
    try:
        check(*arguments)
    except CheckFailed as failed:
        return str(failed)
    return "nothing"


@pytest.mark.parametrize("face", FACES_OF_BOTH_MODES)
def test_token_major_checks_see_damage(pools, face):
    settings = of("token_major", dtype="fp8", face=face)
    for said in pools(2).run(findings, settings, face == "deep_ep"):
        assert said.pop("poison").startswith("tokens")
        assert set(said) == {*SPOILED, "combined"}
        for name, message in said.items():
            assert message.startswith(name), (name, message)


def next_tokens(places):
    """Other tokens of the same ranks."""
    places.copy_(places // 13 * 13 + (places % 13 + 1) % 13)


# What to spoil of what ElasticBuffer and HybridEPBuffer bring, and which check must see it.
OF_HANDLES = {
    "rows": lambda brought: brought.handle.psum_num_recv_tokens_per_scaleup_rank.sub_(1),
    "source_rank": lambda brought: brought.handle.recv_src_metadata[:, 0].add_(13),
    "source_token": lambda brought: next_tokens(brought.handle.recv_src_metadata[:, 0]),
    "tokens_per_expert": lambda brought: brought.handle.num_unaligned_recv_tokens_per_expert.sub_(
        1
    ),
}
SPOILED_ELSEWHERE = {
    ("elastic", "token_major"): {
        **OF_HANDLES,
        "tokens": SPOILED["tokens"],
        "scales": SPOILED["scales"],
        "topk_idx": lambda brought: brought.topk_idx[1].add_(1),
        "topk_weights": lambda brought: brought.weights.add_(1),
    },
    ("elastic", "expert_major"): {
        **{name: OF_HANDLES[name] for name in ("source_rank", "source_token")},
        "tokens_per_expert": OF_HANDLES["tokens_per_expert"],
        "offsets": lambda brought: brought.handle.psum_num_recv_tokens_per_expert.add_(8),
        "tokens": SPOILED["tokens"],
        "scales": SPOILED["scales"],
        "weights": lambda brought: brought.weights.add_(1),
    },
    ("hybridep", "expert_major"): {
        "offsets": lambda brought: brought.counts[1].add_(8),
        "tokens": SPOILED["tokens"],
        "scales": SPOILED["scales"],
        "weights": lambda brought: brought.weights.add_(1),
    },
}


def findings_elsewhere(group, settings):
    expectation, said = expectation_of(group, settings), {}
    spoilers = SPOILED_ELSEWHERE[settings.face, settings.layout]
    with closing(open_calls(group, settings)) as calls:
        given = Given.of(expectation, calls.device, quantized=True)
        for name, spoiler in spoilers.items():
            brought = calls.dispatch(given)
            calls.check(brought, expectation)
            spoiler(brought)
            said[name] = _said(calls.check, brought, expectation)
        brought = calls.dispatch(given)
        out = calls.combine(calls.outputs(brought, expectation), brought)
        calls.check_combined(out, expectation)
        out.view(torch.int16)[5, 7] += 1
        said["combined"] = _said(calls.check_combined, out, expectation)
        spoil(brought)
        calls.check(calls.dispatch_again(given, brought), expectation)
        said["poison"] = _said(calls.check, brought, expectation)
    return said


@pytest.mark.parametrize(("face", "layout"), SPOILED_ELSEWHERE)
def test_checks_see_damage_through_other_faces(pools, face, layout):
    alignment = 8 if layout == "expert_major" else None
    settings = of(layout, dtype="fp8", face=face, alignment=alignment)
    for said in pools(2).run(findings_elsewhere, settings):
        assert said.pop("poison").startswith(("tokens", "rows of padding"))
        for name, message in said.items():
            assert message.startswith(name), (name, message)


# What to spoil of the rows between experts, by what the check says.
SPOILED_PADDING = {
    "rows of padding": lambda brought, at: brought.tokens.view(torch.uint8)[at].add_(1),
    "source_rank of padding": lambda brought, at: brought.source_rank[at].zero_(),
    "source_token of padding": lambda brought, at: brought.source_token[at].zero_(),
    "weights of padding": lambda brought, at: brought.weights[at].fill_(1),
}


def findings_in_padding(group, settings):
    expectation, said = expectation_of(group, settings), {}
    with closing(open_calls(group, settings)) as calls:
        given = Given.of(expectation, calls.device, quantized=True)
        for name, spoiler in SPOILED_PADDING.items():
            brought = calls.dispatch(given)
            calls.check(brought, expectation)
            at = int((brought.source_rank < 0).nonzero()[-1])
            spoiler(brought, slice(at, at + 1))
            said[name] = _said(calls.check, brought, expectation)
            calls._zero_padding = False
            unwritten = _said(calls.check, brought, expectation)
            calls._zero_padding = True
            assert unwritten == ("nothing" if name == "rows of padding" else said[name])
    return said


def test_checks_see_damage_in_padding(pools):
    """Of rows that need not be zeros, only what marks them."""
    for said in pools(2).run(findings_in_padding, of("expert_major", dtype="fp8", alignment=8)):
        for name, message in said.items():
            assert message.startswith(name), (name, message)


def with_room(group, settings):
    """Whether a dispatch with more room than rows, in memory of something else, is as it must be,
    and one with another room than asked for is seen."""
    expectation = expectation_of(group, settings)
    capacity = cuda_high_throughput.capacity_for(expectation, settings)
    with closing(open_calls(group, settings)) as calls:
        given = Given.of(expectation, calls.device, quantized=True)
        spoil(calls.dispatch(given, capacity))
        brought = calls.dispatch(given, capacity)
        calls.check(brought, expectation, capacity)
        out = torch.empty(expectation.own.x.shape, dtype=torch.bfloat16)
        out = calls.combine(calls.outputs(brought, expectation), brought, out)
        calls.check_combined(out, expectation)
        # As if exactly the rows that came had been asked for.
        said = _said(calls.check, brought, expectation)
        return capacity, len(brought.tokens), len(expectation._arrived.row), said


@pytest.mark.parametrize(("layout", "face"), KINDS)
def test_dispatches_with_capacity(pools, layout, face):
    alignment = 8 if layout == "expert_major" else None
    for found in pools(2).run(with_room, of(layout, face=face, alignment=alignment)):
        capacity, room, tokens, said = found
        assert capacity % 128 == 0
        if face == "elastic":  # which has room for all that could come, whatever is asked for
            assert room == {"token_major": 2 * 13, "expert_major": 104}[layout]
        else:
            assert room == capacity
        if (layout, room) == ("token_major", tokens):
            assert said == "nothing"
        else:
            assert said.startswith(f"tokens has {room} rows instead of")


def layouts_counted(group, settings):
    """How often a layout is counted in a dispatch by a new routing, and in one more by the same."""
    expectation, counted = expectation_of(group, settings), []
    with (
        mock.patch.object(layouts, "dispatch_layout", lambda *args: counted.append(args)),
        closing(open_calls(group, settings)) as calls,
    ):
        given = Given.of(expectation, calls.device, quantized=True)
        brought = calls.dispatch(given)
        new = len(counted)
        calls.dispatch_again(given, brought)
        return new, len(counted) - new


def test_a_new_token_major_routing_has_its_layout_counted(pools):
    assert pools(2).run(layouts_counted, of("token_major")) == [(1, 0)] * 2


# ---- the program of the GPUs --------------------------------------------------------------------


STANDINS = {
    "empty_kernel": lambda: None,
    "sms_taken": lambda settings, device, kind: 24,
    "_RIVAL_BACKEND": "gloo",
}
"""What high throughput asks of GPUs besides."""


def as_on_gpus(group, settings):
    """What ``time_on_gpu`` reports of calls on the host."""
    expectation = expectation_of(group, settings)
    with (
        standing_in(cuda_high_throughput, **STANDINS),
        closing(open_calls(group, settings)) as calls,
    ):
        return cuda_high_throughput.time_on_gpu(calls, group, expectation, settings)


@pytest.mark.parametrize("routing", REUSES)
@pytest.mark.parametrize(("layout", "face"), KINDS)
def test_the_program_of_the_gpus(pools, layout, face, routing):
    alignment = 8 if layout == "expert_major" else None
    settings = of(layout, routing, face=face, dtype="fp8", alignment=alignment, baseline=True)
    reports = pools(2).run(as_on_gpus, settings)
    ways = {"end_to_end", "graph", "host"} | ({"wall"} if routing == "new" else set())
    for report in reports:
        for operation in cuda_run.OPERATIONS:
            timed = {n.partition(".")[2] for n in report.samples if n.startswith(f"{operation}.")}
            assert timed == ways
        assert (report.sms, report.capacity is None) == (24, routing == "cached")
        assert report.pulled is False  # so few ranks' short rows
    for pattern in cuda_high_throughput.samples_timed(settings).values():
        assert cuda_run.timings(reports, pattern).microseconds.shape == (2, 2, 3)
    assert ("cpu_sync" in cuda_high_throughput.summary(reports)) == (routing == "new")


def on_gpus_without_sums(group, settings):
    """The same of a DeepEP face whose combines, but for the first, return its memory as it is."""
    whole, kept = Buffer.combine, []

    def combine(buffer, *args, **options):
        returned = whole(buffer, *args, **options)
        kept.append(returned[0])
        return kept[0], *returned[1:]

    with mock.patch.object(Buffer, "combine", combine):
        return _said(as_on_gpus, group, settings)


def test_sums_that_nobody_writes_are_seen(pools):
    """DeepEP's combine takes no tensor for its sums that could be set before."""
    settings = of("token_major", "cached", face="deep_ep")
    for said in pools(2).run(on_gpus_without_sums, settings):
        assert said.startswith("combined tokens: ")
