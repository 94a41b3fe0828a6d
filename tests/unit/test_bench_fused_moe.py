"""``fanfold bench fused-moe``: its arithmetic, its checks, its lines, and what it refuses."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fanfold
from fanfold.bench import (
    fused_moe,
    fused_moe_report,
    fused_moe_rivals,
    fused_moe_timing,
    fused_moe_tune,
)
from fanfold.bench.check import CheckFailed
from fanfold.bench.fused_moe import FusedMoeSettings, RankPoint
from fanfold.bench.fused_moe_report import FusedMoePoint
from fanfold.bench.fused_moe_rivals import NotTimed, TorchWeights, Unfused
from fanfold.bench.fused_moe_timing import GpuClock, Spans, Spread, in_turns
from fanfold.bench.nvml import Nvml
from fanfold.cli import bench, main
from fanfold.errors import ArgumentError
from fanfold.formats import quantize
from fanfold.fused_moe import ExpertWeights
from fanfold.fused_moe.tuning import FORMS, TunedLayer, TunedPoint

CPU = torch.device("cpu")
SMALL = FusedMoeSettings(
    tokens=(5,), hidden=256, intermediate=128, top_k=2, experts=4, backend="host", iterations=2,
    warmup=1, pause_ms=0.0,
)  # fmt: skip
TINY = ("--tokens", "5,9", "--hidden", "256", "--intermediate", "128", "--top-k", "2",
        "--experts", "4", "--iterations", "2", "--warmup", "0", "--pause-ms", "0")  # fmt: skip


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["fused-moe", *arguments]))


def spans_of(calls: int = 2) -> Spans:
    """Two CTAs of SMs at 1600 MHz; the second has no tile of the first GEMM, and lasts a µs longer
    in each call."""
    ns = torch.zeros((calls, 2, 5), dtype=torch.int64)
    for call in range(calls):
        late = 1000 * call
        ns[call] = torch.tensor(
            [[5000, 6000, 9000, 12000, 13000], [5500, 7000, 0, 11000, 15000 + late]]
        )
    return Spans(ns, (ns[:, :, -1] - ns[:, :, 0]) * 16 // 10)


def point_on_gpu(tokens: int = 64, name: str = "NVIDIA H200", **changes: Any) -> FusedMoePoint:
    """A result as of one GPU with 64 experts, all of them hit."""
    settings = FusedMoeSettings(tokens=(tokens,), hidden=7168, intermediate=2048)
    times = torch.tensor([20.0, 30.0], dtype=torch.float64)
    rank = RankPoint(
        tokens=tokens,
        slots=8 * tokens,
        experts_hit=64,
        differences={"fused": 2e-5, "unfused": 3e-5, "torch_gemms": 1e-3},
        microseconds={
            name: times * factor
            for name, factor in (
                ("fused", 1), ("unfused", 3), ("unfused_gemms", 2), ("torch_gemms", 2),
            )
        },
        backend="cuda",
        fast_accumulation=True,
        torch_gemms="fp8",
        spans=spans_of(),
        watts=[500.0, 600.0, None],
        late_share=0.25,
        device={"name": name},
    )  # fmt: skip
    return FusedMoePoint(settings, [dataclasses.replace(rank, **changes)])


# ---- arithmetic ---------------------------------------------------------------------------------


def test_spans_are_from_the_first_beginning_to_the_last_end() -> None:
    assert spans_of().total_us().tolist() == [10.0, 11.0]
    assert spans_of().phase_us("routed") == (1.0, 2.0)
    assert spans_of().phase_us("second_end") == (6.0, 7.0)
    assert spans_of().phase_us("end") == (8.0, 10.5)


def test_the_clock_is_a_mean_over_a_call() -> None:
    spans = spans_of()
    assert spans.clock_mhz().tolist() == [1600.0, 1600.0]
    spans.cycles[1] //= 2
    assert spans.clock_mhz().tolist() == [1600.0, 800.0]
    written = torch.cat([spans.ns, spans.cycles.unsqueeze(-1)], 2)  # as the backend has them
    again = Spans.of(written)
    assert torch.equal(again.ns, spans.ns)
    assert torch.equal(again.cycles, spans.cycles)


def test_a_cta_without_a_phase_is_left_out_of_it() -> None:
    assert spans_of().phase_us("first_end") == (4.0, 4.0)
    without = spans_of()
    without.ns[1, :, 2] = 0
    assert without.phase_us("first_end") is None


def test_median_least_and_most() -> None:
    assert Spread.of(torch.tensor([4, 1, 9])) == Spread(4.0, 1.0, 9.0)


@pytest.mark.parametrize(("tokens", "roof"), [(64, 629), (1024, 709), (2048, 1178), (8192, 4712)])
def test_roof_of_an_h200(tokens: int, roof: int) -> None:
    """Below 2048 tokens it is bytes, from there on products."""
    point = point_on_gpu(tokens)
    assert point.roof_us == pytest.approx(roof, abs=1)
    assert point.roof_share == pytest.approx(roof / 10.5, rel=1e-2)


def test_no_roof_of_a_gpu_whose_limits_are_not_known() -> None:
    point = point_on_gpu(name="NVIDIA B999")
    assert (point.roof_us, point.roof_share) == (None, None)
    assert fused_moe_report.record(point)["roof_share"] is None
    assert any("limits of NVIDIA B999 are not known" in n for n in fused_moe_report.notes([point]))


def test_rates_are_of_the_kernel_and_the_ratio_is_between_events() -> None:
    point = point_on_gpu(64)
    assert point.total_us == Spread(10.5, 10.0, 11.0)
    assert point.tflops == pytest.approx(6 * 64 * 8 * 7168 * 2048 / 10.5e6)
    assert point.weight_bytes == 64 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert point.weight_gbps == pytest.approx(point.weight_bytes / 10.5e3)
    assert point.ratio == pytest.approx(3.0)


def test_the_slowest_rank_of_each_call_counts() -> None:
    one = point_on_gpu().ranks[0]
    late = spans_of()
    late.ns[0, 0, -1] += 50_000
    other = dataclasses.replace(one, spans=late, slots=0, experts_hit=10, differences={"fused": 1})
    point = FusedMoePoint(point_on_gpu().settings, [one, other])
    assert point.total_us == Spread(34.5, 11.0, 58.0)
    assert point.flops == point_on_gpu().flops / 2
    assert point.experts_hit == 64
    assert point.difference("fused") == 1


def test_contenders_alternate_and_warmup_is_left_out() -> None:
    class Counting:
        calls = 0.0

        def time(self, call: Any, during: Any = None) -> float:
            call()
            self.calls += 1
            return self.calls

    order: list[Any] = []
    times = in_turns(
        Counting(),
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        warmup=1,
        iterations=2,
        after=lambda name, kept: order.append((name, kept)),
    )
    assert {name: t.tolist() for name, t in times.items()} == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    one_round = ["a", ("a", True), "b", ("b", True)]
    assert order == ["a", ("a", False), "b", ("b", False), *one_round, *one_round]


def test_a_call_on_a_gpu_begins_behind_a_pause_a_flush_and_a_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for what needs a GPU."""
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.passed = iter([False, False, True])

        def record(self) -> None:
            order.append("event")

        def query(self) -> bool:
            return next(self.passed)

        def elapsed_time(self, end: Event) -> float:
            return 0.5

    properties = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("head start"))
    monkeypatch.setattr(time, "sleep", lambda seconds: order.append(f"{seconds} s"))
    monkeypatch.setattr(fused_moe_timing, "_LEAST_FLUSH_BYTES", 4096)
    clock = GpuClock(lambda: order.append("barrier"), lambda: order.append("meet"), CPU, 0.01)
    clock._written.fill_(7)
    assert clock.late_share == 0.0
    us = clock.time(lambda: order.append("call"), lambda: order.append("sample"))
    assert us == 500.0
    assert clock._written.shape == clock._read.shape == (1024,)
    assert not clock._written.any()
    assert clock.late_share == 0.0
    assert order == [
        "synchronize", "0.01 s", "meet", "head start", "barrier", "event", "call", "event",
        "sample", "synchronize",
    ]  # fmt: skip
    monkeypatch.setattr(Event, "query", lambda self: True)
    clock.time(lambda: None)
    assert clock.late_share == 0.5


def test_weights_of_an_expert_do_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    most, quantize_weights = [], ExpertWeights.quantize

    def counting(gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        most.append(len(gate_up))
        return quantize_weights(gate_up, down)

    monkeypatch.setattr(ExpertWeights, "quantize", counting)
    every = fused_moe.expert_weights(SMALL, range(4), CPU)
    some = fused_moe.expert_weights(SMALL, [3, 1], CPU)
    for name in ("l1", "l1_scales", "l2", "l2_scales"):
        wanted, found = getattr(every, name), getattr(some, name)
        assert torch.equal(found.float(), wanted.float()[[3, 1]])
        assert not torch.equal(wanted.float()[0], wanted.float()[1])
    assert set(most) == {1}  # never the unquantised weights of more than one


# ---- checks -------------------------------------------------------------------------------------


def test_finds_what_is_on_the_cpu() -> None:
    (point,) = (fused_moe.sweep(SMALL) or [])[0]
    assert (point.backend, point.tokens, point.slots) == ("host", 5, 10)
    topk_idx = SMALL.workload(5).batch(0).topk_idx
    assert point.experts_hit == len(topk_idx.unique())
    assert point.differences["fused"] == 0.0
    assert 0 < point.differences["unfused"] < 1e-3
    assert set(point.microseconds) >= {"fused", "unfused", "unfused_gemms"}
    assert all(len(t) == 2 and bool((t > 0).all()) for t in point.microseconds.values())
    assert (point.spans, point.watts, point.device) == (None, [], None)


@pytest.mark.parametrize("wrong", [lambda y: y.mul_(1.1), lambda y: y[-1].fill_(torch.nan)])
def test_a_wrong_result_ends_it(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    forward = fanfold.FusedMoE.forward

    def spoilt(*arguments: Any, **more: Any) -> torch.Tensor:
        out = forward(*arguments, **more)
        wrong(out)
        return out

    monkeypatch.setattr(fanfold.FusedMoE, "forward", spoilt)
    with pytest.raises(CheckFailed, match="fused with 5 tokens: the difference from the reference"):
        fused_moe.sweep(SMALL)


def test_a_wrong_unfused_layer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Unfused.layer
    monkeypatch.setattr(Unfused, "layer", lambda self: layer(self) * 1.1)
    with pytest.raises(CheckFailed, match="unfused with 5 tokens"):
        fused_moe.sweep(SMALL)


def test_the_last_timed_call_must_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = fanfold.FusedMoE.forward, []

    def drifting(*arguments: Any, **more: Any) -> torch.Tensor:
        calls.append(1)
        out = forward(*arguments, **more)
        if len(calls) > 2:
            out[0, 0] += 1
        return out

    monkeypatch.setattr(fanfold.FusedMoE, "forward", drifting)
    with pytest.raises(CheckFailed, match="the fused result of the last timed call"):
        fused_moe.sweep(SMALL)


def test_padding_rows_have_no_group() -> None:
    weights = fused_moe.expert_weights(SMALL, range(4), CPU)
    batch = SMALL.workload(5).batch(0)
    with fanfold.HighThroughput(
        num_experts=4, top_k=2, hidden=256, max_tokens=5, dispatch_dtype="fp8",
        expert_alignment=128,
    ) as ep:  # fmt: skip
        routing = (batch.topk_idx, batch.topk_weights)
        unfused = Unfused(ep, weights, quantize(batch.x), routing, fast=False)
    counts = batch.topk_idx.flatten().bincount(minlength=4)
    assert len(unfused.groups) == 128 * int((counts > 0).sum())
    assert [int((unfused.groups == expert).sum()) for expert in range(4)] == counts.tolist()
    assert int((unfused.groups == -1).sum()) == len(unfused.groups) - 10
    firsts = unfused.groups[::128].tolist()
    assert firsts == [expert for expert in range(4) if counts[expert]]


def test_says_why_torch_has_no_grouped_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("_grouped_mm", "_scaled_grouped_mm"):
        monkeypatch.delattr(torch, name, raising=False)
    path = tmp_path / "r.jsonl"
    assert run(*TINY, "--json", str(path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "PyTorch's grouped GEMMs are not timed: torch._scaled_grouped_mm: module" in said
    fields = json.loads(path.read_text().splitlines()[0])
    assert fields["torch_gemms"] is None
    assert "_grouped_mm" in fields["torch_gemms_reason"]
    assert "torch_gemms_us" not in fields


def test_torch_weights_are_those_of_the_layer() -> None:
    weights = fused_moe.expert_weights(SMALL, range(2), CPU)
    values, scales = fused_moe_rivals._matrices("fp8", weights.l1, weights.l1_scales)
    wide = fanfold.fused_moe.dequantize_weights(weights.l1, weights.l1_scales)
    again = values.float() * scales.unsqueeze(-1)
    assert 0 < fanfold.fused_moe.difference(again, wide) < 1e-3
    if hasattr(torch, "_grouped_mm"):
        found = TorchWeights.of(weights, fast=False)
        assert isinstance(found, (TorchWeights, NotTimed))
        if isinstance(found, TorchWeights):
            assert found.kind == "bf16"  # PyTorch has no fp8 on CPUs


# ---- NVML ---------------------------------------------------------------------------------------


class FakeNvml:
    """Has one GPU."""

    knows_power = True

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetPowerUsage(self, handle: Any, value: Any) -> int:  # noqa: N802
        ctypes.cast(value, ctypes.POINTER(ctypes.c_uint))[0] = 654_321
        return 0 if self.knows_power else 3


def test_nvml_reports_the_power() -> None:
    library = FakeNvml()
    assert Nvml(library, "GPU-1").watts() == pytest.approx(654.321)
    assert Nvml(library, "GPU-2").watts() is None
    assert Nvml(None, "GPU-1").watts() is None
    library.knows_power = False
    assert Nvml(library, "GPU-1").watts() is None


# ---- lines and words ----------------------------------------------------------------------------


def test_writes_a_line_for_each_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"an": "earlier line"}\n')
    assert run(*TINY, "--seed", "3", "--json", str(path)) == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("fused-moe: 1 rank", "wall µs", "weights GB/s", "unfused µs", "both by wall time"):
        assert word in said
    assert "kernel" not in said
    earlier, *lines = path.read_text().splitlines()
    assert json.loads(earlier) == {"an": "earlier line"}
    for tokens, line in zip((5, 9), map(json.loads, lines), strict=True):
        assert (line["bench"], line["tokens"], line["slots"]) == ("fused_moe", tokens, 2 * tokens)
        assert (line["backend"], line["ranks"], line["seed"]) == ("host", 1, 3)
        assert 0 < line["total_us_least"] <= line["total_us"] <= line["total_us_most"]
        assert line["unfused_us"] > 0
        assert line["ratio"] > 0
        assert line["difference"] <= 1e-3
        assert (line["event_us"], line["roof_share"], line["phases"]) == (None, None, {})


def test_without_baseline_nothing_else_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    assert run(*TINY, "--no-baseline", "--json", str(path)) == 0
    assert "nfused" not in capsys.readouterr().out.replace("fused-moe", "")
    fields = json.loads(path.read_text().splitlines()[0])
    assert [name for name in fields if "unfused" in name or "torch" in name] == []


def test_line_of_a_gpu() -> None:
    fields = json.loads(json.dumps(fused_moe_report.record(point_on_gpu(64))))
    assert (fields["total_us"], fields["total_us_least"], fields["total_us_most"]) == (10.5, 10, 11)
    assert fields["event_us"] == 25.0
    assert fields["phases"]["routed"] == {"least_us": 1.0, "most_us": 2.0}
    assert (fields["kernel_clock_mhz"], fields["kernel_clock_mhz_most"]) == (1600.0, 1600.0)
    assert (fields["power_w"], fields["power_w_least"]) == (550.0, 500.0)
    assert (fields["torch_gemms"], fields["torch_gemms_us"]) == ("fp8", 50.0)
    assert fields["late_share"] == 0.25


def test_words_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = point_on_gpu(64, microseconds=point_on_gpu().ranks[0].microseconds)
    monkeypatch.setattr(fused_moe, "sweep", lambda settings, group: [point.ranks])
    assert run("--tokens", "64", "--hidden", "7168", "--intermediate", "2048") == 0
    said = " ".join(capsys.readouterr().out.split())
    for word in ("kernel µs", "events", "roof", "MHz", "1,600", "550", "first GEMM stored",
                 "4.0 – 4.0", "6.0 – 7.0", "a pause of 10 ms", "late for 25.0%",
                 "torch._scaled_grouped_mm, fp8", "takes 3.00 times as long"):  # fmt: skip
        assert word in said


def test_documents_every_field() -> None:
    fields = fused_moe_report.record(point_on_gpu())
    other = fused_moe_report.record(point_on_gpu(torch_gemms=NotTimed("no")))
    line = fused_moe_report.timeline_lines(point_on_gpu())[0]
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    text = page.partition("\n## Fused MoE\n")[2].partition("\n## ")[0]
    own = {*fields, *other, *line, *fields["phases"], *fields["phases"]["end"]}
    own -= {"schema", "machine", "versions", "commit", "time", "config"}
    for name in own:
        if not name.endswith(("_least", "_most")):
            assert f"`{name}`" in text, name


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--tokens", "0"), "tokens"),
        (("--tokens", "8,16777216"), "tokens"),
        (("--hidden", "100"), "hidden"),
        (("--intermediate", "64"), "intermediate"),
        (("--hidden", "16512"), "hidden"),
        (("--intermediate", "16512"), "intermediate"),
        (("--top-k", "5"), "top_k"),
        (("--experts", "0"), "experts"),
        (("--ranks", "3"), "experts"),
        (("--iterations", "0"), "iterations"),
        (("--warmup", "-1"), "warmup"),
        (("--pause-ms", "-1"), "pause_ms"),
        (("--pause-ms", "nan"), "pause_ms"),
        (("--seed", "-1"), "seed"),
    ],
)
def test_refuses(arguments: tuple[str, ...], name: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        run(*TINY, *arguments)
    assert caught.value.argument == name


def test_deep_products_need_no_baseline() -> None:
    with pytest.raises(ArgumentError, match="--no-baseline"):
        dataclasses.replace(SMALL, hidden=16512)
    assert dataclasses.replace(SMALL, hidden=16512, baseline=False).hidden == 16512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeline", "t.jsonl"), "--timeline is of the kernel on GPUs"),
        (("--json", "/nowhere/at/all"), "--json is /nowhere/at/all"),
    ],
)
def test_one_line_for_a_wrong_argument(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "fused-moe", *TINY, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert message in said.err


# ---- fanfold tune -------------------------------------------------------------------------------


def test_tune_times_every_form_of_a_number_of_tokens_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[FusedMoeSettings] = []

    def timed(settings: FusedMoeSettings) -> list[list[RankPoint]]:
        """Two ranks, of which one gets more slots; each call takes as many µs as calls before."""
        asked.append(settings)
        (tokens,) = settings.tokens
        ends = torch.tensor([[[0, 0, 0, 0, 1000 * len(asked)]]], dtype=torch.int64, device=CPU)
        spans = Spans(ends, torch.zeros_like(ends[..., 0]))
        rank = point_on_gpu(tokens, spans=spans).ranks[0]
        return [[rank, dataclasses.replace(rank, slots=rank.slots + 5)]]

    monkeypatch.setattr(fused_moe_tune, "sweep", timed)
    settings = FusedMoeSettings(tokens=(8, 512), ranks=2, hidden=7168, intermediate=2048)
    points = fused_moe_tune.tune(settings)
    assert [each.tokens for each in asked] == [(8,)] * 3 + [(512,)] * 3
    assert [each.tuning for each in asked] == 2 * list(FORMS.values())
    assert all(each.backend == "cuda" and not each.baseline for each in asked)
    layer = TunedLayer("NVIDIA H200", 2, 64, 8, 7168, 2048, fast_accumulation=True)
    assert points == [
        TunedPoint(layer, 8, 69, {"rows": 1.0, "swap_ab": 2.0, "groups": 3.0}),
        TunedPoint(layer, 512, 4101, {"rows": 4.0, "swap_ab": 5.0, "groups": 6.0}),
    ]
