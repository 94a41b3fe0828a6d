"""On which CUDA stream the calls of a Buffer run, and what waits for what: DeepEP's rules.

- A plain call is done, for what follows on the current stream, when it returns. It runs there.
- ``async_finish``: the call runs on the communication stream, after what the current stream was
  given so far; its event, recorded there, is what the caller waits for. Tensors that both streams
  use are recorded on both, so that the allocator gives none of them away too early.
- A previous event: the stream that the call runs on waits for it. The communication stream then
  waits for nothing else, so that what the current stream was given since may run beside the call.
- With a hook, both halves run on the stream that is current when they are called.

That each call follows the one before, whatever streams they run on, is the mode's own care.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fanfold.backends.low_latency import Hook
from fanfold.deep_ep.events import EventHandle, EventOverlap

__all__ = ["HostStreams", "Streams", "record"]

_Result = TypeVar("_Result")
Call = Callable[[], tuple[_Result, Hook | None]]
Tensors = tuple[torch.Tensor, ...]


class HostStreams:
    """Where there are no streams: a call has done its work when it returns."""

    @property
    def comm(self) -> Any:
        """``torch.cpu.Stream``, which has no queue."""
        return torch.cpu.current_stream()

    def run(
        self,
        call: Call[_Result],
        *,
        async_finish: bool,
        inputs: object,
        previous: EventHandle | None = None,
    ) -> tuple[_Result, Hook | None, EventOverlap]:
        """See :meth:`Streams.run`. Tensors of devices without Buffers' own streams come by the
        current one."""
        if previous is not None:
            previous.current_stream_wait()
        result, hook = call()
        if not async_finish:
            return result, hook, EventOverlap()
        return result, hook, EventOverlap(EventHandle(), tuple(_tensors((inputs, result))))


class Streams:
    """The streams of one Buffer on a GPU.

    Args:
        device: the Buffer's.

    Attributes:
        comm: the communication stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.comm = torch.cuda.Stream(device, priority=-1)

    def run(
        self,
        call: Call[_Result],
        *,
        async_finish: bool,
        inputs: object,
        previous: EventHandle | None = None,
    ) -> tuple[_Result, Hook | None, EventOverlap]:
        """Enqueues ``call`` where it belongs.

        Args:
            call: enqueues its work on the current stream; returns its result and maybe a hook,
                which does the same with the rest.
            async_finish: run on the communication stream.
            inputs: what the call reads: tensors, and tuples and dataclasses with tensors in them.
            previous: what the call waits for.

        Returns:
            The result, the hook, and the event, which holds None without ``async_finish``.
        """
        if not async_finish:
            if previous is not None:
                previous.current_stream_wait()
            result, hook = call()
            return result, hook, EventOverlap()
        current = torch.cuda.current_stream(self._device)
        given = tuple(_tensors(inputs))
        if previous is None:
            self.comm.wait_stream(current)
        try:
            with torch.cuda.stream(self.comm):
                if previous is not None:
                    previous.current_stream_wait()
                result, hook = call()
        except BaseException:
            # A report of an earlier call is raised when this one has been enqueued.
            current.wait_stream(self.comm)
            raise
        finally:
            record(given, self.comm)
        tensors = (*given, *_tensors(result))
        record(tensors[len(given) :], self.comm)
        record(tensors, current)
        return result, hook, EventOverlap(EventHandle(self.comm), tensors)


def record(tensors: Tensors, stream: torch.cuda.Stream) -> None:
    """Tells the allocator that ``stream`` uses these tensors, those on the CPU aside."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or those in its parts. A handle on GPUs has none until it is
    looked into."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is tuple:
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))
