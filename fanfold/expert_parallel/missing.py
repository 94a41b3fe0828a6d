"""Who is left where late peers are masked (``late_peers="mask"``), and what that leaves out."""

from __future__ import annotations

import torch

from fanfold import low_latency
from fanfold.geometry import Geometry, Mode, check_tensor
from fanfold.symmetric import SymmetricMemory
from fanfold.symmetric_cuda import CudaSymmetricMemory

__all__ = ["Survivors", "missing_entries"]


class Survivors:
    """The queries of an ExpertParallel about masked ranks."""

    geometry: Geometry
    mode: Mode
    device: torch.device
    memory: SymmetricMemory | CudaSymmetricMemory
    _low_latency: low_latency.LowLatency

    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are not masked: all of them, but where ``late_peers`` is ``"mask"`` and a
        rank was late. On a GPU this waits for the current stream, and no CUDA graph can hold it.

        Each rank masks for itself. High throughput on GPUs masks no rank.

        Raises:
            UsageError: closed.
        """
        masked = self._masked().tolist()
        return tuple(rank for rank in range(self.geometry.ranks) if not masked[rank])

    def missing(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Which top-k entries get no contribution, because their expert is on a masked rank.

        To renormalise a token's output, divide it by the share of its weights that is left::

            left = (topk_weights * ~ep.missing(topk_idx)).sum(1) / topk_weights.sum(1)

        The masks are those after the calls so far: ask after a combine for what that combine left
        out. Of the call in which a rank is masked, some rows may have arrived: its result is
        undefined for tokens with such an entry. On a GPU this waits for nothing: it is enqueued on
        the current stream, and in a CUDA graph each replay reads the masks anew.

        Args:
            topk_idx: ``[T, top_k]`` int64, as dispatched.

        Returns:
            ``[T, top_k]`` bool, where ``topk_idx`` is; False for -1.

        Raises:
            ArgumentError: ``topk_idx`` is no such tensor.
            UsageError: closed.
        """
        return missing_entries(self.geometry, self._masked(), topk_idx)

    def _masked(self) -> torch.Tensor:
        """``[R]``: not zero for each masked rank."""
        self._check_open()
        if isinstance(self.memory, SymmetricMemory):
            return torch.tensor(self.memory.masked(), dtype=torch.bool, device="cpu")
        if self.mode == "low_latency":
            return self._low_latency.masked()
        return torch.zeros(self.geometry.ranks, dtype=torch.bool, device=self.device)

    def _check_open(self) -> None:
        raise NotImplementedError


def missing_entries(
    geometry: Geometry, masked: torch.Tensor, topk_idx: torch.Tensor
) -> torch.Tensor:
    """See :meth:`Survivors.missing`.

    Args:
        geometry: of the call.
        masked: ``[R]``, not zero for each masked rank.
        topk_idx: of the call.
    """
    shape = ("tokens", geometry.top_k)
    check_tensor("topk_idx", topk_idx, shape, (torch.int64,), contiguous=False)
    last = geometry.num_experts - 1
    ranks = topk_idx.clamp(0, last) // geometry.experts_per_rank
    absent = masked.to(topk_idx.device, torch.bool)[ranks]
    return absent & (topk_idx >= 0) & (topk_idx <= last)
