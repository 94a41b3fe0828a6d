"""The CUDA streams of one mode: calls follow each other, whatever streams they are made on."""

from __future__ import annotations

import torch

__all__ = ["StreamOrder", "stream_at"]


def stream_at(address: int, device: torch.device) -> torch.cuda.Stream:
    """The stream that PyTorch calls by ``address``; 0 is the default one."""
    # For an ExternalStream, 0 is no address: it would be another stream of PyTorch's pool.
    if address == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(address, device=device)


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
        earlier = stream_at(before, self._device)
        with torch.cuda.stream(earlier):
            if torch.cuda.is_current_stream_capturing():
                return
        stream_at(stream, self._device).wait_stream(earlier)
