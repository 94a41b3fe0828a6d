"""Memory of one rank in which its kernels keep their state from call to call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fanfold import _core

__all__ = ["new_state"]


def new_state(
    nbytes: int, table_at: int, peers: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Zeros, but for the addresses of all ranks' symmetric memory if those do not fit a kernel's
    arguments.

    Args:
        nbytes: of the state, as the core declares it.
        table_at: where it keeps the addresses.
        peers: the address of each rank's memory.
        device: of the kernels.
    """
    state = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    if len(peers) > _core.CUDA_FEW_RANKS:
        table = torch.tensor(peers, dtype=torch.int64, device="cpu").view(torch.uint8)
        state[table_at : table_at + len(table)] = table.to(device)
    return state
