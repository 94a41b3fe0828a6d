"""Pins memory of this process, so that a GPU's kernels read and write it at its address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from fanfold.errors import SystemFailure

__all__ = ["PinnedRanges"]


class PinnedRanges:
    """Ranges of pages that are pinned, of memory that stays mapped meanwhile."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}  # bytes by address

    def change(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Has ``ranges`` (address, bytes) pinned and no others. No kernel uses those that go.

        Raises:
            SystemFailure: CUDA pins no more; then none is pinned.
        """
        wanted = dict(ranges)
        for address in [each for each in self._ranges if self._ranges[each] != wanted.get(each)]:
            _unpin(address)
            del self._ranges[address]
        for address, nbytes in wanted.items():
            if address in self._ranges:
                continue
            try:
                _pin(address, nbytes)
            except RuntimeError as failure:
                total = sum(wanted.values())
                self.close()
                raise SystemFailure(
                    f"CUDA did not pin {nbytes} of {total} bytes of this process's memory, through "
                    f"which kernels reach ranks on other hosts ({failure}): lower max_tokens"
                ) from failure
            self._ranges[address] = nbytes

    def close(self) -> None:
        """Unpins all. No kernel uses them any more. Harmless when repeated."""
        while self._ranges:
            address, _ = self._ranges.popitem()
            with contextlib.suppress(RuntimeError, AssertionError):  # CUDA is lost
                _unpin(address)


def _pin(address: int, nbytes: int) -> None:
    _check(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def _unpin(address: int) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(address))


def _check(code: int) -> None:
    torch.cuda.check_error(int(code))
