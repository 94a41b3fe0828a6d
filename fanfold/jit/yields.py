"""Lets other warps issue between the multiplications of accumulators in a compiled kernel.

Every second FMUL of a long run gets the yield hint and loses its operand-cache hint, which a warp
that yields cannot keep. The result is the same to the bit, and grouped GEMMs of Hopper are 4 to 6%
faster (docs/decisions/fused-moe-experiments.md); ptxas has no option for it.

Use: python yields.py SOURCE TARGET, for a program whose device code is not compressed.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["with_yields"]

_INSTRUCTION_BYTES = 16
_FMUL_OF_REGISTERS = 0x7220  # the low bits of the first word, without the predicate: always
_NO_YIELD = 1 << 45  # of the second word
_REUSE = 0xF << 58
_SHORTEST_RUN = 24
_LARGEST_GAP = 6  # instructions of another kind inside a run


def _runs(image: bytes) -> Iterator[list[int]]:
    """Offsets of the FMULs of each run; code begins on 8 bytes or on 16 in the file."""
    for start in (0, 8):
        run: list[int] = []
        for offset in range(start, len(image) - _INSTRUCTION_BYTES, _INSTRUCTION_BYTES):
            (low,) = struct.unpack_from("<Q", image, offset)
            if low & 0xFFFF == _FMUL_OF_REGISTERS:
                run.append(offset)
            elif run and offset - run[-1] > _LARGEST_GAP * _INSTRUCTION_BYTES:
                if len(run) >= _SHORTEST_RUN:
                    yield run
                run = []


def with_yields(image: bytes) -> tuple[bytes, int]:
    """The patched image, and how many instructions were changed."""
    patched = bytearray(image)
    changed = 0
    for run in _runs(image):
        for offset in run[1:-1:2]:
            (high,) = struct.unpack_from("<Q", patched, offset + 8)
            struct.pack_into("<Q", patched, offset + 8, high & ~(_NO_YIELD | _REUSE))
            changed += 1
    return bytes(patched), changed


def main() -> int:
    """The program."""
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
