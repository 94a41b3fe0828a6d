"""Kernels compiled at run time: what is compiled, what is kept, and what happens when it is not.

NVRTC needs no GPU, so all of this runs everywhere the wheel nvidia-cuda-nvrtc is installed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fanfold import errors, jit
from fanfold.config import Config
from fanfold.jit import cache as cache_module
from fanfold.jit import kernel, log, nvrtc
from fanfold.jit.cache import Cache, Entry
from fanfold.jit.kernel import KernelSource, compile_in
from tests.unit.conftest import Command

DEVICE = """#pragma once
#include "constants.h"
__device__ inline int scaled(int value) { return value * fanfold::kScale; }
"""
SCALE = """#include "device/scaled.cuh"
struct Args { int* out; int n; };
extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ Args args) {
  __shared__ int sums[256];
  sums[threadIdx.x] = scaled(args.n);
  __syncthreads();
  args.out[threadIdx.x] = sums[255 - threadIdx.x];
}
"""
SOURCE = KernelSource("test/scale.cu", "scale", {"kScale": 3}, threads=256)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of kernels with one that works."""
    kernels = tmp_path / "kernels"
    for folder in ("device", "test"):
        (kernels / folder).mkdir(parents=True)
    (kernels / "device/scaled.cuh").write_text(DEVICE)
    (kernels / "test/scale.cu").write_text(SCALE)
    return kernels


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the process remembers is forgotten, before and after."""
    monkeypatch.setattr(cache_module, "_warned", False)
    monkeypatch.setattr(nvrtc, "_refused", {})
    kernel._read_tree.cache_clear()
    yield
    kernel._read_tree.cache_clear()


def files(cache: Cache, suffix: str = "") -> list[Path]:
    assert cache.folder is not None
    return sorted(cache.folder.glob(f"*{suffix}"))


def same(one: jit.Binary, other: jit.Binary) -> bool:
    def kept(binary: jit.Binary) -> tuple[Any, ...]:
        return (
            binary.image, binary.registers, binary.spill_bytes, binary.stack_bytes,
            binary.shared_bytes,
        )  # fmt: skip

    return kept(one) == kept(other)


# ---- compiling ----------------------------------------------------------------------------------


def test_cold_then_warm(root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = compile_in(root, cache, SOURCE, "sm_90a")
    assert not cold.from_cache
    assert cold.image[:4] == b"\x7fELF"
    assert 0 < cold.registers <= SOURCE.register_limit
    assert (cold.spill_bytes, cold.stack_bytes, cold.shared_bytes) == (0, 0, 1024)
    assert f"Used {cold.registers} registers" in cold.log
    [entry] = files(cache)
    assert entry.suffix == ".kernel"
    # The warm start opens no compiler, and waits for nobody.
    monkeypatch.setattr(nvrtc, "library", None)
    monkeypatch.setattr(Cache, "lock", None)
    warm = compile_in(root, cache, SOURCE, "sm_90a")
    assert warm.from_cache
    assert same(warm, cold)
    assert warm.log == cold.log
    assert files(cache) == [entry]


def test_what_is_compiled_or_loaded_is_logged(
    root: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fanfold.jit"):
        for _ in range(2):
            compile_in(root, cache, SOURCE, "sm_90a")
    cold, warm = caplog.records
    assert (cold.levelno, warm.levelno) == (logging.INFO, logging.DEBUG)
    assert cold.getMessage().startswith("compiled test/scale.cu (scale; kScale = 3) for sm_90a in")
    assert warm.getMessage().startswith("loaded test/scale.cu")
    for record, from_cache in ((cold, False), (warm, True)):
        found = [getattr(record, name) for name in ("kernel", "arch", "from_cache")]
        assert found == ["test/scale.cu", "sm_90a", from_cache]


def test_a_warm_start_imports_no_torch_and_opens_no_library(root: Path, cache: Cache) -> None:
    compile_in(root, cache, SOURCE, "sm_90a")
    program = f"""
import sys
from pathlib import Path
from fanfold.jit.kernel import Cache, KernelSource, compile_in
binary = compile_in(Path({str(root)!r}), Cache(Path({str(cache.folder)!r}).parent),
                    KernelSource("test/scale.cu", "scale", {{"kScale": 3}}), "sm_90a")
print(binary.from_cache, [name for name in ("torch", "ctypes") if name in sys.modules])
print("libnvrtc" in Path("/proc/self/maps").read_text())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["True []", "False"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_architectures(root: Path, cache: Cache, arch: str) -> None:
    binary = compile_in(root, cache, SOURCE, arch)
    assert f"for '{arch}'" in binary.log
    assert binary.registers > 0


def test_architecture_of_a_gpu() -> None:
    capabilities = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    expected = ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103", "sm_120a"]
    assert [jit.architecture_of(capability) for capability in capabilities] == expected


@pytest.mark.parametrize("arch", ["compute_90a", "90", "sm_", "sm_90a,sm_80"])
def test_virtual_and_odd_architectures_are_refused(root: Path, cache: Cache, arch: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"arch is '{arch}'"):
        compile_in(root, cache, SOURCE, arch)


def test_an_architecture_that_the_compiler_lacks(root: Path, cache: Cache) -> None:
    with pytest.raises(errors.UnavailableError, match=r"does not compile for sm_70, .*sm_90"):
        compile_in(root, cache, SOURCE, "sm_70")


def test_constants_are_one_header() -> None:
    source = KernelSource("f.cu", "f", {"kB": 2, "kA": -1, "kWide": 1 << 40, "kFlag": True})
    assert source == KernelSource("f.cu", "f", source.pairs[::-1])
    assert hash(source) == hash(KernelSource("f.cu", "f", source.pairs[::-1]))
    assert pickle.loads(pickle.dumps(source)) == source
    assert source.header.splitlines() == [
        "#pragma once",
        "namespace fanfold {",
        "inline constexpr int kA = -1;",
        "inline constexpr int kB = 2;",
        "inline constexpr int kFlag = 1;",
        "inline constexpr long long kWide = 1099511627776;",
        "}",
    ]


@pytest.mark.parametrize(
    ("constants", "told"),
    [({"2k": 1}, "identifier"), ({"k;": 1}, "identifier"), ({"k": 1 << 63}, "64 bits")],
)
def test_constants_that_cannot_be(constants: dict[str, int], told: str) -> None:
    with pytest.raises(errors.ArgumentError, match=told):
        KernelSource("f.cu", "f", constants)


def test_register_limit() -> None:
    limits = [KernelSource("f.cu", "f", (), threads).register_limit for threads in (0, 128, 768)]
    assert limits == [255, 255, 80]
    assert KernelSource("f.cu", "f", (), 1024).register_limit == 64


# ---- resources from the compiler's log ----------------------------------------------------------

SPILLS = """
__device__ __noinline__ float helper(float* p) {
  float r[100];
  for (int i = 0; i < 100; i++) r[i] = p[i * int(p[i])];
  return r[int(p[3])];
}
extern "C" __global__ void __launch_bounds__(1024) crowded(float* p) {
  float r[180];
#pragma unroll
  for (int i = 0; i < 180; i++) r[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 180; i++) p[i * 1024 + threadIdx.x] = r[i] * r[179 - i];
}
extern "C" __global__ void roomy(float* p) { p[0] = helper(p); }
"""


def test_spills_and_stack_are_the_entrys_own(root: Path, cache: Cache) -> None:
    (root / "test/spills.cu").write_text(SPILLS)
    crowded = compile_in(root, cache, KernelSource("test/spills.cu", "crowded"), "sm_90a")
    roomy = compile_in(root, cache, KernelSource("test/spills.cu", "roomy"), "sm_90a")
    assert crowded.registers == 64
    assert crowded.spill_bytes > 0
    assert roomy.spill_bytes == 0
    assert roomy.stack_bytes >= 400  # of the function that it calls
    assert roomy.registers not in (crowded.registers, -1)


def test_spills_of_called_functions_count() -> None:
    text = """
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 24 bytes cumulative stack size, 132 bytes smem
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 100 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 16 registers
ptxas info    : Function properties for _Z4helpPi
ptxas         .     0 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
"""
    assert log.resources(text, "a") == log.Resources(32, 19, 24, 132)
    assert log.resources(text, "b") == log.Resources(16, 203, 0, 0)
    assert log.resources(text, "c") == log.Resources(-1, -1, -1, -1)


# ---- mistakes in the source ---------------------------------------------------------------------


def test_a_mistake_in_the_file(root: Path, cache: Cache) -> None:
    (root / "test/scale.cu").write_text(SCALE.replace("scaled(", "scald("))
    with pytest.raises(errors.CompileError) as caught:
        compile_in(root, cache, SOURCE, "sm_90a")
    error = caught.value
    first, *rest = str(error).splitlines()
    assert first.startswith("test/scale.cu does not compile for sm_90a: test/scale.cu(5): error:")
    assert '"scald" is undefined' in first
    line = next(i for i, text in enumerate(rest) if text.startswith("     5 | "))
    assert rest[line].endswith("sums[threadIdx.x] = scald(args.n);")
    assert rest[line + 1].index("^") == rest[line].index("scald")
    assert rest[line - 1].startswith("     4 | ")
    assert rest[line + 2].startswith("     6 | ")
    assert "kScale = 3" in error.context
    assert "NVRTC 13." in error.context
    assert "FANFOLD_BACKEND=host" in str(error)
    assert "1 error detected" in error.log
    assert not list(files(cache, ".kernel"))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.arch, again.log) == (str(error), "sm_90a", error.log)


def test_a_mistake_in_a_header(root: Path, cache: Cache) -> None:
    (root / "device/scaled.cuh").write_text(DEVICE.replace("kScale", "kSkale"))
    with pytest.raises(errors.CompileError, match=r"device/scaled.cuh\(3\): error") as caught:
        compile_in(root, cache, SOURCE, "sm_90a")
    assert "     3 | __device__ inline int scaled" in caught.value.context


def test_a_missing_header(root: Path, cache: Cache) -> None:
    (root / "device/scaled.cuh").unlink()
    with pytest.raises(errors.CompileError, match=r"scale.cu\(1\): .*device/scaled.cuh"):
        compile_in(root, cache, SOURCE, "sm_90a")


def test_a_missing_entry(root: Path, cache: Cache) -> None:
    with pytest.raises(errors.CompileError, match=r'no kernel scales: .*"scales" is undefined'):
        compile_in(root, cache, KernelSource("test/scale.cu", "scales", {"kScale": 1}), "sm_90a")


def test_an_option_that_the_compiler_refuses(root: Path, cache: Cache) -> None:
    with pytest.raises(errors.CompileError, match=r"for sm_90a: .*unrecognized option --fast"):
        compile_in(root, cache, SOURCE, "sm_90a", ("--fast",))


def test_a_missing_file(root: Path, cache: Cache) -> None:
    with pytest.raises(errors.ArgumentError, match=r"file is 'test/none.cu'"):
        compile_in(root, cache, KernelSource("test/none.cu", "none"), "sm_90a")


# ---- what makes a key ---------------------------------------------------------------------------


def test_every_part_makes_another_key(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh_compile(source: KernelSource = SOURCE, *options: str, arch: str = "sm_90a") -> None:
        kernel._read_tree.cache_clear()
        binary = compile_in(root, cache, source, arch, options)
        assert not binary.from_cache
        assert compile_in(root, cache, source, arch, options).from_cache

    fresh_compile()
    fresh_compile(KernelSource("test/scale.cu", "scale", {"kScale": 4}))
    fresh_compile(KernelSource("test/scale.cu", "scale", {"kScale": 3, "kOther": 0}))
    fresh_compile(SOURCE, "--define-macro=OTHER")
    fresh_compile(arch="sm_100a")
    (root / "device/unused.cuh").write_text("#pragma once\n")
    fresh_compile()
    (root / "device/unused.cuh").rename(root / "device/unusual.cuh")
    fresh_compile()
    (root / "device/scaled.cuh").write_text(DEVICE + "// changed\n")
    fresh_compile()
    (root / "test/scale.cu").write_text(SCALE + 'extern "C" __global__ void other() {}\n')
    fresh_compile()
    fresh_compile(KernelSource("test/scale.cu", "other", {"kScale": 3}))
    monkeypatch.setattr(nvrtc.Candidate, "identity", "another version")
    fresh_compile()
    assert len(files(cache, ".kernel")) == 11


def test_an_edit_cannot_be_kept_under_the_key_of_what_was_read(root: Path, cache: Cache) -> None:
    assert cache.folder is not None
    kernel._read_tree(root)
    before = compile_in(root, Cache(cache.folder / "other"), SOURCE, "sm_90a")
    (root / "test/scale.cu").write_text(SCALE.replace("255 -", "254 -"))
    (root / "device/scaled.cuh").write_text(DEVICE.replace("value *", "value +"))
    assert compile_in(root, cache, SOURCE, "sm_90a").image == before.image


# ---- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 9, 20, 50, 60, -1])
def test_a_changed_byte_means_compiling_anew(root: Path, cache: Cache, place: int) -> None:
    first = compile_in(root, cache, SOURCE, "sm_90a")
    [entry] = files(cache)
    data = bytearray(entry.read_bytes())
    data[place] ^= 0x40
    entry.write_bytes(data)
    again = compile_in(root, cache, SOURCE, "sm_90a")
    assert not again.from_cache
    assert same(again, first)
    assert compile_in(root, cache, SOURCE, "sm_90a").from_cache


@pytest.mark.parametrize("length", [0, 7, 47, 50, 51, 60, -1])
def test_a_shortened_entry_means_compiling_anew(root: Path, cache: Cache, length: int) -> None:
    compile_in(root, cache, SOURCE, "sm_90a")
    [entry] = files(cache)
    entry.write_bytes(entry.read_bytes()[:length])
    assert not compile_in(root, cache, SOURCE, "sm_90a").from_cache
    assert compile_in(root, cache, SOURCE, "sm_90a").from_cache


def compile_here(root: Path, folder: Path, start: Any, results: Any) -> None:
    start.wait(60)
    try:
        binary = compile_in(root, Cache(folder), SOURCE, "sm_90a")
        results.put((binary.from_cache, binary.image))
    except BaseException as error:
        results.put((None, str(error).encode()))
        raise


def test_processes_at_once_compile_it_once(root: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    arguments = (root, tmp_path / "cache", start, results)
    processes = [context.Process(target=compile_here, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    # One that comes just when the lock's file is removed may compile again.
    assert 1 <= [from_cache for from_cache, _ in found].count(False) <= 2
    assert len({image for _, image in found}) == 1
    assert [path.suffix for path in files(Cache(tmp_path / "cache"))] == [".kernel"]


def test_a_process_killed_while_compiling_is_in_nobodys_way(root: Path, cache: Cache) -> None:
    program = f"""
import time
from pathlib import Path
from fanfold.jit import cache, kernel
def never(path, data):
    path.write_bytes(data[:100])  # as far as it came
    print("writing", flush=True)
    time.sleep(600)
cache._write_synced = never
kernel.compile_in(Path({str(root)!r}), cache.Cache(Path({str(cache.folder)!r}).parent),
                  kernel.KernelSource("test/scale.cu", "scale", {{"kScale": 3}}), "sm_90a")
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    [lock] = files(cache, ".lock")
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    child.stdout.close()
    [left] = files(cache, ".tmp")
    began = time.monotonic()
    assert not compile_in(root, cache, SOURCE, "sm_90a").from_cache
    assert time.monotonic() - began < cache_module.LOCK_WAIT_S  # nobody waited for the dead
    assert not lock.exists()
    assert left.exists()  # until it is old
    os.utime(left, (0, 0))
    compile_in(root, cache, KernelSource("test/scale.cu", "scale", {"kScale": 9}), "sm_90a")
    assert not left.exists()


def test_the_wait_for_another_process_is_bounded(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "LOCK_WAIT_S", 0.05)
    monkeypatch.setattr(cache_module, "_try_lock", lambda handle: False)
    assert not compile_in(root, cache, SOURCE, "sm_90a").from_cache
    assert compile_in(root, cache, SOURCE, "sm_90a").from_cache


def test_a_file_system_without_locks(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    assert not compile_in(root, cache, SOURCE, "sm_90a").from_cache
    assert compile_in(root, cache, SOURCE, "sm_90a").from_cache


def warned(root: Path, cache: Cache) -> list[str]:
    """The warnings of two compilations without a usable folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (1, 2):
            source = KernelSource("test/scale.cu", "scale", {"kScale": scale})
            assert not compile_in(root, cache, source, "sm_90a").from_cache
    assert all(issubclass(one.category, RuntimeWarning) for one in caught)
    return [str(one.message) for one in caught]


def test_a_folder_that_cannot_be_made(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [told] = warned(root, Cache(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file" / "cache") in told
    assert "FANFOLD_CACHE_DIR" in told


def test_a_user_without_a_home(root: Path) -> None:
    [told] = warned(root, Cache(None))
    assert "no home" in told


@pytest.mark.parametrize("number", [28, 30], ids=["full", "read-only"])
def test_a_folder_that_takes_nothing(
    root: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(cache_module, "_write_synced", refuse)
    [told] = warned(root, cache)
    assert os.strerror(number) in told
    assert not files(cache)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(root: Path, cache: Cache) -> None:
    assert cache.folder is not None
    cache.folder.mkdir(parents=True)
    cache.folder.chmod(0o500)
    [told] = warned(root, cache)
    assert "Permission denied" in told


def test_clear_and_entries(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.clear() == 0
    assert list(cache.entries()) == []
    for name in ("b", "a"):
        cache.store(name, Entry(name.encode(), {"n": name}))
    (tmp_path / "mine.txt").write_text("stays")
    assert cache.folder is not None
    (cache.folder / "b.kernel").write_bytes(b"damaged")
    (cache.folder / "a.1.tmp").write_bytes(b"left")
    listed = [(key, entry) for key, _, entry in cache.entries()]
    assert listed == [("a", Entry(b"a", {"n": "a"})), ("b", None)]
    assert cache.clear() == 2
    assert files(cache) == []
    assert (tmp_path / "mine.txt").exists()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FANFOLD_CACHE_DIR", raising=False)
    assert Config.resolve().cache_folder() == Path("/home/somebody/.cache/fanfold")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Config.resolve().cache_folder() == Path("/home/somebody/.cache/fanfold")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert Config.resolve().cache_folder() == Path("/xdg/fanfold")
    monkeypatch.setenv("FANFOLD_CACHE_DIR", "~/kernels")
    assert Config.resolve().cache_folder() == Path("/home/somebody/kernels")
    config = Config.resolve(cache_dir="/given")
    assert config.cache_folder() == Path("/given")
    assert kernel.cache_of(config).folder == Path("/given/kernels")
    monkeypatch.setenv("FANFOLD_CACHE_DIR", "~nobody-of-that-name/kernels")
    assert Config.resolve().cache_folder() is None


# ---- the command --------------------------------------------------------------------------------


def fanfold(*arguments: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fanfold.cli.main", *arguments],
        env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_list_and_clear(root: Path, tmp_path: Path, inside: Command) -> None:
    tmp_path /= "cache"
    cache = Cache(tmp_path)
    binary = compile_in(root, cache, SOURCE, "sm_90a")
    (tmp_path / "kernels" / "0123456789abcdef.kernel").write_text("no kernel")
    code, out, err = fanfold("jit", "list", FANFOLD_CACHE_DIR=str(tmp_path))
    assert (code, err) == (0, "")
    damaged, first, second, last = out.splitlines()
    assert damaged.startswith("0123456789ab ")
    assert "damaged" in damaged
    pattern = rf"[0-9a-f]{{12}} +\d+\.\d KiB +\d+ s  sm_90a +{binary.registers} registers  "
    assert re.fullmatch(pattern + r"test/scale\.cu scale", first)
    assert second.strip() == "kScale=3"
    assert last.startswith("2 compiled kernels, ")
    code, out, err = inside("jit", "list", "--json")
    listed = json.loads(out)["kernels"]
    assert [one["damaged"] for one in listed] == [True, False]
    assert listed[1]["constants"] == {"kScale": 3}
    assert listed[1]["registers"] == binary.registers
    code, out, err = inside("jit", "clear")
    assert (code, err) == (0, "")
    assert out == f"removed 2 compiled kernels from {tmp_path}/kernels\n"
    assert not files(cache)


def test_where(tmp_path: Path, inside: Command) -> None:
    code, out, err = inside("jit", "where")
    assert (code, err) == (0, "")
    assert str(tmp_path) in out
    assert "NVRTC 13." in out
    assert "sm_90" in out
