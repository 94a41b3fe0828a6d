"""Memory of GPUs, with PyTorch's part played by an impostor on the CPU."""

from __future__ import annotations

import os
import types
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from fanfold.errors import FanfoldError, SystemFailure, UnavailableError, UsageError
from fanfold.group import Group, as_group
from fanfold.memory import cuda as symmetric_cuda
from fanfold.memory.cuda import CudaSymmetricMemory

NBYTES = 4096
OFFSET = 256  # of the tensor in its allocation
PEER_BASE = 1 << 40
VARIABLES = ("DISABLE_MULTICAST", "ALLOW_OVERLAPPING_DEVICES")


class Two:
    """A group of two ranks, of which only rank 0 is here and rank 1 says the same."""

    rank, size = 0, 2

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost

    def all_gather(self, value: Any) -> list[Any]:
        if self.lost:
            raise RuntimeError("[gloo] Connection closed by peer\nsome C++ stack")
        return [value, value]


class Allocator:
    """What is used of torch's ``_SymmetricMemory``."""

    failure: Exception | None = None
    allocation: Exception | None = None
    met: str = ""
    environment: ClassVar[dict[str, str | None]] = {}  # when the ranks met

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: Any, device: Any) -> torch.Tensor:
        if cls.allocation is not None:
            raise cls.allocation
        assert (size, stride, dtype) == ((NBYTES,), (1,), torch.uint8)
        return torch.empty(NBYTES, dtype=torch.uint8)

    @classmethod
    def rendezvous(cls, tensor: torch.Tensor, group_name: str) -> Any:
        if cls.failure is not None:
            raise cls.failure
        cls.met = group_name
        cls.environment = {name: os.environ.get(f"TORCH_SYMM_MEM_{name}") for name in VARIABLES}
        return types.SimpleNamespace(buffer_ptrs=[tensor.data_ptr() - OFFSET, PEER_BASE])


@pytest.fixture
def torch_side(monkeypatch: pytest.MonkeyPatch) -> type[Allocator]:
    """A machine with GPUs, as far as CudaSymmetricMemory asks."""

    class Fresh(Allocator):
        pass

    empty = torch.empty
    for name, value in {
        "current_device": lambda: 1,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **rest: empty(*size, **rest))
    monkeypatch.setattr(symmetric_cuda, "_allocator", lambda: Fresh)
    monkeypatch.setattr(
        symmetric_cuda, "process_group", lambda group: types.SimpleNamespace(group_name="world")
    )
    for name in VARIABLES:
        monkeypatch.delenv(f"TORCH_SYMM_MEM_{name}", raising=False)
    return Fresh


def test_addresses(torch_side: type[Allocator]) -> None:
    with CudaSymmetricMemory(Two(), NBYTES) as memory:
        assert memory.device == torch.device("cuda:1")
        assert (memory.rank, memory.ranks, memory.bytes_per_rank) == (0, 2, NBYTES)
        assert memory.base(0) == memory.tensor.data_ptr()
        assert memory.base(1) == PEER_BASE + OFFSET
        assert torch_side.met == "world"
    memory.close()
    for use in (lambda: memory.tensor, lambda: memory.base(0)):
        with pytest.raises(UsageError, match="closed"):
            use()


def test_what_torch_reads_from_the_environment(torch_side: type[Allocator]) -> None:
    before = dict(os.environ)
    CudaSymmetricMemory(Two(), NBYTES).close()
    # Both ranks say cuda:1, and placement has seen that they mean different GPUs.
    assert torch_side.environment == dict.fromkeys(VARIABLES, "1")
    assert dict(os.environ) == before, "what the program maps itself is not Fanfold's affair"


def test_the_users_own_setting_stays(
    torch_side: type[Allocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    CudaSymmetricMemory(Two(), NBYTES).close()
    assert torch_side.environment["DISABLE_MULTICAST"] == "0"
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "0"


def test_alone_nobody_is_met(torch_side: type[Allocator]) -> None:
    torch_side.failure = torch_side.allocation = AssertionError("used")
    with CudaSymmetricMemory(as_group(), NBYTES) as memory:
        assert memory.base(0) == memory.tensor.data_ptr()
        assert memory.tensor.shape == (NBYTES,)


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (
            dist.DistStoreError("wait timeout after 300000ms, keys: /x\nstack"),
            FanfoldError,
            r"rank 0 waited in vain for one of the ranks \[1\] .*\(wait timeout after 300000ms,",
        ),
        (
            RuntimeError("CUDA driver error: invalid device ordinal\nstack"),
            UnavailableError,
            r"rank 0 could not map the memory of ranks \[1\] from cuda:1 .*peer access",
        ),
    ],
    ids=["absent", "no access"],
)
def test_a_rendezvous_that_fails(
    torch_side: type[Allocator], failure: Exception, kind: type[Exception], text: str
) -> None:
    torch_side.failure = failure
    with pytest.raises(kind, match=text) as caught:
        CudaSymmetricMemory(Two(), NBYTES)
    assert "stack" not in str(caught.value)


def test_a_group_that_breaks(torch_side: type[Allocator]) -> None:
    with pytest.raises(FanfoldError, match=r"ranks \[1\] .*\(\[gloo\] Connection closed by peer\)"):
        CudaSymmetricMemory(Two(lost=True), NBYTES)


def test_too_little_memory(torch_side: type[Allocator]) -> None:
    torch_side.allocation = torch.OutOfMemoryError("CUDA out of memory.\nstack")
    with pytest.raises(SystemFailure, match=r"no 4096 bytes .* cuda:1 \(CUDA out of memory\.\)"):
        CudaSymmetricMemory(Two(), NBYTES)


def test_only_torch_groups_meet(
    torch_side: type[Allocator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_cuda, "process_group", lambda group: None)
    group: Group = Two()
    with pytest.raises(UnavailableError, match=r"torch\.distributed\.init_process_group"):
        CudaSymmetricMemory(group, NBYTES)
    reason = symmetric_cuda.unavailable(group)
    assert reason is not None
    assert "mpi4py communicator" in reason


def test_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_cuda, "_MODULE", "torch.distributed._no_such_module")
    reason = symmetric_cuda.unavailable(Two())
    assert reason is not None
    assert "no torch.distributed._no_such_module with empty_strided_p2p and rendezvous" in reason
    assert "install PyTorch 2.6 or later" in reason
    assert symmetric_cuda.unavailable(as_group()) is None
