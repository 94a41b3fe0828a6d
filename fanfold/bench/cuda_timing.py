"""Timing calls on a GPU: replays of CUDA graphs, single calls, and the host's part of a call.

A graph holds, for each span to be timed, a barrier of all GPUs, an event, the span and an event. So
neither the launch of the graph nor the skew between the ranks' hosts is inside the clock. One span
between two events costs more than its work: the price of an empty kernel measured the same way is
known too (:meth:`Clock.overhead`), and docs/bench.md says how to read one with the other.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fanfold.base_dispatcher import GroupLike
from fanfold.bench.calls import Calls
from fanfold.config import Config
from fanfold.errors import UnavailableError
from fanfold.group import as_group
from fanfold.low_latency import LowLatency

__all__ = ["BarrierAcrossHosts", "Clock", "GpuBarrier", "barrier_of", "empty_kernel"]

Call = Callable[[], Any]
_TimedSpan = tuple[tuple[torch.cuda.Event, torch.cuda.Event], Call]  # begin and end

_US_PER_MS = 1000.0
_NS_PER_US = 1000.0
_LEAST_FLUSH_BYTES = 128 << 20
_BARRIER_TIMEOUT_MS = 30_000
# Longer than the host needs to enqueue a call, so that the GPU never waits for it.
_HEAD_START_CYCLES = 400_000
# The same for a call that also allocates and plans; the flush comes on top.
_LONG_HEAD_START_CYCLES = 2_000_000
# The driver's queue holds about a thousand launches; a fuller one makes the host wait for the GPU.
_CALLS_IN_QUEUE = 100
_KNOWN_WORK = 200  # squares, added up


def empty_kernel() -> None:
    """Enqueues a kernel of one thread that does nothing."""
    torch.cuda._sleep(0)


class GpuBarrier:
    """A barrier of all ranks' GPUs, enqueued on the current stream. Making one is collective.

    Args:
        group: a torch.distributed group of any backend, each rank with a GPU of its own and an
            dispatcher there, which has prepared PyTorch's symmetric memory.
        device: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._memory: Any = None
        if dist.get_world_size(group) == 1:
            return
        module = importlib.import_module("torch.distributed._symmetric_memory")
        allocator: Any = module._SymmetricMemory
        # Never used; the signals of the barrier come and go with it.
        self._words = allocator.empty_strided_p2p((1,), (1,), torch.int32, device)
        self._memory = allocator.rendezvous(self._words, group.group_name)

    def __call__(self) -> None:
        """Enqueues one arrival and the wait for the others'."""
        if self._memory is None:
            empty_kernel()
        else:
            self._memory.barrier(channel=0, timeout_ms=_BARRIER_TIMEOUT_MS)


class BarrierAcrossHosts:
    """A barrier of GPUs on several hosts, enqueued on the current stream: a dispatch of no tokens,
    which ends once every peer has said so. Ranks leave it as far apart as a message between hosts
    takes. Making one is collective, and so is closing it.

    Args:
        group: the ranks, each with a GPU.
        config: names the hosts and the network.
    """

    def __init__(self, group: GroupLike, config: Config) -> None:
        ranks = as_group(group).size
        self._ep = LowLatency(
            group, num_experts=ranks, top_k=1, hidden=16, max_tokens=1, config=config
        )
        device = self._ep.device
        self._x = torch.empty((0, 16), dtype=torch.bfloat16, device=device)
        self._topk_idx = torch.empty((0, 1), dtype=torch.int64, device=device)
        self._topk_weights = torch.empty((0, 1), dtype=torch.float32, device=device)
        self()  # the first call prepares the memory, which a graph cannot hold

    def __call__(self) -> None:
        """Enqueues one arrival and the wait for the others'."""
        self._ep.dispatch(self._x, self._topk_idx, self._topk_weights)

    def close(self) -> None:
        """Closes what it sends with."""
        self._ep.close()


@contextmanager
def barrier_of(calls: Calls, group: Any, config: Config) -> Iterator[Callable[[], None]]:
    """A barrier of the GPUs of all ranks, whether on one host or several. Collective."""
    if not calls.network:
        yield GpuBarrier(group, calls.device)
        return
    with closing(BarrierAcrossHosts(group, config)) as barrier:
        yield barrier


def _timed_event(external: bool) -> torch.cuda.Event:
    try:
        return torch.cuda.Event(enable_timing=True, external=external)
    except TypeError as error:
        raise UnavailableError(
            f"PyTorch {torch.__version__} cannot record events inside of CUDA graphs "
            "(torch.cuda.Event has no argument external): install PyTorch 2.8 or newer"
        ) from error


class Clock:
    """Takes times on one rank; the ranks must ask for the same things in the same order.

    Args:
        barrier: enqueues a barrier of all ranks' GPUs.
        device: this rank's GPU.
        warmup: samples that are left out.
        iterations: samples that are kept.
    """

    def __init__(
        self, barrier: Call, device: torch.device, *, warmup: int, iterations: int
    ) -> None:
        self._barrier = barrier
        self._device = device
        self._warmup = warmup
        self._iterations = iterations
        self._ahead: list[bool] = []
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        flush_bytes = max(2 * l2_bytes, _LEAST_FLUSH_BYTES)
        self._flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    @property
    def late_share(self) -> float:
        """Share of the calls timed end to end that the GPU could begin before the host had enqueued
        all of them: their times are too long."""
        return self._ahead.count(False) / len(self._ahead) if self._ahead else 0.0

    def graph(
        self, *spans: Call, flushed: bool = False, between: Call | None = None
    ) -> torch.Tensor:
        """Times ``spans``, which follow each other in one graph, replayed again and again.

        Args:
            spans: each enqueues work on the current stream, the same each time.
            flushed: have no input in the L2 cache when a span begins.
            between: what the host does behind each span, which then has a graph of its own.

        Returns:
            ``[iterations, spans]`` float64 microseconds.
        """
        for span in spans:  # compiled, loaded and allocated before capture
            span()
        torch.cuda.synchronize(self._device)
        events = [(_timed_event(True), _timed_event(True)) for _ in spans]
        timed = list(zip(events, spans, strict=True))
        graphs = [
            self._captured(part, flushed=flushed)
            for part in ([timed] if between is None else [[each] for each in timed])
        ]
        samples = []
        for _ in range(self._warmup + self._iterations):
            for graph in graphs:
                graph.replay()
                torch.cuda.synchronize(self._device)
                if between is not None:
                    between()
            samples.append([begin.elapsed_time(end) * _US_PER_MS for begin, end in events])
        for graph in graphs:
            graph.reset()
        return _tensor(samples[self._warmup :])

    def _captured(self, spans: list[_TimedSpan], *, flushed: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for (begin, end), span in spans:
                if flushed:
                    self._flush.zero_()
                self._barrier()
                begin.record()
                span()
                end.record()
        return graph

    def chain(self, call: Call, calls: int) -> torch.Tensor:
        """``[iterations]`` microseconds of one call of ``calls`` back to back in a graph."""

        def span() -> None:
            for _ in range(calls):
                call()

        return self.graph(span)[:, 0] / calls

    def alone(self, call: Call, *, flushed: bool) -> torch.Tensor:
        """``[iterations]`` microseconds of one call by itself in a graph."""
        return self.graph(call, flushed=flushed)[:, 0]

    def single(self, call: Call) -> torch.Tensor:
        """``[iterations]`` microseconds between the events around a call without a graph.

        The host is ahead: what it takes to enqueue is not inside.
        """
        samples = []
        begin, end = _timed_event(False), _timed_event(False)
        for _ in range(self._warmup + self._iterations):
            torch.cuda._sleep(_HEAD_START_CYCLES)
            self._barrier()
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize(self._device)
            samples.append([begin.elapsed_time(end) * _US_PER_MS])
        return _tensor(samples[self._warmup :])[:, 0]

    def end_to_end(self, call: Call) -> torch.Tensor:
        """``[iterations]`` microseconds between the events around all that a call enqueues, without
        a graph, nothing of its input in the L2 cache.

        The host is ahead, so the call must not wait for the GPU; :attr:`late_share` says whether it
        was.
        """
        samples = []
        begin, end = _timed_event(False), _timed_event(False)
        for number in range(self._warmup + self._iterations):
            torch.cuda._sleep(_LONG_HEAD_START_CYCLES)
            self._flush.zero_()
            self._barrier()
            begin.record()
            kept = call()
            end.record()
            if number >= self._warmup:
                self._ahead.append(not begin.query())
            torch.cuda.synchronize(self._device)
            samples.append([begin.elapsed_time(end) * _US_PER_MS])
            del kept
        return _tensor(samples[self._warmup :])[:, 0]

    def wall(self, call: Call) -> torch.Tensor:
        """``[iterations]`` microseconds of the host's clock from before a call until the GPU has
        done it, nothing of its input in the L2 cache. The GPU is idle when it begins."""
        samples = []
        for _ in range(self._warmup + self._iterations):
            self._flush.zero_()
            self._barrier()
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter_ns()
            kept = call()
            torch.cuda.synchronize(self._device)
            samples.append([(time.perf_counter_ns() - begin) / _NS_PER_US])
            del kept
        return _tensor(samples[self._warmup :])[:, 0]

    def host(self, call: Call) -> torch.Tensor:
        """``[iterations]`` microseconds that the host takes to enqueue a call."""
        samples = []
        for number in range(self._warmup + self._iterations):
            if number % _CALLS_IN_QUEUE == 0:
                torch.cuda.synchronize(self._device)
            begin = time.perf_counter_ns()
            kept = call()
            samples.append([(time.perf_counter_ns() - begin) / _NS_PER_US])
            del kept
        torch.cuda.synchronize(self._device)
        return _tensor(samples[self._warmup :])[:, 0]

    def overhead(self, calls: int) -> dict[str, torch.Tensor]:
        """What measuring costs: an empty kernel between two events, warm (``empty``) and behind a
        flush (``empty_flushed``), and one of ``calls`` back to back (``launch``). And how fast this
        rank's core is: the same little Python in every run (``python``)."""
        return {
            "empty": self.alone(empty_kernel, flushed=False),
            "empty_flushed": self.alone(empty_kernel, flushed=True),
            "launch": self.chain(empty_kernel, calls),
            "python": self.host(_known_work),
        }


def _known_work() -> int:
    """Takes CPython 3.12 about 6 us on a core of 2024 that it has to itself."""
    total = 0
    for number in range(_KNOWN_WORK):
        total += number * number
    return total


def _tensor(samples: Sequence[Sequence[float]]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float64, device="cpu")
