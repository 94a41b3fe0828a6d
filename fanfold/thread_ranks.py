"""Ranks as threads of this process: the third placement, beside processes of one host and GPUs.

It is for tests, which start such ranks in microseconds, and for a machine with one GPU, on which
the kernels of the ranks run at the same time::

    with ThreadRanks(4) as ranks:
        results = ranks.run(function, *args)  # function(group, *args) on each rank

What is a process's own is shared by all ranks: the environment, the random generator of PyTorch,
filters of warnings, module-level variables.

**On a GPU** each rank has a stream of its own, and its kernels take at most its share of the SMs.
The kernels of one rank wait for those of the others, so a thread must never wait for the whole GPU
(``torch.cuda.synchronize``, the default capture of ``torch.cuda.graph``): it waits for its stream.
Two things are such a wait where the driver decides so, and hold up the launches of other threads:

* a copy between the GPU and pageable memory (``tensor.cpu()``, ``tensor.to("cuda")``) while kernels
  of the rank run: wait for the stream first. Where processes share the GPU, such a copy was seen to
  wait for a kernel of another rank, too: meet the other ranks behind the copy;
* loading a kernel. Fanfold loads one when the rank's own calls have ended, which is enough where
  all ranks make the same calls; PyTorch loads its own at the start where
  ``CUDA_MODULE_LOADING=EAGER`` is set. The first launch of a kernel may wait even then: launch what
  one rank alone uses once before, when no rank is in a call.

PyTorch runs the backward pass of all ranks in one thread of its own, so that a backward pass whose
calls wait on the CPU is for ranks that are processes. A rank whose calls run far ahead of the other
ranks' (about a thousand launches) keeps the others from launching: wait for the stream at times.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fanfold.config import Config
from fanfold.deferred_free import drain_deferred_frees
from fanfold.errors import ArgumentError, FanfoldError, PeerTimeout, UsageError
from fanfold.gpus import lacking, shared_by_threads
from fanfold.launch import LaunchError, RankFailure

__all__ = ["ThreadGroup", "ThreadRanks"]

MOST_RANKS = 1024
_SHOWN_CALLS = 4  # of a late rank, the innermost
MOST_RANKS_OF_GPU = 8
"""The driver has 8 queues where nothing else is set (CUDA_DEVICE_MAX_CONNECTIONS); in one that two
streams share, a kernel waits for the end of the other stream's."""


class _Meeting:
    """Where the threads of one run exchange values."""

    def __init__(self, ranks: int, bound_s: float) -> None:
        self._ranks, self._bound_s = ranks, bound_s
        self._changed = threading.Condition()
        self._exchanges: dict[int, dict[int, Any]] = {}  # that ranks are in, by number
        self._entered = [0] * ranks  # exchanges that each rank has begun
        self._ended: dict[int, str] = {}  # why the ranks come to no further exchange

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        start = time.monotonic()
        with self._changed:
            number = self._entered[rank] = self._entered[rank] + 1
            values = self._exchanges.setdefault(number, {})
            values[rank] = value
            if len(values) == self._ranks:
                del self._exchanges[number]
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(values) == self._ranks or self._ended.keys() - values, self._bound_s
            )
            if len(values) == self._ranks:
                return [values[peer] for peer in range(self._ranks)]
            where = f"exchange {number} of the group"
            for gone in sorted(self._ended.keys() - values):
                raise FanfoldError(
                    f"rank {rank} waited for rank {gone} in {where}, but rank {gone} "
                    f"{self._ended[gone]}"
                )
            late = next(peer for peer in range(self._ranks) if peer not in values)
            waited = time.monotonic() - start
            raise PeerTimeout(rank, late, where, number, self._entered[late], waited, False)

    def end(self, rank: int, how: str) -> None:
        """Has exchanges that wait for ``rank`` fail: it ``how`` (a predicate)."""
        with self._changed:
            self._ended.setdefault(rank, how)
            self._changed.notify_all()


class ThreadGroup:
    """The group of ranks that are threads of one process, as one of them sees it; it is a
    :class:`fanfold.group.Group`. Values travel as they are, without a copy.

    Attributes:
        rank, size: as in every group.
    """

    one_process = True

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.rank, self.size = rank, size

    def all_gather(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, in rank order. Collective.

        Raises:
            FanfoldError: a rank has ended without coming; the message says which and how.
            PeerTimeout: a rank did not come in time.
        """
        return self._meeting.exchange(self.rank, value)


class ThreadRanks:
    """Ranks that are threads of this process; a context manager. Each run has fresh threads.

    On a machine with a GPU, unless ``backend`` is ``"host"``, the ranks share the current one.

    Args:
        ranks: how many, 1 to 1024; at most 8 on a GPU.
        timeout_s: seconds that one run may last. How long an exchange of the group may last says
            the setting ``timeout_s``.

    Raises:
        ArgumentError: ``ranks`` out of bounds.
        ConfigError: a malformed variable of the environment.
    """

    def __init__(self, ranks: int, *, timeout_s: float = 300.0) -> None:
        config = Config.resolve()
        on_gpu = config.backend != "host" and lacking() is None
        most = MOST_RANKS_OF_GPU if on_gpu else MOST_RANKS
        if type(ranks) is not int or not 1 <= ranks <= most:
            where = " on one GPU" if on_gpu else ""
            raise ArgumentError("ranks", repr(ranks), f"an integer from 1 to {most}{where}")
        self.ranks, self.timeout_s = ranks, timeout_s
        self._exchange_s = config.timeout_s
        self._closed: str | None = None  # why nothing runs any more
        self._running = threading.Lock()
        # Made one after the other, so that no two are in one of the driver's queues.
        self._streams = [torch.cuda.Stream() for _ in range(ranks)] if on_gpu else []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(group, *args)`` on every rank; the results in rank order. All ranks get the
        same objects, and the caller those that they return.

        Raises:
            Exception: what a rank raised; its rank is in ``__cause__``, a LaunchError. If several
                did, not one that only reports another rank's failure.
            LaunchError: ranks did not finish in time.
        """
        return self.run_each(function, [args] * self.ranks)

    def run_each(self, function: Callable[..., Any], args_of: Sequence[Sequence[Any]]) -> list[Any]:
        """As :meth:`run`, with the arguments ``args_of[r]`` on rank r."""
        outcomes = self._outcomes(function, args_of)
        failures = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
        if not failures:
            return outcomes
        summary = LaunchError(failures)
        cause = summary.failures[0].error
        assert cause is not None
        raise cause from summary

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """As :meth:`run`, but a rank that raises has a :class:`RankFailure` in its place."""
        return self._outcomes(function, [args] * self.ranks)

    def close(self) -> None:
        """Nothing runs afterwards. Harmless when repeated."""
        self._closed = self._closed or "is closed; make a new one"

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _outcomes(
        self, function: Callable[..., Any], args_of: Sequence[Sequence[Any]]
    ) -> list[Any]:
        if len(args_of) != self.ranks:
            bound = f"one for each of {self.ranks}"
            raise ArgumentError("args_of", f"{len(args_of)} entries", bound)
        if self._closed is not None:
            raise UsageError(f"this ThreadRanks {self._closed}")
        if not self._running.acquire(blocking=False):
            raise UsageError("this ThreadRanks runs a function already; wait for its end")
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)  # as ranks that are processes have; new threads take it over
            with shared_by_threads() if self._streams else contextlib.nullcontext():
                return self._run_threads(function, args_of)
        finally:
            torch.set_num_threads(threads)
            if self._closed is None:  # else kernels of late ranks may run, for which it would wait
                drain_deferred_frees()
            self._running.release()

    def _run_threads(
        self, function: Callable[..., Any], args_of: Sequence[Sequence[Any]]
    ) -> list[Any]:
        meeting = _Meeting(self.ranks, self._exchange_s)
        outcomes: dict[int, Any] = {}
        threads = [
            threading.Thread(
                target=self._be_rank,
                args=(ThreadGroup(meeting, rank, self.ranks), function, args, outcomes),
                name=f"rank {rank}",
                daemon=True,  # no thread can be killed, and a late one must not keep the process
            )
            for rank, args in enumerate(args_of)
        ]
        deadline = time.monotonic() + self.timeout_s
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:  # after Ctrl-C too, or where the system starts no more threads
            late = [rank for rank in range(self.ranks) if rank not in outcomes]
            if late:
                self._closed = f"has ranks that did not finish: {late}; make a new one"
            for rank in late:
                meeting.end(rank, "did not finish in time")
        if late:
            failures = [
                outcome for outcome in outcomes.values() if isinstance(outcome, RankFailure)
            ]
            raise LaunchError(failures or [self._late(rank, threads[rank]) for rank in late])
        return [outcomes[rank] for rank in range(self.ranks)]

    def _late(self, rank: int, thread: threading.Thread) -> RankFailure:
        """The failure of a rank whose thread still runs, with the place where it is."""
        text = f"did not finish in {self.timeout_s:g} s; its thread goes on"
        frame = sys._current_frames().get(thread.ident or 0)
        if frame is not None:
            calls = traceback.extract_stack(frame)[-1 : -_SHOWN_CALLS - 1 : -1]
            names = [f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in calls]
            text += f", at {', called from '.join(names)}"
        return RankFailure(rank, None, text)

    def _be_rank(
        self,
        group: ThreadGroup,
        function: Callable[..., Any],
        args: Sequence[Any],
        outcomes: dict[int, Any],
    ) -> None:
        """The life of one thread."""
        how = "has returned"
        try:
            with self._own_stream(group.rank):
                outcome = function(group, *args)
        except BaseException as error:
            outcome = RankFailure(group.rank, None, traceback.format_exc(), error)
            how = f"has ended with {type(error).__name__}: {error}"
        outcomes[group.rank] = outcome
        group._meeting.end(group.rank, how)

    @contextlib.contextmanager
    def _own_stream(self, rank: int) -> Iterator[None]:
        """Makes the stream of ``rank`` current in this thread, and waits for it in the end."""
        if not self._streams:
            yield
            return
        stream = self._streams[rank]
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            # PyTorch's runtime makes its context current in a thread at the first launch; kernels
            # of Fanfold are launched through the driver, which needs one.
            torch.zeros(1, dtype=torch.uint8, device=stream.device)
            yield
            stream.synchronize()
