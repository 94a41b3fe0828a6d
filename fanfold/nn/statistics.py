"""What a MoE layer has done: tokens, rows, bytes and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from fanfold.representation import show_fields

__all__ = ["MoEStatistics"]


class _Count:
    """An attribute of a dataclass: an int that may still be on its way on a GPU, for which only
    who reads it waits."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: object | None, owner: type) -> int:
        return 0 if instance is None else int(vars(instance)[self._name])

    def __set__(self, instance: object, value: int | torch.Tensor) -> None:
        vars(instance)[self._name] = value


@dataclass
class MoEStatistics:
    """What a layer did since it was made or :meth:`reset`, on this rank. A pass that activation
    checkpointing computes again counts again.

        >>> ep = fanfold.LowLatency(num_experts=4, top_k=2, hidden=64, max_tokens=16)
        >>> layer = fanfold.nn.MoE(64, 32, num_experts=4, top_k=2, dispatcher=ep)
        >>> with torch.no_grad():
        ...     out = layer(torch.randn((5, 64), device=ep.device))
        >>> layer.statistics.tokens, int(layer.statistics.expert_rows.sum())
        (5, 10)
        >>> ep.close()

    Attributes:
        tokens: tokens that this rank passed to the layer.
        expert_rows: ``[E_l]`` int64, where the rows are: rows that each local expert computed.
        dispatch_seconds: time that this thread spent in dispatches, forward and backward. On the
            host that is all they take, waiting for peers included. On a GPU only a forward
            dispatch of high throughput waits, for the numbers of rows; the others return when they
            are enqueued.
        combine_seconds: the same for combines, which a GPU's ranks only enqueue.
        bytes_sent: row values that left this rank for another in dispatches, as they travel: one
            row for each (token, other rank). Reading it waits for the GPU.
        bytes_returned: row values that came back to this rank's tokens in combines, likewise.
    """

    tokens: int = 0
    expert_rows: torch.Tensor = field(
        default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu")
    )
    dispatch_seconds: float = 0.0
    combine_seconds: float = 0.0
    bytes_sent: _Count = _Count()
    bytes_returned: _Count = _Count()

    __repr__ = show_fields

    def count_bytes(
        self, name: Literal["bytes_sent", "bytes_returned"], rows: torch.Tensor, row_bytes: int
    ) -> None:
        """Adds to a number of bytes without waiting for anything.

        Args:
            name: the number's.
            rows: how many, an int64 scalar on any device.
            row_bytes: of each.
        """
        known = vars(self)[f"_{name}"]
        if isinstance(known, torch.Tensor):
            known = known.to(rows.device)
        setattr(self, name, rows * row_bytes + known)

    def count_rows(self, tokens: int, expert_rows: torch.Tensor) -> None:
        """Adds this rank's tokens of a forward pass, and the rows of its experts."""
        self.tokens += tokens
        # On the rows' device, as reading them would wait for it.
        self.expert_rows = self.expert_rows.to(expert_rows.device) + expert_rows

    def reset(self) -> None:
        """Sets everything to zero."""
        fresh = MoEStatistics(expert_rows=torch.zeros_like(self.expert_rows))
        self.__dict__.update(fresh.__dict__)
