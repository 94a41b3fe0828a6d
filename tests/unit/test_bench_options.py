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

from fanfold.bench import deep_ep_calls, layouts, oracle, report
from fanfold.bench.calls import Given
from fanfold.bench.check import Expectation
from fanfold.bench.cuda_high_throughput import capacity_for
from fanfold.bench.notes import notes as notes_of
from fanfold.bench.report import Placement, Result, Traffic
from fanfold.bench.settings import FACES, FACES_OF_BOTH_MODES, MODES, THROUGH, BenchSettings
from fanfold.bench.timing import Timings
from fanfold.bench.workload import Workload
from fanfold.cli import bench
from fanfold.deep_ep import Buffer
from fanfold.errors import ArgumentError, ConfigError, UnavailableError
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
    assert asked.zero_padding is None
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
        (
            "high-throughput --layout token-major --no-zero-padding",
            "zero_padding .* has no padding",
        ),
        ("low-latency --no-zero-padding", "zero_padding is False, .*high throughput"),
        ("high-throughput --backend host --no-zero-padding", "--backend host: always zeros"),
        ("high-throughput --face deep_ep --no-zero-padding", "zero_padding .*--face deep_ep"),
        ("high-throughput --face hybridep --no-zero-padding", "zero_padding .*--face hybridep"),
        ("low-latency --in-place", "in_place is True, .*high throughput"),
        ("high-throughput --backend host --in-place", "layout, routing and alignment work there"),
        (
            "high-throughput --face deep_ep --layout expert-major",
            "layout is expert_major, .*token_major, or left out, with --face deep_ep",
        ),
        ("high-throughput --face deep_ep --alignment 8", "alignment is 8, .*with --face deep_ep"),
        ("high-throughput --face deep_ep --in-place", "in_place is True, .*with --face deep_ep"),
        (
            "high-throughput --face hybridep --layout token-major",
            "layout is token_major, .*expert_m",
        ),
        ("high-throughput --face elastic --in-place", "in_place is True, .*with --face elastic"),
        ("low-latency --face elastic", "face is elastic, .*native or deep_ep in low latency"),
        ("low-latency --face hybridep", "face is hybridep, .*native or deep_ep in low latency"),
        ("high-throughput --face deep_ep --sms 13", "sms is 13, .*even with --face deep_ep"),
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


def test_the_calls_of_deep_ep_are_token_major():
    for backend in ("host", "cuda"):
        (low_latency,) = points("low-latency", "--face", "deep_ep")
        assert (low_latency.on(backend).face, low_latency.on(backend).layout) == ("deep_ep", None)
        for layout in ((), ("--layout", "token-major")):
            (found,) = points("high-throughput", "--face", "deep_ep", *layout)
            assert found.on(backend).layout == "token_major"
        (native,) = points("high-throughput")
        assert (native.face, native.on(backend).layout) == ("native", "expert_major")


def test_committed_results_have_steps_for_deep_ep():
    file = Path(__file__).parents[2] / "benchmarks" / "run_cuda.py"
    steps = runpy.run_path(str(file))["STEPS"]
    found = {name: list(step(4)) for name, step in steps.items()}
    through = {name for name, points in found.items() if any(s.face == "deep_ep" for s in points)}
    assert through == {"deep_ep", "deep_ep_rows", "faces"}  # the last one compares all faces
    through.remove("faces")
    native = [dataclasses.replace(s, baseline=False, overlap=False) for s in found["baseline"]]
    assert [dataclasses.replace(s, face="native") for s in found["deep_ep"]] == native
    assert all(s.face == "deep_ep" and s.check for name in through for s in found[name])


@pytest.mark.parametrize("option", ["overlap", "sms", "in_place"])
def test_what_needs_gpus_says_so_without(monkeypatch, option):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = BenchSettings("high_throughput", **{option: 12 if option == "sms" else True})
    with pytest.raises(UnavailableError, match=f"{option} is asked for with 4 ranks"):
        settings.backend_here()
    assert BenchSettings("high_throughput").backend_here() == "host"


@pytest.mark.parametrize(("transfer", "sms"), [("push", 24), ("pull", 21)])
def test_sms_are_those_that_a_dispatch_takes(monkeypatch, transfer, sms):
    """The link of pulled rows is slower, so fewer SMs fill it."""
    gpu = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setenv("FANFOLD_DISPATCH_TRANSFER", transfer)
    sizes = {"hidden": 7168, "experts": 256, "top_k": 8, "dtype": "fp8"}
    settings = BenchSettings("high_throughput", routing="cached", **sizes).on("cuda")
    kind = layouts.dispatch_kind(settings, "")
    assert layouts.sms_taken(settings, torch.device("cuda"), kind) == sms
    assert kind.pulls is (transfer == "pull")


@pytest.mark.parametrize("face", ["native", "hybridep"])
def test_rows_are_pulled_where_the_model_says_so(monkeypatch, face):
    """Between few ranks of one host."""
    monkeypatch.delenv("FANFOLD_DISPATCH_TRANSFER", raising=False)
    sizes = {"hidden": 7168, "experts": 256, "top_k": 8, "dtype": "bf16", "face": face}
    of = {
        ranks: BenchSettings("high_throughput", ranks=ranks, routing="cached", **sizes).on("cuda")
        for ranks in (1, 2, 4)
    }
    assert {n: layouts.dispatch_kind(settings, "").pulls for n, settings in of.items()} == {
        1: False, 2: True, 4: False,
    }  # fmt: skip
    assert not layouts.dispatch_kind(of[2], "libfabric:tcp").pulls


def test_padding_that_is_not_written_needs_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match="no zero_padding is asked for with 4 ranks"):
        BenchSettings("high_throughput", zero_padding=False).backend_here()
    assert BenchSettings("high_throughput", zero_padding=True).backend_here() == "host"


def test_zero_padding_is_of_expert_major_on_gpus():
    (asked,) = points("high-throughput")
    assert asked.on("cuda").zero_padding is True
    assert asked.on("host").zero_padding is None
    (unwritten,) = points("high-throughput", "--no-zero-padding")
    assert unwritten.on("cuda").zero_padding is False
    (token_major,) = points("high-throughput", "--layout", "token-major")
    assert token_major.on("cuda").zero_padding is None
    of_elastic = ("high-throughput", "--face", "elastic", "--layout", "expert-major")
    for options, zeros in (((), False), (("--zero-padding",), True)):
        (elastic,) = points(*of_elastic, *options)
        assert elastic.on("cuda").zero_padding is zeros


class Recorded:
    """Stands in for a HighThroughput, and keeps what it is given."""

    device = torch.device("cuda")
    memory = types.SimpleNamespace(bytes_per_rank=0)

    def __init__(self, mode, group, **options):
        assert mode == "high_throughput"
        self.options, self.dispatched, self.zero_padding = options, [], []
        self.use_zero_padding = self.zero_padding.append

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


def test_elsewhere_no_memory_is_kept_for_rows(monkeypatch):
    monkeypatch.setattr(layouts, "open_dispatcher", Recorded)
    monkeypatch.setattr(layouts, "HighThroughput", Recorded)
    settings = BenchSettings("high_throughput", tokens=3, hidden=16, backend="cuda").on("cuda")
    calls = layouts.open_calls(None, settings)
    assert calls.ep.options["in_place_rows"] == 0
    batch = settings.workload().batch(0)
    calls.dispatch(Given(batch.x, batch.topk_idx, batch.topk_weights))
    assert calls.ep.dispatched == [{"capacity": None, "in_place": False}]


@pytest.mark.parametrize("zeros", [None, True, False])
def test_the_face_knows_whether_padding_is_zero(monkeypatch, zeros):
    monkeypatch.setattr(layouts, "open_dispatcher", Recorded)
    monkeypatch.setattr(layouts, "HighThroughput", Recorded)
    settings = BenchSettings("high_throughput", tokens=3, hidden=16, zero_padding=zeros)
    calls = layouts.open_calls(None, settings.on("cuda"))
    assert calls.ep.zero_padding == [zeros is not False]


@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_runs_on_the_host_is_no_bench_of_gpus(monkeypatch, mode):
    """High throughput does on an older GPU, without an error of the Buffer's."""
    choice = mock.Mock(supports=lambda asked: asked != mode)
    buffer = mock.Mock(runtime=mock.Mock(choice=choice), device=torch.device("cuda"))

    class OnTheHost(Buffer):
        def __new__(cls, *args, **options):
            return buffer

    monkeypatch.setattr(deep_ep_calls, "Buffer", OnTheHost)
    settings = BenchSettings(mode, ranks=1, backend="cuda", face="deep_ep")
    settings = dataclasses.replace(settings, sms=8 if mode == "high_throughput" else None)
    before = Buffer.num_sms
    with pytest.raises(UnavailableError, match=f"{mode.replace('_', ' ')} of a Buffer runs on the"):
        layouts.open_calls(None, settings.on("cuda"))
    buffer.destroy.assert_called_once_with()
    assert Buffer.num_sms == before


def said_of(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(result))
    return " ".join([*console.export_text().split(), *notes_of(result)])


@pytest.mark.parametrize("backend", ["host", "cuda"])
@pytest.mark.parametrize("mode", MODES)
def test_reports_say_whose_calls_they_are_of(backend, mode):
    times = Timings(torch.ones((2, 3, 3), dtype=torch.float64, device="cpu"))
    traffic = Traffic(1.0, 2.0, 0.0, 1.0)
    for face in FACES if mode == "high_throughput" else FACES_OF_BOTH_MODES:
        result = Result(
            settings=BenchSettings(mode, ranks=2, face=face).on(backend),
            ranks=2, placement=Placement(1, 2), fanfold=times, baseline=None, dispatch=traffic,
            combine=traffic, checked=True, memory_bytes=1, timing={},
            device={"name": "none"} if backend == "cuda" else None,
        )  # fmt: skip
        assert report.record(result)["face"] == face
        said = said_of(result)
        assert (", through" in said) == (face != "native")
        assert f", through {THROUGH.get(face, '')}" in said or face == "native"
        late = face == "deep_ep" and mode == "low_latency"
        assert ("Weights come with combine" in said) is late


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_reports_say_whether_rows_came_in_place(in_place, zeros):
    settings = BenchSettings(
        "high_throughput", ranks=2, backend="cuda", in_place=in_place, zero_padding=zeros
    )
    times = Timings(torch.ones((2, 3, 3), dtype=torch.float64, device="cpu"))
    traffic = Traffic(1.0, 2.0, 0.0, 1.0)
    result = Result(
        settings=settings.on("cuda"), ranks=2, placement=Placement(1, 2), fanfold=times,
        baseline=None, dispatch=traffic, combine=traffic, checked=True, memory_bytes=1,
        device={"name": "none"}, timing={},
    )  # fmt: skip
    assert report.record(result)["in_place"] is in_place
    assert report.record(result)["zero_padding"] is zeros
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(result))
    console.print(report.sweep_table([result]))
    said = " ".join(console.export_text().split())
    assert "expert-major" in said
    unwritten = "" if zeros else ", padding unwritten"
    assert said.count(f"expert-major{unwritten}, in place") == (2 if in_place else 0)
    assert said.count("padding unwritten") == (0 if zeros else 2)
    assert ("Rows came in place" in " ".join(notes_of(result))) is in_place
    assert "dispatch_transfer" not in report.record(result)
    assert "pulled" not in said


def _result_on_gpu(**fields):
    times = Timings(torch.ones((2, 3, 3), dtype=torch.float64, device="cpu"))
    traffic = Traffic(1.0, 2.0, 0.0, 1.0)
    return Result(
        settings=BenchSettings("high_throughput", ranks=2, backend="cuda").on("cuda"), ranks=2,
        placement=Placement(1, 2), fanfold=times, baseline=None, dispatch=traffic, combine=traffic,
        checked=True, memory_bytes=1, device={"name": "none"}, timing={}, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("few", [True, False])
def test_reports_say_by_which_protocol_few_tokens_went(few):
    result = _result_on_gpu(few_tokens=few)
    assert report.record(result).get("few_tokens") is (True if few else None)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(result))
    said = " ".join(console.export_text().split())
    assert ("by the low-latency protocol" in said) is few


@pytest.mark.parametrize("pulled", [True, False])
def test_reports_say_how_rows_moved(pulled):
    result = _result_on_gpu(pulled=pulled)
    assert report.record(result)["dispatch_transfer"] == ("pull" if pulled else "push")
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.table(result))
    console.print(report.sweep_table([result]))
    said = " ".join(console.export_text().split())
    assert said.count("expert-major, pulled") == (2 if pulled else 0)


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
