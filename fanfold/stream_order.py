"""The CUDA streams of one mode: calls follow each other, whatever streams they are made on."""

from __future__ import annotations

import torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """Has every call of a mode come after the one before it.

    Args:
        device: of the mode, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        self._stream = 0

    def follow(self) -> int:
        """The current stream, which from here on comes after all earlier calls."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            # A capture stands apart: what comes before it is the caller's to order.
            self._order_after(self._stream, stream)
            self._stream = stream
        return stream

    def _order_after(self, before: int, stream: int) -> None:
        earlier = torch.cuda.ExternalStream(before, device=self._device)
        with torch.cuda.stream(earlier):
            if torch.cuda.is_current_stream_capturing():
                return
        torch.cuda.ExternalStream(stream, device=self._device).wait_stream(earlier)
