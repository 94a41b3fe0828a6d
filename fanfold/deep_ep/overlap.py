"""The arguments by which a low-latency combine begins before all outputs are written: those of the
DeepEP branches that SGLang's single-batch overlap uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.backends.low_latency import ReadyRows
from fanfold.deep_ep.sizes import check_count
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, check_tensor
from fanfold.representation import worded

__all__ = ["Overlap"]

_MOST = 2**31 - 1  # signals are compared as int32


@dataclass(frozen=True)
class Overlap:
    """The arguments of ``low_latency_combine`` with ``overlap=True``, unchecked."""

    packed_recv_count: torch.Tensor | None
    comp_signal: torch.Tensor | None
    block_m: int
    threshold: int
    num_sms: int
    src_signals: torch.Tensor | None
    src_signal_expect_value: int

    def ready_rows(self, y: torch.Tensor, geometry: Geometry) -> ReadyRows:
        """The outputs as the mode takes them.

        Args:
            y: the outputs, checked.
            geometry: of the call.

        Raises:
            ArgumentError: neither or both kinds of signals, or one argument is not as it must be.
        """
        if (self.comp_signal is None) == (self.src_signals is None):
            given = "neither" if self.comp_signal is None else "both"
            raise ArgumentError(
                "overlap", f"True with {given}", "with either comp_signal or src_signals"
            )
        check_count("num_sms", self.num_sms, 1)
        local, device = geometry.experts_per_rank, y.device
        counts = self.packed_recv_count
        if counts is not None:
            check_tensor("packed_recv_count", counts, (local,), (torch.int32,), device=device)
        if self.src_signals is not None:
            _check_bound("src_signal_expect_value", self.src_signal_expect_value)
            dtypes = (torch.uint32, torch.int32)
            signals = _check_signals("src_signals", self.src_signals, dtypes, device)
            _check_enough("src_signals", signals, local, "one for each local expert")
            rows, bound = geometry.expert_capacity, self.src_signal_expect_value
            return ReadyRows(y, signals, max(rows, 1), bound, self.num_sms)
        check_count("block_m", self.block_m, 1)
        _check_bound("threshold", self.threshold)
        signals = _check_signals("comp_signal", self.comp_signal, (torch.int32,), device)
        rows = max(min(self.block_m, geometry.expert_capacity), 1)
        ready = ReadyRows(y, signals, rows, self.threshold, self.num_sms)
        blocks = ready.blocks(geometry.expert_capacity)
        why = (
            f"{blocks} for each of {local} local experts, as block_m={self.block_m} divides their "
            f"{geometry.expert_capacity} rows"
        )
        _check_enough("comp_signal", signals, local * blocks, why)
        return ready


def _check_bound(name: str, value: object) -> None:
    """Raises ArgumentError unless a signal that began as 0 can wait for ``value``."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        bound = f"an integer from 1 to {_MOST}: with 0 every row would count as written"
        raise ArgumentError(name, worded(value), bound)


def _check_signals(
    name: str, signals: object, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """``signals`` if they are contiguous, of one of the dtypes and on ``device``."""
    shape: tuple[int | str, ...] = ("signals",)
    if isinstance(signals, torch.Tensor):
        shape = tuple(signals.shape)  # any shape, read in order
    return check_tensor(name, signals, shape, dtypes, device=device)


def _check_enough(name: str, signals: torch.Tensor, needed: int, why: str) -> None:
    if signals.numel() < needed:
        bound = f"at least {needed}: {why}"
        raise ArgumentError(f"{name}.numel()", worded(signals.numel()), bound)
