"""High throughput on the host for tensors of any device: in through host memory, and out again.

Where the ranks' GPUs cannot run a mode's kernels, tensors may still lie on them. Every tensor is
copied twice then, and the CPU waits for the device each time: slow, but right on every device that
PyTorch knows. CPU tensors pass through as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fanfold.backends.high_throughput.host import Dispatched, HostHighThroughput, Plan
from fanfold.backends.high_throughput.protocol import RowOrder, Rows
from fanfold.backends.staging import Staging
from fanfold.geometry import check_tensor
from fanfold.refusal import Refusing

__all__ = ["StagedHighThroughput"]


class StagedHighThroughput:
    """A :class:`HighThroughputBackend` around the host's.

    Args:
        host: does the work. What fails while tensors are copied is refused through it.
    """

    device = torch.device("cpu")

    def __init__(self, host: HostHighThroughput) -> None:
        self._host = host

    def check_devices(self, **tensors: object) -> None:
        """Raises ArgumentError if the tensors of one call are on different devices."""
        Staging(**tensors)

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        **options: Any,
    ) -> Dispatched:
        """See :meth:`HighThroughputBackend.dispatch`."""
        with Refusing(self._host.refuse_dispatch):
            staging = Staging(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
            x, topk_idx, topk_weights = staging.host((x, topk_idx, topk_weights))
        return _back(
            self._host.dispatch(x, topk_idx, topk_weights, **options),
            staging,
        )

    def dispatch_cached(
        self,
        x: Rows,
        plan: Plan,
        *,
        layout: RowOrder,
        in_place: bool = False,
    ) -> Dispatched:
        """See :meth:`HighThroughputBackend.dispatch_cached`."""
        with Refusing(self._host.refuse_dispatch):
            staging = Staging(x=x)
            x = staging.host(x)
        dispatched = self._host.dispatch_cached(x, plan, layout=layout, in_place=in_place)
        return _back(dispatched, staging)

    def combine(
        self,
        y: torch.Tensor,
        plan: Plan,
        *,
        layout: RowOrder,
        row_weights: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :meth:`HighThroughputBackend.combine`."""
        with Refusing(self._host.refuse_combine):
            tensors = {"y": y, "row_weights": row_weights, "topk_weights": topk_weights}
            staging = Staging(**tensors, bias=bias, out=out)
            y, row_weights, topk_weights, bias = staging.host((y, row_weights, topk_weights, bias))
            if staging.needed and out is not None:
                columns = "hidden" if y.dim() != 2 else y.shape[1]
                check_tensor("out", out, (_tokens_of(plan), columns), (torch.bfloat16,))
        result, slots = self._host.combine(
            y,
            plan,
            layout=layout,
            row_weights=row_weights,
            topk_weights=topk_weights,
            bias=bias,
            out=None if staging.needed else out,
        )
        return staging.result(result, out), staging.back(slots)

    def combine_weights(
        self, topk_weights: torch.Tensor, plan: Plan, *, layout: RowOrder
    ) -> torch.Tensor:
        """See :meth:`HighThroughputBackend.combine_weights`."""
        with Refusing(self._host.refuse_combine):
            staging = Staging(topk_weights=topk_weights)
            topk_weights = staging.host(topk_weights)
        return staging.back(self._host.combine_weights(topk_weights, plan, layout=layout))

    def use_sms(self, sms: int | None) -> None:
        """See :meth:`HighThroughputBackend.use_sms`."""
        self._host.use_sms(sms)

    def use_zero_padding(self, zeros: bool) -> None:
        """See :meth:`HighThroughputBackend.use_zero_padding`."""
        self._host.use_zero_padding(zeros)

    def check(self) -> None:
        """See :meth:`HighThroughputBackend.check`."""
        self._host.check()

    def refuse_dispatch(self, error: BaseException, plan: object = None) -> None:
        """See :meth:`HighThroughputBackend.refuse_dispatch`."""
        self._host.refuse_dispatch(error, plan)

    def refuse_combine(self, error: BaseException, plan: object = None) -> None:
        """See :meth:`HighThroughputBackend.refuse_combine`."""
        self._host.refuse_combine(error, plan)


def _back(dispatched: Dispatched, staging: Staging) -> Dispatched:
    """What the caller gets, where the caller's tensors are; the plan and what later calls read of
    it stay on the host."""
    if not staging.needed:
        return dispatched
    return dataclasses.replace(
        dispatched,
        tokens=staging.back(dispatched.tokens),
        scales=staging.back(dispatched.scales),
        row_weights=staging.back(dispatched.row_weights),
        offsets=staging.back(dispatched.offsets),
        tokens_per_expert=staging.back(dispatched.tokens_per_expert),
    )


def _tokens_of(plan: object) -> int | str:
    return plan.tokens if isinstance(plan, Plan) else "tokens"
