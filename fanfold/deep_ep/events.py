"""DeepEP's events: points in the work of a CUDA stream.

On the CPU a call has done its work when it returns, so an event is complete from the start and
waiting for it costs nothing. What programs may rely on is the same: ``EventOverlap.event`` is None
exactly when nothing asynchronous was asked for, and hooks run at the first wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from fanfold.errors import ArgumentError, UsageError
from fanfold.representation import described, worded
from fanfold.stream_order import stream_at

__all__ = ["EventHandle", "EventOverlap", "check_ordering", "event_of", "event_on"]


class EventHandle:
    """The point that a stream has been given work up to; without CUDA one that has been reached.

    May be made and waited for while a CUDA graph is captured, both within the same capture.

        >>> event = fanfold.deep_ep.EventHandle()  # all work of the current stream so far
        >>> event.current_stream_wait()

    Args:
        stream: the current CUDA stream if None; nothing in a process that has not used CUDA.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        if stream is None and torch.cuda.is_initialized():
            stream = torch.cuda.current_stream()
        if stream is not None:
            self._event = stream.record_event()

    def __repr__(self) -> str:
        where = "complete" if getattr(self, "_event", None) is None else "of a CUDA stream"
        return f"{type(self).__name__}({where})"

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event. The CPU does not wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def event_on(device: torch.device) -> EventHandle:
    """The point that the current stream of a GPU has been given work up to. For a call that counts
    microseconds: PyTorch takes some to make the object of a stream, so those are kept here."""
    address = torch._C._cuda_getCurrentRawStream(device.index)
    return EventHandle(_stream_at(address, device))


@functools.lru_cache(maxsize=64)
def _stream_at(address: int, device: torch.device) -> torch.cuda.Stream:
    return stream_at(address, device)


class EventOverlap:
    """An event with what DeepEP's callers do around it.

        >>> with fanfold.deep_ep.Buffer.capture():  # waits at the end of the block
        ...     pass

    Args:
        event: the event, or None where a call was not asynchronous.
        extra_tensors: tensors kept alive as long as this object is.

    Attributes:
        event: as given; None after a wait with ``release_handle``.
        extra_tensors: as given.
        hook_after_wait: what the next wait will run, or None.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor | None, ...] | None = None,
    ) -> None:
        if event is not None and not isinstance(event, EventHandle):
            raise ArgumentError("event", worded(event), "an EventHandle or None")
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release_at_exit = False

    def __repr__(self) -> str:
        return described(
            self, event="event", extra_tensors="extra_tensors", hook_after_wait="hook_after_wait"
        )

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Waits for the event, then runs the registered hook.

        Args:
            release_handle: forget the event afterwards.

        Returns:
            What the hook returned; None without a hook.

        Raises:
            UsageError: there is no event, because the call was not asynchronous.
        """
        if self.event is None:
            raise UsageError(
                "this EventOverlap holds no event: the call that returned it was not asynchronous "
                "(async_finish=False), so its results are ready and there is nothing to wait for"
            )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = hook() if hook is not None else None
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """The same as :meth:`current_stream_wait`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Has ``hook_after_wait`` run at the end of the next wait, once.

        Raises:
            UsageError: a hook is registered already.
        """
        if self.hook_after_wait is not None:
            raise UsageError("a hook is registered on this EventOverlap already; wait first")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """This object, set to forget its event when the following ``with`` block ends."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release, self._release_at_exit = self._release_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle=release)


def check_ordering(
    previous_event: object, async_finish: bool, allocate_on_comm_stream: bool
) -> EventHandle | None:
    """The event to wait for, after checks of the three stream arguments that high-throughput calls
    share.

    Raises:
        ArgumentError: ``previous_event`` is no event, or ``allocate_on_comm_stream`` is set without
            a previous event and ``async_finish``.
    """
    event = event_of("previous_event", previous_event)
    if allocate_on_comm_stream and (event is None or not async_finish):
        raise ArgumentError(
            "allocate_on_comm_stream",
            f"True with previous_event {'absent' if event is None else 'given'} and "
            f"async_finish={async_finish}",
            "used only together with a previous_event and async_finish=True",
        )
    return event


def event_of(name: str, given: object) -> EventHandle | None:
    """The event in an argument.

    Raises:
        ArgumentError: it is no event.
    """
    if isinstance(given, EventOverlap):
        return given.event
    if given is not None and not isinstance(given, EventHandle):
        raise ArgumentError(name, worded(given), "an EventOverlap or None")
    return given
