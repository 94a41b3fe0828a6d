"""Options that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["add_numbers", "one_or_more"]


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


def one_or_more(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads values with commas between them."""

    def read(text: str) -> list[Any]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no list of numbers with commas between them"
            ) from None

    return read
