"""The obvious alternative: a row for each (token, expert), sent by torch.distributed's all-to-all.

This is what the all-to-all token dispatchers of training frameworks do. The rank sorts its rows by
expert, exchanges counts, exchanges rows, and sorts what came by local expert; on the way back it
undoes both sorts and sums each token's rows with their weights.

It is meant as a fair rival: no loop runs over rows, buffers are kept from call to call (on a CPU,
touching fresh memory costs more than the copy), and the last step is PyTorch's fastest gather and
sum, ``embedding_bag``, which takes the weights in bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["AllToAll", "Routed"]


@dataclass(frozen=True)
class Routed:
    """What one dispatch brought, and the way back.

    Attributes:
        rows: ``[n, columns]``, dtype as sent: by local expert, then source rank, then token. Valid
            until the next call.
        tokens_per_expert: ``[E_l]`` int64.
        order: ``[n]`` int64: place in the order of arrival of each of ``rows``.
        places: ``[n]`` int64: place in ``rows`` of each row in the order of arrival.
        lanes: ``[m]`` int64: the lane (token * top_k + k) of each row sent.
        sent: rows sent to each rank.
        received: rows received from each rank.
        tokens: of this rank.
        top_k: experts per token.
    """

    rows: torch.Tensor
    tokens_per_expert: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    lanes: torch.Tensor
    sent: list[int]
    received: list[int]
    tokens: int
    top_k: int

    def on_host(self) -> Routed:
        """A copy in host memory."""
        names = ("rows", "tokens_per_expert", "order", "places", "lanes")
        moved: dict[str, Any] = {name: getattr(self, name).cpu() for name in names}
        return dataclasses.replace(self, **moved)

    @cached_property
    def leaving(self) -> torch.Tensor:
        """The token of each row sent."""
        return self.lanes // self.top_k

    @cached_property
    def bags(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows that come back lie, token by token, and where each token's begin."""
        per_token = torch.bincount(self.leaving, minlength=self.tokens)
        return self.lanes.argsort(), torch.nn.functional.pad(per_token.cumsum(0), (1, 0))


class AllToAll:
    """Dispatch and combine through one torch.distributed group.

    Args:
        group: the ranks.
        experts: of all ranks.
        top_k: experts per token.
        device: where tensors are: the CPU for gloo, this rank's GPU for NCCL.
    """

    def __init__(
        self, group: Any, experts: int, top_k: int, device: torch.device | None = None
    ) -> None:
        self._device = device or torch.device("cpu")
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._experts = experts
        self._top_k = top_k
        self._buffers: dict[str, torch.Tensor] = {}

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor) -> Routed:
        """Sends row t of ``x`` ``[T, columns]`` once for each entry of ``topk_idx[t]`` (``[T, K]``
        int64, -1 for none) to the rank that holds this expert."""
        experts, lanes = topk_idx.flatten().sort(stable=True)
        nowhere = int(torch.searchsorted(experts, 0))
        experts, lanes = experts[nowhere:], lanes[nowhere:]
        counts = torch.bincount(experts, minlength=self._experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        local = self._experts // self._ranks
        sent = counts.view(self._ranks, local).sum(1).tolist()
        received = arriving.view(self._ranks, local).sum(1).tolist()
        local_expert = torch.arange(local, device=self._device, dtype=torch.int64).repeat(
            self._ranks
        )
        order = local_expert.repeat_interleave(arriving).argsort(stable=True)
        routed = Routed(
            rows=x,
            tokens_per_expert=arriving.view(self._ranks, local).sum(0),
            order=order,
            places=order.argsort(),
            lanes=lanes,
            sent=sent,
            received=received,
            tokens=topk_idx.shape[0],
            top_k=self._top_k,
        )
        return dataclasses.replace(routed, rows=self.rows(x, routed))

    def rows(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Sends ``x`` by the routing of an earlier dispatch: the rows as in :class:`Routed`."""
        permuted = self._select("permuted", x, routed.leaving)
        arrived = self._exchange("arrived", permuted, routed.received, routed.sent)
        return self._select("rows", arrived, routed.order)

    def combine(self, y: torch.Tensor, routed: Routed, topk_weights: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` bfloat16: for each token the sum of its rows of ``y`` (shaped and ordered
        like ``routed.rows``, bfloat16) times ``topk_weights`` ``[T, K]`` float32."""
        arrived = self._select("unsorted", y, routed.places)
        back = self._exchange("back", arrived, routed.sent, routed.received)
        if not len(back):
            return y.new_zeros((routed.tokens, y.shape[1]))
        in_lane_order, bounds = routed.bags
        weights = topk_weights.flatten()[routed.lanes].index_select(0, in_lane_order)
        return torch.nn.functional.embedding_bag(
            in_lane_order,
            back,
            bounds,
            mode="sum",
            per_sample_weights=weights.to(back.dtype),
            include_last_offset=True,
        )

    def _select(self, name: str, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = self._buffer(name, (len(index), rows.shape[1]), rows.dtype)
        return torch.index_select(rows, 0, index, out=out)

    def _exchange(
        self, name: str, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> torch.Tensor:
        """The rows that arrive when ``sent[r]`` of ``rows`` go to each rank r."""
        arrived = self._buffer(name, (sum(received), rows.shape[1]), rows.dtype)
        # As bytes, because gloo does not know every dtype.
        dist.all_to_all_single(
            arrived.view(torch.uint8), rows.view(torch.uint8), received, sent, group=self._group
        )
        return arrived

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size].view(dtype).view(shape)
