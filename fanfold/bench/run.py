"""One bench from its settings to its result: start or join the ranks, check, then time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from fanfold.bench import cuda_high_throughput, cuda_run, oracle
from fanfold.bench.baseline import AllToAll, Routed
from fanfold.bench.calls import Calls, Given, HighThroughputCalls, LowLatencyCalls, spoil
from fanfold.bench.check import Expectation, packed_fp8, same_bits
from fanfold.bench.cuda_run import CudaReport
from fanfold.bench.layouts import open_calls
from fanfold.bench.report import Result, Traffic
from fanfold.bench.settings import BenchSettings
from fanfold.bench.timing import Contender, Timings, interleave
from fanfold.config import Backend, Config
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.group import as_group
from fanfold.launch import launch
from fanfold.memory.hosts import find_hosts

__all__ = ["RankReport", "bench", "bench_rank", "check_ranks", "sweep"]

_LONGEST_S = 7200.0
_GRAPH_SAMPLES = {"fanfold": "{}.graph", "baseline": "baseline.{}", "compared": "{}.graph"}


@dataclass(frozen=True)
class RankReport:
    """What one rank found.

    Attributes:
        microseconds: for each contender ``[iterations, 3]``.
        rows_remote: rows that this rank sent to others in one dispatch.
        rows_total: to itself as well.
        memory_bytes: its symmetric memory.
        on_gpu: what it measured there, instead of ``microseconds``.
    """

    microseconds: dict[str, torch.Tensor]
    rows_remote: int
    rows_total: int
    memory_bytes: int
    on_gpu: CudaReport | None = None


def bench(settings: BenchSettings, group: Any = None) -> Result | None:
    """Runs ``settings``, on fresh ranks of this host or on the ranks of ``group``.

    Args:
        settings: checked when they were made.
        group: a joined group; ``settings.ranks`` must be its size.

    Returns:
        The result, on every rank but rank 0 of a joined group None.

    Raises:
        ArgumentError: ``settings.ranks`` is not the size of the joined group.
        UnavailableError: GPUs were asked for, and there are not enough.
        CheckFailed: something is not as the oracle says.
        LaunchError: a started rank failed.
    """
    results = sweep([settings], group)
    return None if results is None else results[0]


def sweep(points: Sequence[BenchSettings], group: Any = None) -> list[Result] | None:
    """Runs all ``points``, which have the same number of ranks, one after the other on the same
    ranks; else as :func:`bench`."""
    if group is None:
        chosen = [settings.on(settings.backend_here()) for settings in points]
        of_ranks = launch(bench_ranks, points[0].ranks, (chosen,), timeout_s=_LONGEST_S)
    else:
        for settings in points:
            check_ranks(settings, group)
        everywhere = as_group(group).all_gather([each.backend_here() for each in points])
        chosen = [
            settings.on("cuda" if set(backends) == {"cuda"} else "host")
            for settings, *backends in zip(points, *everywhere, strict=True)
        ]
        of_ranks = as_group(group).all_gather(bench_ranks(group, chosen))
        if dist.get_rank(group) != 0:
            return None
    return [
        _result(asked, settings, reports)
        for asked, settings, *reports in zip(points, chosen, *of_ranks, strict=True)
    ]


def check_ranks(settings: BenchSettings, group: Any) -> None:
    """Raises ArgumentError if ``group`` is joined and not of the size that the settings name."""
    ranks = settings.ranks if group is None else dist.get_world_size(group)
    if settings.ranks != ranks:
        raise ArgumentError("ranks", settings.ranks, f"{ranks}, the ranks that were started")


def bench_ranks(group: Any, points: Sequence[BenchSettings]) -> list[RankReport]:
    """One rank's part of a sweep. Raises UnavailableError if the ranks are on several hosts: the
    oracle, and what is said of the bytes, are of one."""
    hosts = find_hosts(as_group(group), Config.resolve())
    if hosts.several:
        raise UnavailableError(f"benches of the modes run on one host, but {hosts.reason}")
    reports, made = [], None
    for settings in points:
        data = (settings.workload(), settings.dtype)
        with _threads_for(settings):
            if made is None or made[0] != data:
                made = None  # the memory of one is enough
                made = (data, _expectation(group, settings))
            reports.append(_bench_rank(group, settings, made[1]))
    return reports


@contextmanager
def _threads_for(settings: BenchSettings) -> Iterator[None]:
    """Where GPUs are timed, the ranks share the cores for what the oracle works out, which takes
    much longer than all that is timed; a launched rank has one thread."""
    before = torch.get_num_threads()
    if settings.backend == "cuda":
        torch.set_num_threads(max(before, len(os.sched_getaffinity(0)) // settings.ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bench_rank(group: Any, settings: BenchSettings) -> RankReport:
    """One rank's part, on the backend that the settings name (``auto``: host)."""
    backend: Backend = "host" if settings.backend == "auto" else settings.backend
    return bench_ranks(group, [settings.on(backend)])[0]


def _expectation(group: Any, settings: BenchSettings) -> Expectation:
    batches = [settings.workload().batch(rank) for rank in range(settings.ranks)]
    return Expectation(batches, as_group(group).rank, settings.experts, settings.dtype == "fp8")


def _bench_rank(group: Any, settings: BenchSettings, expectation: Expectation) -> RankReport:
    on_gpu = settings.backend == "cuda"
    with closing(open_calls(group, settings)) as calls:
        if on_gpu and settings.mode == "high_throughput":
            again = cast("HighThroughputCalls", calls)
            found = cuda_high_throughput.time_on_gpu(again, group, expectation, settings)
            return _report(calls, expectation, {}, found)
        if on_gpu:
            halves = cast("LowLatencyCalls", calls)
            found = cuda_run.time_on_gpu(halves, group, expectation, settings)
            return _report(calls, expectation, {}, found)
        race = _Race(calls, group, expectation, settings)
        contenders = [race.fanfold()]
        if settings.baseline:
            contenders.append(race.rival())
        microseconds = interleave(
            contenders,
            lambda: dist.barrier(group),
            warmup=settings.warmup,
            iterations=settings.iterations,
        )
        race.check_last()
        return _report(calls, expectation, microseconds)


def _report(
    calls: Calls,
    expectation: Expectation,
    microseconds: dict[str, torch.Tensor],
    on_gpu: CudaReport | None = None,
) -> RankReport:
    total, remote = expectation.rows_sent()
    return RankReport(microseconds, remote, total, calls.memory_bytes, on_gpu)


class _Race:
    """The contenders of one rank on the host, over the same data.

    Args:
        calls: Fanfold's.
        group: the ranks.
        expectation: the data and what must come of it.
        settings: what is asked for.
    """

    def __init__(
        self, calls: Calls, group: Any, expectation: Expectation, settings: BenchSettings
    ) -> None:
        self._calls, self._check = calls, settings.check
        self._cached = settings.routing == "cached"
        self._spoils = settings.mode == "high_throughput"
        self._all_to_all = AllToAll(group, settings.experts, settings.top_k)
        self._expectation = expectation
        # High throughput takes fp8 rows quantised, so they are before the race.
        self._given = Given.of(expectation, calls.device, quantized=self._spoils)
        self._first: torch.Tensor | None = None

    def fanfold(self) -> Contender:
        """Fanfold, checked first if asked to."""
        calls, expectation, given = self._calls, self._expectation, self._given
        out = torch.full(expectation.own.x.shape, torch.nan, dtype=torch.bfloat16, device="cpu")
        known = calls.dispatch(given) if self._cached else None

        def dispatch() -> Any:
            if known is None:
                return calls.dispatch(given)
            return cast("HighThroughputCalls", calls).dispatch_again(given, known)

        if self._spoils:
            spoil(dispatch())
        brought = dispatch()
        if self._check:
            calls.check(brought, expectation)
        y = calls.outputs(brought, expectation)

        def combine(brought: Any) -> None:
            self._last = calls.combine(y, brought, out)

        # An interface that makes its own tensor is likely to get the same memory again.
        calls.combine(y, brought, out).fill_(torch.nan)
        combine(brought)
        if self._check:
            calls.check_combined(self._last, expectation)
        self._first = self._last.clone()
        return Contender("fanfold", dispatch, combine)

    def rival(self) -> Contender:
        """The torch.distributed all-to-all, checked first if asked to."""
        rival, own, expectation = self._all_to_all, self._expectation.own, self._expectation
        rows = self._rival_rows()
        known = rival.dispatch(rows(), own.topk_idx)

        def dispatch() -> Routed:
            if not self._cached:
                return rival.dispatch(rows(), own.topk_idx)
            rival.rows(rows(), known)
            return known

        if self._check:
            expectation.routed(known)
        y = expectation.rival_outputs(known)

        def combine(routed: Routed) -> torch.Tensor:
            return rival.combine(y, routed, own.topk_weights)

        out = combine(known)
        if self._check:
            expectation.rival_combined(out)
        return Contender("baseline", dispatch, combine)

    def _rival_rows(self) -> Callable[[], torch.Tensor]:
        """What the rival sends; quantised in its own time where Fanfold does that too."""
        own = self._expectation.own
        if not self._expectation.fp8:
            return lambda: own.x
        if isinstance(self._given.x, tuple):
            packed = packed_fp8(oracle.Fp8Rows(*self._given.x))
            return lambda: packed
        return lambda: packed_fp8(oracle.quantize_fp8(own.x))

    def check_last(self) -> None:
        """The last timed round must have given the bits of the first, checked one."""
        assert self._first is not None
        same_bits("combined tokens of the last timed round", self._last, self._first)


def _result(asked: BenchSettings, settings: BenchSettings, reports: Sequence[RankReport]) -> Result:
    on_gpu = [report.on_gpu for report in reports if report.on_gpu is not None]
    high_throughput = settings.mode == "high_throughput"
    names = cuda_high_throughput.samples_timed(settings) if high_throughput else _GRAPH_SAMPLES
    summary = cuda_high_throughput.summary if high_throughput else cuda_run.summary

    def timings(name: str) -> Timings:
        if on_gpu:
            return cuda_run.timings(on_gpu, names[name])
        own = "fanfold" if name == "compared" else name
        return Timings(torch.stack([report.microseconds[own] for report in reports]))

    hidden = settings.hidden
    row = hidden * 2 if settings.dtype == "bf16" else hidden + 4 * -(-hidden // 128)
    remote = sum(report.rows_remote for report in reports) / len(reports)
    total = sum(report.rows_total for report in reports) / len(reports)
    sms = on_gpu[0].sms if on_gpu else None
    return Result(
        settings=dataclasses.replace(settings, backend=asked.backend, sms=sms),
        ranks=len(reports),
        hosts=1,
        fanfold=timings("fanfold"),
        baseline=timings("baseline") if settings.baseline else None,
        compared=timings("compared") if settings.baseline else None,
        dispatch=Traffic(remote * row, total * row),
        combine=Traffic(remote * hidden * 2, total * hidden * 2),
        checked=settings.check,
        memory_bytes=max(report.memory_bytes for report in reports),
        device=on_gpu[0].device if on_gpu else None,
        timing=summary(on_gpu) if on_gpu else None,
        capacity=on_gpu[0].capacity if on_gpu else None,
    )
