#!/usr/bin/env python3
"""Lets other warps issue between the multiplications of accumulators in a built probe.

Every second FMUL of a long run gets the yield hint and loses its operand-cache hint, which a warp
that yields cannot keep. The result is the same to the bit. ptxas has no option for it.

    python3 yield.py build/grouped_gemm build/grouped_gemm_yield
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION_BYTES = 16
FMUL_OF_REGISTERS = 0x7220  # the low bits of the first word, without the predicate: always
NO_YIELD = 1 << 45  # of the second word
REUSE = 0xF << 58
SHORTEST_RUN = 24
LARGEST_GAP = 6  # instructions of another kind inside a run


def runs(image: bytes) -> Iterator[list[int]]:
    """Offsets of the FMULs of each run; code begins on 8 bytes or on 16 in the file."""
    for start in (0, 8):
        run: list[int] = []
        for offset in range(start, len(image) - INSTRUCTION_BYTES, INSTRUCTION_BYTES):
            (low,) = struct.unpack_from("<Q", image, offset)
            if low & 0xFFFF == FMUL_OF_REGISTERS:
                run.append(offset)
            elif run and offset - run[-1] > LARGEST_GAP * INSTRUCTION_BYTES:
                if len(run) >= SHORTEST_RUN:
                    yield run
                run = []


def with_yields(image: bytes) -> tuple[bytes, int]:
    """The patched image, and how many instructions were changed."""
    patched = bytearray(image)
    changed = 0
    for run in runs(image):
        for offset in run[1:-1:2]:
            (high,) = struct.unpack_from("<Q", patched, offset + 8)
            struct.pack_into("<Q", patched, offset + 8, high & ~(NO_YIELD | REUSE))
            changed += 1
    return bytes(patched), changed


def main() -> int:
    source, target = map(Path, sys.argv[1:3])
    patched, changed = with_yields(source.read_bytes())
    if changed == 0:
        sys.stderr.write(f"{source}: no run of FMULs found; is its device code compressed?\n")
        return 1
    target.write_bytes(patched)
    target.chmod(0o755)
    sys.stdout.write(f"{target}: {changed} instructions yield\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
