"""The part of the symmetric memory into which peers write the rows of dispatches in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fanfold.backends.high_throughput.kernels import DispatchKind
from fanfold.backends.high_throughput.protocol import Rows, apart, check_apart
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.memory import GpuPeerMemory

__all__ = ["Kinds", "Results", "bytes_for_results", "bytes_for_rows"]

Kinds = Sequence[tuple[tuple[int, int], torch.dtype]]
"""Shapes and dtypes of rows and, if there are any, of their scales."""

_LINE = 128


def bytes_for_results(rows: int, hidden: int, itemsize: int, scale_columns: int = 0) -> int:
    """Bytes for ``rows`` rows of a dispatch in place, of values of ``itemsize`` bytes and of
    ``scale_columns`` scales; on every rank the rows, with padding, of the one that gets most."""
    return rows * (hidden * itemsize + 4 * scale_columns) + _LINE


def bytes_for_rows(rows: int, hidden: int, row_format: RowFormat, scale_format: ScaleFormat) -> int:
    """The same for rows of a format, with the scales that it has."""
    scales = scale_columns(hidden, scale_format) if row_format is RowFormat.FP8 else 0
    return bytes_for_results(rows, hidden, row_format.dtype.itemsize, scales)


class Results:
    """Rows begin where the memory does, and scales behind all rows that fit: every rank knows where
    those of the others are, whatever their number in a call.

    Args:
        memory: of the ranks.
        begin: where in it, the same on every rank.
        nbytes: likewise.
    """

    def __init__(self, memory: GpuPeerMemory, begin: int, nbytes: int) -> None:
        # Not the tensor, which would keep all of the memory when it is closed.
        self._memory, self._begin, self._nbytes = memory, begin, nbytes

    @property
    def memory(self) -> torch.Tensor:
        """``[bytes]`` uint8: all of it."""
        return self._memory.tensor[self._begin : self._begin + self._nbytes]

    def check(self, x: Rows) -> None:
        """Raises unless a dispatch of ``x`` can be in place."""
        if self._nbytes == 0:
            raise UsageError("a dispatch in place needs a mode with result_bytes")
        begin = self._memory.base(self._memory.rank) + self._begin
        for part in x if isinstance(x, tuple) else (x,):
            clear = apart(part.data_ptr(), part.nbytes, begin, self._nbytes)
            if not clear or not part.is_contiguous():
                check_apart("x", part, "results in place", self.memory)

    def most_rows(self, kind: DispatchKind) -> int:
        """Rows that fit."""
        return self._most(kind.row_bytes + 4 * kind.scale_words)

    def rows(self, kinds: Kinds) -> list[torch.Tensor]:
        """Rows, and their scales, if there are any: of these shapes and dtypes.

        Raises:
            ArgumentError: they do not fit.
        """
        (count, columns), dtype = kinds[0]
        row_bytes = columns * dtype.itemsize
        each = row_bytes + 4 * sum(words for (_, words), _ in kinds[1:])
        most = self._most(each)
        if count > most:
            bound = (
                f"at most {most} of {each} bytes, as {self._nbytes} bytes are kept for rows in "
                "place (in_place_rows of a HighThroughput, else result_bytes)"
            )
            raise ArgumentError("rows", count, bound)
        memory, begin = self._memory.tensor, self._begin
        made = [_rows_at(memory, begin, count, row_bytes, dtype)]
        for (_, words), scale_dtype in kinds[1:]:
            behind = begin + -(-most * row_bytes // _LINE) * _LINE
            made.append(_rows_at(memory, behind, count, 4 * words, scale_dtype))
        return made

    def _most(self, row_bytes: int) -> int:
        return max(0, self._nbytes - _LINE) // row_bytes


def _rows_at(
    memory: torch.Tensor, begin: int, rows: int, row_bytes: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows one after the other in ``memory``, from byte ``begin`` of it on."""
    at = memory.storage_offset() + begin
    return torch.as_strided(memory, (rows, row_bytes), (row_bytes, 1), at).view(dtype)
