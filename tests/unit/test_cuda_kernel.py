"""The core's use of the CUDA driver, against a driver of the test's own: no GPU is needed.

The stand-in states the driver's binary interface by itself, as NVIDIA documents it, and records
what it is asked. Each test is a process of its own, in which the stand-in is the only driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DRIVER = """
#include <stddef.h>
#include <string.h>

typedef struct { int id; char pad[4]; union { char pad[64]; int numbers[3]; } value; } Attribute;
typedef struct {
  unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
} Config;

#ifndef VERSION
#define VERSION 13000
#endif
#define KERNEL ((void*)0x77)
#define MODULE ((void*)0x55)

char fails[64];          // the function that fails next
int code;                // with this
int loads, unloads, pushes, pops, function_loads, parameters = 1, parameter_bytes = 16;
int shared_limit;
int clusters = 66;            // that an idle GPU runs
void* current = (void*)0x11;  // the context
Config launched, asked;       // asked: about clusters
Attribute launched_attributes[2], asked_attributes[2];
struct {
  int type, rank;
  long long address, sizes[3], strides[2];
  int box[3], steps[3], modes[4];  // interleave, swizzle, promotion, out of bounds
} maps[16];
int map_count;
int attributes[200];  // of GPU 3
int dmabuf;           // of 64 bytes at address 4096
char argument[4096];

static int outcome(const char* name) {
  if (strcmp(fails, name) != 0) return 0;
  fails[0] = 0;
  return code;
}

int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuGetErrorName(int result, const char** text) {
  if (result == 999) return 1;
  *text = result == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int result, const char** text) {
  if (result == 999) return 1;
  *text = "said the driver";
  return 0;
}
int cuCtxGetCurrent(void** context) { *context = current; return outcome("cuCtxGetCurrent"); }
int cuCtxPushCurrent_v2(void* context) {
  if (outcome("cuCtxPushCurrent")) return 201;
  pushes++;
  current = context;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) { *context = current; pops++; return 0; }
int cuModuleLoadData(void** module, const char* image) {
  loads++;
  *module = MODULE;
  return memcmp(image, "cubin", 5) != 0 ? 200 : outcome("cuModuleLoadData");
}
int cuModuleUnload(void* module) {
  unloads += module == MODULE && current == (void*)0x11;
  return outcome("cuModuleUnload");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = KERNEL;
  return strcmp(name, "add") == 0 && module == MODULE ? 0 : 500;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  *value = 1000 + attribute;
  return function == KERNEL ? outcome("cuFuncGetAttribute") : 400;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (function != KERNEL || attribute != 8) return 400;
  shared_limit = value;
  return outcome("cuFuncSetAttribute");
}
#ifndef WITHOUT_LAUNCH
int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void** extra) {
  if (function != KERNEL || extra != NULL) return 400;
  launched = *config;
  memcpy(launched_attributes, config->attributes, config->count * sizeof(Attribute));
  memcpy(argument, arguments[0], parameter_bytes);
  return outcome("cuLaunchKernelEx");
}
#endif
#ifndef WITHOUT_CLUSTERS
int cuOccupancyMaxActiveClusters(int* count, void* function, const Config* config) {
  if (function != KERNEL) return 400;
  asked = *config;
  memcpy(asked_attributes, config->attributes, config->count * sizeof(Attribute));
  *count = clusters;
  return outcome("cuOccupancyMaxActiveClusters");
}
#endif
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const void* sizes,
                           const void* strides, const void* box, const void* steps, int interleave,
                           int swizzle, int promotion, int bounds) {
  const int modes[4] = {interleave, swizzle, promotion, bounds};
  maps[map_count].type = type;
  maps[map_count].rank = (int)rank;
  maps[map_count].address = (long long)address;
  memcpy(maps[map_count].sizes, sizes, 24);
  memcpy(maps[map_count].strides, strides, 16);
  memcpy(maps[map_count].box, box, 12);
  memcpy(maps[map_count].steps, steps, 12);
  memcpy(maps[map_count].modes, modes, 16);
  memset(map, 'a' + map_count++, 128);
  return outcome("cuTensorMapEncodeTiled");
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device != 3) return 101;
  *value = attributes[attribute];
  return outcome("cuDeviceGetAttribute");
}
int cuMemGetHandleForAddressRange(void* handle, size_t address, size_t bytes, int type,
                                  unsigned long long flags) {
  if (address != 4096 || bytes != 64 || type != 1 || flags != 0) return 1;
  *(int*)handle = dmabuf;
  return outcome("cuMemGetHandleForAddressRange");
}
#if VERSION >= 12040
int cuFuncLoad(void* function) { function_loads += function == KERNEL; return 0; }
int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* bytes) {
  if (function != KERNEL || index >= (size_t)parameters) return 1;
  *offset = 0;
  *bytes = (size_t)parameter_bytes;
  return 0;
}
#endif

static int number_of(const Config* config, const Attribute* attribute, int what) {
  const unsigned values[] = {
      config->gridX, config->gridY, config->gridZ, config->blockX, config->blockY, config->blockZ,
      config->shared, (unsigned)(size_t)config->stream, config->count, (unsigned)attribute->id,
      (unsigned)attribute->value.numbers[0], (unsigned)attribute->value.numbers[1],
      (unsigned)attribute->value.numbers[2]};
  return (int)values[what];
}
int launched_as(int what) { return number_of(&launched, launched_attributes, what); }
int asked_as(int what) { return number_of(&asked, asked_attributes, what); }
"""

PRELUDE = """
import ctypes, gc, struct
from fanfold import _core, errors

cuda = ctypes.CDLL("libcuda.so.1")


def number(name):
    return ctypes.c_int.in_dll(cuda, name).value


def fail(name, code):
    ctypes.c_int.in_dll(cuda, "code").value = code
    (ctypes.c_char * 64).in_dll(cuda, "fails").value = name.encode()


def put(name, value):
    ctypes.c_void_p.in_dll(cuda, name).value = value


def refused(kind, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} is not refused")


argument = ctypes.create_string_buffer(b"sixteen bytes!!!", 16)
address = ctypes.addressof(argument)
"""

Drive = Callable[..., None]


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    """``drive(program, *defines)``: runs the program with the stand-in compiled so."""

    def run(program: str, *defines: str) -> None:
        (tmp_path / "driver.c").write_text(DRIVER)
        build = [
            os.environ.get("CXX", "c++"),
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-o",
            "libcuda.so.1",
            "driver.c",
        ]
        flags = [f"-D{define}" for define in defines]
        subprocess.run([*build, *flags], cwd=tmp_path, check=True, timeout=60)
        check(tmp_path, PRELUDE + program)

    return run


def check(folder: Path, program: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_launch_reaches_the_driver(drive: Drive) -> None:
    drive("""
kernel = _core.CudaKernel(b"cubin", "math::add", "add")  # the driver knows the symbol alone
assert kernel.entry == "math::add"
assert (kernel.static_shared_bytes, kernel.local_bytes, kernel.registers) == (1001, 1003, 1004)
assert number("function_loads") == 1
kernel.launch(address, 16, ctas=132, threads=768, shared_bytes=65536, stream=0x1234, early=True)
found = [cuda.launched_as(i) for i in range(11)]
assert found == [132, 1, 1, 768, 1, 1, 65536, 0x1234, 1, 6, 1], found
assert bytes((ctypes.c_char * 16).in_dll(cuda, "argument")) == argument.raw
kernel.launch(address, 16, 1, 32)
found = [cuda.launched_as(i) for i in range(9)]
assert found == [1, 1, 1, 32, 1, 1, 0, 0, 0], found
kernel.allow_shared_bytes(200000)
assert number("shared_limit") == 200000
""")


def test_clusters_and_maps_reach_the_driver(drive: Drive) -> None:
    drive("""
ctypes.c_int.in_dll(cuda, "parameter_bytes").value = 576
kernel = _core.CudaKernel(b"cubin", "add", "add")
# a, its scales, b, its scales, d, groups; slices, rows, rows of the scales, columns, depth, groups
addresses = [0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000]
args = _core.CudaGroupedGemmArgs(addresses, [2, 100, 104, 320, 256, 3], 64)
args.launch(kernel, 132, 384, 198656, 0x1234)
found = [cuda.launched_as(i) for i in range(13)]
assert found == [132, 1, 1, 384, 1, 1, 198656, 0x1234, 1, 4, 2, 1, 1], found
assert bytes((ctypes.c_char * 16).in_dll(cuda, "argument")) == b"a" * 16  # the first map
maps = struct.iter_unpack("<2i6q10i", bytes((ctypes.c_char * 384).in_dll(cuda, "maps")))
assert list(maps) == [
    # type and rank, address, sizes, strides, box, steps, modes
    (0, 3, 0x1000, 256, 100, 2, 256, 25600, 128, 32, 1, 1, 1, 1, 0, 3, 3, 0),
    (7, 3, 0x2000, 100, 2, 2, 416, 832, 64, 1, 1, 1, 1, 1, 0, 0, 3, 0),
    (0, 3, 0x3000, 256, 320, 3, 256, 81920, 128, 128, 1, 1, 1, 1, 0, 3, 3, 0),
    (9, 3, 0x5000, 320, 100, 2, 640, 64000, 64, 64, 1, 1, 1, 1, 0, 3, 3, 0),
], list(maps)
fail("cuLaunchKernelEx", 1)
told = refused(errors.DriverFailure, args.launch, kernel, 132, 384, 99, 0)
assert "132 CTAs of 384 threads" in told and "in clusters of 2" in told, told
ctypes.c_int.in_dll(cuda, "map_count").value = 0
fail("cuTensorMapEncodeTiled", 1)
sizes = [1, 8, 8, 64, 128, 1]
told = refused(errors.DriverFailure, _core.CudaGroupedGemmArgs, addresses, sizes, 64)
assert "the map of a: 128 x 8 x 1 elements" in told, told
""")


def test_most_clusters_asks_for_the_launch(drive: Drive) -> None:
    drive("""
kernel = _core.CudaKernel(b"cubin", "add", "add")
assert kernel.most_clusters(threads=384, shared_bytes=232448, cluster=2) == 66
found = [cuda.asked_as(i) for i in range(13)]
assert found == [2, 1, 1, 384, 1, 1, 232448, 0, 1, 4, 2, 1, 1], found
ctypes.c_int.in_dll(cuda, "clusters").value = 132
assert kernel.most_clusters(threads=32, shared_bytes=0, cluster=1) == 132
found = [cuda.asked_as(i) for i in range(9)]
assert found == [1, 1, 1, 32, 1, 1, 0, 0, 0], found
fail("cuOccupancyMaxActiveClusters", 1)
told = refused(errors.DriverFailure, kernel.most_clusters, 384, 232448, 2)
for part in ("cuOccupancyMaxActiveClusters", "CUDA_ERROR_INVALID_VALUE", "kernel add",
             "384 threads", "232448 bytes", "in clusters of 2"):
    assert part in told, (part, told)
""")


def test_memory_of_a_gpu_for_the_network(drive: Drive) -> None:
    """NICs must reach it, and the GPU see what they write in order (attribute 118, from 100 on)."""
    drive("""
attributes = (ctypes.c_int * 200).in_dll(cuda, "attributes")
why = _core.cuda_why_no_network_memory
assert why(3) == "the driver lets no NIC reach this GPU's memory"
for reaches in (116, 124):
    attributes[116] = attributes[124] = 0
    attributes[reaches], attributes[118] = 1, 0
    assert why(3) == "this GPU does not see what NICs write in order"
    attributes[118] = 100
    assert why(3) == ""
told = refused(errors.DriverFailure, why, 2)
assert "cuDeviceGetAttribute" in told and "of GPU 2" in told, told
ctypes.c_int.in_dll(cuda, "dmabuf").value = 12
assert _core.cuda_make_dmabuf(4096, 64) == 12
fail("cuMemGetHandleForAddressRange", 801)
assert _core.cuda_make_dmabuf(4096, 64) == -1
""")


FUSED_MOE = """
names = "ranks experts top_k hidden intermediate tokens".split()
sizes = _core.CudaFusedMoeSizes(**dict(zip(names, [2, 6, 4, 384, 256, 100])))
rows = 1280  # 800 entries, and 127 rows more for each of 3 experts, in blocks
assert sizes.rows == rows


class Args(ctypes.Structure):
    # The argument of the kernel, as fanfold/kernels/layout/fused_moe.h describes it.
    _fields_ = [
        ("maps", ctypes.c_char * 128 * 16),
        *((name, ctypes.c_uint64) for name in (
            "x", "x_scales", "token_stride", "block_stride", "topk_idx", "topk_weights",
            "l1_scales", "l2_scales", "addend", "y", "statistics")),
        ("peers", ctypes.c_uint64 * 33),
        *((name, ctypes.c_uint64) for name in (
            "counted", "counters", "next_counters", "rows", "row_scales", "row_weights",
            "row_calls", "slots", "activation_scales", "counts", "places", "copies", "tables",
            "state", "reports", "spans", "row_count", "timeout_ns")),
        ("tokens", ctypes.c_int32), ("rows_for_groups", ctypes.c_int32),
        ("clamp", ctypes.c_float), ("rank", ctypes.c_int32), ("refused", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("padding", ctypes.c_char * 56),  # to a multiple of a map's alignment
    ]


def args():
    return Args.from_buffer_copy((ctypes.c_char * ctypes.sizeof(Args)).in_dll(cuda, "argument"))


def letters():
    return b"".join(bytes(each)[:1] for each in args().maps)


ctypes.c_int.in_dll(cuda, "parameter_bytes").value = ctypes.sizeof(Args)
kernel = _core.CudaKernel(b"cubin", "add", "add")
peers = [0x100000000, 0x200000000]
core = _core.CudaFusedMoe(sizes, 1, peers, 0x7000)
core.timeout_ns = 5
core.set_rows_for_groups(144)
call = _core.CudaFusedMoeCall()
call.tokens, call.clamp = 99, 2.5
for number, name in enumerate(("x", "x_scales", "topk_idx", "topk_weights", "l1", "l1_scales",
                               "l2", "l2_scales", "addend", "y", "statistics", "spans")):
    setattr(call, name, 0x1000 * (number + 1))
call.set_scale_strides(1, 104)
core.launch(call, kernel, 132, 384, 232448, 0x1234)
"""


def test_a_fused_layer_reaches_the_driver(drive: Drive) -> None:
    drive(
        FUSED_MOE
        + """
found = [cuda.launched_as(i) for i in range(13)]
assert found == [132, 1, 1, 384, 1, 1, 232448, 0x1234, 1, 4, 2, 1, 1], found
# Encoded when the layer was made: four maps of a and one of the scales for each GEMM, four of the
# results; and for the call: l1 and l2, which stand first.
assert letters() == b"opabcdfghiklmnej", letters()
found = args()
memory = peers[1]
rest = (found.x, found.x_scales, found.topk_idx, found.topk_weights, found.l1_scales,
        found.l2_scales, found.addend, found.y, found.statistics, found.spans)
assert rest == tuple(0x1000 * n for n in (1, 2, 3, 4, 6, 8, 9, 10, 11, 12)), rest
assert (found.token_stride, found.block_stride) == (1, 104)
assert list(found.peers) == peers + [0] * 31
assert (found.tokens, found.rank, found.refused, found.clamp) == (99, 1, 0, 2.5)
assert (found.row_count, found.timeout_ns, found.rows_for_groups) == (rows, 5, 144)
assert found.reports == 0x7000 and found.state >= memory

fields = struct.iter_unpack("<2i6q10i", bytes((ctypes.c_char * 96 * 16).in_dll(cuda, "maps")))
maps = dict(zip("abcdefghijklmnop", fields))
e4m3, float32, bf16, swizzled, plain = 0, 7, 9, (0, 3, 3, 0), (0, 0, 3, 0)


def bytes_map(address, depth, count, matrices, box_rows):
    return (e4m3, 3, address, depth, count, matrices, depth, depth * count, 128, box_rows, 1,
            1, 1, 1, *swizzled)


for gemm, (boxes, scales) in enumerate((("abcd", "e"), ("fghi", "j"))):
    depth = [384, 256][gemm]
    for box, name in enumerate(boxes):
        address = maps[boxes[0]][2]
        assert maps[name] == bytes_map(address, depth, rows, 1, 64 >> box), maps[name]
    assert maps[scales] == (
        float32, 3, maps[scales][2], rows, depth // 128, 1, 4 * rows, 4 * rows * depth // 128,
        128, 1, 1, 1, 1, 1, *plain), maps[scales]
assert maps["a"][2] == memory + found.rows
assert maps["e"][2] == memory + found.row_scales
assert maps["j"][2] == found.activation_scales
for box, name in enumerate("klmn"):
    assert maps[name] == (bf16, 3, memory + found.slots, 384, rows, 1, 768, 768 * rows, 64,
                          64 >> box, 1, 1, 1, 1, *swizzled), maps[name]
assert maps["o"] == bytes_map(0x5000, 384, 512, 3, 128), maps["o"]
assert maps["p"] == bytes_map(0x7000, 256, 384, 3, 128), maps["p"]
addresses = [maps[name][2] for name in "aefjk"]
assert all(memory <= each < memory + sizes.bytes and each % 1024 == 0 for each in addresses)
assert len(set(addresses)) == 5
"""
    )


def test_a_fused_layer_refuses_a_call(drive: Drive) -> None:
    drive(
        FUSED_MOE
        + """
core.refuse(kernel, 132, 384, 232448, 0x1234)
assert [cuda.launched_as(i) for i in (0, 7, 9, 10)] == [132, 0x1234, 4, 2]
found = args()
assert (found.refused, found.rank, found.row_count) == (1, 1, rows)
assert list(found.peers) == peers + [0] * 31
assert (found.x, found.y, found.tokens) == (0, 0, 0)  # nothing of the call before
fail("cuLaunchKernelEx", 1)
told = refused(errors.DriverFailure, core.launch, call, kernel, 132, 384, 99, 0)
assert "132 CTAs of 384 threads" in told and "in clusters of 2" in told, told
ctypes.c_int.in_dll(cuda, "map_count").value = 0
fail("cuTensorMapEncodeTiled", 1)
told = refused(errors.DriverFailure, core.launch, call, kernel, 132, 384, 99, 0)
assert "the map of l1: 384 x 512 x 3 elements" in told, told
"""
    )


def test_refusals_say_what_was_asked(drive: Drive) -> None:
    drive("""
kernel = _core.CudaKernel(b"cubin", "add", "add")
fail("cuLaunchKernelEx", 1)
told = refused(errors.DriverFailure, kernel.launch, address, 16, 7, 2048, 99)
for part in ("cuLaunchKernelEx", "CUDA_ERROR_INVALID_VALUE", "said the driver", "kernel add",
             "7 CTAs of 2048 threads", "99 bytes", "1024 threads"):
    assert part in told, (part, told)
fail("cuFuncSetAttribute", 999)
told = refused(errors.DriverFailure, kernel.allow_shared_bytes, 1 << 20)
assert "CUresult 999" in told and "1048576 bytes" in told and "1001 static" in told, told
told = refused(errors.ArgumentError, kernel.launch, address, 24, 1, 32)
assert "kernel add is 24 bytes, but must be 16 bytes" in told, told
kernel.launch(address, 16, 1, 32)
""")


def test_a_kernel_that_cannot_be_loaded_leaves_nothing(drive: Drive) -> None:
    drive("""
refused(errors.DriverFailure, _core.CudaKernel, b"other", "add", "add")
assert number("unloads") == 0
told = refused(errors.DriverFailure, _core.CudaKernel, b"cubin", "math::add", "subtract")
assert "kernel math::add, symbol subtract" in told, told
fail("cuFuncGetAttribute", 1)
refused(errors.DriverFailure, _core.CudaKernel, b"cubin", "add", "add")
ctypes.c_int.in_dll(cuda, "parameters").value = 2
told = refused(errors.ArgumentError, _core.CudaKernel, b"cubin", "add", "add")
assert "several parameters" in told, told
assert (number("loads"), number("unloads")) == (4, 3)
refused(errors.ArgumentError, _core.CudaKernel, b"", "add", "add")
put("current", 0)
assert "set_device" in refused(errors.UsageError, _core.CudaKernel, b"cubin", "add", "add")
""")


def test_unloading_finds_its_context_and_bears_a_dead_one(drive: Drive) -> None:
    drive("""
def made():
    put("current", 0x11)
    return _core.CudaKernel(b"cubin", "add", "add")

kernel = made()
del kernel; gc.collect()
assert (number("unloads"), number("pushes"), number("pops")) == (1, 0, 0)
kernel = made()
put("current", 0x22)
del kernel; gc.collect()
assert (number("unloads"), number("pushes"), number("pops")) == (2, 1, 1)
kernel = made()
put("current", 0)
fail("cuCtxPushCurrent", 201)
del kernel; gc.collect()
assert (number("unloads"), number("pushes"), number("pops")) == (2, 1, 1)
kernel = made()
fail("cuCtxGetCurrent", 4)
del kernel; gc.collect()
assert number("unloads") == 2
kernel = made()
fail("cuModuleUnload", 700)
del kernel; gc.collect()
assert number("unloads") == 3
""")


def test_an_older_driver_lacks_only_the_check_of_the_size(drive: Drive) -> None:
    drive(
        """
assert _core.cuda_driver_version() == 12020
kernel = _core.CudaKernel(b"cubin", "add", "add")
kernel.launch(address, 24, 1, 32)
""",
        "VERSION=12020",
    )


@pytest.mark.parametrize("define", ["VERSION=11080", "WITHOUT_LAUNCH", "WITHOUT_CLUSTERS"])
def test_a_driver_that_is_too_old(drive: Drive, define: str) -> None:
    drive(
        """
told = refused(errors.UnavailableError, _core.CudaKernel, b"cubin", "add", "add")
assert "12.0" in told and "install a newer" in told, told
missing = ("cuLaunchKernelEx", "cuOccupancyMaxActiveClusters")
assert ("11.8" in told) != any(name in told for name in missing), told
""",
        define,
    )


def test_no_driver(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    check(
        tmp_path,
        """
from fanfold import _core, errors
for _ in range(2):
    try:
        _core.cuda_driver_version()
    except errors.UnavailableError as error:
        assert "libcuda.so.1" in str(error) and "FANFOLD_BACKEND=host" in str(error), error
    else:
        raise AssertionError("a text file is no driver")
""",
    )
