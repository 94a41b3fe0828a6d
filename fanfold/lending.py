"""Tensors as the C++ core gets them: on the CPU never an address without the bytes behind it."""

from __future__ import annotations

import torch

__all__ = ["Lent", "address_of", "lend", "lend_if_given"]

Lent = tuple[int, int]
"""An address and how many bytes may be read and written there."""


def lend(tensor: torch.Tensor) -> Lent:
    """The memory of ``tensor``, from its first element to the end of its last.

    Args:
        tensor: on the CPU, of any shape, dtype and (non-negative) strides. It must outlive the call
            that it is lent to.
    """
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), elements * tensor.itemsize


def lend_if_given(tensor: torch.Tensor | None) -> Lent | None:
    """The same for a tensor that may be left out."""
    return None if tensor is None else lend(tensor)


def address_of(tensor: torch.Tensor | None) -> int:
    """Where a tensor on a GPU begins, for a kernel's arguments; 0 for one that is left out."""
    return 0 if tensor is None else tensor.data_ptr()
