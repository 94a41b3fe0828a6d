"""The ``fanfold`` command: finds the subcommand, runs it, and turns errors into one line.

Each subcommand is a module of this package with ``add_arguments(parser)`` and ``run(args) -> int``.
Only the one that is asked for is imported, so that ``fanfold doctor`` works where others cannot.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fanfold.descriptors import advice
from fanfold.errors import FanfoldError

__all__ = ["main"]

COMMANDS = {
    "demo": "train a small MoE model over local ranks and check it against one process",
    "bench": "check and time dispatch and combine, a fused layer, or the ring of commands",
    "tune": "find the best forms of a kernel for a layer, and keep them",
    "plot": "draw the results of benches",
    "simulate": "predict dispatch and combine across hosts",
    "jit": "list, clear or warm the cache of compiled kernels",
    "doctor": "say what this machine can do, and why not more",
    "env": "explain every setting, its value and where it came from",
}

EXIT_FAILED = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_FAILED, f"{self.prog}: error: {message} (--help explains)\n")


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser, complete for the chosen command."""
    parser = _Parser(
        prog="fanfold", description="Expert-parallel dispatch and combine for MoE models."
    )
    version = importlib.metadata.version("fanfold")
    parser.add_argument("--version", action="version", version=f"fanfold {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
        if name == chosen:
            module = importlib.import_module(f"fanfold.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _one_line(error: Exception) -> str:
    """The first line of the message: later ones are the ranks' tracebacks."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code: 0, 1 for a failed check, 2 for an error, 130 after
    Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in given if not word.startswith("-")), None)
    try:
        code = _run(given, chosen)
        sys.stdout.flush()
    except FanfoldError as error:
        return _failed(error)
    except ImportError as error:
        missing = (
            f"fanfold {chosen} cannot be loaded: {error}; `fanfold doctor` says what is missing"
        )
        print(missing, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        _abandon_output()
        return EXIT_FAILED
    except OSError as error:  # a full disk, most likely
        _abandon_output()
        print(f"fanfold: error: {error}{advice(error)}", file=sys.stderr)
        return EXIT_FAILED
    return code


def _run(given: list[str], chosen: str | None) -> int:
    try:
        args = _parser(chosen).parse_args(given)
    except SystemExit as end:  # of --help and --version, whose text is yet to be written
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    code: int = args.run(args)
    return code


def _abandon_output() -> None:
    """What standard output still holds is not written when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: FanfoldError) -> int:
    print(f"fanfold: error: {_one_line(error)}", file=sys.stderr)
    cause = error.__cause__
    # Ranks that raise something else have met a mistake in Fanfold: their tracebacks help.
    if cause is not None and not isinstance(cause, (FanfoldError, OSError)) and _is_of_ranks(error):
        print(f"{error}", file=sys.stderr)
    return EXIT_FAILED


def _is_of_ranks(error: FanfoldError) -> bool:
    from fanfold.launch import LaunchError  # imports torch, which may be missing

    return isinstance(error, LaunchError)


if __name__ == "__main__":
    sys.exit(main())
