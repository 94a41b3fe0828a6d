"""The obvious alternative on GPUs: one row for each (token, rank), by NCCL's all-to-all.

It does less than Fanfold inside the clock. It knows the routing, so no counts travel;
its rows lie ready, quantised, with their scales; it does not pack by expert; and its experts' rows
come back summed and weighted already, so that the source only adds one row for each rank. What
remains is a gather, NCCL, and a gather with a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fanfold.bench import oracle
from fanfold.bench.check import CheckFailed, packed_fp8, same_bits
from fanfold.bench.workload import Batch

__all__ = ["NcclAllToAll"]

# Rows and their sum are bfloat16.
_TOLERANCE = 2.0**-7


class NcclAllToAll:
    """Dispatch and combine of one known routing. Making one is collective.

    Args:
        batches: of all ranks.
        experts: of all ranks together.
        fp8: rows travel as fp8 with float32 scales, instead of bfloat16.
        device: this rank's GPU.
    """

    def __init__(
        self, batches: Sequence[Batch], experts: int, fp8: bool, device: torch.device
    ) -> None:
        # A group of its own: the default one may be gloo's, which moves host memory.
        self._group: Any = dist.new_group(backend="nccl")
        rank, ranks = dist.get_rank(), len(batches)
        goes = [_goes_to(batch, ranks, experts) for batch in batches]
        own = goes[rank]
        self._batches, self._rank, self._fp8 = batches, rank, fp8
        self._arriving = [each[:, rank].nonzero().flatten() for each in goes]
        self._sent = own.sum(0).tolist()
        self._received = [len(tokens) for tokens in self._arriving]
        # By destination, then token.
        tokens = own.T.nonzero()[:, 1]
        self._leaving = tokens.to(device)
        order = tokens.argsort(stable=True)
        self._back_order = order.to(device)
        bounds = torch.nn.functional.pad(own.sum(1).cumsum(0), (1, 0))
        self._bounds = bounds.to(device)
        self._rows = self._sendable(batches[rank].x).to(device)
        self._fan_out = own.sum(1)
        hidden = batches[rank].x.shape[1]
        self._arrived = self._rows.new_empty((sum(self._received), self._rows.shape[1]))
        self._back = torch.empty((len(tokens), hidden), dtype=torch.bfloat16, device=device)

    def dispatch(self) -> torch.Tensor:
        """The rows for this rank, by source rank, then token: ``[rows, columns]``."""
        rows = self._rows.index_select(0, self._leaving)
        dist.all_to_all_single(self._arrived, rows, self._received, self._sent, group=self._group)
        return self._arrived

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` bfloat16: the sum of what the ranks made of each token's rows.

        Args:
            rows: ``[rows, hidden]`` bfloat16, in the order of :meth:`dispatch`.
        """
        dist.all_to_all_single(self._back, rows, self._sent, self._received, group=self._group)
        return torch.nn.functional.embedding_bag(
            self._back_order, self._back, self._bounds, mode="sum", include_last_offset=True
        )

    def outputs(self) -> torch.Tensor:
        """What this rank sends back: the rows that came, as bfloat16."""
        rows = [
            self._values(batch.x)[tokens]
            for batch, tokens in zip(self._batches, self._arriving, strict=True)
        ]
        return torch.cat(rows).bfloat16().to(self._back.device)

    def check(self) -> None:
        """Runs both and compares them with what must come.

        Raises:
            CheckFailed: naming the first thing that is wrong.
        """
        expected = [
            self._sendable(batch.x)[tokens]
            for batch, tokens in zip(self._batches, self._arriving, strict=True)
        ]
        same_bits("rows of the baseline", self.dispatch().cpu(), torch.cat(expected))
        out = self.combine(self.outputs()).cpu().float()
        own = self._values(self._batches[self._rank].x).bfloat16().float()
        wanted = own * self._fan_out.unsqueeze(1)
        error = (out - wanted).abs() - _TOLERANCE * wanted.abs()
        if error.numel() and float(error.max()) > 1e-6:
            raise CheckFailed(f"combined tokens of the baseline are off by {float(error.max())}")

    def _sendable(self, x: torch.Tensor) -> torch.Tensor:
        return packed_fp8(oracle.quantize_fp8(x)) if self._fp8 else x

    def _values(self, x: torch.Tensor) -> torch.Tensor:
        return oracle.dequantize_fp8(oracle.quantize_fp8(x)) if self._fp8 else x.float()


def _goes_to(batch: Batch, ranks: int, experts: int) -> torch.Tensor:
    """``[T, ranks]`` bool: whether a token has an expert on a rank."""
    rank_of = batch.topk_idx.div(experts // ranks, rounding_mode="floor")
    return torch.stack([(rank_of == rank).any(1) for rank in range(ranks)], dim=1)
