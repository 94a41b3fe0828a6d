"""Ranks as threads of one process on one GPU.

A thread waits for its own stream only, never for the GPU, and does that before it copies to or from
the CPU. Where a graph is captured no kernel of any rank runs (:func:`meet`): the driver may wait
for all of them there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fanfold.group import Group
from fanfold.launch import RankPool
from fanfold.thread_ranks import ThreadRanks

__all__ = ["OneGpu", "capture", "meet", "wait"]


class OneGpu:
    """A process on a GPU, in which ranks run as threads; a new one after a failure, as a process in
    which a kernel has failed cannot use CUDA any more."""

    def __init__(self) -> None:
        self._process: RankPool | None = None

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(group, *args)`` on every rank."""
        try:
            if self._process is None:
                self._process = self._start()
            (results,) = self._process.run(_be_threads, ranks, function, args)
        except BaseException:
            self.close()
            raise
        return results  # type: ignore[no-any-return]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    @staticmethod
    def _start() -> RankPool:
        with pytest.MonkeyPatch.context() as environment:
            environment.delenv("FANFOLD_SHARE_GPUS", raising=False)
            # PyTorch's own kernels are loaded at once, not while kernels of ranks wait.
            environment.setenv("CUDA_MODULE_LOADING", "EAGER")
            return RankPool(1, timeout_s=250.0)


def _be_threads(
    alone: object, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> list[Any]:
    del alone
    with ThreadRanks(ranks, timeout_s=200.0) as threads:
        return threads.run(function, *args)


def wait() -> None:
    """Returns when no kernel of this rank runs."""
    torch.cuda.current_stream().synchronize()


def meet(group: Group) -> None:
    """Returns when no kernel of any rank runs."""
    wait()
    group.all_gather(None)


def _own_stream() -> torch.cuda.Stream:
    current = torch.cuda.current_stream()
    return torch.cuda.Stream() if current == torch.cuda.default_stream() else current


def capture(
    group: Group, call: Callable[[], torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of ``call``, and its result. One rank captures after the other, and without
    ``torch.cuda.graph``, which waits for the GPU and gives back memory. A rank that is a process
    has no stream of its own: it takes another than the default one, where nothing is captured."""
    graph, out = torch.cuda.CUDAGraph(), None
    meet(group)
    for turn in range(group.size):
        if turn == group.rank:
            with torch.cuda.stream(_own_stream()):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    out = call()
                finally:
                    graph.capture_end()
        group.all_gather(None)
    assert out is not None
    return graph, out
