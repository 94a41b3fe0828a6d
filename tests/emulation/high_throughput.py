"""The high-throughput mode of GPUs with its kernels on CPUs; see :mod:`tests.emulation.world`."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from fanfold import _core, cpu_words, kernel_reports
from fanfold.backends.high_throughput import kernels, launches
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.room import Room
from fanfold.config import Config
from tests.distributed.routings import Case
from tests.emulation.pinned import PAGEABLE
from tests.emulation.world import Builder, ThreadGroup, gpu_memory

ARGUMENTS = (
    _core.CudaPlanArgs,
    _core.CudaHighThroughputDispatchArgs,
    _core.CudaHighThroughputCombineArgs,
)


class _Loaded:
    """A kernel as the mode takes it."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def allow_shared_bytes(self, nbytes: int) -> None:
        assert nbytes <= kernels.MOST_SHARED_BYTES

    def run(self, address: int, shape: _core.CudaLaunch) -> None:
        self._library.emulate(address, shape.ctas)
        needed, given = self._library.dynamic_shared_bytes(), shape.shared_bytes
        assert needed <= given, f"a CTA of {self._library._name} needs {needed} bytes, has {given}"


class _Event:
    """Of a stream whose work is done when it is enqueued."""

    def query(self) -> bool:
        return True


def _poisoned(room: Room, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for results as it may come: nothing in it may be taken for what a call has written."""
    return torch.full(shape, 7, dtype=torch.float32, device=room.device).to(dtype)


def _launch_between(args: Any, kernel: _Loaded, ctas: int, *_: object) -> None:
    kernel.run(args.address, _core.CudaLaunch(ctas, 32, 0, early=False))


def _launch(args: Any, kernel: _Loaded, shape: _core.CudaLaunch, stream: int) -> None:
    del stream
    kernel.run(args.address, shape)


@contextmanager
def emulated(builder: Builder, ctas: int) -> Iterator[None]:
    """Within it the mode takes the CPU for a GPU with ``ctas`` SMs; its CTAs have fewer warps."""
    cuda_answers = {
        "get_device_properties": lambda index: types.SimpleNamespace(multi_processor_count=ctas),
        "get_device_capability": lambda index: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device: None,
        "current_stream": lambda device: types.SimpleNamespace(record_event=_Event),
    }
    # Rows of 32 bytes and more have several slices, and a combine has folds of all its kinds.
    few_warps = {"_PLAN_WARPS": 2, "_MANY_WORKERS": 3, "_FEW_WORKERS": 2, "_SLICE_UNITS": 2,
                 "_ADDED_SLICE_UNITS": 3, "_LONG_ROW_BYTES": 64, "_MOST_PIECES": 3,
                 "_MANY_PIECES": 4, "_MOST_TILES": 2, "_SHORT_TOKENS": 11,
                 "lags": lambda kind, ctas, slots: (slots // 2, 1)}  # fmt: skip
    patches = [
        *(mock.patch.object(cls, "launch", _launch) for cls in ARGUMENTS),
        mock.patch.object(_core.GinBetweenCallsArgs, "launch", _launch_between),
        mock.patch.multiple(torch.cuda, **cuda_answers),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0),
        mock.patch.object(torch._C, "_cuda_getDevice", create=True, return_value=None),
        mock.patch.object(launches.jit, "load", lambda source, *_: _Loaded(builder.load(source))),
        mock.patch.object(launches.jit, "load_all", return_value=[]),
        *(mock.patch.object(each, "torch", PAGEABLE) for each in (kernel_reports, cpu_words)),
        mock.patch.multiple(kernels, **few_warps),
        mock.patch.object(Room, "empty", _poisoned),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


# What most tests take.
CTAS = 3
ROOMY_RING = 1 << 16
SMALL = Case(tokens=(30, 0, 45), experts_per_rank=3, top_k=4, hidden=32, alignment=4)

_BEHIND = 8192  # bytes behind each rank's memory, which nobody may write


class World:
    """All ranks of a group; only within :func:`emulated`.

    Args:
        ranks: their number.
        ring_bytes: of each of their rings.
        max_tokens: of the mode.
        ctas, senders: of every kernel.
        result_bytes: for dispatches in place.
        settings: of :class:`Config`.
    """

    def __init__(
        self,
        ranks: int,
        ring_bytes: int,
        *,
        max_tokens: int = 256,
        ctas: int | None = None,
        senders: int | None = None,
        result_bytes: int = 0,
        **settings: Any,
    ) -> None:
        config = Config.resolve(**{"timeout_s": 10.0, **settings})
        nbytes = _core.cuda_high_throughput_bytes(ranks, ring_bytes)[1] + result_bytes
        # What the mode does not make zero itself may hold anything.
        whole = [
            torch.full((nbytes + 128 + _BEHIND,), 0xA5, dtype=torch.uint8) for _ in range(ranks)
        ]
        whole = [region[-region.data_ptr() % 128 :] for region in whole]
        regions = [region[:nbytes] for region in whole]
        self._behind = [region[nbytes:] for region in whole]
        values: list[Any] = [None] * ranks
        barrier = threading.Barrier(ranks, timeout=120.0)

        groups = [ThreadGroup(rank, values, barrier) for rank in range(ranks)]
        self.memories = self._memories(ranks, ring_bytes, config, groups, regions)

        def open_mode(rank: int) -> CudaHighThroughput:
            return CudaHighThroughput(
                self.memories[rank],
                config,
                max_tokens=max_tokens,
                ctas=ctas,
                senders=senders,
                result_bytes=result_bytes,
            )

        with ThreadPoolExecutor(ranks) as pool:
            self.modes = list(pool.map(open_mode, range(ranks)))

    def _memories(
        self,
        ranks: int,
        ring_bytes: int,
        config: Config,
        groups: list[ThreadGroup],
        regions: list[torch.Tensor],
    ) -> list[Any]:
        del ranks, ring_bytes, config
        return [gpu_memory(group, regions, group.rank) for group in groups]

    def run(self, program: Callable[[int, CudaHighThroughput], Any]) -> list[Any]:
        """``program(rank, mode)`` on all ranks at once; their results."""
        with ThreadPoolExecutor(len(self.modes)) as pool:
            results = list(pool.map(program, range(len(self.modes)), self.modes))
        assert all(bool((memory == 0xA5).all()) for memory in self._behind), "written to"
        return results
