"""One rank's part of a high-throughput bench on GPUs: check everything with the oracle, then time
it end to end and apart."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fanfold.bench import oracle
from fanfold.bench.baseline import AllToAll, Routed
from fanfold.bench.calls import Given, HighThroughputCalls, spoil
from fanfold.bench.check import Expectation, packed_fp8, same_bits
from fanfold.bench.cuda_run import (
    OPERATIONS,
    CudaReport,
    device_properties,
    host_speed,
    host_times,
    slowest_rank,
    worst_median,
)
from fanfold.bench.cuda_timing import Clock, barrier_of, empty_kernel
from fanfold.bench.elastic_calls import ElasticCalls
from fanfold.bench.layouts import dispatch_kind, room_for, sms_taken
from fanfold.bench.settings import LEAVE_SMS, BenchSettings
from fanfold.group import as_group

__all__ = ["capacity_for", "samples_timed", "summary", "time_on_gpu"]

_RIVAL_BACKEND = "nccl"

_GEMM_SIZE = 8192  # about 1.5 ms
_GEMMS = 8  # one after the other: a GPU that has been idle is faster for a few milliseconds
_MOST_OVERLAPS = 20
_COVER = 3.0  # what is beside lasts this many times longer than what is timed does alone
_CHAIN = 8  # dispatches of one graph
_HEAD_START_CYCLES = 2_000_000


def time_on_gpu(
    calls: HighThroughputCalls, group: Any, expectation: Expectation, settings: BenchSettings
) -> CudaReport:
    """Checks, then times, what ``settings`` ask for. Collective."""
    work = _Work(calls, expectation, settings)
    work.prepare()
    with barrier_of(calls, group, settings.config()) as barrier:
        return _timed(work, barrier, calls, group, expectation, settings)


def _timed(
    work: _Work,
    barrier: Callable[[], None],
    calls: HighThroughputCalls,
    group: Any,
    expectation: Expectation,
    settings: BenchSettings,
) -> CudaReport:
    device, kind = calls.device, dispatch_kind(settings, calls.network)
    sms = sms_taken(settings, device, kind)
    clock = Clock(barrier, device, warmup=settings.warmup, iterations=settings.iterations)
    samples = {f"overhead.{name}": t for name, t in clock.overhead(settings.calls).items()}
    samples["overhead.end_to_end"] = clock.end_to_end(empty_kernel)
    for name, call in work.calls().items():
        samples[f"{name}.end_to_end"] = clock.end_to_end(call)
        samples[f"{name}.graph"] = clock.chain(call, settings.calls)
        samples[f"{name}.host"] = clock.host(call)
    for name, call in work.waiting_calls().items():
        samples[f"{name}.wall"] = clock.wall(call)
    if settings.overlap:
        samples |= _Overlap(work.dispatch, sms, barrier, device, group).time(settings.iterations)
    work.check_last()
    if settings.baseline:
        samples |= _time_rival(clock, expectation, settings, device)
    samples["overhead.late"] = torch.tensor([clock.late_share], dtype=torch.float64, device="cpu")
    few = isinstance(calls, ElasticCalls) and calls.few_tokens
    pulled = None if few else kind.pulls
    return CudaReport(samples, device_properties(device), sms, work.capacity, pulled, few)


def capacity_for(expectation: Expectation, settings: BenchSettings) -> int:
    """Rows that a dispatch is given when it must not wait for counts: a quarter more than the
    fullest rank receives, the same on all ranks."""
    return room_for(expectation.batches, settings)


class _Work:
    """What is timed: the calls of one rank over its batch.

    Args:
        calls: on this rank's GPU.
        expectation: the data and what must come of it.
        settings: what is asked for.
    """

    def __init__(
        self, calls: HighThroughputCalls, expectation: Expectation, settings: BenchSettings
    ) -> None:
        self._calls, self._expectation, self._settings = calls, expectation, settings
        self._given = Given.of(expectation, calls.device, quantized=True)
        self._out = torch.empty(
            expectation.own.x.shape, dtype=torch.bfloat16, device=calls.device
        )  # fmt: skip
        self._cached = settings.routing == "cached"
        self.capacity = None if self._cached else capacity_for(expectation, settings)

    def prepare(self) -> None:
        """Runs every kind of dispatch, and a combine, on which all later ones are modelled, and
        checks them if that is asked for.

        Raises:
            CheckFailed: naming the first thing that is wrong.
        """
        self._known = self.dispatch_waiting()
        for dispatch, capacity in ((self.dispatch_waiting, None), (self.dispatch, self.capacity)):
            spoil(dispatch())
            brought = dispatch()
            self._calls.synchronize()
            if self._settings.check:
                self._calls.check(brought, self._expectation, capacity)
        self._brought = brought
        self._y = self._calls.outputs(brought, self._expectation)
        # Where an interface makes its own tensor, the next one is likely to get the same memory.
        self.combine().fill_(torch.nan)
        out = self.combine()
        self._calls.synchronize()
        if self._settings.check:
            self._calls.check_combined(out.cpu(), self._expectation)
        self._first = out.clone()
        if not self._cached:  # its combine has another number of rows
            self._exact = self.dispatch_waiting()
            self._exact_y = self._y[: self._exact.tokens.shape[0]]
            self._calls.combine(self._exact_y, self._exact, self._out).fill_(torch.nan)
            out = self._calls.combine(self._exact_y, self._exact, self._out)
            self._calls.synchronize()
            same_bits("combined tokens without capacity", out.cpu(), self._first.cpu())

    def dispatch(self) -> Any:
        """One dispatch, of the routing asked for; the CPU waits for nothing."""
        if self._cached:
            return self._calls.dispatch_again(self._given, self._known)
        return self._calls.dispatch(self._given, self.capacity)

    def dispatch_waiting(self) -> Any:
        """One dispatch of a new routing that waits for its counts on the CPU."""
        return self._calls.dispatch(self._given)

    def combine(self) -> torch.Tensor:
        """One combine of the first dispatch."""
        return self._calls.combine(self._y, self._brought, self._out)

    def round(self) -> torch.Tensor:
        """A dispatch, and the combine of what it brought."""
        return self._calls.combine(self._y, self.dispatch(), self._out)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed without the CPU's waiting, by ``OPERATIONS``."""
        return {"dispatch": self.dispatch, "combine": self.combine, "round": self.round}

    def waiting_calls(self) -> dict[str, Callable[[], Any]]:
        """What is timed by the CPU's clock, because a dispatch waits: new routings only."""
        if self._cached:
            return {}

        def combine() -> None:
            self._calls.combine(self._exact_y, self._exact, self._out)

        def round_() -> None:
            self._calls.combine(self._exact_y, self.dispatch_waiting(), self._out)

        return {"dispatch": self.dispatch_waiting, "combine": combine, "round": round_}

    def check_last(self) -> None:
        """Whatever ran last must have given the bits of the first, checked round, without errors.

        Raises:
            CheckFailed: it has not.
        """
        self.combine().fill_(torch.nan)
        out = self.round()
        self._calls.synchronize()
        same_bits("combined tokens after timing", out.cpu(), self._first.cpu())


# ---- beside a matrix product --------------------------------------------------------------------


class _Overlap:
    """A matrix product beside back-to-back dispatches, on all ranks at once.

    The dispatches are on a stream of higher priority, as a framework's communication is: when one
    ends, the next gets the SMs that it frees. The product is asked to leave as many: one that takes
    whichever are free for a moment keeps them to its end, and dispatches wait for it.

    Args:
        dispatch: one dispatch; must not wait on the CPU.
        sms: that it takes.
        barrier: of all ranks' GPUs.
        device: this rank's.
        group: the ranks.
    """

    def __init__(
        self,
        dispatch: Callable[[], Any],
        sms: int,
        barrier: Callable[[], None],
        device: torch.device,
        group: Any,
    ) -> None:
        self._dispatch, self._sms, self._barrier, self._device = dispatch, sms, barrier, device
        self._group = as_group(group)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._a = torch.randn(
            (_GEMM_SIZE, _GEMM_SIZE), device=device, dtype=torch.float32
        ).bfloat16()
        self._b = torch.randn(
            (_GEMM_SIZE, _GEMM_SIZE), device=device, dtype=torch.float32
        ).bfloat16()
        self._product = torch.empty_like(self._a)
        self._gemm = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._chain = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def time(self, iterations: int) -> dict[str, torch.Tensor]:
        """Microseconds of each alone and beside the other, of the product alone also on all SMs;
        ``covered``: whether dispatches ran from before the product's beginning to after its end."""
        turns = range(max(3, min(iterations, _MOST_OVERLAPS)))
        graph = self._captured()
        self._turn(graph, 1, 1)  # libraries loaded, clocks up
        on_all = [self._turn(graph, 0, _GEMMS).gemm for _ in turns]
        with _leaving(self._sms):
            self._turn(graph, 1, 1)
            times = self._beside(graph, turns)
        graph.reset()
        return {"overlap.gemm_on_all": _tensor(on_all), **times}

    def _beside(self, graph: torch.cuda.CUDAGraph, turns: range) -> dict[str, torch.Tensor]:
        alone = [self._turn(graph, 0, _GEMMS).gemm for _ in turns]
        dispatch_alone = [self._turn(graph, 1, 0).dispatch for _ in turns]
        chain = _CHAIN * max(min(dispatch_alone), 1.0)
        replays = max(self._group.all_gather(math.ceil(_COVER * _GEMMS * max(alone) / chain)))
        beside = [self._turn(graph, replays, _GEMMS) for _ in turns]
        products = 1 + math.ceil(_COVER * chain / min(alone))
        dispatch_beside = [self._turn(graph, 1, products).dispatch for _ in turns]
        return {
            "overlap.gemm_alone": _tensor(alone),
            "overlap.gemm_beside": _tensor([turn.gemm for turn in beside]),
            "overlap.dispatch_alone": _tensor(dispatch_alone),
            "overlap.dispatch_beside": _tensor(dispatch_beside),
            "overlap.covered": _tensor([turn.covered for turn in beside]),
        }

    def _captured(self) -> torch.cuda.CUDAGraph:
        """A few dispatches, one after the other."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for _ in range(_CHAIN):
                self._dispatch()
        return graph

    def _turn(self, graph: torch.cuda.CUDAGraph, replays: int, products: int) -> _Turn:
        """``products``, which begin when dispatches run, beside ``replays`` of the graph."""
        torch.cuda.synchronize(self._device)
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            # All is enqueued while the GPU waits, so that the host is ahead.
            torch.cuda._sleep(_HEAD_START_CYCLES)
            self._barrier()
            if replays:
                self._dispatch()
            self._chain[0].record()
            for _ in range(replays):
                graph.replay()
            self._chain[1].record()
        main.wait_event(self._chain[0])
        self._gemm[0].record()
        for _ in range(products):
            torch.mm(self._a, self._b, out=self._product)
        self._gemm[1].record()
        torch.cuda.synchronize(self._device)
        after = self._gemm[0].elapsed_time(self._chain[1])
        return _Turn(
            gemm=_us(*self._gemm) / max(products, 1),
            dispatch=_us(*self._chain) / max(replays * _CHAIN, 1),
            covered=float(after >= self._gemm[0].elapsed_time(self._gemm[1])),
        )


@contextmanager
def _leaving(sms: int) -> Iterator[None]:
    """Asks matrix products to leave that many SMs; cuBLASLt takes it as advice, cuBLAS less."""
    libraries = torch.backends.cuda
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both settings are called experimental
        leave_sms = getattr(torch._C, LEAVE_SMS)
        before = libraries.preferred_blas_library()
        libraries.preferred_blas_library("cublaslt")
        leave_sms(sms)
        try:
            yield
        finally:
            leave_sms(None)
            libraries.preferred_blas_library(before)


@dataclass(frozen=True)
class _Turn:
    """Microseconds of one product, of one dispatch, and whether these covered the products."""

    gemm: float
    dispatch: float
    covered: float


def _us(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) * 1000.0


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


# ---- the rival ----------------------------------------------------------------------------------


def _time_rival(
    clock: Clock, expectation: Expectation, settings: BenchSettings, device: torch.device
) -> dict[str, torch.Tensor]:
    """NCCL's all-to-all of one row for each (token, expert), checked, then timed: with a cached
    routing as Fanfold is, with a new one by the CPU's clock, as it waits for counts there."""
    # A group of its own: the default one may be gloo's, which moves host memory.
    group: Any = dist.new_group(backend=_RIVAL_BACKEND)
    rival = AllToAll(group, settings.experts, settings.top_k, device)
    own = expectation.own
    rows = packed_fp8(oracle.quantize_fp8(own.x)) if expectation.fp8 else own.x
    x, topk_idx = rows.to(device), own.topk_idx.to(device)
    weights = own.topk_weights.to(device)
    known = rival.dispatch(x, topk_idx)
    y = _rival_outputs(rival, known, weights, expectation, check=settings.check)

    def dispatch() -> Routed | torch.Tensor:
        return rival.rows(x, known) if cached else rival.dispatch(x, topk_idx)

    def combine() -> torch.Tensor:
        return rival.combine(y, known, weights)

    def round_() -> torch.Tensor:
        routed = known
        if cached:
            rival.rows(x, known)
        else:
            routed = rival.dispatch(x, topk_idx)
        return rival.combine(y, routed, weights)

    cached = settings.routing == "cached"
    timed = clock.end_to_end if cached else clock.wall
    calls: dict[str, Callable[[], Any]] = {
        "dispatch": dispatch,
        "combine": combine,
        "round": round_,
    }
    samples = {f"baseline.{name}": timed(call) for name, call in calls.items()}
    dist.destroy_process_group(group)
    return samples


def _rival_outputs(
    rival: AllToAll,
    routed: Routed,
    weights: torch.Tensor,
    expectation: Expectation,
    *,
    check: bool,
) -> torch.Tensor:
    """The experts' outputs for what the rival brought, after all checks."""
    there = routed.on_host()
    y = expectation.rival_outputs(there).to(weights.device)
    out = rival.combine(y, routed, weights)
    if check:
        expectation.routed(there)
        expectation.rival_combined(out.cpu())
    return y


# ---- all ranks together -------------------------------------------------------------------------


def samples_timed(settings: BenchSettings) -> dict[str, str]:
    """Patterns of the samples, with ``{}`` for the operation: ``fanfold``'s, the ``baseline``'s,
    and Fanfold's that were ``compared`` to the baseline's, taken the same way."""
    compared = "{}.end_to_end" if settings.routing == "cached" else "{}.wall"
    return {"fanfold": "{}.end_to_end", "baseline": "baseline.{}", "compared": compared}


def summary(reports: Sequence[CudaReport]) -> dict[str, dict[str, float]]:
    """All times in microseconds, by operation and by way of timing, as in the JSON line.

    Each is the median over iterations of the slowest rank, the times of the matrix product the
    largest of the ranks' medians, the host's the largest and the least.
    """
    found: dict[str, dict[str, float]] = {}
    for name in OPERATIONS:
        found[name] = {f"{way}_us": slowest_rank(reports, f"{name}.{way}")
                       for way in ("end_to_end", "graph")}  # fmt: skip
        found[name] |= host_times(reports, name)
    names = ("empty", "empty_flushed", "launch", "end_to_end")
    found["overhead"] = {f"{name}_us": slowest_rank(reports, f"overhead.{name}") for name in names}
    late = max(float(report.samples["overhead.late"].max()) for report in reports)
    found["overhead"] |= {"late_share": late, **host_speed(reports)}
    if "dispatch.wall" in reports[0].samples:
        found["cpu_sync"] = {
            f"{name}_us": slowest_rank(reports, f"{name}.wall") for name in OPERATIONS
        }
    if "overlap.gemm_alone" in reports[0].samples:
        found["overlap"] = _overlap(reports)
    return {
        part: {
            name: round(value, 2 if name.endswith("_us") else 4) for name, value in times.items()
        }
        for part, times in found.items()
    }


def _overlap(reports: Sequence[CudaReport]) -> dict[str, float]:
    """The product's and the dispatch's times; ``kept`` is the product's speed beside dispatches by
    its speed alone, both times asked to leave these their SMs; ``sms_left``: the others' share."""
    names = ("gemm_on_all", "gemm_alone", "gemm_beside", "dispatch_alone", "dispatch_beside")
    times = {f"{name}_us": worst_median(reports, f"overlap.{name}") for name in names}
    there, taken = reports[0].device["sms"], reports[0].sms or 0
    left = (there - taken) / there
    kept = times["gemm_alone_us"] / times["gemm_beside_us"]
    covered = min(float(report.samples["overlap.covered"].mean()) for report in reports)
    return {**times, "sms_left": left, "kept": kept, "covered": covered}
