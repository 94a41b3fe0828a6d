"""Memory of GPUs whose owner is gone while kernels may still use it."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from fanfold.gpus import threads_share_gpu

__all__ = ["drop_left", "let_go"]

_left: deque[tuple[torch.device, object]] = deque()


def let_go(device: torch.device, kept: object) -> None:
    """Drops the last reference to ``kept`` once nothing runs on ``device``.

    Waits for that, with two exceptions, as the garbage collector runs finalisers wherever it likes:
    where this thread captures a CUDA graph, which a wait would break, and while ranks that are
    threads share a GPU, whose kernels may wait for the next launch of this very thread. There
    ``kept`` is left for the next call of this or of :func:`drop_left`. No kernel of a GPU uses what
    is on the CPU.
    """
    if device.type == "cpu":
        return
    _left.append((device, kept))
    del kept
    drop_left()


def drop_left() -> None:
    """Drops what :func:`let_go` has left, unless this thread captures a graph, or
    threads share a GPU.

    A forked child keeps it all: the memory is the parent's, and CUDA does not work in the child.
    """
    if threads_share_gpu() or torch.cuda._is_in_bad_fork():
        return
    # Where CUDA has failed, or is not there, nothing runs.
    with contextlib.suppress(RuntimeError, AssertionError):
        if torch.cuda.is_current_stream_capturing():
            return
    while _left:
        try:
            device, kept = _left.popleft()
        except IndexError:  # another thread, or a finaliser meanwhile, was faster
            return
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.cuda.synchronize(device)
        del kept
