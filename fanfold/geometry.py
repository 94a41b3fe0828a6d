"""Sizes of an expert-parallel layer, and every check on them and on the tensors they describe.

No size is taken from a list: each is bounded only by what an encoding can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fanfold.errors import ArgumentError
from fanfold.representation import show_fields, worded

__all__ = [
    "MAX_EXPERTS",
    "MAX_TOP_K",
    "Geometry",
    "Mode",
    "check_activations",
    "check_aligned",
    "check_flag",
    "check_hidden",
    "check_integer",
    "check_tensor",
    "check_topk",
    "is_plain",
    "on_device",
]

Mode = Literal["low_latency", "high_throughput"]

MAX_EXPERTS = 32767  # expert indices travel as int16
MAX_TOP_K = 32
MAX_HIDDEN = 65536
MAX_TOKENS = 1 << 24
MIN_HIDDEN = 16


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    device: torch.device | None = None,
    contiguous: bool = True,
) -> torch.Tensor:
    """``tensor`` if it has the given shape (a name for any size), one of the dtypes, the device.

    Raises:
        ArgumentError: naming ``name``, what it is and what it must be.
    """
    if not isinstance(tensor, torch.Tensor):
        bound = f"a torch.Tensor of shape {_written(shape)} and dtype {_any_of(dtypes)}"
        raise ArgumentError(name, worded(tensor), bound)
    if tensor.dtype not in dtypes:
        raise ArgumentError(f"{name}.dtype", tensor.dtype, _any_of(dtypes))
    if tensor.dim() != len(shape) or any(
        isinstance(size, int) and actual != size
        for actual, size in zip(tensor.shape, shape, strict=True)
    ):
        raise ArgumentError(f"{name}.shape", tuple(tensor.shape), _written(shape))
    if device is not None and not on_device(tensor, device):
        raise ArgumentError(f"{name}.device", tensor.device, f"{device}, as the group's backend is")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name}.layout", tensor.layout, "torch.strided: call .to_dense()")
    if contiguous and not tensor.is_contiguous():
        bound = "contiguous, with the last dimension innermost: call .contiguous()"
        raise ArgumentError(f"{name}.stride()", tensor.stride(), bound)
    return tensor


def check_activations(
    name: str, x: object, hidden: int, max_tokens: int, device: torch.device
) -> None:
    """Checks the input of a layer: ``[..., hidden]`` of a floating dtype, at most ``max_tokens``.

    Raises:
        ArgumentError: naming ``name``, what it is and what it must be.
    """
    if not isinstance(x, torch.Tensor):
        bound = f"a torch.Tensor of shape (..., {hidden}) and a floating dtype"
        raise ArgumentError(name, worded(x), bound)
    if not x.is_floating_point():
        raise ArgumentError(f"{name}.dtype", x.dtype, "a floating dtype")
    if x.dim() == 0 or x.shape[-1] != hidden:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), f"(..., {hidden})")
    if not on_device(x, device):
        raise ArgumentError(f"{name}.device", x.device, f"{device}, as the layer's parameters are")
    tokens = x.shape[:-1].numel()
    if tokens > max_tokens:
        bound = f"at most the max_tokens of the dispatcher, {max_tokens}"
        raise ArgumentError(f"{name}.shape", f"{tuple(x.shape)}, {tokens} tokens", bound)


def _written(shape: tuple[int | str, ...]) -> str:
    """``(tokens, 64)``."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _any_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(map(str, dtypes))


def is_plain(
    tensor: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether ``tensor`` is contiguous, with this shape and dtype, on this very device.

    The fast path of validation: :func:`check_tensor` accepts every such tensor. It also accepts
    others, a subclass for example, so call it for a tensor that is not plain.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.is_contiguous()
        and tensor.device == device
    )


def on_device(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``; a device without an index matches all of its kind."""
    actual = tensor.device
    return actual.type == device.type and device.index in (None, actual.index)


def check_hidden(hidden: int, element_bytes: int, name: str = "hidden") -> None:
    """Rows are moved 16 bytes at a time, so a row must be a multiple of that."""
    if not MIN_HIDDEN <= hidden <= MAX_HIDDEN:
        raise ArgumentError(name, hidden, f"from {MIN_HIDDEN} to {MAX_HIDDEN}")
    if hidden * element_bytes % 16:
        step = 16 // element_bytes
        raise ArgumentError(
            name, hidden, f"a multiple of {step}: a row must be a multiple of 16 bytes"
        )


def check_topk(
    topk_idx: object, tokens: int, top_k: int, num_experts: int, device: torch.device
) -> torch.Tensor:
    """``topk_idx`` if it is ``[tokens, top_k]`` int64 with entries from -1 to num_experts - 1.

    Raises:
        ArgumentError: naming the first offending entry and its place.
    """
    checked = check_tensor("topk_idx", topk_idx, (tokens, top_k), (torch.int64,), device=device)
    if checked.numel() == 0:
        return checked
    low, high = (int(bound) for bound in checked.aminmax())
    if low < -1 or high >= num_experts:
        wrong = ((checked < -1) | (checked >= num_experts)).nonzero()[0].tolist()
        value = int(checked[wrong[0], wrong[1]])
        raise ArgumentError(
            f"topk_idx[{wrong[0]}, {wrong[1]}]", value, f"from -1 (none) to {num_experts - 1}"
        )
    return checked


@dataclass(frozen=True)
class Geometry:
    """What every rank must agree about.

    Attributes:
        ranks: size of the expert-parallel group.
        num_experts: experts of all ranks together; rank r holds experts
            ``r * num_experts / ranks`` and the following ``num_experts / ranks - 1``.
        top_k: experts per token.
        hidden: columns of a row.
        max_tokens: most tokens that one rank may pass to one call.
    """

    ranks: int
    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Checks every bound.

        Raises:
            ArgumentError: for the first one that does not hold.
        """
        check_integer("ranks", self.ranks, 1, MAX_EXPERTS)  # each has an expert
        check_integer("num_experts", self.num_experts, 1, MAX_EXPERTS)
        if self.num_experts % self.ranks:
            raise ArgumentError(
                "num_experts", self.num_experts, f"divisible by the {self.ranks} ranks"
            )
        check_integer("top_k", self.top_k, 1, MAX_TOP_K)
        check_integer("hidden", self.hidden, MIN_HIDDEN, MAX_HIDDEN)
        check_hidden(self.hidden, 2)
        check_integer("max_tokens", self.max_tokens, 0, MAX_TOKENS)

    @property
    def experts_per_rank(self) -> int:
        """Local experts of each rank."""
        return self.num_experts // self.ranks

    @property
    def expert_capacity(self) -> int:
        """Most rows one local expert can receive in low latency: ranks x max_tokens."""
        return self.ranks * self.max_tokens


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raises ArgumentError unless ``value`` is an integer from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(name, worded(value), f"an integer from {low} to {high}")
    if not low <= value <= high:
        raise ArgumentError(name, value, f"from {low} to {high}")


def check_flag(name: str, value: object) -> bool:
    """``value``. Raises ArgumentError unless it is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(name, worded(value), "a bool")
    return value


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Checks what kernels on GPUs read and write 16 bytes at a time.

    Raises:
        ArgumentError: its address is no multiple of 16.
    """
    address = tensor.data_ptr()
    if address % 16:
        raise ArgumentError(f"{name}.data_ptr()", hex(address), "on a 16-byte boundary")
