"""Low latency of an ExpertParallel: opened where its calls run."""

from __future__ import annotations

from fanfold import low_latency
from fanfold.config import Config
from fanfold.geometry import Geometry
from fanfold.group import Group
from fanfold.placement import Placement
from fanfold.symmetric import SymmetricMemory
from fanfold.symmetric_cuda import CudaSymmetricMemory

__all__ = ["open_placed"]


def open_placed(
    group: Group,
    placement: Placement,
    geometry: Geometry,
    config: Config,
    *,
    late_weights: bool = False,
) -> tuple[SymmetricMemory | CudaSymmetricMemory, low_latency.LowLatency]:
    """The memory and the mode of low latency where ``placement`` says. Collective.

    Raises:
        ArgumentError, UnavailableError: as for :class:`ExpertParallel`.
    """
    memory: SymmetricMemory | CudaSymmetricMemory
    if placement.backend == "cuda":
        low_latency.check_cuda_geometry(geometry)
        nbytes = low_latency.cuda_required_bytes(geometry, late_weights=late_weights)
        memory = CudaSymmetricMemory(group, nbytes)
    else:
        nbytes = low_latency.HostLowLatency.required_bytes(geometry)
        memory = SymmetricMemory(group, nbytes, config)
    try:
        mode = low_latency.open_low_latency(
            memory, config, late_weights=late_weights, check_place=placement.check
        )
    except BaseException:
        memory.close()
        raise
    return memory, mode
