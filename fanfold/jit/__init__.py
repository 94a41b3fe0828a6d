"""Kernels compiled at run time for exactly the sizes at hand, and kept for the next process."""

from fanfold.jit.kernel import (
    Binary,
    ForeignHeaders,
    KernelSource,
    architecture_of,
    compile,  # noqa: A004, called as jit.compile
    load,
    load_all,
    refuse_in_capture,
)

__all__ = [
    "Binary",
    "ForeignHeaders",
    "KernelSource",
    "architecture_of",
    "compile",
    "load",
    "load_all",
    "refuse_in_capture",
]
