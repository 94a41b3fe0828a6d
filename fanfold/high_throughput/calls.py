"""What the high-throughput mode's backends share: what calls bring, and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fanfold.errors import ArgumentError
from fanfold.geometry import (
    MAX_TOKENS,
    MAX_TOP_K,
    Geometry,
    check_hidden,
    check_integer,
    check_tensor,
    check_topk,
)
from fanfold.representation import worded

__all__ = [
    "MOST_ALIGNMENT",
    "MOST_ROWS",
    "PlaceCheck",
    "RowOrder",
    "Rows",
    "anywhere",
    "check_apart",
    "check_biases",
    "check_capacity",
    "check_lanes",
    "check_layout",
    "check_outputs",
    "check_routing",
    "check_rows",
]

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows to send: ``[T, hidden]``, or such values of a 1-byte dtype and their ``[T, S]`` scales."""

RowOrder = Literal["expert_major", "token_major"]

PlaceCheck = Callable[..., None]
"""Raises ArgumentError for the first of some tensors (by name) that is not where it must be."""

MOST_ROWS = 2**31 - 1  # row numbers are int32
MOST_ALIGNMENT = 1 << 20


def anywhere(**tensors: object) -> None:
    """The PlaceCheck that leaves it to others."""


def check_layout(layout: object) -> None:
    """Raises ArgumentError unless ``layout`` is a :data:`RowOrder`."""
    if layout not in ("expert_major", "token_major"):
        raise ArgumentError("layout", repr(layout), "'expert_major' or 'token_major'")


def check_rows(x: object, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values and scales that ``x`` consists of, after all checks of ``dispatch``."""
    if not isinstance(x, tuple):
        return _check_values("x", x, device), None
    if len(x) != 2:
        raise ArgumentError("x", worded(x), "a torch.Tensor, or a pair of them (values, scales)")
    values = _check_values("x[0]", x[0], device)
    if values.itemsize != 1:
        raise ArgumentError("x[0].dtype", values.dtype, "a 1-byte dtype, as it comes with scales")
    dtypes = (torch.float32, torch.int32)
    shape = (values.shape[0], "scales")
    scales = check_tensor("x[1]", x[1], shape, dtypes, device=device, contiguous=False)
    if not 1 <= scales.shape[1] <= values.shape[1]:
        raise ArgumentError("x[1].shape[1]", scales.shape[1], f"from 1 to {values.shape[1]}")
    return values, scales


def _check_values(name: str, values: object, device: torch.device) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        raise ArgumentError(name, worded(values), "a torch.Tensor of shape (tokens, hidden)")
    check_tensor(name, values, ("tokens", "hidden"), (values.dtype,), device=device)
    check_integer(f"{name}.shape[0]", values.shape[0], 0, MAX_TOKENS)
    check_hidden(values.shape[1], values.itemsize, f"{name}.shape[1]")
    return values


def check_routing(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    tokens: int | None,
    num_experts: int,
    ranks: int,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless this is a routing that ``dispatch`` takes.

    On a GPU the entries of ``topk_idx`` are left to the kernels, as reading them would wait.
    """
    shape = ("tokens" if tokens is None else tokens, "top_k")
    check_tensor("topk_idx", topk_idx, shape, (torch.int64,), device=device)
    top_k = topk_idx.shape[1]
    check_integer("topk_idx.shape[1]", top_k, 1, MAX_TOP_K)
    check_integer("topk_idx.shape[0]", topk_idx.shape[0], 0, MAX_TOKENS)
    Geometry(ranks, num_experts, top_k, hidden=16, max_tokens=0)
    if device.type == "cpu":
        check_topk(topk_idx, topk_idx.shape[0], top_k, num_experts, device)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,),
                     device=device)  # fmt: skip


def check_capacity(capacity: int | None, needed: int) -> None:
    """Raises ArgumentError if more rows arrive than there is room for."""
    if capacity is not None and capacity < needed:
        raise ArgumentError("capacity", capacity, f"at least the {needed} rows that arrive")


def check_outputs(
    y: torch.Tensor,
    allowed: Sequence[int],
    layout: RowOrder,
    row_weights: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless these are outputs that ``combine`` takes.

    Args:
        y: the outputs.
        allowed: the numbers of rows that it may have.
        layout: which order they are in.
        row_weights: their factors, or None.
        device: where they must be.
    """
    check_tensor("y", y, ("rows", "hidden"), (torch.bfloat16,), device=device)
    check_hidden(y.shape[1], 2, "y.shape[1]")
    _check_row_count("y", y, allowed)
    if row_weights is None:
        return
    if layout == "token_major":
        raise ArgumentError("row_weights", "given", "None in token-major order")
    check_tensor("row_weights", row_weights, (y.shape[0],), (torch.float32,), device=device)


def _check_row_count(name: str, tensor: torch.Tensor, allowed: Sequence[int]) -> None:
    if tensor.shape[0] not in allowed:
        bound = " or ".join(str(rows) for rows in allowed)
        raise ArgumentError(f"{name}.shape[0]", tensor.shape[0], f"{bound}, the rows of the plan")


def check_lanes(
    lane_weights: torch.Tensor,
    allowed: Sequence[int],
    layout: RowOrder,
    rows: int | None,
    top_k: int,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless these are numbers of lanes that ``combine`` takes.

    Args:
        lane_weights: the numbers.
        allowed: how many rows they may have.
        layout: which order they are in.
        rows: of the outputs that they come with; None if they come alone.
        top_k: K.
        device: where they must be.
    """
    count = allowed[0] if rows is None and len(allowed) == 1 else "rows" if rows is None else rows
    shape = (count,) if layout == "expert_major" else (count, top_k)
    check_tensor("lane_weights", lane_weights, shape, (torch.float32,), device=device)
    _check_row_count("lane_weights", lane_weights, allowed)


def check_apart(name: str, tensor: torch.Tensor, what: str, other: torch.Tensor) -> None:
    """Raises ArgumentError where ``tensor`` shares memory with ``other``, which rows leave or come
    to in the same call."""
    begin, end = other.data_ptr(), other.data_ptr() + other.nbytes
    # From the first element to the last, whatever the strides.
    first = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((count - 1) * stride for count, stride in steps) + 1 if tensor.numel() else 0
    if first < end and begin < first + span * tensor.itemsize:
        raise ArgumentError(name, f"in the memory of {what}", "apart from it, as rows move there")


def check_biases(
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
    shape: tuple[int, int],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """The tensors that each sum starts from."""
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    if len(biases) > 2:
        raise ArgumentError("bias", f"a tuple of {len(biases)}", "at most two tensors")
    for place, rows in enumerate(biases):
        name = f"bias[{place}]" if isinstance(bias, tuple) else "bias"
        check_tensor(name, rows, shape, (torch.bfloat16,), device=device)
    return biases
