"""Results as a table for people and as a JSON line for programs (docs/bench.md)."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fanfold.bench.settings import NCCL_LSA, THROUGH, BenchSettings
from fanfold.bench.timing import PHASES, Timings
from fanfold.bench.traffic import MessageTimes, RowsMoved
from fanfold.config import Config
from fanfold.config import settings as config_settings
from fanfold.errors import ArgumentError
from fanfold.memory.hosts import Hosts

__all__ = [
    "Placement",
    "Result",
    "Traffic",
    "append_json_line",
    "check_writable",
    "command_line",
    "gpu_table",
    "hosts_table",
    "origin",
    "record",
    "sweep_table",
    "table",
]

SCHEMA = 2  # 1 had in `routing` what is `distribution` now


@dataclass(frozen=True)
class Traffic:
    """Payload bytes that one rank moves in one phase: rows with their scales, one for each (token,
    destination rank); a mean over ranks.

    Attributes:
        remote: to other ranks.
        total: to itself as well.
        between_hosts: that cross to other hosts, as :class:`fanfold.bench.traffic.RowsMoved` has
            them.
        inside_hosts: between ranks of one host, likewise.
    """

    remote: float
    total: float
    between_hosts: float
    inside_hosts: float

    @classmethod
    def of(cls, rows: Sequence[RowsMoved], row_bytes: int) -> Traffic:
        """That of rows of ``row_bytes``, given what each rank moves."""

        def mean(name: str) -> float:
            return float(sum(getattr(each, name) for each in rows) * row_bytes / len(rows))

        return cls(mean("remote"), mean("total"), mean("between_hosts"), mean("inside_hosts"))

    def __add__(self, other: Traffic) -> Traffic:
        own, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Traffic(*(a + b for a, b in zip(own, others, strict=True)))


@dataclass(frozen=True)
class Placement:
    """Where the ranks were.

    Attributes:
        hosts: on how many hosts.
        ranks_per_host: as many on each.
        network: what carried between hosts, such as ``"libfabric:tcp"``; "" on one host.
        proxy_threads: of each rank; None on one host.
        emulated: whether one machine acted as several of these hosts.
    """

    hosts: int
    ranks_per_host: int
    network: str = ""
    proxy_threads: int | None = None
    emulated: bool = False

    @classmethod
    def of(cls, hosts: Hosts, network: str) -> Placement:
        """That of ranks as :func:`fanfold.memory.hosts.find_hosts` finds them."""
        here = len(hosts.host) // hosts.count
        if not hosts.several:
            return cls(1, here)
        emulated = hosts.machine_ranks > here
        return cls(hosts.count, here, network, hosts.proxy_threads, emulated)

    def __str__(self) -> str:
        ranks = f"{self.ranks_per_host} rank{'s' if self.ranks_per_host > 1 else ''}"
        return f"{self.hosts} hosts of {ranks} over {self.network}"


@dataclass(frozen=True)
class Result:
    """What one bench found.

    Attributes:
        settings: what was asked for, with the choices that were left to the bench.
        ranks: how many there were.
        placement: where they were.
        fanfold: its times.
        baseline: the rival's times, if it ran.
        dispatch: bytes of one dispatch.
        combine: bytes of one combine.
        checked: whether results were compared with the oracle.
        memory_bytes: symmetric memory of a rank.
        device: properties of rank 0's GPU where the ranks were GPUs; the times above are then those
            of graph replays in low latency, and those end to end in high throughput.
        timing: all ways of timing there, as the ``summary`` of ``cuda_run`` and of
            ``cuda_high_throughput`` have them.
        compared: Fanfold's times taken as the rival's were; None if ``fanfold`` are such.
        capacity: rows that dispatches with a new routing were given there.
        pulled: whether ranks loaded the rows of dispatches from their sources, in high throughput
            there.
        few_tokens: whether calls of an ElasticBuffer went by the low-latency protocol.
        messages: what those between hosts took, of all ranks; None on one host.
    """

    settings: BenchSettings
    ranks: int
    placement: Placement
    fanfold: Timings
    baseline: Timings | None
    dispatch: Traffic
    combine: Traffic
    checked: bool
    memory_bytes: int
    device: dict[str, Any] | None = None
    timing: dict[str, dict[str, float]] | None = None
    compared: Timings | None = None
    capacity: int | None = None
    pulled: bool | None = None
    few_tokens: bool = False
    messages: MessageTimes | None = None

    def traffic(self, phase: str) -> Traffic:
        """Bytes of one of the :data:`PHASES`."""
        parts = {"dispatch": [self.dispatch], "combine": [self.combine]}
        first, *others = parts.get(phase, [self.dispatch, self.combine])
        return sum(others, first)

    @property
    def ratio(self) -> float | None:
        """How many times longer the rival takes, dispatch plus combine; None without one."""
        if self.baseline is None:
            return None
        own = self.fanfold if self.compared is None else self.compared
        return self.baseline.slowest("total").p50 / own.slowest("total").p50

    def rate(self, phase: str) -> float:
        """GB/s of a rank to other ranks in one of the :data:`PHASES`."""
        time = self.fanfold.slowest(phase).p50
        return self.traffic(phase).remote / time / 1e3 if time else 0.0


def _times(prefix: str, timings: Timings) -> dict[str, float]:
    fields = {}
    for phase in PHASES:
        percentiles = timings.slowest(phase)
        fields[f"{prefix}{phase}_us"] = round(percentiles.p50, 2)
        fields[f"{prefix}{phase}_us_p90"] = round(percentiles.p90, 2)
        fields[f"{prefix}{phase}_us_p99"] = round(percentiles.p99, 2)
    return fields


def _bytes(prefix: str, traffic: Traffic) -> dict[str, int]:
    sizes = dataclasses.asdict(traffic)
    return {f"{prefix}bytes_{name}": round(size) for name, size in sizes.items()}


def _within_a_host(result: Result) -> str:
    if result.device is None:
        return "shm"
    return NCCL_LSA if result.settings.config().gpu_memory == "nccl" else "nvlink"


def record(result: Result) -> dict[str, Any]:
    """The result as one flat JSON object; docs/bench.md says what each field means."""
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        **dataclasses.asdict(result.settings),
        "backend": "host" if result.device is None else "cuda",
        "backend_asked": result.settings.backend,
        "transport": result.placement.network or _within_a_host(result),
        "hosts": result.placement.hosts,
        "emulated_hosts": result.placement.emulated,
        "ranks_per_host": result.placement.ranks_per_host,
        "proxy_threads": result.placement.proxy_threads,
        "ranks": result.ranks,
        **_times("", result.fanfold),
        **_bytes("", result.traffic("total")),
        **_bytes("dispatch_", result.dispatch),
        **_bytes("combine_", result.combine),
        **{f"{phase}_gbps": round(result.rate(phase), 2) for phase in PHASES},
        "memory_bytes": result.memory_bytes,
        "checked": result.checked,
    }
    if result.baseline is not None:
        fields |= _times("baseline_", result.baseline)
        fields["ratio"] = round(result.ratio or 0.0, 3)
    if result.device is not None:
        fields |= {"device": result.device, "timing": result.timing}
    if result.capacity is not None:
        fields["capacity"] = result.capacity
    if result.pulled is not None:
        fields["dispatch_transfer"] = "pull" if result.pulled else "push"
    if result.few_tokens:
        fields["few_tokens"] = True
    if result.messages is not None:
        fields["messages"] = {
            name: round(value, 2) for name, value in dataclasses.asdict(result.messages).items()
        }
    return fields | origin()


def origin() -> dict[str, Any]:
    """Where and how a figure was measured: machine, versions, commit, time, and ``config``, the
    settings of the environment that were not the defaults, but for where kernels are kept."""
    config = Config.resolve()
    names = [setting.name for setting in config_settings() if setting.name != "cache_dir"]
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "config": {
            name: getattr(config, name) for name in names if config.source_of(name) != "default"
        },
    }


def machine() -> dict[str, Any]:
    """The processor, the cores this process may use, memory in bytes, and the kernel."""
    model = platform.processor() or platform.machine()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages * page,
        "kernel": platform.release(),
        "system": platform.system(),
    }


def versions() -> dict[str, str | None]:
    """Versions of what a figure depends on."""
    return {
        "fanfold": importlib.metadata.version("fanfold"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """The commit of the checkout this package runs from, with "+" if files differ from it; None for
    an installed package."""
    here = Path(__file__).parent
    head = _git(here, "rev-parse", "--verify", "HEAD")
    tracked = _git(here, "ls-files", "--error-unmatch", __file__)
    if head is None or tracked is None:
        return None
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")


def command_line(results: Path) -> str:
    """The command that runs this program, from the folder above the program's; the file for its
    results by name alone."""
    program = Path(sys.argv[0])
    arguments = [results.name if each == str(results) else each for each in sys.argv[1:]]
    return " ".join([f"{program.parent.name}/{program.name}", *arguments])


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def check_writable(path: Path, option: str = "--json") -> None:
    """Raises ArgumentError, which names ``option``, unless lines can be appended to ``path``; makes
    the file."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ArgumentError(option, f"{path} ({error.strerror})", "a file to append to") from error


def append_json_line(path: Path, fields: dict[str, Any], option: str = "--json") -> None:
    """Appends one line in one write, so that lines of several programs do not mix.

    Raises:
        ArgumentError: it was not written whole; names ``option``.
    """
    line = (json.dumps(fields) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        written = os.write(descriptor, line)
    finally:
        os.close(descriptor)
    if written != len(line):
        raise ArgumentError(option, f"{path} ({written} of {len(line)} bytes written)", "writable")


def table(result: Result) -> Table:
    """Times over ranks and iterations, the slowest rank's, and bytes and rates of each phase."""
    s = result.settings
    title = (
        f"{s.mode.replace('_', ' ')}: {result.ranks} ranks, {s.tokens} tokens, hidden {s.hidden}, "
        f"top-{s.top_k} of {s.experts} experts, {s.dtype}"
    )
    if s.mode == "high_throughput":
        title += f", {_variant(result)}"
    if s.face != "native":
        title += f", through {THROUGH[s.face]}"
    if result.placement.hosts > 1:
        title += f", {result.placement.hosts} hosts"
    out = Table(title=title)
    out.add_column("")
    for heading in ("p50 µs", "p90 µs", "p99 µs", "slowest rank", "MB remote", "MB total",
                    "GB/s remote", "GB/s total"):  # fmt: skip
        out.add_column(heading, justify="right")
    for phase in PHASES:
        out.add_row(phase, *_cells(result.fanfold, phase, result.traffic(phase)))
    if result.baseline is not None:
        out.add_section()
        for phase in PHASES:
            out.add_row(f"baseline {phase}", *_cells(result.baseline, phase, None))
    return out


def hosts_table(result: Result) -> Table:
    """Payload that crosses between hosts, and payload that stays inside them."""
    out = Table(title=f"{result.placement}, a mean over ranks")
    out.add_column("")
    for heading in ("MB between hosts", "GB/s between hosts", "MB inside hosts"):
        out.add_column(heading, justify="right")
    for phase in PHASES:
        traffic, time = result.traffic(phase), result.fanfold.slowest(phase).p50
        rate = traffic.between_hosts / time / 1e3 if time else 0.0
        out.add_row(
            phase, f"{traffic.between_hosts / 1e6:,.2f}", f"{rate:,.3f}",
            f"{traffic.inside_hosts / 1e6:,.2f}",
        )  # fmt: skip
    return out


def _variant(result: Result) -> str:
    """What of high throughput was timed."""
    settings = result.settings
    said = f"{_layout(result)}, {settings.routing} routing"
    if result.few_tokens:
        return f"{said}, by the low-latency protocol"
    return said if settings.sms is None else f"{said}, {settings.sms} SMs"


def _layout(result: Result) -> str:
    """The order of rows, whether they came in place or were pulled, and padding that was left
    unwritten."""
    settings = result.settings
    said = (settings.layout or "").replace("_", "-")
    said = f"{said}, padding unwritten" if settings.zero_padding is False else said
    said = f"{said}, in place" if settings.in_place else said
    return f"{said}, pulled" if result.pulled else said


def sweep_table(results: Sequence[Result]) -> Table:
    """A line for each result, what varies first."""
    out = Table(title="µs of the slowest rank (median), GB/s of a rank to others")
    for heading in ("layout", "routing", "SMs", "dispatch", "GB/s", "combine", "GB/s", "round"):
        out.add_column(heading, justify="right")
    for result in results:
        s = result.settings
        times = {phase: f"{result.fanfold.slowest(phase).p50:,.1f}" for phase in PHASES}
        out.add_row(
            _layout(result), s.routing, "" if s.sms is None else str(s.sms),
            times["dispatch"], f"{result.rate('dispatch'):,.1f}",
            times["combine"], f"{result.rate('combine'):,.1f}", times["total"],
        )  # fmt: skip
    return out


_GPU_ROWS = {
    "end_to_end_us": "end to end, L2 flushed",
    "graph_us": "graph, back to back",
    "alone_us": "graph, alone",
    "l2_flushed_us": "graph, alone, L2 flushed",
    "send_us": "send half",
    "receive_us": "receive half, all arrived",
    "single_us": "between events, no graph",
    "host_us": "host time of a call",
    "host_least_us": "the same, fastest rank's",
    "host_hook_us": "host time with a hook",
    "host_hook_least_us": "the same, fastest rank's",
}


def gpu_table(result: Result) -> Table:
    """All ways of timing on GPUs: medians of the slowest rank, as between the events in brackets
    where that differs."""
    timing = result.timing or {}
    out = Table(title=f"{result.ranks} × {(result.device or {}).get('name')}, µs, slowest rank")
    out.add_column("")
    columns = [name for name in ("dispatch", "combine", "round") if name in timing]
    for name in columns:
        out.add_column(name, justify="right")
    for field, label in _GPU_ROWS.items():
        if any(field in timing[name] for name in columns):
            out.add_row(label, *(_gpu_cell(timing[name], field) for name in columns))
    if "cpu_sync" in timing:
        waiting = [f"{timing['cpu_sync'][f'{name}_us']:.1f}" for name in columns]
        out.add_row("counts read by the CPU, its clock", *waiting)
    if result.baseline is not None:
        times = [result.baseline.slowest(phase).p50 for phase in PHASES]
        out.add_row(f"baseline, {_rival_way(result)}", *(f"{value:.1f}" for value in times))
    return out


def _rival_way(result: Result) -> str:
    """How the rival was timed on GPUs."""
    if result.settings.mode == "low_latency":
        return "back to back"
    return "end to end" if result.settings.routing == "cached" else "the CPU's clock"


def _gpu_cell(times: dict[str, float], field: str) -> str:
    if field not in times:
        return ""
    raw = times.get(field.replace("_us", "_raw_us"))
    return f"{times[field]:.1f}" + ("" if raw is None else f" ({raw:.1f})")


def _cells(timings: Timings, phase: str, traffic: Traffic | None) -> list[str]:
    overall, slowest = timings.overall(phase), timings.slowest(phase).p50
    cells = [f"{value:,.1f}" for value in (overall.p50, overall.p90, overall.p99, slowest)]
    if traffic is None:
        return cells
    sizes = [traffic.remote, traffic.total]
    rates = [size / slowest / 1e3 if slowest else 0.0 for size in sizes]
    return cells + [f"{size / 1e6:,.2f}" for size in sizes] + [f"{rate:,.2f}" for rate in rates]
