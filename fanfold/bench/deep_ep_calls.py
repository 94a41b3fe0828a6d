"""The calls of the DeepEP face, for ``fanfold bench --face deep_ep``: what a program written for
DeepEP calls, and nothing beside it in what is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fanfold.bench.calls import Given, await_sent, wait_for
from fanfold.bench.check import Expectation, PackedRows, TokenMajorRows
from fanfold.bench.settings import BenchSettings
from fanfold.config import in_environment
from fanfold.deep_ep import Buffer
from fanfold.errors import UnavailableError
from fanfold.group import as_group

__all__ = ["DeepEpHighThroughput", "DeepEpLowLatency"]

_COUNT_BITS = 32  # of an entry of layout_range: count | begin << 32


def _open(group: Any, settings: BenchSettings, **options: Any) -> Buffer:
    with in_environment(settings.overrides()):  # DeepEP's constructor takes no such arguments
        buffer = Buffer(group, explicitly_destroy=True, **options)
    assert buffer.runtime is not None
    if settings.backend == "cuda" and not buffer.runtime.choice.supports(settings.mode):
        buffer.destroy()
        raise UnavailableError(
            f"backend is cuda, but {settings.mode.replace('_', ' ')} of a Buffer runs on the host "
            "here: use --backend host"
        )
    return buffer


def _network_of(buffer: Buffer) -> str:
    assert buffer.runtime is not None
    return buffer.runtime.memory.network


class DeepEpLowLatency:
    """``low_latency_dispatch`` and ``low_latency_combine``; what a dispatch brings is the tuple
    that it returns. Construction is collective.

    Args:
        group: the ranks.
        settings: of low latency, with a backend.
    """

    def __init__(self, group: Any, settings: BenchSettings) -> None:
        ranks = as_group(group).size
        self._tokens, self._experts = settings.tokens, settings.experts
        self._fp8 = settings.dtype == "fp8"
        self.memory_bytes = Buffer.get_low_latency_rdma_size_hint(
            settings.tokens, settings.hidden, ranks, settings.experts
        )
        self._buffer = _open(
            group, settings, num_rdma_bytes=self.memory_bytes, low_latency_mode=True
        )
        self.device, self.network = self._buffer.device, _network_of(self._buffer)

    def dispatch(self, given: Given, capacity: int | None = None) -> Any:
        """Sends ``given``, whose weights stay here until the combine."""
        del capacity  # low latency has none
        self._given = given
        assert not isinstance(given.x, tuple)  # low latency quantises in the call
        return self._buffer.low_latency_dispatch(
            given.x, given.topk_idx, self._tokens, self._experts, use_fp8=self._fp8
        )

    def send_dispatch(self, given: Given) -> Callable[[], None]:
        """The send half of a dispatch; the hook receives."""
        assert not isinstance(given.x, tuple)
        hook = self._buffer.low_latency_dispatch(
            given.x, given.topk_idx, self._tokens, self._experts, use_fp8=self._fp8,
            return_recv_hook=True,
        )[4]  # fmt: skip
        assert hook is not None
        return hook

    def combine(
        self, y: torch.Tensor, brought: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back, weighted and summed."""
        given = self._given
        return self._buffer.low_latency_combine(
            y, given.topk_idx, given.topk_weights, brought[2], out=out
        )[0]

    def send_combine(
        self, y: torch.Tensor, brought: Any, out: torch.Tensor | None = None
    ) -> Callable[[], None]:
        """The send half of a combine; the hook receives."""
        given = self._given
        hook = self._buffer.low_latency_combine(
            y, given.topk_idx, given.topk_weights, brought[2], out=out, return_recv_hook=True
        )[2]
        assert hook is not None
        return hook

    def await_sent(self) -> None:
        """Waits until peers on other hosts have what calls that have ended have sent."""
        assert self._buffer.runtime is not None
        await_sent(*self._buffer.runtime.counting)

    def check(self, brought: Any, expectation: Expectation, capacity: int | None = None) -> None:
        """Compares with the oracle."""
        expectation.received(_packed_rows(brought), capacity=capacity)

    def outputs(self, brought: Any, expectation: Expectation) -> torch.Tensor:
        """What the experts make of each row; NaN elsewhere."""
        return expectation.outputs(_packed_rows(brought)).to(self.device)

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Compares with the oracle."""
        expectation.combined(out)

    def synchronize(self) -> None:
        """Waits for what is enqueued; what it found wrong a later call raises, as in DeepEP."""
        wait_for(self.device)

    def metrics(self) -> dict[str, Any]:
        """What has been counted for the calls."""
        return self._buffer.metrics()

    def close(self) -> None:
        """Lets the memory go."""
        self._buffer.destroy()


def _packed_rows(brought: Any) -> PackedRows:
    """A copy in host memory."""
    rows, counts, handle = brought[:3]
    tokens, scales = rows if isinstance(rows, tuple) else (rows, None)
    ranges = handle[1].cpu()
    local, capacity = len(ranges), tokens.shape[1]
    source_rank = torch.full((local, capacity), -1, dtype=torch.int32, device="cpu")
    for expert, of_ranks in enumerate(ranges.tolist()):
        for rank, entry in enumerate(of_ranks):
            begin, count = entry >> _COUNT_BITS, entry & ((1 << _COUNT_BITS) - 1)
            source_rank[expert, begin : begin + count] = rank
    return PackedRows(
        tokens=tokens.cpu(),
        scales=None if scales is None else scales.cpu(),
        tokens_per_expert=counts.cpu(),
        offsets=torch.arange(local + 1, dtype=torch.int64, device="cpu") * capacity,
        source_rank=source_rank,
        source_token=handle[0].cpu(),
    )


@dataclass(slots=True)
class _Brought:
    """What a high-throughput dispatch returned, that of an earlier one where a known routing brings
    rows alone."""

    rows: Any
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    counts: list[int]
    handle: Any

    @property
    def tokens(self) -> torch.Tensor:
        rows: torch.Tensor = self.rows[0] if isinstance(self.rows, tuple) else self.rows
        return rows

    @property
    def scales(self) -> torch.Tensor | None:
        return self.rows[1] if isinstance(self.rows, tuple) else None


class DeepEpHighThroughput:
    """``get_dispatch_layout``, ``dispatch`` and ``combine``. Construction is collective.

    Args:
        group: the ranks.
        settings: of high throughput, with a backend.
    """

    def __init__(self, group: Any, settings: BenchSettings) -> None:
        ranks = as_group(group)
        self._rank, self._experts = ranks.rank, settings.experts
        self._local = settings.experts // ranks.size
        self._sms = Buffer.num_sms
        if settings.sms is not None:
            Buffer.set_num_sms(settings.sms)
        row_bytes = 2 * settings.hidden
        self.memory_bytes = max(
            config.get_nvl_buffer_size_hint(row_bytes, ranks.size)
            for config in (
                Buffer.get_dispatch_config(ranks.size),
                Buffer.get_combine_config(ranks.size),
            )
        )
        try:
            self._buffer = _open(group, settings, num_nvl_bytes=self.memory_bytes)
        except BaseException:
            Buffer.set_num_sms(self._sms)
            raise
        self.device, self.network = self._buffer.device, _network_of(self._buffer)

    def dispatch(self, given: Given, capacity: int | None = None) -> _Brought:
        """Sends ``given``, by a new routing and its layout."""
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            given.topk_idx, self._experts
        )
        rows, topk_idx, topk_weights, counts, handle, _ = self._buffer.dispatch(
            given.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            num_worst_tokens=capacity or 0,
        )
        assert topk_idx is not None
        assert topk_weights is not None
        assert counts is not None
        return _Brought(rows, topk_idx, topk_weights, counts, handle)

    def dispatch_again(self, given: Given, previous: _Brought) -> _Brought:
        """Sends the rows of ``given`` by the routing of ``previous``."""
        rows = self._buffer.dispatch(given.x, handle=previous.handle)[0]
        return dataclasses.replace(previous, rows=rows)

    def combine(
        self, y: torch.Tensor, brought: _Brought, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back and sums it; DeepEP's call makes its own tensor."""
        del out
        return self._buffer.combine(y, brought.handle)[0]

    def check(
        self, brought: _Brought, expectation: Expectation, capacity: int | None = None
    ) -> None:
        """Compares with the oracle."""
        expectation.token_major(self._rows(brought), capacity)

    def outputs(self, brought: _Brought, expectation: Expectation) -> torch.Tensor:
        """What this rank makes of each row; NaN behind them."""
        return expectation.token_major_outputs(self._rows(brought)).to(self.device)

    def _rows(self, brought: _Brought) -> TokenMajorRows:
        """A copy in host memory."""
        ends = brought.handle[0][:, self._rank].long().cpu()  # rank_prefix_matrix
        count = int(ends[-1])
        rows = torch.arange(len(brought.tokens), dtype=torch.int64, device="cpu")
        topk_idx = brought.topk_idx.cpu()
        counts = torch.tensor(brought.counts, dtype=torch.int32, device="cpu")
        if not brought.counts:  # with a capacity the CPU gets none
            named = topk_idx[:count]
            counts = named[named >= 0].bincount(minlength=self._local).int()
        return TokenMajorRows(
            tokens=brought.tokens.cpu(),
            scales=None if brought.scales is None else brought.scales.cpu(),
            count=count,
            source_rank=torch.searchsorted(ends, rows, right=True),
            source_token=brought.handle[3].cpu(),  # recv_src_idx
            topk_idx=topk_idx,
            topk_weights=brought.topk_weights.cpu(),
            tokens_per_expert=counts,
        )

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Compares with the oracle."""
        expectation.token_major_combined(out)

    def synchronize(self) -> None:
        """Waits for what is enqueued; what it found wrong a later call raises, as in DeepEP."""
        wait_for(self.device)

    def metrics(self) -> dict[str, Any]:
        """What has been counted for the calls."""
        return self._buffer.metrics()

    def close(self) -> None:
        """Lets the memory go."""
        Buffer.set_num_sms(self._sms)
        self._buffer.destroy()
