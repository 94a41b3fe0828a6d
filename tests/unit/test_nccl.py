"""NCCL as a process has it, and its device headers for NVRTC; of no version in particular.

``tests/frameworks/test_nccl_headers.py`` compiles those of real versions.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fanfold.cli import doctor_devices
from fanfold.errors import CompileError, UnavailableError
from fanfold.jit import KernelSource, nvrtc
from fanfold.jit.kernel import Cache, compile_in
from fanfold.nccl import headers, library
from fanfold.nccl.library import FEATURES, NcclLibrary
from tests.kernels.layouts import HOST, layouts_of, same_layouts
from tests.kernels.sources import kernel_root

# Structures with attributes behind their braces, as NCCL's headers have them.
STRUCTURES = """#pragma once
#include <stdint.h>
typedef union {
  uint64_t raw;
  struct {
    uint8_t flag : 1;
    uint8_t rest : 7;
    uint32_t low;
    uint16_t high;
  } __attribute__((packed)) parts;
} Word;
struct Segment {
  uint32_t first;
  union {
    struct {
      uint8_t a;
      uint16_t b;
      uint8_t c;
    } __attribute__((__packed__));
    struct { uint32_t all; } __attribute__((__packed__));
  } __attribute__((__packed__));
} __attribute__((__packed__)) __attribute__((__aligned__(4)));
typedef struct __attribute__((packed)) { uint8_t a; uint64_t b; } InFront;
typedef struct { uint8_t a; uint32_t b; } __attribute__((packed, aligned(16))) Both;
struct Plain { uint8_t a; uint64_t b; };
inline int one() { return 1; } __attribute__((unused)) static int after_a_function;
"""
NAMES = ["Word", "Segment", "InFront", "Both", "Plain"]


def installed(folder: Path, version: tuple[int, int, int], text: str = "") -> Path:
    """A folder such as NCCL's wheel brings, with the version's ``nccl.h`` and one more header."""
    include = folder / "include"
    (include / "nccl_device").mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    lines = [f"#define NCCL_{part} {number}" for part, number in parts]
    (include / "nccl.h").write_text("\n".join(lines) + "\n")
    (include / "nccl_device" / "structures.h").write_text(text)
    (folder / "lib").mkdir()
    return include


def test_structures_have_the_layout_of_the_host(tmp_path: Path) -> None:
    """A compiler that ignored an attribute would give kernels another layout."""
    include = installed(tmp_path, (2, 28, 9), STRUCTURES)
    text = "#include <nccl_device/structures.h>\n"
    layouts = layouts_of(text, NAMES, [include, HOST])
    assert layouts["Word"] == (8, 8)
    assert layouts["Segment"] == (8, 4)
    same_layouts(tmp_path, headers.read(include), "#include <nccl/changed_headers.h>\n", layouts)


def test_the_compiler_ignores_attributes_behind_braces(tmp_path: Path) -> None:
    """Why headers are changed at all. A compiler that sees them makes that superfluous."""
    include = installed(tmp_path, (2, 28, 9), STRUCTURES)
    text = STRUCTURES.replace("<stdint.h>", '"layout/types.h"')
    layouts = layouts_of("#include <nccl_device/structures.h>\n", ["Word"], [include, HOST])
    with pytest.raises(CompileError, match="size of Word"):
        same_layouts(tmp_path, None, text, layouts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("struct a { int b; };", "struct a { int b; };"),
        ("struct a { int b; } __attribute__((packed)) c;",
         "struct __attribute__((packed)) a { int b; } c;"),
        ("union { struct { int a; } __attribute__((packed)) b; } __attribute__((packed)) c;",
         "union __attribute__((packed)) { struct __attribute__((packed)) { int a; } b; } c;"),
        ("struct __attribute__((x)) { int b; } __attribute__((aligned(4))) __attribute__((y)) c;",
         "struct __attribute__((aligned(4))) __attribute__((y)) __attribute__((x)) { int b; } c;"),
        ("struct a; void f() {} __attribute__((unused)) int b;",
         "struct a; void f() {} __attribute__((unused)) int b;"),
    ],
)  # fmt: skip
def test_attributes_move_in_front(text: str, expected: str) -> None:
    """Of structures and unions, nested or not, and of nothing else."""
    assert headers.with_attributes_in_front(text) == expected


def test_an_attribute_that_cannot_move_is_refused() -> None:
    """Rather than given to a compiler that ignores it."""
    with pytest.raises(UnavailableError, match=r"ends in .*aligned\(2 \* 4\).*report it"):
        headers.with_attributes_in_front("struct a { int b; } __attribute__((aligned(2 * 4))) c;")


def test_headers_of_the_same_version_are_found(tmp_path: Path) -> None:
    """Beside the library; those of another version are named, not taken."""
    include = installed(tmp_path, (2, 30, 7))
    path = str(tmp_path / "lib" / "libnccl.so.2")
    assert headers.find(NcclLibrary(path, (2, 30, 7))) == include
    with pytest.raises(UnavailableError, match=r"of NCCL 2\.32\.3 .*include \(2\.30\.7\)"):
        headers.find(NcclLibrary(path, (2, 32, 3)))
    (include / "nccl_device" / "structures.h").unlink()
    (include / "nccl_device").rmdir()
    with pytest.raises(UnavailableError, match=r"Its wheel brings them"):
        headers.find(NcclLibrary(path, (2, 30, 7)))


def test_a_compiler_without_atomics_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its version, before it meets the headers."""
    installed(tmp_path, (2, 28, 9))
    library = NcclLibrary(str(tmp_path / "lib" / "libnccl.so.2"), (2, 28, 9))
    assert headers.of(library) == headers.read(tmp_path / "include")
    monkeypatch.setattr(nvrtc.library(), "version", (12, 6))
    with pytest.raises(UnavailableError, match=r"NVRTC 12\.6 .* lacks the atomics"):
        headers.of(library)


def test_other_headers_are_another_kernel(tmp_path: Path) -> None:
    """The cache tells kernels apart by what the headers say, not by where they lie."""
    root, cache = kernel_root(tmp_path), Cache(tmp_path / "cache")
    (root / "probe.cu").write_text("__global__ void probe() {}\n")
    known = []
    for number, text in enumerate(["// one", "// one", "// two"]):
        foreign = headers.read(installed(tmp_path / str(number), (2, 28, 9), text))
        source = KernelSource("probe.cu", "probe", foreign=foreign)
        known.append(compile_in(root, cache, source, "sm_90a").from_cache)
    known.append(compile_in(root, cache, KernelSource("probe.cu", "probe"), "sm_90a").from_cache)
    assert known == [False, True, False, False]


def test_what_is_made_of_headers_is_another_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only what they say: a mend of how they are changed must not find old kernels."""
    before = headers.read(installed(tmp_path / "before", (2, 28, 9), STRUCTURES))
    monkeypatch.setattr(headers, "with_attributes_in_front", lambda text: text)
    assert headers.read(installed(tmp_path / "after", (2, 28, 9), STRUCTURES)) != before


def test_old_versions_are_refused_with_a_remedy() -> None:
    """By the feature that they lack."""
    old = NcclLibrary("/somewhere/libnccl.so.2", (2, 27, 3))
    assert not any(old.has(feature) for feature in FEATURES)
    with pytest.raises(
        UnavailableError, match=r"2\.27\.3 .* has no windows.* NCCL 2\.28\.9 is the"
    ):
        old.require("windows")
    newest = NcclLibrary("/somewhere/libnccl.so.2", (2, 29, 2))
    for feature in FEATURES:
        newest.require(feature)


@pytest.mark.parametrize(
    ("code", "version"), [(2809, (2, 8, 9)), (22809, (2, 28, 9)), (23203, (2, 32, 3))]
)
def test_versions_from_their_codes(code: int, version: tuple[int, int, int]) -> None:
    """Those before 2.9 have fewer places."""
    assert library._version_of(code) == version


def library_saying(folder: Path, name: str, body: str) -> Path:
    """A library whose ``ncclGetVersion`` has that body."""
    path = folder / name
    source = f'extern "C" int ncclGetVersion(int* version) {{ {body} }}'
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def test_the_loaded_library_is_found(tmp_path: Path) -> None:
    """By what the process has mapped; none, and two, are errors that say what to do."""
    one = library_saying(tmp_path, "libnccl.so.2", "*version = 22809; return 0;")
    (tmp_path / "other").mkdir()
    two = library_saying(tmp_path / "other", "libnccl.so.2", "*version = 23203; return 0;")
    program = f"""
import ctypes
from fanfold.errors import UnavailableError
from fanfold.nccl.library import loaded
def error():
    try:
        loaded()
    except UnavailableError as error:
        return str(error)
assert "loaded no libnccl" in error()
ctypes.CDLL({str(one)!r})
assert str(loaded()) == "NCCL 2.28.9 ({one})", loaded()
ctypes.CDLL({str(two)!r})
assert "more than one NCCL: {one}, {two}" in error(), error()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_libraries_that_say_no_version(tmp_path: Path) -> None:
    """Are refused as what they are."""
    failing = library_saying(tmp_path, "failing.so", "return 3;")
    with pytest.raises(UnavailableError, match=r"ncclGetVersion of .*failing\.so returns 3"):
        NcclLibrary.open(str(failing))
    with pytest.raises(UnavailableError, match="is no NCCL"):
        NcclLibrary.open("libc.so.6")


def test_the_doctor_says_where_headers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or why there are none; and what is wrong with a library."""
    include = installed(tmp_path, (2, 28, 9))
    found = library_saying(tmp_path / "lib", "libnccl.so.2", "*version = 22809; return 0;")
    monkeypatch.setattr(doctor_devices, "_cuda_libraries", lambda pattern: iter([found]))
    serves = "nccl:lsa and, where it finds a network for it, nccl:gin"
    assert doctor_devices.nccl() == (
        "ok",
        f"2.28.9, {found}, {serves}, device headers in {include}",
    )
    (include / "nccl.h").unlink()
    status, detail, *_ = doctor_devices.nccl()
    assert (status, "not for kernels: the device headers of NCCL 2.28.9" in detail) == ("ok", True)
    broken = library_saying(tmp_path / "lib", "broken.so", "return 3;")
    monkeypatch.setattr(doctor_devices, "_cuda_libraries", lambda pattern: iter([broken]))
    status, detail, *_ = doctor_devices.nccl()
    assert (status, "broken.so returns 3" in detail) == ("problem", True)


def test_atomics_that_headers_use(tmp_path: Path) -> None:
    """Every operation with every order, on 32 and 64 bits; the values that NCCL compares."""
    text = """#include <cuda/atomic>
static_assert(cuda::thread_scope_system == 0 && cuda::thread_scope_device == 1);
static_assert(cuda::thread_scope_block == 2 && cuda::thread_scope_thread == 10);
static_assert(cuda::memory_order_acquire == 2 && cuda::memory_order_seq_cst == 5);
template <class T>
__device__ void all(T* word) {
  const cuda::atomic_ref<T, cuda::thread_scope_device> ref(*word);
  T expected = ref.load();
  for (const auto order : {cuda::memory_order_relaxed, cuda::memory_order_acquire}) {
    ref.store(ref.load(order), order);
    ref.fetch_add(ref.fetch_max(T{1}, order), order);
    ref.compare_exchange_weak(expected, T{2}, order);
    ref.compare_exchange_weak(expected, T{3}, order, cuda::memory_order_relaxed);
    cuda::atomic_thread_fence(order, cuda::thread_scope_block);
  }
}
__global__ void probe(uint32_t* a, uint64_t* b) { all(a); all(b); }
"""
    text = text.replace("for (const auto order : {", "const cuda::memory_order orders[] = {")
    text = text.replace("acquire}) {", "acquire};\n  for (const auto order : orders) {")
    root = kernel_root(tmp_path)
    (root / "probe.cu").write_text(text)
    include = installed(tmp_path / "nccl", (2, 28, 9))
    source = KernelSource("probe.cu", "probe", foreign=headers.read(include))
    assert compile_in(root, Cache(tmp_path / "cache"), source, "sm_90a").image


@pytest.mark.parametrize(
    ("version", "gin"),
    [((2, 28, 9), True), ((2, 28, 10), False), ((2, 29, 7), False), ((2, 30, 3), False),
     ((2, 30, 4), True), ((2, 32, 3), True), ((2, 27, 3), False)],
)  # fmt: skip
def test_versions_with_gin(version: tuple[int, int, int], gin: bool) -> None:
    """Of the others the error names those that have it, and the doctor says which they are."""
    library = NcclLibrary("libnccl.so.2", version)
    assert doctor_devices._transports(library).endswith("it, nccl:gin") == gin
    if gin:
        library.require_gin()
        return
    with pytest.raises(UnavailableError, match=r"2\.28\.9 has the one .*, 2\.30\.4 and later"):
        library.require_gin()
