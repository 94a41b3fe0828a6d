"""What programs import from ``deep_ep.utils.testing``: times of calls and of kernels.

>>> from fanfold.deep_ep.utils.testing import bench, parse_num_bytes
>>> average_s, least_s, most_s = bench(lambda: sum(range(10)), num_warmups=1, num_tests=3)
>>> parse_num_bytes("64M")
67108864
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fanfold.errors import ArgumentError, UsageError

__all__ = [
    "bench",
    "bench_kineto",
    "empty_suppress",
    "flush_l2_cache",
    "parse_num_bytes",
    "suppress_stdout_stderr",
]

_FLUSH_BYTES = 256 << 20
# About 10 ms, in which the hosts of all ranks enqueue the barrier and the call.
_HEAD_START_CYCLES = 20_000_000
_MS, _US = 1e-3, 1e-6
_UNITS = ("", "K", "M", "G", "T")


def flush_l2_cache(enabled: bool = True) -> None:
    """Enqueues a write of 256 MiB, more than the L2 cache of a GPU holds, if ``enabled`` and there
    is a GPU."""
    if enabled and torch.cuda.is_available():
        torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Times a call: between two events on the current stream, or by the clock where there is no
    GPU. The first time does not count.

    Args:
        fn: the call.
        num_warmups: calls before the first time.
        num_tests: times, at least 2.
        post_fn: called after each time, outside of it.
        flush_l2: whether to write the L2 cache over before each time.

    Returns:
        The average, the least and the longest time in seconds.
    """
    if num_tests < 2:
        raise ArgumentError("num_tests", str(num_tests), "at least 2: the first does not count")
    for _ in range(num_warmups):
        fn()
    timed = _timed_on_gpu if torch.cuda.is_available() else _timed_on_cpu
    times = timed(fn, num_tests, post_fn or _nothing, flush_l2)[1:]
    return sum(times) / len(times), min(times), max(times)


def _nothing() -> None:
    pass


def _timed_on_cpu(
    fn: Callable[[], Any], times: int, post_fn: Callable[[], Any], _: bool
) -> list[float]:
    seconds = []
    for _i in range(times):
        begin = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - begin)
        post_fn()
    return seconds


def _timed_on_gpu(
    fn: Callable[[], Any], times: int, post_fn: Callable[[], Any], flush_l2: bool
) -> list[float]:
    torch.cuda.synchronize()
    events = []
    for _ in range(times):
        flush_l2_cache(flush_l2)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        events.append((begin, end))
        post_fn()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * _MS for begin, end in events]


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Times kernels by PyTorch's profiler; where there is no GPU, operators of the CPU.

    With the variable EP_USE_NVIDIA_TOOLS, for profilers that allow no second one beside them,
    nothing is called and every time is 1.

    Args:
        fn: the call.
        kernel_names: what is part of a kernel's name, or several. Fanfold's kernels are called
            otherwise than DeepEP's: ``dispatch`` and ``combine`` are in the names of both.
        num_tests: calls that are timed, after as many that are not.
        suppress_kineto_output: whether stdout and stderr go nowhere meanwhile.
        trace_path: a file for the trace, which Chrome and Perfetto show.
        flush_l2: whether to write the L2 cache over before each call.
        barrier_comm_profiling: whether all ranks meet before each call (the variable
            EP_DISABLE_BARRIER_PROFILING: never).
        num_kernels_per_period: how many kernels of each name ``fn`` starts.
        barrier: how they meet; None: an all-reduce over all ranks.

    Returns:
        The average time in seconds of the kernels of each name, 0 if there was none, as
        ``kernel_names`` is given; with ``num_kernels_per_period`` above 1 a list of the averages of
        the first, second, … kernel of a call instead.

    Raises:
        UsageError: not every call had ``num_kernels_per_period`` kernels of a name.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    if int(os.environ.get("EP_USE_NVIDIA_TOOLS", "0")):
        ones = [1.0] * len(names)
        return ones[0] if isinstance(kernel_names, str) else ones
    meets = barrier_comm_profiling and not int(os.environ.get("EP_DISABLE_BARRIER_PROFILING", "0"))
    meet = (barrier or _all_reduce) if meets else _nothing
    fn()  # compiles and tunes what is not yet
    with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
        profiler = _profiled(fn, num_tests, meet, flush_l2)
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    spans = _spans(profiler)
    averages = [_averages(name, spans, num_kernels_per_period) for name in names]
    return averages[0] if isinstance(kernel_names, str) else averages


def _all_reduce() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.all_reduce(torch.ones(1, dtype=torch.float32, device=device))


def _profiled(
    fn: Callable[[], Any], times: int, meet: Callable[[], Any], flush_l2: bool
) -> torch.profiler.profile:
    gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(
        activities=[activity.CUDA if gpu else activity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        acc_events=True,
    )
    with profiler:
        for _ in range(2):  # the first round starts the profiler
            for _ in range(times):
                flush_l2_cache(flush_l2)
                if gpu and meet is not _nothing:
                    torch.cuda._sleep(_HEAD_START_CYCLES)
                meet()
                fn()
            if gpu:
                torch.cuda.synchronize()
            profiler.step()
    return profiler


def _spans(profiler: torch.profiler.profile) -> list[tuple[float, float, str]]:
    """Begin and time in us, and name, of all kernels or operators, by their begin."""
    gpu = torch.cuda.is_available()
    return sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in profiler.events()
        if not gpu or event.device_type.name == "CUDA"
    )


def _averages(
    name: str, spans: Sequence[tuple[float, float, str]], per_call: int
) -> float | list[float]:
    times = [elapsed * _US for _, elapsed, each in spans if name in each]
    if len(times) % per_call != 0:
        raise UsageError(
            f"{len(times)} kernels have {name!r} in their names, not a multiple of the {per_call} "
            "that a call is said to start (num_kernels_per_period)"
        )
    if per_call == 1:
        return sum(times) / len(times) if times else 0.0
    calls = len(times) // per_call
    return [sum(times[kernel::per_call]) / max(calls, 1) for kernel in range(per_call)]


empty_suppress = contextlib.nullcontext
"""A ``with`` statement that does nothing."""


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Has this process's stdout and stderr go nowhere, also what libraries write to them."""
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(Path(os.devnull).open("w"))
        for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            kept = os.dup(descriptor)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, descriptor)
            os.dup2(nothing.fileno(), descriptor)
        stack.enter_context(contextlib.redirect_stdout(nothing))
        stack.enter_context(contextlib.redirect_stderr(nothing))
        yield


def parse_num_bytes(text: str) -> int:
    """Bytes that a text such as ``"1048576"``, ``"512K"``, ``"64MiB"`` or ``"1.5G"`` names; the
    units are powers of 1024.

    Raises:
        ValueError: it names none, or less than one byte.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if found is None:
        raise ValueError(f"{text!r} is no number of bytes, such as 1048576, 512K, 64MiB or 1.5G")
    number, unit = found.groups()
    value = int(float(number) * 1024 ** _UNITS.index(unit))
    if value < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return value
