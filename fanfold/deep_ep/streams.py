"""On which CUDA stream the calls of a Buffer run, and what waits for what: DeepEP's rules.

- A plain call is done, for what follows on the current stream, when it returns. It runs there.
- ``async_finish``: the call runs on the communication stream, after what the current stream was
  given so far; its event, recorded there, is what the caller waits for. Tensors that both streams
  use are recorded on both, so that the allocator gives none of them away too early.
- With a hook, both halves run on the stream that is current when they are called.

That each call follows the one before, whatever streams they run on, is the mode's own care.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from fanfold.deep_ep.events import EventHandle, EventOverlap
from fanfold.low_latency import Hook

__all__ = ["HostStreams", "Streams"]

_Result = TypeVar("_Result")
Call = Callable[[], tuple[_Result, Hook | None]]
Inputs = tuple[torch.Tensor | None, ...]


class HostStreams:
    """Where there are no streams: a call has done its work when it returns."""

    @property
    def comm(self) -> Any:
        """``torch.cpu.Stream``, which has no queue."""
        return torch.cpu.current_stream()

    def run(
        self, call: Call[_Result], *, async_finish: bool, inputs: Inputs
    ) -> tuple[_Result, Hook | None, EventOverlap]:
        """See :meth:`Streams.run`."""
        result, hook = call()
        if not async_finish:
            return result, hook, EventOverlap()
        return result, hook, EventOverlap(EventHandle(), (*inputs, *_tensors(result)))


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
        self, call: Call[_Result], *, async_finish: bool, inputs: Inputs
    ) -> tuple[_Result, Hook | None, EventOverlap]:
        """Enqueues ``call`` where it belongs.

        Args:
            call: enqueues its work on the current stream; returns its result and maybe a hook,
                which does the same with the rest.
            async_finish: run on the communication stream.
            inputs: tensors that the call reads.

        Returns:
            The result, the hook, and the event, which holds None without ``async_finish``.
        """
        if not async_finish:
            result, hook = call()
            return result, hook, EventOverlap()
        current = torch.cuda.current_stream(self._device)
        self.comm.wait_stream(current)
        try:
            with torch.cuda.stream(self.comm):
                result, hook = call()
        except BaseException:
            # A report of an earlier call is raised when this one has been enqueued.
            current.wait_stream(self.comm)
            raise
        finally:
            _record(inputs, self.comm)
        tensors = (*inputs, *_tensors(result))
        _record(tensors[len(inputs) :], self.comm)
        _record(tensors, current)
        return result, hook, EventOverlap(EventHandle(self.comm), tensors)


def _record(tensors: Inputs, stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a result: itself, or those in its fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name))
