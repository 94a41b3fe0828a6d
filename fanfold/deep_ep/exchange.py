"""A few integers from every rank to every rank, through symmetric memory, with one barrier.

Ranks of one host read each other's pages where they were written. Other hosts are sent them, to
pages that they have for each rank.

High-throughput dispatch needs it for the matrices in DeepEP's handle, and both modes to agree about
a new geometry before anything depends on it. It also carries refusals: one rank's bad input makes
the call aborted on all, and all stay in step.
"""

from __future__ import annotations

import ctypes

import torch

from fanfold.errors import ArgumentError, PeerRefused
from fanfold.geometry import MAX_EXPERTS
from fanfold.memory.host import SymmetricMemory

__all__ = ["Exchange"]

_SIGNATURE_WORDS = 16
_REASON_BYTES = 512
_REFUSED = -1


def _view_bytes(address: int, nbytes: int) -> torch.Tensor:
    """``[nbytes]`` uint8 over the memory at ``address``."""
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


class _Page:
    """One rank's words for one call: signature, numbers and, if it refused, the reason."""

    def __init__(self, address: int, numbers: int) -> None:
        self._raw = raw = _view_bytes(address, _Page.nbytes(numbers))
        self.signature = raw[: 4 * _SIGNATURE_WORDS].view(torch.int32)
        self.reason = raw[4 * _SIGNATURE_WORDS : 4 * _SIGNATURE_WORDS + _REASON_BYTES]
        self.numbers = raw[4 * _SIGNATURE_WORDS + _REASON_BYTES :].view(torch.int32)

    @staticmethod
    def nbytes(numbers: int) -> int:
        return 4 * _SIGNATURE_WORDS + _REASON_BYTES + 4 * numbers

    def write(self, signature: list[int], numbers: torch.Tensor) -> None:
        self.signature[0] = len(signature)
        self.signature[1 : 1 + len(signature)] = torch.tensor(
            signature, dtype=torch.int32, device="cpu"
        )
        self.numbers[: numbers.numel()] = numbers

    def refuse(self, reason: str) -> None:
        text = reason.encode()[: _REASON_BYTES - 1]
        self.reason[: len(text) + 1] = torch.tensor([*text, 0], dtype=torch.uint8, device="cpu")
        self.signature[0] = _REFUSED

    def copy_of(self, other: _Page, numbers: int) -> int:
        """Copies another page and its first ``numbers`` numbers. Returns how many bytes that is."""
        nbytes = _Page.nbytes(numbers)
        self._raw[:nbytes] = other._raw[:nbytes]
        return nbytes

    @property
    def refused(self) -> str | None:
        """Why its rank refused, if it did."""
        if int(self.signature[0]) != _REFUSED:
            return None
        return bytes(self.reason.tolist()).partition(b"\0")[0].decode(errors="replace")


class Exchange:
    """All-to-all of small integers over one part of a symmetric memory.

    Args:
        memory: the ranks' symmetric memory.
        rank: this process's place.
        ranks: how many there are.
        offset: where the part of :meth:`required_bytes` begins.
    """

    def __init__(self, memory: SymmetricMemory, rank: int, ranks: int, offset: int) -> None:
        self._core = memory.core
        self._rank, self._ranks = rank, ranks
        numbers = self._numbers(ranks)
        nbytes = _Page.nbytes(numbers)
        host = memory.hosts.host
        remote = [peer for peer in range(ranks) if host[peer] != host[rank]]

        def place(source: int, parity: int) -> int:
            """Where a rank's page lies in the memory of ranks on other hosts."""
            return offset + (2 * (1 + source) + parity) * nbytes

        def page(owner: int, at: int) -> _Page:
            return _Page(self._core.window(owner, at, nbytes), numbers)

        # The pages of a call are written again two calls later, when every rank has passed the
        # barrier of the call between, and so has read them.
        self._pages = [
            [
                page(rank, place(peer, parity))
                if peer in remote
                else page(peer, offset + parity * nbytes)
                for peer in range(ranks)
            ]
            for parity in range(2)
        ]
        self._sent = [
            [(peer, place(rank, parity), page(peer, place(rank, parity))) for peer in remote]
            for parity in range(2)
        ]
        self._calls = 0

    @staticmethod
    def _numbers(ranks: int) -> int:
        # Tokens for each rank and each expert, and the number of tokens; a whole number of lines.
        return -(-(1 + ranks + MAX_EXPERTS) // 32) * 32

    @classmethod
    def required_bytes(cls, ranks: int, hosts: int = 1) -> int:
        """Bytes of symmetric memory per rank."""
        return 2 * _Page.nbytes(cls._numbers(ranks)) * (1 if hosts == 1 else 1 + ranks)

    def gather(
        self,
        phase: str,
        signature: dict[str, int],
        numbers: torch.Tensor,
        error: BaseException | None = None,
    ) -> torch.Tensor:
        """The ``numbers`` of every rank, once all agree about ``signature``. Collective.

        Args:
            phase: the call on whose behalf this is, for messages.
            signature: values that must be the same on all ranks, by name.
            numbers: ``[n]`` int32, n the same on ranks that agree about ``signature``.
            error: this rank's refusal of its own input, if it refuses.

        Returns:
            ``[ranks, n]`` int32; zeros for a masked rank.

        Raises:
            BaseException: ``error``.
            ArgumentError: a value of the signature that differs, naming both, on all ranks.
            PeerRefused: another rank refused.
            PeerTimeout: a rank did not take part in time.
        """
        self._core.check_usable()
        pages = self._pages[self._calls % 2]
        if error is None:
            pages[self._rank].write(list(signature.values()), numbers)
        else:
            pages[self._rank].refuse(f"{error}")
        for peer, place, page in self._sent[self._calls % 2]:
            self._core.put(peer, place, page.copy_of(pages[self._rank], numbers.numel()))
        self._core.barrier()
        self._calls += 1
        if error is not None:
            raise error
        present = [peer for peer in range(self._ranks) if not self._core.masked(peer)]
        for peer in present:
            reason = pages[peer].refused
            if reason is not None:
                raise PeerRefused(self._rank, peer, phase, reason)
        self._check_agreement(phase, signature, pages, present)
        gathered = torch.zeros((self._ranks, numbers.numel()), dtype=torch.int32, device="cpu")
        for peer in present:
            gathered[peer] = pages[peer].numbers[: numbers.numel()]
        return gathered

    def _check_agreement(
        self, phase: str, signature: dict[str, int], pages: list[_Page], present: list[int]
    ) -> None:
        signature = {"the number of values that must agree": len(signature)} | signature
        for place, (name, value) in enumerate(signature.items()):
            for peer in present:
                theirs = int(pages[peer].signature[place])
                if theirs != value:
                    raise ArgumentError(
                        f"{name} of {phase}",
                        f"{value} on rank {self._rank} and {theirs} on rank {peer}",
                        "the same on all ranks",
                    )
