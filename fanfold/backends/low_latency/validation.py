"""Validates the tensors of a low-latency call on a GPU, and writes their addresses into the
arguments of its kernel.

A call goes through ``_core.CudaFastPath`` first, which takes well under a microsecond where PyTorch
(2.10 and later) lets tensors be read from C++, and accepts the tensors that nearly all calls have.
Only what it does not accept comes to :class:`Validation`, which says what is right and what is not.
"""

from __future__ import annotations

import torch

from fanfold import _core
from fanfold.backends.low_latency.outputs import table_of
from fanfold.backends.low_latency.protocol import (
    AnyRouting,
    CudaRouting,
    DeviceCheck,
    RoutingLayout,
    check_outputs,
    check_own,
    check_result,
    check_tokens,
)
from fanfold.backends.low_latency.sizes import core_geometry
from fanfold.errors import ArgumentError
from fanfold.geometry import Geometry, check_aligned

__all__ = ["Validation", "check_apart", "fast_path_of"]


def fast_path_of(
    geometry: Geometry, layout: RoutingLayout, device: torch.device
) -> _core.CudaFastPath:
    """What validates calls of one geometry without Python.

    Args:
        geometry: of the calls.
        layout: of the blocks of their routings.
        device: where tensors must be.
    """
    parts = (layout.table_at, layout.source_tokens_at, layout.row_weights_at)
    like = torch.empty(0, device=device, dtype=torch.float32)
    return _core.CudaFastPath(like, core_geometry(geometry), *(4 * part for part in parts))


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
        _set_tokens(args, x, topk_idx, topk_weights)
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
            _set_topk(args, routing.ranges, topk_idx, weights)
        self._check_devices(out=out)
        result = check_result(out, (tokens, geometry.hidden), self._device)
        check_aligned("out", result)
        check_apart(y, result)
        _set_outputs(args, y, result)
        return result


# ---- what has been checked ----------------------------------------------------------------------


def _set_tokens(
    args: _core.CudaDispatchArgs,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> None:
    """Sets in ``args`` what a dispatch sends."""
    args.tokens, args.x, args.topk_idx = x.shape[0], x.data_ptr(), topk_idx.data_ptr()
    if topk_weights is not None:
        args.topk_weights = topk_weights.data_ptr()


def _set_topk(
    args: _core.CudaCombineArgs,
    ranges: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Sets in ``args`` the routing of a combine with late weights."""
    args.ranges, args.topk_idx = ranges.data_ptr(), topk_idx.data_ptr()
    args.topk_weights = topk_weights.data_ptr()


def _set_outputs(args: _core.CudaCombineArgs, y: torch.Tensor, out: torch.Tensor) -> None:
    """Sets in ``args`` what a combine reads and writes; ``y`` may have gaps between its rows."""
    args.tokens, args.y, args.out = out.shape[0], y.data_ptr(), out.data_ptr()
    args.expert_stride, args.row_stride = 2 * y.stride(0), 2 * y.stride(1)


# ---- what the kernels ask for beyond the other backends -----------------------------------------


def check_apart(y: torch.Tensor, out: torch.Tensor) -> None:
    """Checks that ``out`` (contiguous) shares no memory with the rows of ``y``: a peer's sums
    arrive while this rank's rows are still being read.

    Raises:
        ArgumentError: it does.
    """
    experts, rows, hidden = y.shape
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    step, row = 2 * y.stride(1), 2 * hidden
    for expert in range(experts if begin < end else 0):
        first = y.data_ptr() + 2 * expert * y.stride(0)
        # The first row of this expert that ends behind out's beginning.
        place = 0 if step == 0 else max(0, (begin - row - first) // step + 1)
        at = first + place * step
        if place < rows and begin - row < at < end:
            raise ArgumentError(
                "out",
                f"{out.nbytes} bytes at {hex(begin)}, where y has row {place} of expert {expert}",
                "memory of its own: y is read while out is written",
            )
