"""How low-latency rows are encoded, by DeepEP's three flags."""

from __future__ import annotations

from fanfold.errors import ArgumentError
from fanfold.formats import RowFormat, ScaleFormat

__all__ = ["Formats", "formats_of", "quick_formats"]

Formats = tuple[RowFormat, ScaleFormat]

# By use_fp8, round_scale, use_ue8m0.
_FORMATS: dict[tuple[bool, bool, bool], Formats] = {
    (False, False, False): (RowFormat.BF16, ScaleFormat.FLOAT32),
    (True, False, False): (RowFormat.FP8, ScaleFormat.FLOAT32),
    (True, True, False): (RowFormat.FP8, ScaleFormat.POWER_OF_TWO),
    (True, True, True): (RowFormat.FP8, ScaleFormat.UE8M0),
}


def formats_of(use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Formats:
    """How a dispatch encodes its rows."""
    if use_ue8m0 and not (round_scale and use_fp8):
        raise ArgumentError(
            "use_ue8m0",
            f"True with use_fp8={use_fp8} and round_scale={round_scale}",
            "used only with use_fp8=True and round_scale=True: only powers of two fit in UE8M0",
        )
    if round_scale and not use_fp8:
        raise ArgumentError("round_scale", "True with use_fp8=False", "used only with fp8 rows")
    return _FORMATS[bool(use_fp8), bool(round_scale), bool(use_ue8m0)]


def quick_formats(*flags: object) -> Formats | None:
    """The same of what are truth values; None where :func:`formats_of` must decide."""
    try:
        return _FORMATS.get(flags)  # type: ignore[arg-type]
    except TypeError:  # what cannot be looked up is none
        return None
