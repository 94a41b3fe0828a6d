"""What a MoE layer has done: tokens, rows, bytes and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fanfold.representation import show_fields

__all__ = ["MoEStatistics"]

Replays = dict[str, torch.Tensor]


class _Count:
    """An attribute of a dataclass: an int that may still be on its way on a GPU, for which only
    who reads it waits. What replays of CUDA graphs have counted is part of it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> int:
        if instance is None:
            return 0
        return int(vars(instance)[f"_{self._name}"]) + int(_replays(instance).get(self._name, 0))

    def __set__(self, instance: object, value: int | torch.Tensor) -> None:
        vars(instance)[f"_{self._name}"] = value


class _Rows:
    """An attribute of a dataclass: a tensor, to which what replays of CUDA graphs have counted is
    added when it is read. Nothing writes it afterwards."""

    def __get__(self, instance: object | None, owner: type) -> torch.Tensor:
        if instance is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        rows: torch.Tensor = vars(instance)["_expert_rows"]
        replayed = _replays(instance).get("expert_rows")
        return rows if replayed is None else rows.to(replayed.device) + replayed

    def __set__(self, instance: object, value: torch.Tensor) -> None:
        vars(instance)["_expert_rows"] = value


def _replays(instance: object) -> Replays:
    """What replays add to, by the attribute's name; empty if no graph can hold the layer."""
    found: Replays = vars(instance).get("_replays", {})
    return found


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
        tokens: tokens that this rank passed to the layer. Reading it waits for the GPU if the
            layer runs through a :class:`fanfold.FusedMoE` there.
        expert_rows: ``[E_l]`` int64, where the rows are: rows that each local expert computed.
        dispatch_seconds: time that this thread spent in dispatches, forward and backward. On the
            host that is all they take, waiting for peers included. On a GPU only a forward
            dispatch of high throughput waits, for the numbers of rows; the others return when they
            are enqueued.
        combine_seconds: the same for combines, which a GPU's ranks only enqueue.
        fused_seconds: the same for calls of a :class:`fanfold.FusedMoE`, which a GPU's ranks only
            enqueue. These are no dispatches and no combines.
        bytes_sent: row values that left this rank for another in dispatches, as they travel: one
            row for each (token, other rank), and for each top-k entry of another rank's experts
            through a FusedMoE. Reading it waits for the GPU.
        bytes_returned: row values that came back to this rank's tokens in combines, likewise.

    Replays of a CUDA graph that holds the layer are counted too, but their time is not.
    """

    tokens: _Count = _Count()
    expert_rows: _Rows = _Rows()
    dispatch_seconds: float = 0.0
    combine_seconds: float = 0.0
    fused_seconds: float = 0.0
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
        if (replayed := self._captured(name, rows.device)) is not None:
            replayed.add_(rows * row_bytes)
            return
        known = vars(self)[f"_{name}"]
        if isinstance(known, torch.Tensor):
            known = known.to(rows.device)
        setattr(self, name, rows * row_bytes + known)

    def count_rows(self, tokens: int, expert_rows: torch.Tensor) -> None:
        """Adds this rank's tokens of a forward pass, and the rows of its experts."""
        device = expert_rows.device
        if (replayed := self._captured("expert_rows", device)) is not None:
            replayed.add_(expert_rows)
            _replays(self)["tokens"].add_(tokens)
            return
        vars(self)["_tokens"] += tokens
        # On the rows' device, as reading them would wait for it.
        self.expert_rows = vars(self)["_expert_rows"].to(device) + expert_rows

    def prepare_replays(self, device: torch.device) -> None:
        """Makes what CUDA graphs on ``device`` add to, outside of their memory. Until then a graph
        cannot count; graphs that were captured before are counted on."""
        if _replays(self):
            return
        shapes = {"expert_rows": self.expert_rows.shape}
        shapes |= {name: torch.Size() for name in ("tokens", "bytes_sent", "bytes_returned")}
        with torch.inference_mode(False):  # its tensors could not be written outside of it
            vars(self)["_replays"] = {
                name: torch.zeros(shape, dtype=torch.int64, device=device)
                for name, shape in shapes.items()
            }

    def reset(self) -> None:
        """Sets everything to zero."""
        rows = torch.zeros_like(vars(self)["_expert_rows"])
        self.__dict__.update(MoEStatistics(expert_rows=rows).__dict__)
        for replayed in _replays(self).values():
            replayed.zero_()

    def _captured(self, name: str, device: torch.device) -> torch.Tensor | None:
        """What to add to if a CUDA graph is being captured."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return _replays(self).get(name) if capturing else None
