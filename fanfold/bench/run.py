"""One bench from its settings to its result: start or join the ranks, check, then time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from fanfold import _core
from fanfold.bench import cuda_high_throughput, cuda_run, oracle
from fanfold.bench.baseline import AllToAll, Routed
from fanfold.bench.calls import Calls, Given, HighThroughputCalls, LowLatencyCalls, spoil
from fanfold.bench.check import Expectation, packed_fp8, same_bits
from fanfold.bench.cuda_run import CudaReport
from fanfold.bench.layouts import open_calls
from fanfold.bench.report import Placement, Result, Traffic
from fanfold.bench.settings import (
    ACROSS_HOSTS,
    NCCL_LSA,
    ONE_HOST,
    BenchSettings,
    check_transport,
)
from fanfold.bench.timing import Contender, Timings, interleave
from fanfold.bench.traffic import MessageTimes, RowsMoved, rows_moved
from fanfold.config import NCCL_GIN, Backend, act_as_host_of_nccl, in_environment
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.group import Group, as_group, process_group
from fanfold.launch import launch
from fanfold.memory.hosts import Hosts, find_hosts, host_identity
from fanfold.thread_ranks import ThreadRanks

__all__ = ["RankReport", "bench", "bench_rank", "check_network", "check_ranks", "sweep"]

_LONGEST_S = 7200.0
_GRAPH_SAMPLES = {"fanfold": "{}.graph", "baseline": "baseline.{}", "compared": "{}.graph"}


@dataclass(frozen=True)
class RankReport:
    """What one rank found.

    Attributes:
        microseconds: for each contender ``[iterations, 3]``.
        rows: what one dispatch moved of its tokens.
        memory_bytes: its symmetric memory.
        hosts: where the ranks are.
        network: what carries between hosts; "" on one host.
        metrics: of its calls, across hosts.
        on_gpu: what it measured there, instead of ``microseconds``.
    """

    microseconds: dict[str, torch.Tensor]
    rows: RowsMoved
    memory_bytes: int
    hosts: Hosts
    network: str
    metrics: dict[str, Any]
    on_gpu: CudaReport | None = None


def bench(settings: BenchSettings, group: Any = None) -> Result | None:
    """Runs ``settings``, on fresh ranks of this host or on the ranks of ``group``.

    Args:
        settings: checked when they were made.
        group: a joined group; ``settings.ranks`` must be its size.

    Returns:
        The result, on every rank but rank 0 of a joined group None.

    Raises:
        ArgumentError: ``settings.ranks`` is not the size of the joined group, or a transport is
            asked for where there is one host.
        UnavailableError: GPUs were asked for, and there are not enough; or there is no network
            between hosts.
        CheckFailed: something is not as the oracle says.
        LaunchError: a started rank failed.
    """
    results = sweep([settings], group)
    return None if results is None else results[0]


def sweep(points: Sequence[BenchSettings], group: Any = None) -> list[Result] | None:
    """Runs all ``points``, which have the same number of ranks, one after the other on the same
    ranks; else as :func:`bench`."""
    if group is None:
        several = [check_network(settings) for settings in points]
        chosen = [
            settings.on(settings.backend_here(network != ""))
            for settings, network in zip(points, several, strict=True)
        ]
        of_ranks = _start(chosen, several[0])
    else:
        for settings in points:
            check_ranks(settings, group)
        several_hosts = find_hosts(as_group(group), points[0].config()).several
        ranks_here = as_group(group).all_gather(host_identity()).count(host_identity())
        here = [each.backend_here(several_hosts, ranks_here) for each in points]
        everywhere = as_group(group).all_gather(here)
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
    """Checks that a joined group is what the settings ask for. Collective, and nothing without one.

    Raises:
        ArgumentError: it has another size, their transport does not reach its ranks, or those are
            on one host.
        UnavailableError: hosts have different numbers of ranks.
    """
    ranks = settings.ranks if group is None else dist.get_world_size(group)
    if group is not None and _is_loopback(settings.transport or ""):
        bound = "libfabric or libfabric:PROVIDER: loopback does not reach ranks that are processes"
        raise ArgumentError("transport", repr(settings.transport), bound)
    if settings.ranks != ranks:
        raise ArgumentError("ranks", settings.ranks, f"{ranks}, the ranks that were started")
    if group is not None:
        _checked_hosts(as_group(group), settings)


def check_network(settings: BenchSettings) -> str:
    """Checks, before ranks of this machine are started, that a network reaches between the hosts
    that it is to act as.

    Returns:
        The setting ``network``; "" for one host.

    Raises:
        ArgumentError: the transport is malformed, or there is one host; or the baseline is asked
            for with loopback, whose ranks are threads.
        UnavailableError: there is no libfabric, or none of its networks fits.
    """
    config = settings.config()
    if (config.hosts or 1) == 1:
        if settings.transport not in (None, NCCL_LSA):
            raise ArgumentError("transport", repr(settings.transport), ONE_HOST)
        return ""
    if settings.transport == NCCL_LSA:
        raise ArgumentError("transport", repr(settings.transport), ACROSS_HOSTS)
    source = "" if settings.transport is not None else " (from FANFOLD_NETWORK)"
    try:
        check_transport(config.network)
    except ArgumentError as error:
        raise ArgumentError(error.argument, f"{error.value}{source}", error.bound) from None
    if _is_loopback(config.network):
        if settings.baseline:
            bound = (
                f"left out with transport {config.network!r}{source}, whose ranks are threads, "
                "which torch.distributed has none of; use --transport libfabric:tcp"
            )
            raise ArgumentError("baseline", True, bound)
        return config.network
    try:
        # What CPUs exchange goes over libfabric then.
        network = "libfabric" if config.network == NCCL_GIN else config.network
        _core.choose_network(_core.find_networks(), network, True)
    except UnavailableError as error:
        raise UnavailableError(
            f"transport is {config.network!r}{source}, but {error}. `fanfold doctor` shows the "
            "networks of this machine; --transport loopback needs none"
        ) from None
    return config.network


def _is_loopback(network: str) -> bool:
    return network.partition(":")[0] == "loopback"


def _start(points: Sequence[BenchSettings], network: str) -> list[list[RankReport]]:
    """Runs ``points`` on fresh ranks: processes, or threads where ``network`` is loopback."""
    ranks = points[0].ranks
    if not _is_loopback(network):
        return launch(bench_ranks, ranks, (points,), timeout_s=_LONGEST_S)
    # A Buffer reads the environment, which all threads share.
    with in_environment(points[0].overrides()), ThreadRanks(ranks, timeout_s=_LONGEST_S) as threads:
        return threads.run(bench_ranks, points)


def bench_ranks(group: Any, points: Sequence[BenchSettings]) -> list[RankReport]:
    """One rank's part of a sweep.

    Raises:
        ArgumentError: a transport is asked for, and the ranks are on one host; on all ranks.
        UnavailableError: hosts have different numbers of ranks; on all ranks.
    """
    ranks = as_group(group)
    config = points[0].config()
    if config.network == NCCL_GIN and (config.hosts or 1) > 1:
        # Ranks that each are a host may share a GPU; those that share NCCL's windows must be one.
        shares_windows = config.gpu_memory == "nccl"
        host = ranks.rank * (config.hosts or 1) // ranks.size
        act_as_host_of_nccl(host if shares_windows else ranks.rank)
    reports, made = [], None
    for settings in points:
        hosts = _checked_hosts(ranks, settings)
        data = (settings.workload(), settings.dtype, settings.through_gateways, hosts.host)
        with _threads_for(settings):
            if made is None or made[0] != data:
                made = None  # the memory of one is enough
                made = (data, _expectation(ranks, settings, hosts))
            reports.append(_bench_rank(group, settings, made[1], hosts))
    return reports


def _checked_hosts(ranks: Group, settings: BenchSettings) -> Hosts:
    hosts = find_hosts(ranks, settings.config())
    if settings.transport is not None and hosts.several == (settings.transport == NCCL_LSA):
        bound = ACROSS_HOSTS if hosts.several else ONE_HOST
        raise ArgumentError("transport", repr(settings.transport), bound)
    sizes = [hosts.host.count(number) for number in range(hosts.count)]
    if len(set(sizes)) > 1:
        raise UnavailableError(
            f"benches need as many ranks on each host, but {ranks.size} ranks are on {hosts.count} "
            f"hosts with {', '.join(map(str, sizes))}, because {hosts.reason}: start as many ranks "
            "on each host"
        )
    return hosts


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


def _expectation(ranks: Group, settings: BenchSettings, hosts: Hosts) -> Expectation:
    batches = [settings.workload().batch(rank) for rank in range(settings.ranks)]
    far_hosts = hosts.others(ranks.rank) if settings.through_gateways else ()
    return Expectation(batches, ranks.rank, settings.experts, settings.dtype == "fp8", far_hosts)


def _bench_rank(
    group: Any, settings: BenchSettings, expectation: Expectation, hosts: Hosts
) -> RankReport:
    with closing(open_calls(group, settings)) as calls:
        on_gpu: CudaReport | None = None
        microseconds: Mapping[str, torch.Tensor] = {}
        if settings.backend != "cuda":
            microseconds = _race(calls, group, expectation, settings)
        elif settings.mode == "high_throughput":
            again = cast("HighThroughputCalls", calls)
            on_gpu = cuda_high_throughput.time_on_gpu(again, group, expectation, settings)
        else:
            halves = cast("LowLatencyCalls", calls)
            on_gpu = cuda_run.time_on_gpu(halves, group, expectation, settings)
        rows = rows_moved(
            expectation.own.topk_idx,
            expectation.rank,
            settings.experts,
            hosts.host,
            through_gateways=settings.through_gateways,
        )
        metrics = calls.metrics() if calls.network else {}
        return RankReport(
            dict(microseconds), rows, calls.memory_bytes, hosts, calls.network, metrics, on_gpu
        )


def _race(
    calls: Calls, group: Any, expectation: Expectation, settings: BenchSettings
) -> dict[str, torch.Tensor]:
    """Microseconds of each contender on the host, ``[iterations, 3]``."""
    race = _Race(calls, group, expectation, settings)
    contenders = [race.fanfold()]
    if settings.baseline:
        contenders.append(race.rival())
    microseconds = interleave(
        contenders,
        _barrier(as_group(group)),
        warmup=settings.warmup,
        iterations=settings.iterations,
    )
    race.check_last()
    return microseconds


def _barrier(ranks: Group) -> Callable[[], object]:
    processes = process_group(ranks)
    if processes is None:  # threads
        return lambda: ranks.all_gather(None)
    return lambda: dist.barrier(processes)


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
        self._group, self._settings = group, settings
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
        rival = AllToAll(self._group, self._settings.experts, self._settings.top_k)
        expectation, own = self._expectation, self._expectation.own
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
    rows = [report.rows for report in reports]
    sms = on_gpu[0].sms if on_gpu else None
    return Result(
        settings=dataclasses.replace(settings, backend=asked.backend, sms=sms),
        ranks=len(reports),
        placement=Placement.of(reports[0].hosts, reports[0].network),
        fanfold=timings("fanfold"),
        baseline=timings("baseline") if settings.baseline else None,
        compared=timings("compared") if settings.baseline else None,
        dispatch=Traffic.of(rows, row),
        combine=Traffic.of(rows, hidden * 2),
        checked=settings.check,
        memory_bytes=max(report.memory_bytes for report in reports),
        device=on_gpu[0].device if on_gpu else None,
        timing=summary(on_gpu) if on_gpu else None,
        capacity=on_gpu[0].capacity if on_gpu else None,
        pulled=on_gpu[0].pulled if on_gpu else None,
        few_tokens=bool(on_gpu) and on_gpu[0].few_tokens,
        messages=MessageTimes.of(report.metrics for report in reports),
    )
