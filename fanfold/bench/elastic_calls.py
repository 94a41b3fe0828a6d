"""The calls of DeepEP's other two interfaces, for ``fanfold bench --face elastic`` and ``--face
hybridep``: what a program written for them calls, and nothing beside it in what is timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from fanfold.bench.calls import Calls, Given, wait_for
from fanfold.bench.check import Expectation, PackedRows, TokenMajorRows
from fanfold.bench.settings import BenchSettings
from fanfold.config import in_environment
from fanfold.deep_ep import ElasticBuffer, EPHandle, HybridEPBuffer, HybridEPHandle
from fanfold.deep_ep.few_tokens import RoutedFew
from fanfold.errors import UnavailableError
from fanfold.group import as_group

__all__ = ["ElasticCalls", "HybridCalls"]


@dataclass(slots=True)
class _Brought:
    """What a dispatch returned, that of an earlier one where a known routing brings rows alone.

    Attributes:
        tokens, scales: the rows.
        topk_idx: of a plain dispatch; None where rows are sorted by expert.
        weights: of the rows or of their top-k entries.
        counts: of HybridEPBuffer: rows of each local expert, with padding.
        handle: for the calls that follow.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    weights: torch.Tensor | None
    counts: torch.Tensor | None
    handle: Any


def _check_place(calls: Calls, settings: BenchSettings) -> None:
    """Raises UnavailableError if GPUs were asked for and the calls, which end so, run elsewhere."""
    if settings.backend == "cuda" and calls.device.type != "cuda":
        calls.close()
        raise UnavailableError(
            f"backend is cuda, but high throughput runs on {calls.device} here: use --backend host"
        )


def _network_of(memory: Any) -> str:
    """What carries between hosts; GPUs' memory has none."""
    network: str = getattr(memory, "network", "")
    return network


def _unweighted(expectation: Expectation) -> Expectation:
    """The same where rows are summed as they are: what weights the rows the experts multiply."""
    batches = [
        dataclasses.replace(batch, topk_weights=torch.ones_like(batch.topk_weights))
        for batch in expectation.batches
    ]
    return dataclasses.replace(expectation, batches=batches)


def _split(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return x if isinstance(x, tuple) else (x, None)


def _in_host_memory(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


class ElasticCalls:
    """``ElasticBuffer.dispatch``, expanded where rows are sorted by expert, and ``combine``.
    Construction is collective.

    Args:
        group: the ranks.
        settings: of high throughput, with a backend.

    Attributes:
        few_tokens: whether the last dispatch went by the low-latency protocol.
    """

    def __init__(self, group: Any, settings: BenchSettings) -> None:
        self._experts, self._most = settings.experts, settings.tokens
        self._expands = settings.layout == "expert_major"
        self._alignment, self._sms = settings.alignment or 1, settings.sms or 0
        self._zero_padding = bool(settings.zero_padding)
        with in_environment(settings.overrides()):
            self._buffer = ElasticBuffer(
                group,
                num_max_tokens_per_rank=settings.tokens,
                hidden=settings.hidden,
                num_topk=settings.top_k,
                explicitly_destroy=True,
            )
        self.device, runtime = self._buffer.device, self._buffer.runtime
        self.few_tokens = False
        self.memory_bytes, self.network = runtime.bytes_per_rank, _network_of(runtime)
        _check_place(self, settings)

    def dispatch(self, given: Given, capacity: int | None = None) -> _Brought:
        """Sends ``given``, by a new routing. With a capacity the CPU waits for nothing, and there
        is the room that the interface always has then."""
        x, topk_idx, weights, handle, _ = self._buffer.dispatch(
            given.x,
            given.topk_idx,
            given.topk_weights,
            num_experts=self._experts,
            expert_alignment=self._alignment,
            num_sms=self._sms,
            do_handle_copy=False,
            do_cpu_sync=capacity is None,
            do_expand=self._expands,
            do_zero_padding=self._zero_padding,
        )
        few, self.few_tokens = self._buffer._few, isinstance(handle._plan, RoutedFew)
        if self.few_tokens and few is not None:
            self.memory_bytes = self._buffer.runtime.bytes_per_rank + few.bytes_per_rank
        return _Brought(*_split(x), topk_idx, weights, None, handle)

    def dispatch_again(self, given: Given, previous: _Brought) -> _Brought:
        """Sends the rows of ``given`` by the routing of ``previous``."""
        x = self._buffer.dispatch(
            given.x,
            handle=previous.handle,
            num_sms=self._sms,
            do_expand=self._expands,
            do_zero_padding=self._zero_padding,
        )[0]
        tokens, scales = _split(x)
        return dataclasses.replace(previous, tokens=tokens, scales=scales)

    def combine(
        self, y: torch.Tensor, brought: _Brought, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back and sums it; the call makes its own tensor."""
        del out
        return self._buffer.combine(y, brought.handle, num_sms=self._sms)[0]

    def check(
        self, brought: _Brought, expectation: Expectation, capacity: int | None = None
    ) -> None:
        """Compares with the oracle."""
        room = None if capacity is None else len(brought.tokens)
        if self._expands:
            expectation.received(
                self._sorted(brought), self._alignment, room, zero_padding=self._zero_padding
            )
        else:
            expectation.token_major(self._plain(brought), room)

    def outputs(self, brought: _Brought, expectation: Expectation) -> torch.Tensor:
        """What the experts, or this rank, make of each row; NaN elsewhere."""
        if self._expands:
            y = expectation.outputs(self._sorted(brought))
        else:
            y = expectation.token_major_outputs(self._plain(brought))
        return y.to(self.device)

    def _plain(self, brought: _Brought) -> TokenMajorRows:
        """A copy in host memory."""
        handle: EPHandle = brought.handle
        assert brought.topk_idx is not None
        place = handle.recv_src_metadata[:, 0].cpu()
        return TokenMajorRows(
            tokens=brought.tokens.cpu(),
            scales=_in_host_memory(brought.scales),
            count=int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]),
            source_rank=place.div(self._most, rounding_mode="floor"),
            source_token=place.remainder(self._most),
            topk_idx=brought.topk_idx.cpu(),
            topk_weights=_in_host_memory(brought.weights),
            tokens_per_expert=handle.num_unaligned_recv_tokens_per_expert.cpu(),
        )

    def _sorted(self, brought: _Brought) -> PackedRows:
        """A copy in host memory."""
        handle: EPHandle = brought.handle
        metadata = handle.recv_src_metadata.cpu()
        counts = handle.num_unaligned_recv_tokens_per_expert.cpu()
        ends = handle.psum_num_recv_tokens_per_expert.cpu().long()
        place = torch.full((len(brought.tokens),), -1, dtype=torch.int32, device="cpu")
        for slots in metadata[:, 2:].T:
            there = slots >= 0
            place[slots[there].long()] = metadata[:, 0][there]
        last = -(-ends[-1:] // self._alignment) * self._alignment
        return PackedRows(
            tokens=brought.tokens.cpu(),
            scales=_in_host_memory(brought.scales),
            tokens_per_expert=counts,
            offsets=torch.cat([ends - counts, last]),
            source_rank=place.div(self._most, rounding_mode="floor"),
            source_token=place.remainder(self._most),
            weights=_in_host_memory(brought.weights),
        )

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Compares with the oracle."""
        if self._expands:
            _unweighted(expectation).combined(out)
        else:
            expectation.token_major_combined(out)

    def synchronize(self) -> None:
        """Waits for what is enqueued; what it found wrong a later call raises, as in DeepEP."""
        wait_for(self.device)

    def metrics(self) -> dict[str, Any]:
        """What has been counted for the calls."""
        return self._buffer.metrics()

    def close(self) -> None:
        """Lets the memory go."""
        self._buffer.destroy()


class HybridCalls:
    """``HybridEPBuffer.dispatch_with_permute``, by indices, and ``combine_with_unpermute``.
    Construction is collective.

    Args:
        group: the ranks.
        settings: of high throughput, with a backend.
    """

    def __init__(self, group: Any, settings: BenchSettings) -> None:
        ranks = as_group(group).size
        self._experts, self._alignment = settings.experts, settings.alignment or 1
        with in_environment(settings.overrides()):
            self._buffer = HybridEPBuffer(
                group,
                settings.hidden,
                settings.tokens,
                settings.experts // ranks,
                num_sms_dispatch_api=settings.sms,
                num_sms_combine_api=settings.sms,
            )
        self.device, runtime = self._buffer.device, self._buffer.runtime
        self.memory_bytes, self.network = runtime.bytes_per_rank, _network_of(runtime)
        _check_place(self, settings)

    def dispatch(self, given: Given, capacity: int | None = None) -> _Brought:
        """Sends ``given``, by a new routing."""
        values, scales = _split(given.x)
        tokens, weights, brought, counts, handle = self._buffer.dispatch_with_permute(
            hidden=values,
            scaling_factor=scales,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            num_of_experts=self._experts,
            pad_multiple=self._alignment,
            num_permuted_tokens=capacity,
            non_blocking=capacity is not None,
        )
        return _Brought(tokens, brought, None, weights, counts, handle)

    def dispatch_again(self, given: Given, previous: _Brought) -> _Brought:
        """Sends the rows of ``given`` by the routing of ``previous``."""
        values, scales = _split(given.x)
        handle: HybridEPHandle = previous.handle
        tokens, _, brought, _, _ = self._buffer.dispatch_with_permute(
            hidden=values, scaling_factor=scales, handle=handle
        )
        return dataclasses.replace(previous, tokens=tokens, scales=brought)

    def combine(
        self, y: torch.Tensor, brought: _Brought, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back and sums it; the call makes its own tensor."""
        del out
        return self._buffer.combine_with_unpermute(hidden=y, handle=brought.handle)[0]

    def check(
        self, brought: _Brought, expectation: Expectation, capacity: int | None = None
    ) -> None:
        """Compares with the oracle."""
        expectation.received(self._rows(brought, expectation), self._alignment, capacity)

    def outputs(self, brought: _Brought, expectation: Expectation) -> torch.Tensor:
        """What the experts make of each row; NaN elsewhere."""
        return expectation.outputs(self._rows(brought, expectation)).to(self.device)

    def _rows(self, brought: _Brought, expectation: Expectation) -> PackedRows:
        """A copy in host memory. The call returns counts with padding, by which rows are found;
        how many of them are rows it leaves to the experts."""
        assert brought.counts is not None
        ends = brought.counts.cpu().cumsum(0)
        return PackedRows(
            tokens=brought.tokens.cpu(),
            scales=_in_host_memory(brought.scales),
            tokens_per_expert=expectation.tokens_per_expert,
            offsets=torch.cat([ends.new_zeros(1), ends]),
            source_rank=None,
            source_token=None,
            weights=_in_host_memory(brought.weights),
        )

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Compares with the oracle."""
        _unweighted(expectation).combined(out)

    def synchronize(self) -> None:
        """Waits for what is enqueued; what it found wrong a later call raises, as in DeepEP."""
        wait_for(self.device)

    def metrics(self) -> dict[str, Any]:
        """What has been counted for the calls."""
        return self._buffer.metrics()

    def close(self) -> None:
        """Lets the memory go."""
        self._buffer.runtime.close()
