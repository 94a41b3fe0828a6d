"""What CUDA says about the devices that this process sees.

Everything here may initialise CUDA: call it in ranks, never in a process that is to fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = [
    "identity",
    "lacking",
    "shared_by_threads",
    "take_device",
    "threads_share_gpu",
    "unreachable_from",
]

_sharing: list[object] = []  # the running blocks of shared_by_threads()


@contextlib.contextmanager
def shared_by_threads() -> Iterator[None]:
    """Within the block ranks that are threads of this process have kernels on one GPU."""
    block = object()
    _sharing.append(block)
    try:
        yield
    finally:
        _sharing.remove(block)


def threads_share_gpu() -> bool:
    """Whether ranks that are threads may have kernels on a GPU now: nothing may wait for all
    kernels of the GPU then, nor hold SMs while it waits for the kernel before it."""
    return bool(_sharing)


def take_device(rank: int, ranks: int, *, share: bool) -> None:
    """Makes device number ``rank`` current, if there is one for each of the host's ``ranks``; where
    there are fewer and ranks may ``share`` them, the next in turn.

    A program that has used CUDA before has made its choice, which stays.
    """
    count = torch.cuda.device_count()
    if torch.cuda.is_initialized() or not 0 <= rank < ranks:
        return
    if count == 0 or (count < ranks and not share):
        return
    # A device that does not answer is no reason not to work on the CPU; who needs it says so.
    with contextlib.suppress(RuntimeError):
        torch.cuda.set_device(rank % count)


def lacking() -> str | None:
    """Why this process cannot run CUDA kernels, or None."""
    if torch.version.cuda is None:
        return "its PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "it sees no CUDA device (what do nvidia-smi and CUDA_VISIBLE_DEVICES say?)"
    return None


def identity(device: int) -> str:
    """A name for a device that is the same in every process of the host.

    Its index is none, as ``CUDA_VISIBLE_DEVICES`` renumbers devices.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return str(uuid)
    with contextlib.suppress(AttributeError):
        return f"pci {properties.pci_domain_id}:{properties.pci_bus_id}:{properties.pci_device_id}"
    return f"index {device}"


def unreachable_from(device: int) -> tuple[str, ...]:
    """Identities of the visible devices whose memory ``device`` cannot read and write."""
    others = [peer for peer in range(torch.cuda.device_count()) if peer != device]
    reaches = torch.cuda.can_device_access_peer
    return tuple(identity(peer) for peer in others if not reaches(device, peer))
