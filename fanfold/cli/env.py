"""``fanfold env``: every setting, its value, where the value came from, and what it is for."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from fanfold.config import Config, Setting, settings, unknown_variables
from fanfold.errors import ConfigError

__all__ = ["Row", "add_arguments", "explain", "run"]


@dataclass(frozen=True)
class Row:
    """One setting as it is now.

    Attributes:
        name: of the setting, as in ``fanfold.Config``.
        value: what it resolves to; None if malformed, or where the machine decides.
        source: ``"default"`` or ``"environment"``.
        variable: the environment variable that sets it.
        help: what it is for.
        error: why the variable's text is refused, or None.
    """

    name: str
    value: object
    source: str
    variable: str
    help: str
    error: str | None


def explain() -> list[Row]:
    """Every setting, in the order of ``fanfold.config.settings()``; never raises."""
    return [_explain(setting) for setting in settings()]


def _explain(setting: Setting) -> Row:
    # With all others overridden, only this setting's variable is read: one that is malformed
    # does not hide the rest.
    others: dict[str, Any] = {
        other.name: other.default for other in settings() if other.name != setting.name
    }
    name, variable = setting.name, setting.variable
    try:
        config = Config.resolve(**others)
    except ConfigError as error:
        return Row(name, None, "environment", variable, setting.help, str(error))
    return Row(name, getattr(config, name), config.sources[name], variable, setting.help, None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fanfold env``."""
    parser.description = (
        "Prints every setting, its value, where the value came from (the environment or the "
        "default), its environment variable and what it is for. Exits with 2 if a variable is "
        "malformed, or is named FANFOLD_... and is no setting."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Prints the settings: 0, or 2 if a variable is malformed or unknown."""
    rows = explain()
    unknown = unknown_variables()
    if args.json:
        print(json.dumps({"settings": [asdict(row) for row in rows], "unknown": unknown}))
    else:
        print(_text(rows))
        for variable, meant in unknown.items():
            hint = "" if meant is None else f"; {meant} is one"
            print(f"error: {variable} is in the environment, but is no setting{hint}")
    return 2 if unknown or any(row.error is not None for row in rows) else 0


def _text(rows: list[Row]) -> str:
    """A line of columns for each setting, and below it its error and its help."""
    cells = [(row.name, _shown(row), row.source, row.variable) for row in rows]
    widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
    columns = min(100, shutil.get_terminal_size().columns)
    lines = []
    for row, cell in zip(rows, cells, strict=True):
        padded = (text.ljust(width) for text, width in zip(cell, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
        if row.error is not None:
            lines.append(f"    error: {row.error}")
        lines.append(textwrap.indent(textwrap.fill(row.help, max(40, columns - 4)), "    "))
    return "\n".join(lines)


def _shown(row: Row) -> str:
    if row.error is not None:
        return "malformed"
    return "auto" if row.value is None else str(row.value)
