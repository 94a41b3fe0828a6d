"""One bench from its settings to its result: start or join the ranks, check, then time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fanfold.bench import cuda_run, oracle
from fanfold.bench.baseline import AllToAll, Routed
from fanfold.bench.check import Expectation, packed_fp8, same_bits
from fanfold.bench.cuda_run import CudaReport, time_on_gpu
from fanfold.bench.report import Result, Traffic
from fanfold.bench.settings import BenchSettings
from fanfold.bench.timing import Contender, Timings, interleave
from fanfold.config import Config
from fanfold.errors import ArgumentError
from fanfold.expert_parallel import ExpertParallel
from fanfold.group import as_group
from fanfold.launch import launch
from fanfold.received import Received

__all__ = ["RankReport", "bench", "bench_rank", "check_ranks"]

_LONGEST_S = 7200.0
_GRAPH_SAMPLES = {"fanfold": "{}.graph", "baseline": "baseline.{}"}


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
    if group is None:
        chosen = _on(settings, settings.backend_here())
        reports = launch(bench_rank, settings.ranks, (chosen,), timeout_s=_LONGEST_S)
        return _result(settings, reports)
    check_ranks(settings, group)
    everywhere = as_group(group).all_gather(settings.backend_here())
    chosen = _on(settings, "cuda" if set(everywhere) == {"cuda"} else "host")
    reports = as_group(group).all_gather(bench_rank(group, chosen))
    return _result(settings, reports) if dist.get_rank(group) == 0 else None


def _on(settings: BenchSettings, backend: str) -> BenchSettings:
    """The settings with ``backend`` instead of ``auto``."""
    return dataclasses.replace(settings, backend=backend)


def check_ranks(settings: BenchSettings, group: Any) -> None:
    """Raises ArgumentError if ``group`` is joined and not of the size that the settings name."""
    ranks = settings.ranks if group is None else dist.get_world_size(group)
    if settings.ranks != ranks:
        raise ArgumentError("ranks", settings.ranks, f"{ranks}, the ranks that were started")


def bench_rank(group: Any, settings: BenchSettings) -> RankReport:
    """One rank's part, on the backend that the settings name (``auto``: host)."""
    high_throughput = settings.mode == "high_throughput"
    with ExpertParallel(
        group,
        num_experts=settings.experts,
        top_k=settings.top_k,
        hidden=settings.hidden,
        max_tokens=settings.tokens,
        mode=settings.mode,
        dispatch_dtype=settings.dtype,
        config=Config.resolve(backend="host" if settings.backend == "auto" else settings.backend),
    ) as ep:
        batches = [settings.workload().batch(rank) for rank in range(ep.ranks)]
        expectation = Expectation(batches, ep.rank, settings.experts, settings.dtype == "fp8")
        if settings.backend == "cuda":
            on_gpu = time_on_gpu(ep, group, expectation, settings)
            return _report(ep, expectation, {}, on_gpu)
        race = _Race(ep, group, expectation, quantized=high_throughput and expectation.fp8)
        contenders = [race.fanfold(settings.check)]
        if settings.baseline:
            contenders.append(race.rival(settings.check))
        microseconds = interleave(
            contenders,
            lambda: dist.barrier(group),
            warmup=settings.warmup,
            iterations=settings.iterations,
        )
        race.check_last()
        return _report(ep, expectation, microseconds)


def _report(
    ep: ExpertParallel,
    expectation: Expectation,
    microseconds: dict[str, torch.Tensor],
    on_gpu: CudaReport | None = None,
) -> RankReport:
    total, remote = expectation.rows_sent()
    return RankReport(microseconds, remote, total, ep.memory.bytes_per_rank, on_gpu)


class _Race:
    """The contenders of one rank over the same data.

    Args:
        ep: Fanfold.
        group: the ranks.
        expectation: the data and what must come of it.
        quantized: rows are quantised before the race, because Fanfold takes them so in this mode.
    """

    def __init__(
        self, ep: ExpertParallel, group: Any, expectation: Expectation, *, quantized: bool
    ) -> None:
        self._ep = ep
        self._all_to_all = AllToAll(group, ep.num_experts, ep.top_k)
        self._expectation = expectation
        self._rows = oracle.quantize_fp8(expectation.own.x) if quantized else None
        self._outs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def fanfold(self, check: bool) -> Contender:
        """Fanfold, checked first if asked to."""
        ep, own, expectation = self._ep, self._expectation.own, self._expectation
        x = own.x if self._rows is None else (self._rows.values, self._rows.scales)
        out = torch.empty(own.x.shape, dtype=torch.bfloat16)

        def dispatch() -> Received:
            return ep.dispatch(x, own.topk_idx, own.topk_weights)

        received = dispatch()
        if check:
            expectation.received(received)
        y = expectation.outputs(received)

        def combine(received: Received) -> None:
            ep.combine(y, received, out=out)

        combine(received)
        if check:
            expectation.combined(out)
        self._outs.append((out, out.clone()))
        return Contender("fanfold", dispatch, combine)

    def rival(self, check: bool) -> Contender:
        """The torch.distributed all-to-all, checked first if asked to."""
        rival, own, expectation = self._all_to_all, self._expectation.own, self._expectation
        rows = self._rival_rows()

        def dispatch() -> Routed:
            return rival.dispatch(rows(), own.topk_idx)

        routed = dispatch()
        if check:
            expectation.routed(routed)
        y = expectation.rival_outputs(routed)

        def combine(routed: Routed) -> torch.Tensor:
            return rival.combine(y, routed, own.topk_weights)

        out = combine(routed)
        if check:
            expectation.rival_combined(out)
        return Contender("baseline", dispatch, combine)

    def _rival_rows(self) -> Callable[[], torch.Tensor]:
        """What the rival sends; quantised in its own time where Fanfold does that too."""
        own = self._expectation.own
        if not self._expectation.fp8:
            return lambda: own.x
        if self._rows is not None:
            packed = packed_fp8(self._rows)
            return lambda: packed
        return lambda: packed_fp8(oracle.quantize_fp8(own.x))

    def check_last(self) -> None:
        """The last timed round must have given the bits of the first, checked one."""
        for out, first in self._outs:
            same_bits("combined tokens of the last timed round", out, first)


def _result(settings: BenchSettings, reports: list[RankReport]) -> Result:
    on_gpu = [report.on_gpu for report in reports if report.on_gpu is not None]

    def timings(name: str) -> Timings:
        if on_gpu:
            return cuda_run.timings(on_gpu, _GRAPH_SAMPLES[name])
        return Timings(torch.stack([report.microseconds[name] for report in reports]))

    hidden = settings.hidden
    row = hidden * 2 if settings.dtype == "bf16" else hidden + 4 * -(-hidden // 128)
    remote = sum(report.rows_remote for report in reports) / len(reports)
    total = sum(report.rows_total for report in reports) / len(reports)
    return Result(
        settings=settings,
        ranks=len(reports),
        hosts=1,
        fanfold=timings("fanfold"),
        baseline=timings("baseline") if settings.baseline else None,
        dispatch=Traffic(remote * row, total * row),
        combine=Traffic(remote * hidden * 2, total * hidden * 2),
        checked=settings.check,
        memory_bytes=max(report.memory_bytes for report in reports),
        device=on_gpu[0].device if on_gpu else None,
        timing=cuda_run.summary(on_gpu) if on_gpu else None,
    )
