"""What the core is lent carries its bytes, and the core refuses what is too short."""

from __future__ import annotations

import pytest
import torch

from fanfold import _core
from fanfold.errors import ArgumentError
from fanfold.lending import lend, lend_if_given


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (rows(3, 4), 48),
        (rows(3, 4).t(), 48),
        (rows(3, 4)[1:], 32),
        (rows(3, 4)[:, 1:3], 4 * (2 * 4 + 2)),  # ends with its last element
        (rows(3, 4)[:, ::2], 4 * (2 * 4 + 3)),
        (rows(1, 4).expand(3, 4), 16),
        (rows(3, 0), 0),
        (rows(4, 4)[::2, :0], 0),
        (rows(), 4),
    ],
)
def test_bytes_to_the_end_of_the_last_element(tensor: torch.Tensor, nbytes: int) -> None:
    assert lend(tensor) == (tensor.data_ptr(), nbytes)
    assert lend_if_given(tensor) == lend(tensor)
    assert lend_if_given(None) is None


def test_what_is_lent_comes_back() -> None:
    tokens = _core.LowLatencyTokens()
    assert tokens.x is None
    tokens.x = (64, 7)
    assert tokens.x == (64, 6)  # whole elements
    tokens.x = None
    assert tokens.x is None
    with pytest.raises(ArgumentError, match="x is at address 65, but must be a multiple of 2"):
        tokens.x = (65, 8)


@pytest.mark.parametrize("short", ["x", "values", "scales"])
def test_quantize_refuses_what_is_too_short(short: str) -> None:
    x = torch.zeros((2, 256), dtype=torch.bfloat16)
    memory = {"x": x, "values": x.to(torch.float8_e4m3fn), "scales": rows(2, 2)}
    lent = {name: lend(tensor) for name, tensor in memory.items()}
    address, nbytes = lent[short]
    lent[short] = (address, nbytes - 1)
    with pytest.raises(ArgumentError, match=f"{short} is [0-9]+ elements, but must be at least"):
        _core.quantize_fp8(lent["x"], 2, 256, False, lent["values"], lent["scales"])


@pytest.mark.parametrize(("peer", "offset", "nbytes"), [(1, 0, 8), (-1, 0, 8), (0, 57, 8),
                                                        (0, -8, 8), (0, 0, -1)])  # fmt: skip
def test_windows_lie_within_the_memory(peer: int, offset: int, nbytes: int) -> None:
    memory = _core.SymmetricMemory(0, 1, 64, 1.0, 0.0, False, [])
    memory.map([memory.address()])
    assert memory.window(0, 56, 8) == memory.window(0, 0, 64) + 56
    with pytest.raises(ArgumentError):
        memory.window(peer, offset, nbytes)
    memory.close()
