"""How much symmetric memory low-latency calls need."""

from __future__ import annotations

from fanfold import _core
from fanfold.geometry import Geometry

__all__ = [
    "check_cuda_geometry", "core_geometry", "cuda_bytes_between_hosts", "cuda_required_bytes",
]  # fmt: skip


def core_geometry(geometry: Geometry) -> _core.LowLatencyGeometry:
    """The geometry as the core's layouts take it."""
    return _core.LowLatencyGeometry(
        ranks=geometry.ranks,
        experts=geometry.num_experts,
        top_k=geometry.top_k,
        hidden=geometry.hidden,
        max_tokens=geometry.max_tokens,
    )


def check_cuda_geometry(geometry: Geometry) -> None:
    """Raises ArgumentError for a geometry that the kernels do not take, whatever the memory."""
    _core.check_cuda_geometry(core_geometry(geometry))


def cuda_required_bytes(
    geometry: Geometry, *, late_weights: bool, token_major: bool = False
) -> int:
    """Bytes of a GPU's symmetric memory per rank: with slot = 2 * hidden rounded up to 128, about
    ``4 * R * M * slot + 16 * R * M * K``, and ``16 * R * M * K`` more with late weights.

    Args:
        geometry: of the calls.
        late_weights: whether the routing weights come with combine (DeepEP's interface).
        token_major: whether rows come once for each token and rank.
    """
    _, end = _core.cuda_low_latency_bytes(core_geometry(geometry), late_weights, token_major)
    return end


def cuda_bytes_between_hosts(geometry: Geometry) -> int:
    """Bytes of a rank's memory on the CPU in which kernels receive from ranks on other hosts: about
    ``8 * R * M * H + 32 * R * M * K``. Of as much for each such rank, in which they send, the R-th
    part is used."""
    return int(_core.cuda_low_latency_hosts_bytes(core_geometry(geometry)))
