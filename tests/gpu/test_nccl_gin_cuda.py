"""NCCL's GIN over the plugin of ``csrc/nccl_plugin``: NCCL's own collectives, and a kernel that
puts and signals. Each rank is a host to NCCL, so that ranks can share a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold import _core
from fanfold.group import as_group
from fanfold.jit import architecture_of
from fanfold.jit.kernel import Cache, compile_in
from fanfold.launch import RankPool
from fanfold.memory.nccl import tensor_over
from fanfold.nccl import headers
from fanfold.nccl.communicator import Communicator
from fanfold.nccl.library import loaded
from tests.gpu.hosts import Run, over_plugin
from tests.kernels.sources import PUTS, kernel_root

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

RANKS = [2, 3, 4]
SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run(ranks, function, *args)``: ``function(group, *args)`` in processes of their own, as
    NCCL reads its environment once."""
    pools: dict[int, RankPool] = {}

    def run_on(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if ranks not in pools:
            pools[ranks] = RankPool(ranks, timeout_s=200.0)
        return pools[ranks].run(_with_plugin, function, args)

    yield run_on
    for pool in pools.values():
        pool.close()


def _with_plugin(group: dist.ProcessGroup, function: Callable[..., Any], args: tuple[Any]) -> Any:
    torch.cuda.set_device(dist.get_rank(group) % torch.cuda.device_count())
    with mock.patch.dict("os.environ", over_plugin(dist.get_rank(group))):
        return function(group, *args)


def _all_reduce(group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device())
    over_nccl = dist.new_group(backend="nccl")
    for count in (1, 1000, 1 << 20):
        data = torch.arange(count, dtype=torch.float32, device=device) + rank
        dist.all_reduce(data, group=over_nccl)
        wanted = torch.arange(count, dtype=torch.float32, device=device) * ranks
        assert torch.equal(data, wanted + ranks * (ranks - 1) // 2)


@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_of_nccl(run: Run, ranks: int) -> None:
    run(ranks, _all_reduce)


def _puts(group: dist.ProcessGroup, nbytes: int, rounds: int, folder: str) -> None:
    own = as_group(group)
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = _compiled(Path(folder, str(own.rank)), device)
    communicator = Communicator(loaded(), own, 60.0)
    whole = 2 * own.size * nbytes
    address = communicator.allocate(whole)
    window = communicator.register(address, whole)
    made = communicator.device_communicator(1, 0)
    comm = torch.frombuffer(bytearray(made), dtype=torch.uint8).to(device)
    memory = tensor_over(address, whole, device, communicator)
    sent, came = memory[: own.size * nbytes], memory[own.size * nbytes :]
    seen = torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(1, rounds + 1):
        for peer in range(own.size):
            sent[peer * nbytes :][:nbytes] = _block(own.rank, peer, number, nbytes, device)
        came.fill_(0xA5)
        torch.cuda.synchronize(device)
        own.all_gather(None)  # nobody puts before all are ready
        _launch(
            kernel, comm.data_ptr(), window, 0, own.size * nbytes, nbytes, number * own.size,
            20 * SECOND, seen.data_ptr(),
        )  # fmt: skip
        torch.cuda.synchronize(device)
        assert int(seen) == number * own.size
        for peer in range(own.size):
            wanted = _block(peer, own.rank, number, nbytes, device)
            assert torch.equal(came[peer * nbytes :][:nbytes], wanted)
        own.all_gather(None)
    communicator.check()
    communicator.deregister(window)
    communicator.free(address)
    communicator.close()


def _compiled(folder: Path, device: torch.device) -> _core.CudaKernel:
    folder.mkdir()
    source = dataclasses.replace(PUTS, foreign=headers.of(loaded()))
    arch = architecture_of(torch.cuda.get_device_capability(device))
    binary = compile_in(kernel_root(folder), Cache(folder / "cache"), source, arch)
    return _core.CudaKernel(binary.image, source.entry, binary.symbol)


def _launch(kernel: _core.CudaKernel, *fields: int) -> None:
    """On one CTA of the current stream; ``fields`` of ``PutsArgs``."""
    packed = struct.pack(f"{len(fields)}Q", *fields)
    arguments = ctypes.create_string_buffer(packed, len(packed))
    stream = torch.cuda.current_stream().cuda_stream
    address = ctypes.addressof(arguments)
    kernel.launch(address, len(packed), 1, PUTS.threads, stream=stream)


def _block(
    source: int, target: int, number: int, nbytes: int, device: torch.device
) -> torch.Tensor:
    first = 31 * source + 7 * target + number
    return torch.arange(first, first + nbytes, dtype=torch.int64, device=device).to(torch.uint8)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("nbytes", [64, 100_000])
def test_puts_and_signals(run: Run, tmp_path: Path, ranks: int, nbytes: int) -> None:
    run(ranks, _puts, nbytes, 20, str(tmp_path))
