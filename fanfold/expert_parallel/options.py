"""The options of an ExpertParallel beyond its sizes, and their checks."""

from __future__ import annotations

from fanfold.config import Config
from fanfold.errors import ArgumentError
from fanfold.formats import RowFormat, ScaleFormat
from fanfold.geometry import check_hidden, check_integer
from fanfold.high_throughput.calls import MOST_ALIGNMENT, MOST_ROWS
from fanfold.representation import worded

__all__ = ["check_options", "checked_config"]


def checked_config(config: object) -> Config:
    """``config``, or the settings of the environment if it is None.

    Raises:
        ArgumentError: it is something else.
        ConfigError: a malformed variable of the environment.
    """
    if config is None:
        return Config.resolve()
    if not isinstance(config, Config):
        raise ArgumentError("config", worded(config), "a fanfold.Config or None")
    return config


def check_options(
    hidden: int,
    mode: str,
    dispatch_dtype: object,
    scale_format: str,
    expert_alignment: object,
    in_place_rows: object,
) -> tuple[RowFormat, ScaleFormat]:
    """How rows travel, after checks of the options of an ExpertParallel.

    Raises:
        ArgumentError: for the first option that is out of bounds.
    """
    if mode not in ("low_latency", "high_throughput"):
        raise ArgumentError("mode", repr(mode), "'low_latency' or 'high_throughput'")
    row_format = RowFormat.of(dispatch_dtype)  # type: ignore[arg-type]
    if scale_format not in [member.value for member in ScaleFormat]:
        allowed = " or ".join(repr(member.value) for member in ScaleFormat)
        raise ArgumentError("scale_format", repr(scale_format), allowed)
    check_integer("expert_alignment", expert_alignment, 1, MOST_ALIGNMENT)
    check_integer("in_place_rows", in_place_rows, 0, MOST_ROWS)
    if in_place_rows != 0 and mode == "low_latency":
        raise ArgumentError("in_place_rows", in_place_rows, "0 in low latency")
    check_hidden(hidden, row_format.dtype.itemsize)
    return row_format, ScaleFormat(scale_format)
