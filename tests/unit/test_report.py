"""What benches report: percentiles, bytes and rates, the JSON line and the table."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fanfold.bench import cuda_high_throughput, cuda_run, report, run
from fanfold.bench.notes import notes as notes_of
from fanfold.bench.report import Placement, Result, Traffic
from fanfold.bench.settings import LEAVE_SMS, BenchSettings
from fanfold.bench.timing import Contender, Percentiles, Timings, interleave
from fanfold.errors import ArgumentError, UnavailableError


def timings(scale=1.0):
    """Two ranks, three rounds: dispatch, combine, total."""
    first = [[1.0, 10.0, 11.0], [2.0, 20.0, 22.0], [3.0, 30.0, 33.0]]
    second = [[6.0, 1.0, 7.0], [5.0, 2.0, 7.0], [4.0, 3.0, 7.0]]
    return Timings(torch.tensor([first, second], dtype=torch.float64) * scale)


def result(baseline=True, **changes):
    settings = BenchSettings("low_latency", ranks=2, tokens=3, baseline=baseline, **changes)
    return Result(
        settings=settings,
        ranks=2,
        placement=Placement(1, 2),
        fanfold=timings(),
        baseline=timings(4.0) if baseline else None,
        dispatch=Traffic(3000.0, 4000.0, 0.0, 3000.0),
        combine=Traffic(30.5, 40.0, 0.0, 30.5),
        checked=True,
        memory_bytes=12345,
    )


def test_percentiles_interpolate():
    assert Percentiles.of(torch.arange(11.0).double()) == Percentiles(5.0, 9.0, 9.9)


def test_slowest_is_taken_round_by_round():
    assert timings().slowest("dispatch").p50 == 5.0  # of 6, 5, 4
    assert timings().slowest("combine").p50 == 20.0  # of 10, 20, 30
    assert timings().slowest("total").p50 == 22.0
    assert timings().overall("dispatch").p50 == 3.5


def test_contenders_take_turns_and_warmup_is_left_out():
    calls = []
    contenders = [
        Contender(name, lambda n=name: calls.append(n) or n, lambda sent: calls.append(sent))
        for name in ("a", "b")
    ]
    times = interleave(contenders, lambda: calls.append("|"), warmup=2, iterations=3)
    assert calls == ["|", "a", "a", "|", "b", "b"] * 5
    assert {name: tuple(t.shape) for name, t in times.items()} == {"a": (3, 3), "b": (3, 3)}
    assert torch.equal(times["a"][:, 0] + times["a"][:, 1], times["a"][:, 2])


FIELDS = {
    "mode", "backend", "transport", "hosts", "ranks", "tokens", "hidden", "top_k", "experts",
    "dtype", "bytes_remote", "bytes_total", "checked", "baseline_total_us", "ratio", "seed",
    "iterations", "warmup", "distribution", "layout", "in_place", "routing", "sms", "alignment",
    "zero_padding", "face", "check", "baseline", "machine", "versions", "commit", "config",
    "ranks_per_host", "proxy_threads", "emulated_hosts", "bytes_between_hosts",
    "bytes_inside_hosts",
} | {
    f"{phase}_us{suffix}"
    for phase in ("dispatch", "combine", "total")
    for suffix in ("", "_p90", "_p99")
} | {f"{phase}_gbps" for phase in ("dispatch", "combine", "total")}  # fmt: skip


def test_record_has_the_settings_of_the_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("FANFOLD_")]:
        monkeypatch.delenv(name)
    assert report.record(result())["config"] == {}
    monkeypatch.setenv("FANFOLD_STAGING_BYTES", "1048576")
    monkeypatch.setenv("FANFOLD_CTAS", "auto")
    monkeypatch.setenv("FANFOLD_CACHE_DIR", "/a/folder/of/mine")
    assert report.record(result())["config"] == {"staging_bytes": 1048576, "ctas": None}


def test_record_has_every_field():
    fields = json.loads(json.dumps(report.record(result())))
    assert set(fields) >= FIELDS
    assert (fields["mode"], fields["backend"], fields["transport"]) == (
        "low_latency",
        "host",
        "shm",
    )
    assert (fields["dispatch_us"], fields["combine_us"], fields["total_us"]) == (5.0, 20.0, 22.0)
    assert (fields["bytes_remote"], fields["bytes_total"]) == (3030, 4040)
    assert (fields["baseline_total_us"], fields["ratio"]) == (88.0, 4.0)
    assert fields["dispatch_gbps"] == 0.6  # 3000 bytes in 5 us
    assert (fields["schema"], fields["distribution"]) == (2, "uniform")
    assert fields["layout"] is fields["routing"] is fields["sms"] is None
    assert set(fields["machine"]) >= {"cpu", "cores", "memory_bytes", "kernel"}
    assert set(fields["versions"]) >= {"fanfold", "torch", "python"}
    without = report.record(result(baseline=False))
    assert "ratio" not in without
    assert without["baseline"] is False


def test_table_shows_times_bytes_and_rates():
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.table(result()))
    rows = {r.split("│")[1].strip(): r.split("│")[2:-1] for r in console.export_text().splitlines()
            if r.startswith("│")}  # fmt: skip
    # 4000 bytes in 5 us, the median of the slowest rank
    assert [float(cell) for cell in rows["dispatch"]] == [3.5, 5.5, 6.0, 5.0, 0, 0, 0.6, 0.8]
    assert list(rows) == [
        f"{prefix}{p}" for prefix in ("", "baseline ") for p in ("dispatch", "combine", "total")
    ]
    notes = " ".join(notes_of(result()))
    assert "4.00 times as long" in notes
    assert "Checked against the oracle" in notes


def append_many(path, name):
    for number in range(200):
        report.append_json_line(path, {"name": name, "number": number, "pad": "x" * 3000})


def test_lines_of_several_programs_do_not_mix(tmp_path):
    path = tmp_path / "lines.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, name)) for name in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for name in range(3):
        assert [line["number"] for line in lines if line["name"] == name] == list(range(200))


def test_unwritable_file_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ArgumentError, match="json"):
        report.check_writable(tmp_path / "no" / "file")


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"ranks": 0}, "ranks"),
        ({"experts": 63}, "experts"),
        ({"hidden": 17}, "hidden"),
        ({"hidden": 24, "dtype": "fp8"}, "hidden"),
        ({"tokens": -1}, "tokens"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 9, "experts": 8}, "top_k"),
        ({"iterations": 0}, "iterations"),
        ({"seed": -1}, "seed"),
        ({"calls": 0}, "calls"),
        ({"dtype": "fp4"}, "dtype"),
    ],
)
def test_settings_name_what_is_wrong(changes, argument):
    with pytest.raises(ArgumentError) as caught:
        BenchSettings("high_throughput", **changes)
    assert caught.value.argument == argument


def test_ranks_on_gpus_share_the_cores_for_the_oracle():
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    with run._threads_for(BenchSettings("low_latency", ranks=1, backend="cuda")):
        assert torch.get_num_threads() == max(before, cores)
    assert torch.get_num_threads() == before
    torch.set_num_threads(1)
    try:
        with run._threads_for(BenchSettings("low_latency", ranks=1, backend="cuda")):
            assert torch.get_num_threads() == cores
        with run._threads_for(BenchSettings("low_latency", ranks=1, backend="host")):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_missing_gpus_are_said_honestly(monkeypatch):
    for mode in ("low_latency", "high_throughput"):
        with pytest.raises(UnavailableError, match="overlap"):
            BenchSettings(mode, overlap=True, backend="host")
    with monkeypatch.context() as older:
        older.delattr(torch._C, LEAVE_SMS)
        BenchSettings("low_latency", overlap=True)
        with pytest.raises(UnavailableError, match=r"overlap needs PyTorch 2\.7"):
            BenchSettings("high_throughput", overlap=True)
    BenchSettings("high_throughput", overlap=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for mode in ("low_latency", "high_throughput"):
        with pytest.raises(UnavailableError, match=r"3 ranks.*PyTorch sees 2"):
            BenchSettings(mode, ranks=3, experts=48, backend="cuda").backend_here()
        assert BenchSettings(mode, ranks=3, experts=48).backend_here() == "host"
        assert BenchSettings(mode, ranks=2).backend_here() == "cuda"
    with pytest.raises(UnavailableError, match="sms is asked for"):
        BenchSettings("high_throughput", ranks=3, experts=48, sms=12).backend_here()


# ---- GPUs ---------------------------------------------------------------------------------------


def gpu_report(scale):
    """What one rank measured: every sample a number of its own, times ``scale``."""
    names = [
        f"{operation}.{way}"
        for operation in cuda_run.OPERATIONS
        for way in (
            "graph",
            "alone",
            "l2_flushed",
            "single",
            "host",
            "send",
            "receive",
            "hook_host",
        )
    ]
    samples = {name: torch.full((3,), 10.0 + n) * scale for n, name in enumerate(names)}
    price = {"empty": 6.0, "empty_flushed": 7.0, "launch": 2.0}
    samples |= {f"overhead.{name}": torch.full((3,), us) for name, us in price.items()}
    samples["overhead.python"] = torch.full((3,), 6.4) * scale
    samples |= {f"baseline.{name}": torch.full((3,), 99.0) for name in cuda_run.OPERATIONS}
    samples["overlap.gemm_alone"] = torch.tensor([100.0, 101.0])
    samples["overlap.gemm_beside_hook"] = torch.tensor([101.0, 102.0])
    return cuda_run.CudaReport(samples, {"name": "A GPU", "driver": "1.2"})


def gpu_result():
    reports = [gpu_report(1.0), gpu_report(2.0)]
    return dataclasses.replace(
        result(),
        fanfold=cuda_run.timings(reports, "{}.graph"),
        baseline=cuda_run.timings(reports, "baseline.{}"),
        device=reports[0].device,
        timing=cuda_run.summary(reports),
    )


def test_gpu_times_are_the_slowest_ranks_less_what_measuring_costs():
    fields = json.loads(json.dumps(report.record(gpu_result())))
    assert (fields["backend"], fields["transport"]) == ("cuda", "nvlink")
    assert fields["device"]["driver"] == "1.2"
    assert fields["dispatch_us"] == fields["timing"]["dispatch"]["graph_us"] == 20.0
    dispatch = fields["timing"]["dispatch"]
    assert (dispatch["alone_raw_us"], dispatch["alone_us"]) == (22.0, 22.0 - (6.0 - 2.0))
    assert (dispatch["l2_flushed_raw_us"], dispatch["l2_flushed_us"]) == (24.0, 24.0 - (7.0 - 2.0))
    assert (dispatch["host_us"], dispatch["host_least_us"]) == (28.0, 14.0)
    assert dispatch["send_us"] == dispatch["send_raw_us"] - 4.0
    assert (dispatch["host_hook_us"], dispatch["host_hook_least_us"]) == (34.0, 17.0)
    assert not {"send_us", "host_hook_us"} & fields["timing"]["round"].keys()
    overhead = fields["timing"]["overhead"]
    assert overhead["launch_us"] == 2.0
    assert (overhead["python_us"], overhead["python_least_us"]) == (12.8, 6.4)


def test_gpu_table_and_notes():
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.gpu_table(gpu_result()))
    shown = console.export_text()
    assert "graph, alone, L2 flushed" in shown
    assert "19.0 (24.0)" in shown
    notes = " ".join(notes_of(gpu_result()))
    assert "+1.0%" in notes
    assert "NCCL" in notes
    assert "takes 6.4 to 12.8 µs" in notes


# ---- high throughput on GPUs ---------------------------------------------------------------------


def high_throughput_report(scale, *, waits=True):
    samples = {}
    for number, operation in enumerate(cuda_run.OPERATIONS):
        for way, us in (("end_to_end", 300.0), ("graph", 280.0), ("host", 50.0), ("wall", 400.0)):
            if way != "wall" or waits:
                samples[f"{operation}.{way}"] = torch.full((3,), us + number) * scale
        samples[f"baseline.{operation}"] = torch.full((3,), 1200.0) * scale
    for name, us in (("empty", 6.0), ("empty_flushed", 7.0), ("launch", 2.0), ("end_to_end", 8.0)):
        samples[f"overhead.{name}"] = torch.full((3,), us)
    for name, us in (("gemm_on_all", 1200.0), ("gemm_alone", 1500.0), ("gemm_beside", 2000.0)):
        samples[f"overlap.{name}"] = torch.full((3,), us)
    samples["overhead.python"] = torch.full((3,), 6.4) * scale
    samples["overhead.late"] = torch.tensor([0.25 if scale > 1 else 0.0])
    samples["overlap.dispatch_alone"] = torch.full((3,), 300.0)
    samples["overlap.dispatch_beside"] = torch.full((3,), 330.0)
    samples["overlap.covered"] = torch.tensor([1.0, 1.0, 0.0 if scale > 1 else 1.0])
    device = {"name": "A GPU", "driver": "1.2", "sms": 120}
    return cuda_run.CudaReport(samples, device, 24, 4096 if waits else None)


def high_throughput_result(scale=1.0, routing="new"):
    reports = [high_throughput_report(s, waits=routing == "new") for s in (1.0, scale)]
    settings = BenchSettings(
        "high_throughput", ranks=2, backend="cuda", layout="expert_major", routing=routing, sms=24,
        alignment=128, baseline=True,
    )  # fmt: skip
    names = cuda_high_throughput.samples_timed(settings)
    return dataclasses.replace(
        result(),
        settings=settings,
        fanfold=cuda_run.timings(reports, names["fanfold"]),
        baseline=cuda_run.timings(reports, names["baseline"]),
        compared=cuda_run.timings(reports, names["compared"]),
        device=reports[0].device,
        timing=cuda_high_throughput.summary(reports),
        capacity=reports[0].capacity,
    )


def test_high_throughput_is_timed_end_to_end_and_apart():
    fields = json.loads(json.dumps(report.record(high_throughput_result())))
    assert {name: fields[name] for name in ("layout", "routing", "sms", "alignment")} == {
        "layout": "expert_major", "routing": "new", "sms": 24, "alignment": 128,
    }  # fmt: skip
    assert fields["capacity"] == 4096
    assert fields["dispatch_us"] == fields["timing"]["dispatch"]["end_to_end_us"] == 300.0
    assert fields["timing"]["dispatch"]["graph_us"] == 280.0
    assert fields["timing"]["cpu_sync"]["dispatch_us"] == 400.0
    assert fields["timing"]["overhead"]["end_to_end_us"] == 8.0
    assert fields["timing"]["overhead"]["python_least_us"] == 6.4
    assert fields["timing"]["dispatch"]["host_least_us"] == 50.0
    assert fields["dispatch_gbps"] == pytest.approx(0.01)  # 3000 bytes
    # The baseline waits for counts, so what it is compared with does too.
    assert fields["ratio"] == pytest.approx(1200 / 402, abs=1e-3)
    # A product on 4/5 of the SMs at 3/4 of its speed alone.
    assert fields["timing"]["overlap"]["sms_left"] == 0.8
    assert fields["timing"]["overlap"]["kept"] == pytest.approx(0.75)


def test_cached_routing_has_nothing_to_wait_for():
    fields = report.record(high_throughput_result(routing="cached"))
    assert "cpu_sync" not in fields["timing"]
    assert "capacity" not in fields
    assert fields["ratio"] == pytest.approx(1200 / 302, abs=1e-3)


def shown(*tables):
    console = Console(width=160, record=True, file=io.StringIO())
    for each in tables:
        console.print(each)
    return console.export_text()


def test_high_throughput_tables_and_notes():
    found = high_throughput_result()
    text = shown(report.table(found), report.gpu_table(found))
    assert "expert-major, new routing, 24 SMs" in text
    for label in ("end to end, L2 flushed", "graph, back to back", "baseline, the CPU's clock"):
        assert label in text
    assert "counts read by the CPU" in text
    assert "send half" not in text
    notes = " ".join(notes_of(found))
    assert "room for 4096 rows" in notes
    assert "keeps 75.0% of its speed" in notes
    assert "do not use" not in notes
    assert "late" not in notes
    cached = high_throughput_result(2.0, "cached")
    assert "baseline, end to end" in shown(report.gpu_table(cached))
    assert "do not use this figure" in " ".join(notes_of(cached))
    assert "late for 25.0% of the calls" in " ".join(notes_of(cached))
    swept = shown(report.sweep_table([found, cached])).splitlines()
    assert [c.strip() for c in swept[-2].split("│")[1:4]] == ["expert-major", "cached", "24"]


def test_a_command_names_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    given = ["--sms", "12", str(results), "r.jsonl"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "benchmarks" / "tune.py"), *given])
    assert report.command_line(results) == "benchmarks/tune.py --sms 12 r.jsonl r.jsonl"
