"""Validates the tensors of a call that :mod:`fanfold.backends.low_latency.fast_path` did not
accept: raises what is wrong with them, or fills in the kernel's arguments itself."""

from __future__ import annotations

import torch

from fanfold import _core
from fanfold.backends.low_latency.fast_path import check_apart, set_outputs, set_tokens, set_topk
from fanfold.backends.low_latency.outputs import table_of
from fanfold.backends.low_latency.protocol import (
    AnyRouting,
    CudaRouting,
    DeviceCheck,
    check_outputs,
    check_own,
    check_result,
    check_tokens,
)
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, check_aligned

__all__ = ["Validation"]


class Validation:
    """Looks at tensors that should be on ``device``.

    Args:
        device: a GPU.
        check_devices: raises for tensors (by name) that are elsewhere, and says why.
    """

    def __init__(self, device: torch.device, check_devices: DeviceCheck) -> None:
        self._device = device
        self._check_devices = check_devices

    def dispatch(
        self,
        geometry: Geometry,
        args: _core.CudaDispatchArgs,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> int:
        """The number of tokens of a dispatch; see :meth:`LowLatencyBackend.dispatch`."""
        self._check_devices(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        check_tokens(geometry, x, topk_idx, topk_weights, self._device)
        check_aligned("x", x)
        set_tokens(args, x, topk_idx, topk_weights)
        return x.shape[0]

    def combine(
        self,
        geometry: Geometry,
        args: _core.CudaCombineArgs,
        y: torch.Tensor,
        routing: AnyRouting,
        late: tuple[torch.Tensor | None, torch.Tensor | None] | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """The tensor that a combine writes to; with late weights ``late`` has its topk_idx and
        those weights. See :meth:`LowLatencyBackend.combine`."""
        if late is not None and isinstance(routing, CudaRouting):
            raise ArgumentError("routing", "of a dispatch with weights", "of this mode's dispatch")
        self._check_devices(y=y)
        check_outputs(geometry, y, routing.ranges, self._device)
        check_aligned("y", y)
        if y.stride(0) % 8 or y.stride(1) % 8:
            raise ArgumentError("y.stride()", y.stride(), "rows on 16-byte boundaries")
        if late is None:
            tokens = routing.tokens  # type: ignore[union-attr]
            args.table = table_of(routing)
        else:
            topk_idx, weights = late
            self._check_devices(topk_idx=topk_idx, topk_weights=weights)
            if topk_idx is None or weights is None:
                raise ArgumentError("topk_weights", "None", "given, with topk_idx")
            tokens = check_own(geometry, topk_idx, weights, self._device)
            set_topk(args, routing.ranges, topk_idx, weights)
        self._check_devices(out=out)
        result = check_result(out, (tokens, geometry.hidden), self._device)
        check_aligned("out", result)
        check_apart(y, result)
        set_outputs(args, y, result)
        return result
