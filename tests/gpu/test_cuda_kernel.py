"""A kernel on its whole way: compiled, loaded, launched, captured; in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import ctypes, struct, sys
from pathlib import Path

import torch

from fanfold import _core, errors
from fanfold.jit import architecture_of
from fanfold.jit.kernel import Cache, KernelSource, compile_in

root = Path(sys.argv[1])
(root / "scale.cu").write_text('''
#include "constants.h"
struct Args { int* out; int n; };
extern "C" __global__ void scale(const __grid_constant__ Args args) {
  extern __shared__ int sums[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  sums[threadIdx.x] = args.n * fanfold::kScale;
  __syncthreads();
  args.out[threadIdx.x] += sums[blockDim.x - 1 - threadIdx.x];
}
''')
source = KernelSource("scale.cu", "scale", {"kScale": 3})


def refused(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


capability = torch.cuda.get_device_capability(0)
if capability < (9, 0):
    sys.exit("early launches need compute capability 9.0")
binary = compile_in(root, Cache(root / "cache"), source, architecture_of(capability))
torch.cuda.set_device(0)
out = torch.zeros(256, dtype=torch.int32, device="cuda")
kernel = _core.CudaKernel(binary.image, "scale", binary.symbol)
assert kernel.registers == binary.registers, (kernel.registers, binary.registers)
assert kernel.local_bytes == binary.stack_bytes == 0
args = ctypes.create_string_buffer(struct.pack("Pii", out.data_ptr(), 7, 0), 16)
address = ctypes.addressof(args)
expected = 0


def check(rounds):
    global expected
    torch.cuda.synchronize()
    expected += 21 * rounds
    assert out.tolist() == [expected] * 256, (out[0], expected)


stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
kernel.launch(address, 16, 1, 256, 1024, stream.cuda_stream)
ctypes.memset(address, 0, 16)  # the argument was copied
check(1)
args.raw = struct.pack("Pii", out.data_ptr(), 7, 0)
for _ in range(100):
    kernel.launch(address, 16, 1, 256, 1024, stream.cuda_stream, True)
check(100)

told = refused(errors.DriverFailure, kernel.launch, address, 16, 1, 2048, 1024)
assert "CUDA_ERROR_INVALID_VALUE" in told and "2048 threads" in told, told
told = refused(errors.DriverFailure, kernel.launch, address, 16, 1, 256, 100000)
kernel.allow_shared_bytes(100000)
kernel.launch(address, 16, 1, 256, 100000, stream.cuda_stream)
check(1)
refused(errors.DriverFailure, kernel.allow_shared_bytes, 1 << 20)
if _core.cuda_driver_version() >= 12040:
    refused(errors.ArgumentError, kernel.launch, address, 24, 1, 256)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=stream):
    for _ in range(3):
        kernel.launch(address, 16, 1, 256, 1024, stream.cuda_stream, True)
graph.replay()
graph.replay()
check(6)

refused(errors.DriverFailure, _core.CudaKernel, binary.image, "none", "none")
wrong = "sm_120a" if capability[0] < 12 else "sm_90"
other = compile_in(root, Cache(root / "cache"), source, wrong)
told = refused(errors.DriverFailure, _core.CudaKernel, other.image, "scale", other.symbol)
assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in told, told
second = _core.CudaKernel(binary.image, "scale", binary.symbol)
del second
kernel.launch(address, 16, 1, 256, 1024, stream.cuda_stream)
check(1)
print("done")  # and the kernel outlives the driver
"""


def test_whole_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_no_context(tmp_path: Path) -> None:
    """Before anything has used the GPU, loading says what to do first."""
    program = "from fanfold import _core; _core.CudaKernel(b'no kernel', 'none', 'none')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "UsageError" in done.stderr or "torch.cuda.init" in done.stderr
