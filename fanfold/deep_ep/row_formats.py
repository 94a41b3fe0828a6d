"""How low-latency rows are encoded, by DeepEP's flags."""

from __future__ import annotations

from typing import Any

import torch

from fanfold.backends.low_latency import Dispatched
from fanfold.errors import ArgumentError
from fanfold.formats import BF16_ROWS, Formats, RowFormat, ScaleFormat

__all__ = ["as_deep_ep", "formats_of", "one_scale", "quick_formats"]

# By use_fp8, round_scale, use_ue8m0, use_nvfp4.
_FORMATS: dict[tuple[bool, bool, bool, bool], Formats] = {
    (False, False, False, False): BF16_ROWS,
    (True, False, False, False): (RowFormat.FP8, ScaleFormat.FLOAT32),
    (True, True, False, False): (RowFormat.FP8, ScaleFormat.POWER_OF_TWO),
    (True, True, True, False): (RowFormat.FP8, ScaleFormat.UE8M0),
    (False, False, False, True): (RowFormat.NVFP4, ScaleFormat.FLOAT32),
}


def formats_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool, use_nvfp4: bool) -> Formats:
    """How a dispatch encodes its rows."""
    if use_nvfp4 and use_fp8:
        raise ArgumentError(
            "use_nvfp4",
            f"True with use_fp8={use_fp8}",
            "used only with use_fp8=False: a row travels in one format",
        )
    if use_ue8m0 and not (round_scale and use_fp8):
        raise ArgumentError(
            "use_ue8m0",
            f"True with use_fp8={use_fp8} and round_scale={round_scale}",
            "used only with use_fp8=True and round_scale=True: only powers of two fit in UE8M0",
        )
    if round_scale and not use_fp8:
        raise ArgumentError("round_scale", "True with use_fp8=False", "used only with fp8 rows")
    return _FORMATS[bool(use_fp8), bool(round_scale), bool(use_ue8m0), bool(use_nvfp4)]


def quick_formats(*flags: object) -> Formats | None:
    """The same of what are truth values; None where :func:`formats_of` must decide."""
    try:
        return _FORMATS.get(flags)  # type: ignore[arg-type]
    except TypeError:  # what cannot be looked up is none
        return None


def one_scale(x_global_scale: Any) -> Any:
    """A tensor's first element where it has several: frameworks keep the same scale once for each
    expert."""
    if not isinstance(x_global_scale, torch.Tensor) or x_global_scale.numel() < 2:
        return x_global_scale
    return x_global_scale[(0,) * x_global_scale.dim()]


def as_deep_ep(dispatched: Dispatched) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The rows, with their scales if they have any, in DeepEP's order of dimensions. With nvfp4 the
    experts are the last one, as in views of CuTe's grouped matrix products."""
    tokens, scales = dispatched.tokens, dispatched.scales
    if scales is None:
        return tokens
    if tokens.dtype is torch.uint8:
        return tokens.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0)
    return tokens, scales
