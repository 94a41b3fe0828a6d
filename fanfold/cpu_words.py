"""Numbers that kernels leave for the CPU, which waits for them."""

from __future__ import annotations

import ctypes
import time

import torch

from fanfold.errors import UsageError

__all__ = ["CpuWords"]


class CpuWords:
    """int32 words in pinned memory. A kernel writes them; the CPU reads them when it has ended.

    Args:
        count: of the words.

    Attributes:
        address: where kernels write.
    """

    _NAP_S = 20e-6
    _SPINS = 200

    def __init__(self, count: int) -> None:
        self._tensor = torch.zeros(count, dtype=torch.int32, pin_memory=True, device="cpu")
        self.address = self._tensor.data_ptr()
        self._words = (ctypes.c_int32 * count).from_address(self.address)

    def wait(self, stream: torch.cuda.Stream, timeout_s: float) -> list[int]:
        """The words, when all that is on ``stream`` has run.

        Args:
            stream: on which the kernel is.
            timeout_s: how long the kernel waits for a peer; what was enqueued before it takes time,
                too, so this waits longer.

        Raises:
            UsageError: the stream has not come there in time.
        """
        event = stream.record_event()
        limit_s = 2 * timeout_s + 10
        end = time.monotonic() + limit_s
        looks = 0
        while not event.query():
            looks += 1
            if looks < self._SPINS:
                continue
            if time.monotonic() > end:
                raise UsageError(
                    f"the stream has not come to the end of a call within {limit_s:.3g} s: "
                    "what was enqueued before it takes longer; synchronize first, or raise "
                    "timeout_s (FANFOLD_TIMEOUT_S)"
                )
            time.sleep(self._NAP_S)
        return self._words[:]
