"""Outputs that a low-latency combine sends from where they were written."""

from __future__ import annotations

import torch

from fanfold.deep_ep.events import EventHandle, EventOverlap
from fanfold.deep_ep.streams import HostStreams, Streams
from fanfold.errors import ArgumentError
from fanfold.geometry import check_tensor

__all__ = ["ZeroCopy"]


class ZeroCopy:
    """Where outputs are put for combines that take them from there, and when the last of these has
    read them.

    Args:
        device: of the outputs.

    Attributes:
        tensor: the outputs; None before anybody asked for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor: torch.Tensor | None = None
        self._device = device
        self._has_streams = device.type == "cuda"
        self._read: EventHandle | None = None
        self._captured: list[torch.Tensor] = []  # that CUDA graphs read and write when replayed

    def take(self, shape: tuple[int, ...], streams: HostStreams | Streams) -> torch.Tensor:
        """The tensor, bfloat16, to which the current stream may write from here on.

        Args:
            shape: of the outputs.
            streams: of the Buffer.
        """
        if self._has_streams:
            self._await_reader(streams)
        if self.tensor is None or self.tensor.shape != shape:
            self.tensor = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        if self._has_streams and torch.cuda.is_current_stream_capturing():
            self._keep(self.tensor)
        return self.tensor

    def _keep(self, tensor: torch.Tensor) -> None:
        """Keeps ``tensor`` as long as this object: nobody knows when the graph has gone."""
        if all(kept is not tensor for kept in self._captured):
            self._captured.append(tensor)

    def was_given(self, event: EventOverlap) -> None:
        """Says that a combine, which has this event, reads the tensor."""
        if self._has_streams and not torch.cuda.is_current_stream_capturing():
            self._read = event.event or EventHandle()

    def outputs(
        self, x: torch.Tensor, shape: tuple[int, ...], use_logfmt: bool, zero_copy: bool
    ) -> torch.Tensor:
        """The experts' outputs of a combine: ``x``, or with ``zero_copy`` the tensor.

        Args:
            x: ``shape``, bfloat16.
            shape: of the outputs.
            use_logfmt, zero_copy: as in ``low_latency_combine``.

        Raises:
            ArgumentError: ``x`` is not as it must be, or there is no tensor of this shape.
        """
        check_tensor("x", x, shape, (torch.bfloat16,), device=self._device, contiguous=False)
        if not zero_copy:
            return x
        if use_logfmt:
            raise ArgumentError("zero_copy", "True with use_logfmt=True", "used without LogFMT")
        written = self.tensor
        if written is None or written.shape != shape:
            raise ArgumentError(
                "zero_copy",
                "True, but the zero-copy buffer was not asked for",
                "preceded by get_next_low_latency_combine_buffer(handle)",
            )
        return written

    def _await_reader(self, streams: HostStreams | Streams) -> None:
        if not torch.cuda.is_current_stream_capturing():
            if self._read is not None:
                self._read.current_stream_wait()
            return
        # Within a capture nothing outside of it may be waited for. A combine in the capture has
        # run on the current stream, or on one that was forked from it.
        with torch.cuda.stream(streams.comm):
            forked = torch.cuda.is_current_stream_capturing()
        if forked:
            torch.cuda.current_stream().wait_stream(streams.comm)
