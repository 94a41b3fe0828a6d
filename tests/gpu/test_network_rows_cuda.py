"""Memory of a GPU as the network gets it. No NIC is needed."""

from __future__ import annotations

import os

import pytest
import torch

from fanfold import _core
from fanfold.memory.rows import GpuRows

pytestmark = pytest.mark.gpu

PAGE = 2**21


def test_memory_of_a_gpu() -> None:
    """Whole pages, and a descriptor where the driver makes one; it goes with the memory."""
    device = torch.device("cuda", 0)
    torch.cuda.init()
    assert isinstance(_core.cuda_why_no_network_memory(0), str)
    before = torch.cuda.memory_allocated(device)
    rows = GpuRows(PAGE + 1, device)
    assert (rows.nbytes, rows.address % PAGE, rows.device) == (2 * PAGE, 0, 0)
    descriptor = rows.dmabuf
    if descriptor >= 0:
        os.fstat(descriptor)
    rows.close()
    rows.close()
    assert torch.cuda.memory_allocated(device) == before
    if descriptor >= 0:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
