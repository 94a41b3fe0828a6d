"""NCCL's device headers for kernels that NVRTC compiles.

They are written for nvcc. What they include of the C library and of CUDA, NVRTC lacks:
``kernels/nccl/standard.h`` and ``atomic.h`` take that place. ``kernels/nccl/device.cuh``, which a
kernel includes, gets around what else it lacks.

One thing is changed in their texts. NVRTC ignores an attribute behind the brace of a structure,
``struct {...} __attribute__((packed)) name;``, without a word, so that structures which kernels
share with NCCL's threads and with NICs get another layout. In front of the brace it sees it.
Headers with such attributes reach the compiler with them in front; all others are read from the
folder where NCCL is installed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from fanfold.errors import UnavailableError
from fanfold.jit import ForeignHeaders, nvrtc
from fanfold.nccl.library import NcclLibrary, version_text

__all__ = ["find", "of", "read", "with_attributes_in_front"]

_FOLDERS = (Path("/usr/include"), Path("/usr/local/include"), Path("/usr/local/cuda/include"))
# That NCCL's headers include and NVRTC lacks, by the file of Fanfold's kernels that they get.
_STANDARD = (
    "algorithm", "assert.h", "cassert", "cooperative_groups.h", "cstddef", "cstdint", "cstring",
    "cuda.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda_runtime.h", "errno.h", "limits.h",
    "linux/types.h", "math.h", "new", "stdbool.h", "stddef.h", "stdint.h", "stdio.h",
    "type_traits",
)  # fmt: skip
_INSTEAD = {**dict.fromkeys(_STANDARD, "nccl/standard.h"), "cuda/atomic": "nccl/atomic.h"}

_OLDEST_COMPILER = (12, 8)
_CHANGED = "nccl/changed_headers.h"  # device.cuh includes it

_ATTRIBUTE = (
    r"__attribute__\s*\(\(\s*\w+\s*(?:\(\s*\w+\s*\))?(?:\s*,\s*\w+\s*(?:\(\s*\w+\s*\))?)*\s*\)\)"
)
_BEHIND = re.compile(rf"\}}\s*((?:{_ATTRIBUTE}\s*)+)")
# At the end of what stands before the brace: the name may be missing.
_STRUCTURE = re.compile(rf"\b(struct|union)\s*(?:{_ATTRIBUTE}\s*)*(?:\w+\s*)?$")


def of(library: NcclLibrary) -> ForeignHeaders:
    """The headers that belong to ``library``.

    Raises:
        UnavailableError: they are not installed, or only those of another version; or the run-time
            compiler is too old for them.
    """
    folder = find(library)
    compiler = nvrtc.library()
    if compiler.version < _OLDEST_COMPILER:
        raise UnavailableError(
            f"{compiler} lacks the atomics that kernels with NCCL's device headers need; 12.8 has "
            "them: `pip install -U nvidia-cuda-nvrtc` (nvidia-cuda-nvrtc-cu12 for CUDA 12)"
        )
    return read(folder)


def find(library: NcclLibrary) -> Path:
    """The folder that has the headers of ``library``: beside it, then where packages put them.

    Raises:
        UnavailableError: as :func:`of`.
    """
    library.require("windows")
    seen = []
    path = Path(library.path)
    beside = [path.resolve().parent.parent / "include"] if path.is_absolute() else []
    for folder in (*beside, *_FOLDERS):
        version = _version_in(folder)
        if version == library.version and (folder / "nccl_device").is_dir():
            return folder
        seen.append(f"{folder} ({'none' if version is None else version_text(version)})")
    raise UnavailableError(
        f"the device headers of {library} are in none of: {', '.join(seen)}. Its wheel brings "
        "them, and so do the packages libnccl-dev and libnccl-devel; the version must be the same"
    )


def _version_in(folder: Path) -> tuple[int, int, int] | None:
    try:
        text = (folder / "nccl.h").read_text("utf-8", "replace")
    except OSError:
        return None
    found = [
        re.search(rf"#define NCCL_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    if None in found:
        return None
    major, minor, patch = (int(match[1]) for match in found if match is not None)
    return major, minor, patch


@functools.cache
def read(folder: Path) -> ForeignHeaders:
    """The headers in a folder that has ``nccl.h`` and ``nccl_device``."""
    files = sorted(path for path in (folder / "nccl_device").rglob("*") if path.is_file())
    every = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    every["nccl.h"] = (folder / "nccl.h").read_bytes()
    digest = hashlib.sha256()
    texts = {name: f'#pragma once\n#include "{file}"\n' for name, file in _INSTEAD.items()}
    changed = {}
    for name, content in every.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
        text = content.decode("utf-8", "replace")
        moved = with_attributes_in_front(text)
        if moved != text:
            changed[name] = moved
    # They include each other by paths from their own folders, which the compiler looks up in the
    # file system. So the changed ones come first, and their guards keep those out.
    texts |= changed
    texts[_CHANGED] = "#pragma once\n" + "".join(f"#include <{name}>\n" for name in changed)
    for name in sorted(texts):  # what this module makes of them decides, too
        digest.update(f"{name} {texts[name]}".encode())
    return ForeignHeaders(str(folder), digest.hexdigest(), tuple(sorted(texts.items())))


def with_attributes_in_front(text: str) -> str:
    """``text`` with the attributes behind the braces of structures moved behind their keywords.

    ``struct a {int x;} __attribute__((packed)) b;`` becomes
    ``struct __attribute__((packed)) a {int x;} b;``, which means the same.

    Raises:
        UnavailableError: there is one of a form that is not known.
    """
    behind = _BEHIND.search(text)
    while behind is not None:
        end = behind.end()
        keyword = _keyword_of(text, behind.start())
        if keyword is not None:
            body = text[keyword : behind.start() + 1]
            text = f"{text[:keyword]} {behind[1].strip()}{body} {text[behind.end() :]}"
            end = keyword + 1 + len(behind[1].strip()) + len(body)
        behind = _BEHIND.search(text, end)
    for left in re.finditer(r"\}\s*__attribute__.*", text):
        if _keyword_of(text, left.start()) is not None:
            raise UnavailableError(
                f"a structure of NCCL's headers ends in {left[0]!r}, which NVRTC would ignore and "
                "Fanfold cannot move: please report it with NCCL's version"
            )
    return text


def _keyword_of(text: str, closing: int) -> int | None:
    """Where the keyword ends of the structure whose brace closes at ``closing``; None if that brace
    is of something else."""
    depth = 0
    for brace in reversed(list(re.finditer(r"[{}]", text[: closing + 1]))):
        depth += 1 if brace[0] == "}" else -1
        if depth == 0:
            keyword = _STRUCTURE.search(text[: brace.start()])
            return keyword and keyword.end(1)
    return None
