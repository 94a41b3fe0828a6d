"""Frees the memory of an owner that is gone, once the GPU is idle: kernels may still use it."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from fanfold.gpus import threads_share_gpu

__all__ = ["drain_deferred_frees", "free_when_idle"]

_deferred: deque[tuple[torch.device, object]] = deque()


def free_when_idle(device: torch.device, memory: object) -> None:
    """Drops the last reference to ``memory`` once nothing runs on ``device``.

    Waits until then, with two exceptions, as the garbage collector runs finalisers at any point:
    while this thread captures a CUDA graph, which a wait would break, and while ranks that are
    threads share a GPU, whose kernels may wait for the next launch of this very thread. Then the
    next call of this function or of :func:`drain_deferred_frees` does so. Memory of the CPU needs
    no wait, as no kernel uses it.
    """
    if device.type == "cpu":
        return
    _deferred.append((device, memory))
    del memory
    drain_deferred_frees()


def drain_deferred_frees() -> None:
    """Frees all that :func:`free_when_idle` has deferred, unless this thread captures a graph or
    threads share a GPU.

    A forked child keeps it all: the memory is the parent's, and CUDA does not work in the child.
    """
    if threads_share_gpu() or torch.cuda._is_in_bad_fork():
        return
    # Where CUDA has failed or is missing, nothing runs.
    with contextlib.suppress(RuntimeError, AssertionError):
        if torch.cuda.is_current_stream_capturing():
            return
    while _deferred:
        try:
            device, memory = _deferred.popleft()
        except IndexError:  # another thread, or a finaliser meanwhile, was faster
            return
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.cuda.synchronize(device)
        del memory
