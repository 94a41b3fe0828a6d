"""The fused MoE layer on the CPU: dispatch of the slots, the experts in PyTorch, combine."""

from __future__ import annotations

import dataclasses

import torch

from fanfold.base_dispatcher import GroupLike
from fanfold.config import Config
from fanfold.fused_moe.call import FusedCall
from fanfold.fused_moe.experts import grouped_experts
from fanfold.geometry import Geometry
from fanfold.group import agree, as_group
from fanfold.high_throughput import HighThroughput
from fanfold.refusal import Refusing

__all__ = ["HostLayer"]

_CPU = torch.device("cpu")


class HostLayer:
    """Calls of a layer on the CPU. Construction is collective.

    A row for each (token, slot): the results of slots return one by one, and are summed in the
    order of slots. Low latency would need memory for all of them on every expert; high throughput
    streams any number through a little memory.

    Args:
        group: of the ranks.
        geometry: of the layer.
        config: the settings.
    """

    def __init__(self, group: GroupLike, geometry: Geometry, config: Config) -> None:
        self._group, self._top_k = group, geometry.top_k
        self._dispatcher = HighThroughput(
            group,
            num_experts=geometry.num_experts,
            top_k=1,
            hidden=geometry.hidden,
            max_tokens=geometry.max_tokens * geometry.top_k,
            dispatch_dtype="fp8",
            config=dataclasses.replace(config, backend="host"),
        )

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._dispatcher.rank

    def refuse(self, error: BaseException) -> None:
        """Aborts this call on all ranks because of ``error``."""
        self._dispatcher.refuse_dispatch(error)

    def run(self, call: FusedCall) -> torch.Tensor:
        """See :meth:`fanfold.FusedMoE.forward`; the call is checked."""
        ep, each = self._dispatcher, self._top_k
        with Refusing(ep.refuse_dispatch):
            values, scales = call.quantized()
            rows = values.view(torch.uint8).repeat_interleave(each, dim=0).view(values.dtype)
            row_scales = scales.repeat_interleave(each, dim=0)
        topk_weights = call.topk_weights.view(-1, 1)
        received = ep.dispatch((rows, row_scales), call.topk_idx.view(-1, 1), topk_weights)
        with Refusing(ep.refuse_combine):
            assert received.scales is not None
            assert received.weights is not None
            y = grouped_experts(
                (received.tokens, received.scales),
                received.weights,
                received.expert_ranges(),
                call.weights,
                call.clamp,
            )
            shared = self._shared_result((values, scales), call)
        slots = ep.combine(y, received, weighted=False).view(len(values), each, values.shape[1])
        total = torch.zeros(values.shape, dtype=torch.float32, device=_CPU)
        for slot in range(each):
            total += slots[:, slot]
        if shared is not None:
            total += shared
        if call.statistics is not None:
            call.statistics.add_(received.tokens_per_expert)
        return total.bfloat16() if call.out is None else call.out.copy_(total)

    def prepare_shared_expert(self, intermediate: int) -> None:
        """Nothing has to be loaded."""
        agree(as_group(self._group), {"intermediate": intermediate})

    def check(self) -> None:
        """Nothing is found later than in its call."""

    def close(self) -> None:
        """Releases the memory."""
        self._dispatcher.close()

    @staticmethod
    def _shared_result(
        tokens: tuple[torch.Tensor, torch.Tensor], call: FusedCall
    ) -> torch.Tensor | None:
        """``[n, hidden]`` bfloat16, or None without a shared expert."""
        if call.shared_expert is None:
            return None
        count = tokens[0].shape[0]
        ones = torch.ones(count, dtype=torch.float32, device=_CPU)
        return grouped_experts(tokens, ones, [(0, count)], call.shared_expert, call.clamp)
