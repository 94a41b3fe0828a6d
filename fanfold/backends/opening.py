"""Opens a mode's memory and its backend where :mod:`fanfold.backends.choose` says. Collective."""

from __future__ import annotations

from typing import TypeVar

import torch

from fanfold.backends import low_latency
from fanfold.backends.choose import BackendChoice
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.host import HostHighThroughput
from fanfold.backends.high_throughput.protocol import HighThroughputBackend
from fanfold.backends.ranges import ranged
from fanfold.backends.staged import StagedHighThroughput
from fanfold.config import NCCL_GIN, Config
from fanfold.errors import FanfoldError
from fanfold.formats import ScaleFormat
from fanfold.geometry import Geometry
from fanfold.group import Group, agree, part_of
from fanfold.memory import BetweenHosts, GpuPeerMemory, PeerMemory
from fanfold.memory.between_hosts import BytesBetweenHosts, ProxiesBetweenHosts
from fanfold.memory.cuda import CudaSymmetricMemory
from fanfold.memory.cuda_hosts import CudaMemoryAcrossHosts
from fanfold.memory.gin import GinBetweenHosts
from fanfold.memory.host import SymmetricMemory
from fanfold.memory.hosts import Hosts, find_hosts
from fanfold.memory.nccl import NcclSymmetricMemory

__all__ = [
    "memory_across_hosts", "memory_of_gpus", "open_between_hosts", "open_gpu_memory",
    "open_high_throughput", "open_low_latency",
]  # fmt: skip

_Backend = TypeVar("_Backend")


def open_low_latency(
    group: Group,
    choice: BackendChoice,
    geometry: Geometry,
    config: Config,
    *,
    late_weights: bool = False,
) -> tuple[PeerMemory, low_latency.LowLatencyBackend]:
    """The memory and the backend of low latency for one geometry.

    Args:
        group, choice, geometry, config: of the calls.
        late_weights: whether the routing weights come with combine.

    Raises:
        ArgumentError: a GPU kernel's bound does not hold.
        UnavailableError: the ranks cannot share memory, or the kernels cannot be compiled.
    """
    memory: SymmetricMemory | GpuPeerMemory
    if choice.backend == "cuda":
        low_latency.check_cuda_geometry(geometry)
        nbytes = low_latency.cuda_required_bytes(geometry, late_weights=late_weights)
        between = BytesBetweenHosts(low_latency.cuda_bytes_between_hosts(geometry))
        memory = open_gpu_memory(group, choice, nbytes, between, config)
    else:
        nbytes = low_latency.HostLowLatency.required_bytes(geometry)
        memory = SymmetricMemory(group, nbytes, config)
    try:
        backend = low_latency.open_low_latency(
            memory, config, late_weights=late_weights, check_devices=choice.check_devices
        )
        return memory, ranged(backend, "low_latency", config)
    except BaseException:
        memory.close()
        raise


def open_gpu_memory(
    group: Group,
    choice: BackendChoice,
    nbytes: int,
    between_hosts: BytesBetweenHosts,
    config: Config,
) -> GpuPeerMemory:
    """Regions of ``nbytes`` on the GPUs, and where those are on several hosts, ``between_hosts``.
    Collective.

    Raises:
        FanfoldError: the ranks cannot share memory, or find no network; on all ranks.
    """
    if choice.across_hosts:
        return memory_across_hosts(group, nbytes, between_hosts, config)
    return memory_of_gpus(group, nbytes, config)


def memory_of_gpus(group: Group, nbytes: int, config: Config) -> GpuPeerMemory:
    """Regions of ``nbytes`` on the GPUs of one host, whose memory is as the settings say.
    Collective.

    Raises:
        FanfoldError: the ranks cannot share memory; on all ranks.
    """
    if config.gpu_memory == "nccl":
        return NcclSymmetricMemory(group, nbytes, config.timeout_s)
    return CudaSymmetricMemory(group, nbytes)


def memory_across_hosts(
    group: Group, nbytes: int, between_hosts: BytesBetweenHosts, config: Config
) -> CudaMemoryAcrossHosts:
    """Regions of ``nbytes`` on the GPUs of several hosts, and what is between these: of
    ``between_hosts`` bytes, on the CPUs where proxies carry them. Collective.

    Raises:
        FanfoldError: the ranks cannot share memory, or find no network; on all ranks.
    """
    hosts = find_hosts(group, config)
    gpu, error = None, None
    try:
        gpu = memory_of_gpus(part_of(group, hosts.members(group.rank)), nbytes, config)
    except FanfoldError as failure:  # of which only ranks of this host know
        error = failure
    try:
        agree(group, {}, error)
        assert gpu is not None
        between = open_between_hosts(group, hosts, gpu.device, between_hosts, config)
        return CudaMemoryAcrossHosts(gpu, between)
    except BaseException:
        if gpu is not None:
            gpu.close()
        raise


def open_between_hosts(
    group: Group, hosts: Hosts, device: torch.device, nbytes: BytesBetweenHosts, config: Config
) -> BetweenHosts:
    """What carries between GPUs of several hosts, as the setting ``network`` says. Collective.

    Raises:
        FanfoldError: the ranks find no network; on all ranks.
    """
    if config.network == NCCL_GIN:
        return GinBetweenHosts(group, hosts, device, nbytes, config)
    memory = SymmetricMemory(group, nbytes.received, config, hosts, for_kernels_of=device)
    return ProxiesBetweenHosts(memory, device)


def open_high_throughput(
    group: Group,
    choice: BackendChoice,
    max_tokens: int,
    config: Config,
    *,
    result_bytes: int = 0,
    quantize_to: ScaleFormat | None = None,
) -> tuple[PeerMemory, HighThroughputBackend]:
    """The memory and the backend of high throughput, for any geometry.

    Args:
        group, choice, config: of the calls.
        max_tokens: most tokens of one rank in one call.
        result_bytes: on GPUs, memory for the results of dispatches in place.
        quantize_to: rows that come without scales travel as fp8 with such ones.

    Raises:
        UnavailableError: the ranks cannot share memory, or the kernels cannot be compiled.
    """
    if choice.backend == "host":
        nbytes = HostHighThroughput.staging_bytes(group.size, config)
        host = SymmetricMemory(group, nbytes, config)
        staged = StagedHighThroughput(HostHighThroughput(host, 0, nbytes, quantize_to))
        return host, ranged(staged, "high_throughput", config)
    if choice.across_hosts:
        result_bytes = 0  # rows of other hosts come through rings
    nbytes = CudaHighThroughput.required_bytes(group.size, config, result_bytes)
    between = BytesBetweenHosts.of_high_throughput(group.size, nbytes)
    memory = open_gpu_memory(group, choice, nbytes, between, config)
    try:
        backend = CudaHighThroughput(
            memory,
            config,
            max_tokens=max_tokens,
            result_bytes=result_bytes,
            quantize_to=quantize_to,
            check_devices=choice.check_devices,
        )
        return memory, ranged(backend, "high_throughput", config)
    except BaseException:
        memory.close()
        raise
