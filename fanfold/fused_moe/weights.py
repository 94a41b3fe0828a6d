"""Weights of FP8 experts: their format, checks and conversions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.errors import ArgumentError
from fanfold.formats import BLOCK, E4M3_MAX
from fanfold.geometry import check_integer, check_tensor
from fanfold.representation import show_fields

__all__ = ["ExpertWeights", "check_columns", "dequantize_weights", "quantize_weights"]

_SMALLEST_AMAX = 1e-30  # 448 divided by it is finite


def check_columns(name: str, value: object, most: int) -> None:
    """Raises ArgumentError unless ``value`` is a multiple of 128, at most ``most``."""
    check_integer(name, value, BLOCK, most)
    if isinstance(value, int) and value % BLOCK:
        raise ArgumentError(name, value, f"a multiple of {BLOCK}, the columns of a scale")


def quantize_weights(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values of a matrix, or of several, with a scale for each block of 128 x 128.

    ``scale = amax / 448`` and ``value = e4m3(weight * (448 / amax))``, in FP32, with ``amax =
    max(amax(|block|), 1e-30)``.

        >>> w = torch.randn(4, 256, 128, dtype=torch.bfloat16, device="cpu")
        >>> values, scales = fanfold.fused_moe.quantize_weights(w)
        >>> values.dtype, scales.shape
        (torch.float8_e4m3fn, torch.Size([4, 2, 1]))

    Args:
        weights: ``[..., N, K]`` bfloat16 or float32, N and K multiples of 128, all finite. On a GPU
            the CPU waits for the check.

    Returns:
        Values ``[..., N, K]`` float8_e4m3fn and scales ``[..., N / 128, K / 128]`` float32.

    Raises:
        ArgumentError: they are no such weights.
    """
    dtypes = (torch.bfloat16, torch.float32)
    check_tensor("weights", weights, (*_leading(weights), "N", "K"), dtypes, contiguous=False)
    _check_blocks("weights", weights)
    rows, columns = weights.shape[-2:]
    blocks = weights.float().unflatten(-2, (rows // BLOCK, BLOCK))
    blocks = blocks.unflatten(-1, (columns // BLOCK, BLOCK))  # [..., N/128, 128, K/128, 128]
    largest = blocks.abs().amax((-3, -1)).clamp(min=_SMALLEST_AMAX)
    if not bool(largest.isfinite().all()):
        raise ArgumentError("weights", "not finite everywhere", "finite, to have scales")
    most = torch.full_like(largest, E4M3_MAX)
    scaled = blocks * (most / largest).unsqueeze(-1).unsqueeze(-3)
    values = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.reshape(weights.shape), largest / most


def dequantize_weights(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values of quantised weights.

        >>> values = torch.ones(128, 256, device="cpu").to(torch.float8_e4m3fn)
        >>> scales = torch.full((1, 2), 0.5, dtype=torch.float32, device="cpu")
        >>> fanfold.fused_moe.dequantize_weights(values, scales)[0, 0].item()
        0.5

    Args:
        values: ``[..., N, K]`` float8_e4m3fn.
        scales: ``[..., N / 128, K / 128]`` float32.

    Returns:
        ``[..., N, K]`` float32.

    Raises:
        ArgumentError: they are no such tensors.
    """
    leading = _leading(values)
    check_tensor("values", values, (*leading, "N", "K"), (torch.float8_e4m3fn,), contiguous=False)
    _check_blocks("values", values)
    blocks = (*leading, values.shape[-2] // BLOCK, values.shape[-1] // BLOCK)
    check_tensor("scales", scales, blocks, (torch.float32,), contiguous=False)
    wide = scales.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return values.float() * wide


def _leading(matrices: object) -> tuple[int, ...]:
    """All dimensions but the last two."""
    return tuple(matrices.shape[:-2]) if isinstance(matrices, torch.Tensor) else ()


def _check_blocks(name: str, matrices: torch.Tensor) -> None:
    """Raises ArgumentError unless the last two dimensions are multiples of 128."""
    if matrices.shape[-1] % BLOCK or matrices.shape[-2] % BLOCK:
        bound = f"multiples of {BLOCK} in the last two dimensions"
        raise ArgumentError(f"{name}.shape", tuple(matrices.shape), bound)


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of some experts in FP8, checked once. Several calls, and threads, may use it.

    The tensors are kept, not copied: if their memory is written, later calls see it.

        >>> gate_up = torch.randn(4, 2 * 256, 128, dtype=torch.bfloat16, device="cpu")
        >>> down = torch.randn(4, 128, 256, dtype=torch.bfloat16, device="cpu")
        >>> weights = fanfold.fused_moe.ExpertWeights.quantize(gate_up, down)
        >>> weights.experts, weights.hidden, weights.intermediate
        (4, 128, 256)

    Args:
        l1: ``[E, 2 * intermediate, hidden]`` float8_e4m3fn: of the first GEMM, the gate's rows
            before the up projection's.
        l1_scales: ``[E, 2 * intermediate / 128, hidden / 128]`` float32: of each 128 x 128 block.
        l2: ``[E, hidden, intermediate]`` float8_e4m3fn: of the second GEMM.
        l2_scales: ``[E, hidden / 128, intermediate / 128]`` float32.

    All tensors are contiguous and on one device. Scales must be finite, which is checked on the CPU
    only. A value that is NaN makes NaN of what it is multiplied with.

    Raises:
        ArgumentError: a tensor has another shape, dtype, device or memory layout, or a scale is not
            finite.
    """

    l1: torch.Tensor
    l1_scales: torch.Tensor
    l2: torch.Tensor
    l2_scales: torch.Tensor

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Checks every tensor."""
        e4m3, shape = (torch.float8_e4m3fn,), ("experts", "2 * intermediate", "hidden")
        check_tensor("l1", self.l1, shape, e4m3)
        experts, rows, hidden = self.l1.shape
        if rows % (2 * BLOCK) or hidden % BLOCK or 0 in self.l1.shape:
            bound = "(experts, 2 * intermediate, hidden), both multiples of 128, nothing 0"
            raise ArgumentError("l1.shape", tuple(self.l1.shape), bound)
        intermediate, device = rows // 2, self.l1.device
        check_tensor("l2", self.l2, (experts, hidden, intermediate), e4m3)
        blocks = (experts, rows // BLOCK, hidden // BLOCK)
        check_tensor("l1_scales", self.l1_scales, blocks, (torch.float32,))
        blocks = (experts, hidden // BLOCK, intermediate // BLOCK)
        check_tensor("l2_scales", self.l2_scales, blocks, (torch.float32,))
        for name in ("l1_scales", "l2", "l2_scales"):
            actual = getattr(self, name).device
            if actual != device:
                raise ArgumentError(f"{name}.device", actual, f"{device}, as that of l1")
        for name in ("l1_scales", "l2_scales"):
            _check_finite(name, getattr(self, name))

    @classmethod
    def quantize(cls, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        """Weights of ``gate_up [E, 2 * intermediate, hidden]`` and ``down [E, hidden,
        intermediate]``, bfloat16 or float32, by :func:`quantize_weights`."""
        return cls(*quantize_weights(gate_up), *quantize_weights(down))

    @property
    def experts(self) -> int:
        """How many experts have their weights here."""
        return self.l1.shape[0]

    @property
    def hidden(self) -> int:
        """Columns of a token."""
        return self.l1.shape[2]

    @property
    def intermediate(self) -> int:
        """Columns between the GEMMs."""
        return self.l2.shape[2]

    def shard(self, rank: int, ranks: int) -> ExpertWeights:
        """The weights of the experts that ``rank`` of ``ranks`` holds; views.

        Raises:
            ArgumentError: the experts are not divisible by the ranks, or there is no such rank.
        """
        check_integer("ranks", ranks, 1, self.experts)
        check_integer("rank", rank, 0, ranks - 1)
        if self.experts % ranks:
            raise ArgumentError("ranks", ranks, f"a divisor of the {self.experts} experts")
        share = self.experts // ranks
        mine = slice(rank * share, (rank + 1) * share)
        return ExpertWeights(
            self.l1[mine], self.l1_scales[mine], self.l2[mine], self.l2_scales[mine]
        )


def _check_finite(name: str, scales: torch.Tensor) -> None:
    """Raises ArgumentError for the first scale on the CPU that is NaN or infinite."""
    if scales.device.type != "cpu" or bool(scales.isfinite().all()):
        return
    place = (~scales.isfinite()).nonzero()[0].tolist()
    value = float(scales[tuple(place)])
    raise ArgumentError(f"{name}[{', '.join(map(str, place))}]", value, "finite")
