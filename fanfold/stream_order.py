"""The CUDA streams of one mode, or of the two of an ElasticBuffer: calls follow each other,
whatever streams they are made on."""

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
    """Has every call of a mode come after the one before it, inside of a capture too. A capture
    stands apart: what comes before it, and where it is replayed, is the caller's to order. There is
    one at a time.

    Args:
        device: of the mode, with an index.

    Attributes:
        marks: whether the mode has each call marked, for :meth:`follow_calls`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        self._stream: int | None = 0  # of the last call; None: it was captured
        self._outside = 0  # of the last call that was not
        self._captured: int | None = None  # of the last call, if it was
        self.marks = False
        # Behind the last call, on which stream, and whether it was captured.
        self._mark: tuple[torch.cuda.Event, int, bool] | None = None

    def follow(self) -> int:
        """The current stream, which from here on comes after all earlier calls."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream != self._stream:
            self._change_to(stream)
        return stream

    def mark(self, stream: int) -> None:
        """Marks the end of a call that ``stream``, the current one, has just been given."""
        event = torch.cuda.Event()
        event.record(stream_at(stream, self._device))
        self._mark = (event, stream, torch.cuda.is_current_stream_capturing())

    def follow_calls(self) -> int:
        """The current stream, which from here on comes after the last call, but not after what else
        that call's stream was given since, if the call was marked."""
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        if stream != self._stream:
            self._change_to(stream, self._mark)
        return stream

    def _change_to(
        self, stream: int, mark: tuple[torch.cuda.Event, int, bool] | None = None
    ) -> None:
        captures = torch.cuda.is_current_stream_capturing()
        # The first call of a capture on the stream of the last call came by without a word.
        before = self._outside if self._captured is None or not captures else self._captured
        if before != stream and self._captures(before) == captures:
            if mark is not None and mark[1:] == (before, captures):
                stream_at(stream, self._device).wait_event(mark[0])
            else:
                stream_at(stream, self._device).wait_stream(stream_at(before, self._device))
        if captures:
            self._stream, self._captured = None, stream
            return
        self._stream = self._outside = stream
        if self._captured is not None and not self._captures(self._captured):
            self._captured = None

    def _captures(self, stream: int) -> bool:
        if stream == 0:
            return False  # no capture can begin there, and during some others it must not be asked
        with torch.cuda.stream(stream_at(stream, self._device)):
            return torch.cuda.is_current_stream_capturing()
