"""Options that modes of ``fanfold bench`` share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

__all__ = ["add_numbers"]


def add_numbers(
    parser: argparse.ArgumentParser, defaults: object, options: Iterable[tuple[str, str]]
) -> None:
    """Adds options with what each is, whose defaults are attributes of ``defaults``."""
    for option, what in options:
        default = getattr(defaults, option.replace("-", "_"))
        parser.add_argument(
            f"--{option}", type=int, default=default, metavar="N",
            help=f"{what} (default %(default)s)",
        )  # fmt: skip
