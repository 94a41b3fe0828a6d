"""Options of ``fanfold bench``: what they mean, what is refused, and in which words."""

from __future__ import annotations

import argparse
import dataclasses
import io
import runpy
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.low_latency import Dispatched, LateRouting, cuda_required_bytes
from fanfold.bench import late_weights, layouts, oracle, report
from fanfold.bench.check import Expectation
from fanfold.bench.cuda_high_throughput import capacity_for
from fanfold.bench.layouts import Given
from fanfold.bench.report import Result, Traffic
from fanfold.bench.settings import BenchSettings
from fanfold.bench.timing import Timings
from fanfold.bench.workload import Workload
from fanfold.cli import bench
from fanfold.errors import ArgumentError, ConfigError, UnavailableError
from fanfold.formats import RowFormat
from fanfold.geometry import Geometry
from fanfold.results import HighThroughputResult


@pytest.fixture(autouse=True)
def no_backend_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANFOLD_BACKEND", raising=False)


def points(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench._points(parser.parse_args(arguments), None)


def test_each_of_several_is_a_point():
    found = points(
        "high-throughput", "--layout", "token-major,expert_major", "--routing", "cached",
        "--sms", "12,24", "--distribution", "skewed",
    )  # fmt: skip
    assert [(each.layout, each.routing, each.sms) for each in found] == [
        ("token_major", "cached", 12),
        ("token_major", "cached", 24),
        ("expert_major", "cached", 12),
        ("expert_major", "cached", 24),
    ]
    assert {each.distribution for each in found} == {"skewed"}
    assert {each.workload().routing for each in found} == {"skewed"}


def test_the_setting_decides_where_no_option_does(monkeypatch):
    monkeypatch.setenv("FANFOLD_BACKEND", "host")
    assert points("low-latency")[0].backend == "host"
    assert points("low-latency", "--backend", "auto")[0].backend == "auto"
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "soon")
    with pytest.raises(ConfigError, match="FANFOLD_TIMEOUT_S is 'soon'"):
        points("low-latency")


def test_what_is_left_out_the_backend_decides():
    (asked,) = points("high-throughput")
    assert (asked.layout, asked.routing, asked.sms, asked.alignment) == (None,) * 4
    here, there = asked.on("host"), asked.on("cuda")
    assert (here.backend, here.layout, here.routing, here.alignment) == (
        "host", "expert_major", "new", 1,
    )  # fmt: skip
    assert (there.backend, there.alignment, there.sms) == ("cuda", 128, None)
    (token_major,) = points("high-throughput", "--layout", "token-major")
    assert token_major.on("cuda").alignment is None
    (low_latency,) = points("low-latency")
    assert low_latency.on("cuda").layout is None
    (aligned,) = points("high-throughput", "--alignment", "16")
    assert aligned.on("host").alignment == aligned.on("cuda").alignment == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("low-latency --layout token-major", "layout is token_major, .*left out in low latency"),
        ("low-latency --routing uniform", "experts tokens choose is --distribution"),
        ("low-latency --sms 12", "sms is 12, .*high throughput"),
        ("low-latency --alignment 8", "alignment is 8, .*high throughput"),
        ("high-throughput --routing uniform", "routing is 'uniform', .*new, cached"),
        ("high-throughput --layout flat", "layout is 'flat', .*expert_major, token_major"),
        ("high-throughput --backend host --sms 12", "layout, routing and alignment work there"),
        ("high-throughput --sms 1", "sms is 1, .*from 2 to"),
        ("high-throughput --sms 12,1000", "sms is 1000"),
        ("high-throughput --alignment 0", "alignment is 0"),
        ("high-throughput --layout token-major --alignment 8", "has no padding"),
        ("low-latency --in-place", "in_place is True, .*high throughput"),
        ("high-throughput --backend host --in-place", "layout, routing and alignment work there"),
        ("high-throughput --late-weights", "late_weights is True, .*option of low latency"),
    ],
)
def test_what_does_not_apply_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        points(*arguments.split())


def test_in_place_is_of_high_throughput_on_gpus():
    arguments = ("high-throughput", "--backend", "cuda", "--routing", "new,cached")
    found = points(*arguments, "--in-place")
    assert [(each.routing, each.on("cuda").in_place) for each in found] == [
        ("new", True),
        ("cached", True),
    ]
    (asked, _) = points(*arguments)
    assert asked.in_place is None
    assert asked.on("cuda").in_place is False
    assert asked.on("host").in_place is None
    (token_major,) = points("high-throughput", "--layout", "token-major", "--in-place")
    assert token_major.on("cuda").in_place is True
    (low_latency,) = points("low-latency")
    assert low_latency.on("cuda").in_place is None


def test_weights_come_with_combine_where_asked_for():
    (asked,) = points("low-latency")
    assert asked.late_weights is None
    (late,) = points("low-latency", "--late-weights")
    for backend in ("host", "cuda"):
        assert asked.on(backend).late_weights is False
        assert late.on(backend).late_weights is True
        (packed,) = points("high-throughput")
        assert packed.on(backend).late_weights is None


def test_committed_results_have_a_step_for_late_weights():
    file = Path(__file__).parents[2] / "benchmarks" / "run_cuda.py"
    steps = runpy.run_path(str(file))["STEPS"]
    found = {name: list(step(4)) for name, step in steps.items()}
    assert {name for name, settings in found.items() if any(s.late_weights for s in settings)} == {
        "late_weights"
    }
    early = [dataclasses.replace(s, baseline=False, overlap=False) for s in found["baseline"]]
    assert [dataclasses.replace(s, late_weights=None) for s in found["late_weights"]] == early
    assert all(s.late_weights and s.check for s in found["late_weights"])


@pytest.mark.parametrize("option", ["overlap", "sms", "in_place"])
def test_what_needs_gpus_says_so_without(monkeypatch, option):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = BenchSettings("high_throughput", **{option: 12 if option == "sms" else True})
    with pytest.raises(UnavailableError, match=f"{option} is asked for with 4 ranks"):
        settings.backend_here()
    assert BenchSettings("high_throughput").backend_here() == "host"


class Recorded:
    """Stands in for a HighThroughput, and keeps what it is given."""

    device = torch.device("cuda")
    memory = types.SimpleNamespace(bytes_per_rank=0)

    def __init__(self, mode, group, **options):
        assert mode == "high_throughput"
        self.options, self.dispatched = options, []

    def dispatch(self, x, topk_idx=None, topk_weights=None, **options):
        self.dispatched.append(options)


@pytest.mark.parametrize("distribution", ["uniform", "skewed", "one_expert"])
@pytest.mark.parametrize("tokens", [0, 33])
def test_in_place_has_room_for_every_dispatch(monkeypatch, tokens, distribution):
    monkeypatch.setattr(layouts, "open_dispatcher", Recorded)
    monkeypatch.setattr(layouts, "HighThroughput", Recorded)
    settings = BenchSettings(
        "high_throughput", ranks=3, tokens=tokens, hidden=16, top_k=2, experts=6, backend="cuda",
        distribution=distribution, seed=3, in_place=True,
    ).on("cuda")  # fmt: skip
    batches = [settings.workload().batch(rank) for rank in range(3)]
    capacity = capacity_for(Expectation(batches, 0, 6, False), settings)
    calls = layouts.open_calls(None, settings)
    assert calls.ep.options["in_place_rows"] == max(1, capacity)
    assert capacity >= max(oracle.rows_arriving(batches, 6, token_major=False, alignment=128))
    given = Given(batches[0].x, batches[0].topk_idx, batches[0].topk_weights)
    calls.dispatch(given, 5)
    previous = mock.create_autospec(HighThroughputResult, instance=True)
    calls.dispatch_again(given, previous)
    assert calls.ep.dispatched == [
        {"capacity": 5, "in_place": True},
        {"previous": previous, "in_place": True},
    ]


@pytest.mark.parametrize(("dtype", "row_bytes"), [("fp8", 272 + 4 * 3), ("bf16", 2 * 272)])
def test_token_major_rows_in_place_have_their_memory(dtype, row_bytes):
    settings = BenchSettings(
        "high_throughput", ranks=2, tokens=9, hidden=272, top_k=2, experts=4, backend="cuda",
        dtype=dtype, layout="token_major", in_place=True,
    )  # fmt: skip
    room = layouts.room_for([settings.workload().batch(rank) for rank in range(2)], settings)
    assert layouts._result_bytes(settings) == room * row_bytes + 128
    assert layouts._result_bytes(dataclasses.replace(settings, in_place=False)) == 0


GPU = torch.device("cuda")


class RecordedMode:
    """Stands in for the low-latency mode of a GPU, and keeps what it is given."""

    def __init__(self):
        self.calls = []
        self.dispatched = Dispatched(*[torch.zeros((2, 12, 16))] * 3, LateRouting(None, None))

    def dispatch(self, geometry, x, topk_idx, **options):
        self.calls.append(("dispatch", geometry, options))
        return self.dispatched, "receives" if options["return_hook"] else None

    def combine(self, geometry, y, routing, topk_idx, **options):
        assert routing is self.dispatched.routing
        self.calls.append(("combine", geometry, options))
        return options["out"], "receives" if options["return_hook"] else None


def open_late_weights(monkeypatch, settings):
    """A LateWeights of a GPU that is not there; what was asked for to make it is in its mode."""
    mode = RecordedMode()
    mode.opened = {}

    def memory(group, nbytes):
        mode.opened["nbytes"] = nbytes
        return types.SimpleNamespace(bytes_per_rank=nbytes)

    def open_mode(memory, config, **options):
        mode.opened |= options
        return mode

    monkeypatch.setattr(late_weights, "choose", lambda *which: BackendChoice("cuda", GPU, ""))
    monkeypatch.setattr(opening, "CudaSymmetricMemory", memory)
    monkeypatch.setattr(opening.low_latency, "open_low_latency", open_mode)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: tensor)
    return layouts.open_calls(None, settings), mode


def test_late_weights_on_gpus_are_the_modes_own(monkeypatch):
    settings = BenchSettings(
        "low_latency", ranks=1, tokens=12, hidden=16, top_k=2, experts=2, dtype="fp8",
        backend="cuda", late_weights=True,
    ).on("cuda")  # fmt: skip
    calls, mode = open_late_weights(monkeypatch, settings)
    nbytes = cuda_required_bytes(Geometry(1, 2, 2, 16, 12), late_weights=True)
    assert mode.opened.pop("check_devices")
    assert mode.opened == {"nbytes": nbytes, "late_weights": True}
    assert (calls.device, calls.memory_bytes) == (GPU, nbytes)
    batch = settings.workload().batch(0)
    out, weights = torch.zeros_like(batch.x), batch.topk_weights
    calls.combine(batch.x, calls.dispatch(Given(batch.x, batch.topk_idx, weights)), out)
    received, hook = calls.ep.dispatch(batch.x, batch.topk_idx, weights, return_hook=True)
    assert hook == calls.ep.combine(batch.x, received, out=out, return_hook=True)[1] == "receives"
    for number, (name, geometry, options) in enumerate(mode.calls):
        # Kernels are found by the very object.
        assert geometry is mode.calls[0][1]
        assert name == ("dispatch", "combine")[number % 2]
        sent = {"row_format": RowFormat.FP8} if number % 2 == 0 else {}
        assert options.pop("late_weights", None) is (weights if number % 2 else None)
        assert options.pop("out", None) is (out if number % 2 else None)
        assert options == {**sent, "return_hook": number >= 2}


def test_elsewhere_no_memory_is_kept_for_rows(monkeypatch):
    monkeypatch.setattr(layouts, "open_dispatcher", Recorded)
    monkeypatch.setattr(layouts, "HighThroughput", Recorded)
    settings = BenchSettings("high_throughput", tokens=3, hidden=16, backend="cuda").on("cuda")
    calls = layouts.open_calls(None, settings)
    assert calls.ep.options["in_place_rows"] == 0
    batch = settings.workload().batch(0)
    calls.dispatch(Given(batch.x, batch.topk_idx, batch.topk_weights))
    assert calls.ep.dispatched == [{"capacity": None, "in_place": False}]


def said_of(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(result))
    return console.export_text() + " ".join(report.notes(result))


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_reports_say_which_way_weights_came(backend):
    times, traffic = Timings(torch.ones((2, 3, 3), dtype=torch.float64)), Traffic(1.0, 2.0)
    for late in (False, True):
        settings = BenchSettings("low_latency", ranks=2, late_weights=late).on(backend)
        result = Result(
            settings=settings, ranks=2, hosts=1, fanfold=times, baseline=None, dispatch=traffic,
            combine=traffic, checked=True, memory_bytes=1, timing={},
            device={"name": "none"} if backend == "cuda" else None,
        )  # fmt: skip
        assert report.record(result)["late_weights"] is late
        said = said_of(result)
        assert (", weights with combine" in said) is late
        assert ("Weights come with combine" in said) is late
    packed = BenchSettings("high_throughput", ranks=2).on(backend)
    assert report.record(dataclasses.replace(result, settings=packed))["late_weights"] is None


@pytest.mark.parametrize("in_place", [True, False])
def test_reports_say_whether_rows_came_in_place(in_place):
    settings = BenchSettings("high_throughput", ranks=2, backend="cuda", in_place=in_place)
    times, traffic = Timings(torch.ones((2, 3, 3), dtype=torch.float64)), Traffic(1.0, 2.0)
    result = Result(
        settings=settings.on("cuda"), ranks=2, hosts=1, fanfold=times, baseline=None,
        dispatch=traffic, combine=traffic, checked=True, memory_bytes=1, device={"name": "none"},
        timing={},
    )  # fmt: skip
    assert report.record(result)["in_place"] is in_place
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(result))
    console.print(report.sweep_table([result]))
    said = console.export_text()
    assert "expert-major" in said
    assert said.count("expert-major, in place") == (2 if in_place else 0)
    assert ("Rows came in place" in " ".join(report.notes(result))) is in_place


def test_a_list_of_something_else_is_refused(capsys):
    with pytest.raises(SystemExit):
        points("high-throughput", "--sms", "12,many")
    assert "'12,many' is no list of numbers" in capsys.readouterr().err


def test_distribution_is_one_of_those_there_are():
    with pytest.raises(ArgumentError, match="distribution is 'even'"):
        BenchSettings("low_latency", distribution="even")


@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_arriving_are_those_of_the_layouts(alignment):
    workload = Workload(
        ranks=3, tokens=20, hidden=16, top_k=4, experts=12, seed=5, none_share=0.3,
        duplicate_share=0.3, uneven=True,
    )  # fmt: skip
    batches = [workload.batch(rank) for rank in range(3)]
    arrived = [oracle.arrivals(batches, rank, 12) for rank in range(3)]
    token_major = oracle.rows_arriving(batches, 12, token_major=True)
    assert token_major == [len(each.row) for each in arrived]
    rows = oracle.rows_arriving(batches, 12, token_major=False, alignment=alignment)
    assert rows == [int(oracle.expert_major(each, alignment).offsets[-1]) for each in arrived]
    assert torch.tensor(rows).sum() > 0
