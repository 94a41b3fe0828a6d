"""What kernels find wrong, in pinned memory that they write and the host reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from fanfold.errors import FanfoldError, PeerTimeout, SignalTimeout, logged

__all__ = ["KernelReports"]


class KernelReports:
    """Four words for each kind of report, of which the first is 0 or tells a call.

    The host only reads them, so no report is lost to a race; it remembers which it has raised.

    Args:
        nbytes: of all kinds.
        explain: raises what is known of an error's cause, if anything is.

    Attributes:
        address: where kernels write.
    """

    def __init__(self, nbytes: int, explain: Callable[[FanfoldError], None] | None = None) -> None:
        self._explain = explain
        self._tensor = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        self.address = self._tensor.data_ptr()
        self._words = (ctypes.c_int32 * (nbytes // 4)).from_address(self.address)
        self._raised: dict[int, tuple[int, int]] = {}

    def _explained(self, error: FanfoldError) -> FanfoldError:
        """``error``, which is logged if it says that somebody was late.

        Raises:
            FanfoldError: what ``explain`` raises instead.
        """
        if self._explain is not None:
            self._explain(error)
        return logged(error) if isinstance(error, (PeerTimeout, SignalTimeout)) else error

    def _is_new(self, kind: int) -> bool:
        call, epoch = self._words[4 * kind], self._words[4 * kind + 1]
        # Several ranks may refuse one call; it is reported once.
        return call != 0 and self._raised.get(kind) != (call & 0xFF, epoch)

    @staticmethod
    def _choice(second: int) -> tuple[int, int | str]:
        """The place in its token's row and the value of a bad expert index (layout/reports.h)."""
        value = (second & 0xFFFFFF) - ((second & 0x800000) << 1)
        beyond = {0x7FFFFF: f"{value} or more", -0x800000: f"{value} or less"}
        return second >> 24 & 0xFF, beyond.get(value, value)
