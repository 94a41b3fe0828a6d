"""One rank's part of a low-latency bench on GPUs: check everything with the oracle, then time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fanfold.bench.calls import Given, LowLatencyCalls
from fanfold.bench.check import Expectation, same_bits
from fanfold.bench.cuda_baseline import NcclAllToAll
from fanfold.bench.cuda_timing import Clock, barrier_of
from fanfold.bench.settings import BenchSettings
from fanfold.bench.timing import Timings

__all__ = [
    "OPERATIONS",
    "CudaReport",
    "device_properties",
    "host_speed",
    "host_times",
    "slowest_rank",
    "summary",
    "time_on_gpu",
    "timings",
    "worst_median",
]

OPERATIONS = ("dispatch", "combine", "round")

# One product takes about 1.5 ms; peers come later than that.
_GEMM_SIZE = 8192
_LATE_CYCLES = 8_000_000
_MOST_OVERLAPS = 20


@dataclass(frozen=True)
class CudaReport:
    """What one rank measured.

    Attributes:
        samples: microseconds by what was timed, ``"dispatch.graph"`` for example: ``[iterations]``.
        device: properties of its GPU.
        sms: that each kernel took; high throughput only.
        capacity: rows that a dispatch with a new routing was given; high throughput only.
        pulled: whether ranks loaded the rows of dispatches from their sources; high throughput
            only.
        few_tokens: whether calls of an ElasticBuffer went by the low-latency protocol.
    """

    samples: dict[str, torch.Tensor]
    device: dict[str, Any]
    sms: int | None = None
    capacity: int | None = None
    pulled: bool | None = None
    few_tokens: bool = False


def time_on_gpu(
    calls: LowLatencyCalls,
    group: Any,
    expectation: Expectation,
    settings: BenchSettings,
) -> CudaReport:
    """Checks, then times, what ``settings`` ask for. Collective."""
    work = _Work(calls, expectation)
    work.prepare(check=settings.check)
    with barrier_of(calls, group, settings.config()) as barrier:
        return _timed(work, barrier, calls, expectation, settings)


def _timed(
    work: _Work,
    barrier: Callable[[], None],
    calls: LowLatencyCalls,
    expectation: Expectation,
    settings: BenchSettings,
) -> CudaReport:
    device = calls.device
    clock = Clock(barrier, device, warmup=settings.warmup, iterations=settings.iterations)
    samples = {f"overhead.{name}": t for name, t in clock.overhead(settings.calls).items()}
    for name, call in work.calls().items():
        samples |= _time_call(clock, name, call, settings.calls)
    for name, halves in work.halves().items():
        both = clock.graph(*halves, between=calls.await_sent if calls.network else None)
        samples[f"{name}.send"], samples[f"{name}.receive"] = both[:, 0], both[:, 1]
        samples[f"{name}.hook_host"] = clock.host(partial(_in_halves, *halves))
    if settings.overlap:
        samples |= _time_overlap(work, barrier, device, settings.iterations)
    work.check_last()
    if settings.baseline:
        samples |= _time_rival(clock, expectation, settings, device)
    return CudaReport(samples, device_properties(device))


def _time_call(
    clock: Clock, name: str, call: Callable[[], Any], calls: int
) -> dict[str, torch.Tensor]:
    return {
        f"{name}.graph": clock.chain(call, calls),
        f"{name}.alone": clock.alone(call, flushed=False),
        f"{name}.l2_flushed": clock.alone(call, flushed=True),
        f"{name}.single": clock.single(call),
        f"{name}.host": clock.host(call),
    }


def _in_halves(send: Callable[[], None], receive: Callable[[], None]) -> None:
    send()
    receive()


class _Work:
    """What is timed: the calls of one rank over its batch.

    Args:
        calls: on this rank's GPU.
        expectation: the data and what must come of it.
    """

    def __init__(self, calls: LowLatencyCalls, expectation: Expectation) -> None:
        self._calls, self._expectation = calls, expectation
        self._given = Given.of(expectation, calls.device, quantized=False)
        self._out = torch.empty(
            expectation.own.x.shape, dtype=torch.bfloat16, device=calls.device
        )  # fmt: skip

    def prepare(self, *, check: bool) -> None:
        """Runs one round, on which all later ones are modelled, and checks it if asked to.

        Raises:
            CheckFailed: naming the first thing that is wrong.
        """
        calls, expectation = self._calls, self._expectation
        self._out.fill_(torch.nan)
        self._brought = self.dispatch()
        calls.synchronize()
        if check:
            calls.check(self._brought, expectation)
        self._y = calls.outputs(self._brought, expectation)
        self.combine()
        calls.synchronize()
        if check:
            calls.check_combined(self._out.cpu(), expectation)
        self._first = self._out.clone()

    def dispatch(self) -> Any:
        """One dispatch."""
        return self._calls.dispatch(self._given)

    def combine(self) -> None:
        """One combine of the first dispatch."""
        self._calls.combine(self._y, self._brought, self._out)

    def round(self) -> None:
        """A dispatch, and the combine of what it brought."""
        self._calls.combine(self._y, self.dispatch(), self._out)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed whole, by :data:`OPERATIONS`."""
        return {"dispatch": self.dispatch, "combine": self.combine, "round": self.round}

    def halves(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """The send and the receive half of each call; receive must follow send."""
        hooks: list[Callable[[], None]] = []

        def send_dispatch() -> None:
            hooks.append(self.send())

        def send_combine() -> None:
            hooks.append(self._calls.send_combine(self._y, self._brought, self._out))

        def receive() -> None:
            hooks.pop(0)()

        return {"dispatch": (send_dispatch, receive), "combine": (send_combine, receive)}

    def send(self) -> Callable[[], None]:
        """The send half of a dispatch; its hook."""
        return self._calls.send_dispatch(self._given)

    def check_last(self) -> None:
        """Whatever ran last must have given the bits of the first, checked round, without errors.

        Raises:
            CheckFailed: it has not.
        """
        self._out.fill_(torch.nan)
        self.round()
        self._calls.synchronize()
        same_bits("combined tokens after timing", self._out.cpu(), self._first.cpu())


# ---- beside a matrix product --------------------------------------------------------------------


def _time_overlap(
    work: _Work, barrier: Callable[[], None], device: torch.device, iterations: int
) -> dict[str, torch.Tensor]:
    """A matrix product on another stream, alone and between a send and its receive.

    One rank after the other measures. It has sent and awaits rows of peers that send only
    when its product is over: a wait that held SMs would show in the product's time.
    """
    a = torch.randn((_GEMM_SIZE, _GEMM_SIZE), device=device, dtype=torch.float32).bfloat16()
    b = torch.randn((_GEMM_SIZE, _GEMM_SIZE), device=device, dtype=torch.float32).bfloat16()
    out = torch.empty_like(a)
    side, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def product() -> float:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            begin.record()
            torch.mm(a, b, out=out)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000.0

    product()
    pairs = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for turn in range(ranks * max(3, min(iterations, _MOST_OVERLAPS))):
        mine = turn % ranks == rank
        torch.cuda.synchronize(device)
        alone = product() if mine else 0.0
        barrier()
        if not mine:
            torch.cuda._sleep(_LATE_CYCLES)
        receive = work.send()
        if mine:
            pairs.append([alone, product()])
        receive()
    both = torch.tensor(pairs, dtype=torch.float64, device="cpu")
    return {"overlap.gemm_alone": both[:, 0], "overlap.gemm_beside_hook": both[:, 1]}


# ---- the rival ----------------------------------------------------------------------------------


def _time_rival(
    clock: Clock, expectation: Expectation, settings: BenchSettings, device: torch.device
) -> dict[str, torch.Tensor]:
    rival = NcclAllToAll(expectation.batches, settings.experts, expectation.fp8, device)
    rival.check()
    rows = rival.outputs()

    def round_() -> None:
        rival.dispatch()
        rival.combine(rows)

    calls: dict[str, Callable[[], Any]] = {
        "dispatch": rival.dispatch,
        "combine": lambda: rival.combine(rows),
        "round": round_,
    }
    return {f"baseline.{n}": clock.chain(call, settings.calls) for n, call in calls.items()}


# ---- all ranks together -------------------------------------------------------------------------


def timings(reports: Sequence[CudaReport], pattern: str) -> Timings:
    """The graph replays of all ranks as dispatch, combine and total.

    Args:
        reports: of all ranks.
        pattern: of the sample's name, with ``{}`` for the operation.
    """
    return Timings(
        torch.stack([
            torch.stack([report.samples[pattern.format(name)] for name in OPERATIONS], dim=1)
            for report in reports
        ])
    )  # fmt: skip


def summary(reports: Sequence[CudaReport]) -> dict[str, dict[str, float]]:
    """All times in microseconds, by operation and by way of timing, as in the JSON line.

    Each is the median over iterations of the slowest rank; the host's times the largest and the
    least of the ranks' medians. ``_raw_us`` is as between the events, without it less what an empty
    kernel costs there over its price in a chain.
    """

    def slowest(name: str) -> float:
        return slowest_rank(reports, name)

    def median_of_worst_rank(name: str) -> float:
        return worst_median(reports, name)

    overhead = {name: slowest(f"overhead.{name}") for name in ("empty", "empty_flushed", "launch")}
    warm = overhead["empty"] - overhead["launch"]
    flushed = overhead["empty_flushed"] - overhead["launch"]
    found: dict[str, dict[str, float]] = {}
    for operation in OPERATIONS:
        times = {"graph_us": slowest(f"{operation}.graph")}
        parts = [("alone", warm), ("l2_flushed", flushed)]
        if operation != "round":
            parts += [("send", warm), ("receive", warm)]
        for name, price in parts:
            raw = slowest(f"{operation}.{name}")
            times[f"{name}_us"], times[f"{name}_raw_us"] = raw - price, raw
        times["single_us"] = slowest(f"{operation}.single")
        times |= host_times(reports, operation)
        if operation != "round":
            times |= _extremes(reports, f"{operation}.hook_host", "host_hook")
        found[operation] = times
    found["overhead"] = {f"{name}_us": value for name, value in overhead.items()}
    found["overhead"] |= host_speed(reports)
    if "overlap.gemm_alone" in reports[0].samples:
        found["overlap"] = {
            f"{name}_us": median_of_worst_rank(f"overlap.{name}")
            for name in ("gemm_alone", "gemm_beside_hook")
        }
    return {
        part: {name: round(value, 2) for name, value in times.items()}
        for part, times in found.items()
    }


def slowest_rank(reports: Sequence[CudaReport], name: str) -> float:
    """Median over iterations of the slowest rank of each."""
    both = torch.stack([report.samples[name] for report in reports])
    return float(both.amax(dim=0).quantile(0.5))


def worst_median(reports: Sequence[CudaReport], name: str) -> float:
    """The largest of the ranks' medians."""
    return max(float(report.samples[name].quantile(0.5)) for report in reports)


def host_times(reports: Sequence[CudaReport], operation: str) -> dict[str, float]:
    """What the host takes to enqueue an operation: medians of the slowest and of the fastest rank's
    host, which may differ, as cores do: :func:`host_speed`."""
    return _extremes(reports, f"{operation}.host", "host")


def host_speed(reports: Sequence[CudaReport]) -> dict[str, float]:
    """What the ranks' cores take for the same little Python, slowest and fastest."""
    return _extremes(reports, "overhead.python", "python")


def _extremes(reports: Sequence[CudaReport], sample: str, name: str) -> dict[str, float]:
    medians = [float(report.samples[sample].quantile(0.5)) for report in reports]
    return {f"{name}_us": max(medians), f"{name}_least_us": min(medians)}


def device_properties(device: torch.device) -> dict[str, Any]:
    """Name, SMs, memory and L2 in bytes, and the version of the driver."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    """The kernel module's, 580.82.07 for example."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return match.group() if match else None
