"""The calls of the native face, for each order in which rows can arrive: one class for each, which
runs on the host and on GPUs alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fanfold import _core
from fanfold.backends import high_throughput
from fanfold.backends.choose import choose
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.high_throughput.grid import Grid, with_transfer
from fanfold.backends.high_throughput.in_place import bytes_for_rows
from fanfold.backends.high_throughput.kernels import DispatchKind, Sizes
from fanfold.backends.high_throughput.layout import dispatch_layout
from fanfold.backends.opening import memory_of_gpus
from fanfold.bench.calls import Calls, Given, await_sent
from fanfold.bench.check import Expectation, TokenMajorRows
from fanfold.bench.deep_ep_calls import DeepEpHighThroughput, DeepEpLowLatency
from fanfold.bench.dispatchers import AnyDispatcher, open_dispatcher
from fanfold.bench.elastic_calls import ElasticCalls, HybridCalls
from fanfold.bench.oracle import rows_arriving
from fanfold.bench.settings import BenchSettings
from fanfold.bench.workload import Batch
from fanfold.config import Config
from fanfold.deep_ep import Buffer
from fanfold.errors import UnavailableError
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.group import as_group
from fanfold.high_throughput import HighThroughput
from fanfold.low_latency import LowLatency
from fanfold.memory import GpuPeerMemory
from fanfold.memory.cuda_hosts import counting_cores
from fanfold.memory.host import SymmetricMemory
from fanfold.metrics import collect
from fanfold.results import DispatchResult, HighThroughputResult

__all__ = ["ExpertMajor", "TokenMajor", "dispatch_kind", "open_calls", "room_for", "sms_taken"]

# Room that a caller who does not know the routing leaves above the fullest rank.
_SPARE = 1.25
_ROOM_STEP = 128


def open_calls(group: Any, settings: BenchSettings) -> Calls:
    """What ``settings`` (as :meth:`BenchSettings.on` gives them) are about. Collective.

    Raises:
        UnavailableError: GPUs were asked for, and this mode does not run there.
    """
    if settings.face == "deep_ep":
        if settings.mode == "low_latency":
            return DeepEpLowLatency(group, settings)
        return DeepEpHighThroughput(group, settings)
    if settings.face == "elastic":
        return ElasticCalls(group, settings)
    if settings.face == "hybridep":
        return HybridCalls(group, settings)
    kind = TokenMajor if settings.layout == "token_major" else ExpertMajor
    return kind(group, settings, settings.config())


def room_for(batches: Sequence[Batch], settings: BenchSettings) -> int:
    """Rows for which any rank has room: a quarter more than the fullest receives.

    Args:
        batches: of all ranks; only their ``topk_idx`` are looked at.
        settings: with an order of rows and its alignment.
    """
    fullest = max(
        rows_arriving(
            batches,
            settings.experts,
            token_major=settings.layout == "token_major",
            alignment=settings.alignment or 1,
        )
    )
    return math.ceil(fullest * _SPARE / _ROOM_STEP) * _ROOM_STEP


def _in_place_rows(settings: BenchSettings) -> int:
    """Rows of memory for dispatches in place, the same on all ranks: enough for any capacity."""
    if not settings.in_place:
        return 0
    # A batch chooses its experts before its rows are made: without columns it chooses the same.
    workload = dataclasses.replace(settings.workload(), hidden=0)
    batches = [workload.batch(rank) for rank in range(settings.ranks)]
    return max(1, room_for(batches, settings))


def _result_bytes(settings: BenchSettings) -> int:
    """Of the memory for those rows, where no :class:`fanfold.HighThroughput` works it out."""
    if not settings.in_place:
        return 0
    row_format = RowFormat.of(settings.dtype)
    rows = _in_place_rows(settings)
    return bytes_for_rows(rows, settings.hidden, row_format, ScaleFormat.FLOAT32)


def sms_taken(settings: BenchSettings, device: torch.device, kind: DispatchKind) -> int:
    """SMs that a dispatch of that kind, with the plan of a new routing, takes on ``device``; a
    combine takes no more."""
    there = torch.cuda.get_device_properties(device).multi_processor_count
    most = min(there, _core.CUDA_HIGH_THROUGHPUT_MOST_CTAS)
    asked = settings.sms or (
        Buffer.num_sms if settings.face == "deep_ep" else settings.config().ctas
    )
    grid = Grid(settings.ranks, most, None if asked is None else min(asked, most))
    plan = grid.of_plan()[0] if settings.routing == "new" else 0
    return max(grid.of_dispatch(kind)[0], plan)


def dispatch_kind(settings: BenchSettings, network: str) -> DispatchKind:
    """The kind of the dispatches that are timed on GPUs, over ``network``; "" for one host."""
    row_format, new = RowFormat.of(settings.dtype), settings.routing == "new"
    scales = scale_columns(settings.hidden, ScaleFormat.FLOAT32)
    kind = DispatchKind(
        Sizes(settings.ranks, settings.experts, settings.top_k, across_hosts=network != ""),
        row_bytes=settings.hidden * row_format.dtype.itemsize,
        scale_words=scales if row_format is RowFormat.FP8 else 0,
        expert_major=settings.layout != "token_major",
        new_routing=new,
        weighted=new,
        in_place=bool(settings.in_place),
    )
    return with_transfer(kind, settings.config().dispatch_transfer)


def _on_host(received: DispatchResult) -> DispatchResult:
    """A copy in host memory, for the oracle."""

    def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu()

    return dataclasses.replace(
        received,
        tokens=received.tokens.cpu(),
        scales=moved(received.scales),
        weights=moved(received.weights),
        tokens_per_expert=received.tokens_per_expert.cpu(),
        offsets=received.offsets.cpu(),
    )


class ExpertMajor:
    """Through the class of the mode. Construction is collective.

    Args:
        group: the ranks.
        settings: with a backend.
        config: of the library.
    """

    def __init__(self, group: Any, settings: BenchSettings, config: Config) -> None:
        self._alignment = settings.alignment or 1
        self._zero_padding = settings.zero_padding is not False
        self._in_place = bool(settings.in_place)
        options: dict[str, Any] = {}
        if settings.mode == "high_throughput":
            rows = _in_place_rows(settings)
            options = {"expert_alignment": self._alignment, "in_place_rows": rows}
        self.ep: AnyDispatcher = open_dispatcher(
            settings.mode,
            group,
            num_experts=settings.experts,
            top_k=settings.top_k,
            hidden=settings.hidden,
            max_tokens=settings.tokens,
            dispatch_dtype=settings.dtype,
            config=config,
            **options,
        )
        self.device, self.memory_bytes = self.ep.device, self.ep.memory.bytes_per_rank
        self.network: str = getattr(self.ep.memory, "network", "")  # GPUs' memory has none
        if settings.backend == "cuda" and self.device.type != "cuda":
            self.close()
            raise UnavailableError(
                f"backend is cuda, but {settings.mode.replace('_', ' ')} runs on "
                f"{self.device} here: use --backend host"
            )
        if isinstance(self.ep, HighThroughput):
            self.ep.use_zero_padding(self._zero_padding)

    def dispatch(self, given: Given, capacity: int | None = None) -> DispatchResult:
        """Sends ``given``, by a new routing."""
        if isinstance(self.ep, LowLatency):
            assert not isinstance(given.x, tuple)
            return self.ep.dispatch(given.x, given.topk_idx, given.topk_weights)
        return self.ep.dispatch(
            given.x,
            given.topk_idx,
            given.topk_weights,
            capacity=capacity,
            in_place=self._in_place,
        )

    def dispatch_again(self, given: Given, previous: DispatchResult) -> DispatchResult:
        """Sends the rows of ``given`` by the routing of ``previous``."""
        assert isinstance(self.ep, HighThroughput)  # low latency has no such dispatch
        assert isinstance(previous, HighThroughputResult)
        return self.ep.dispatch(given.x, previous=previous, in_place=self._in_place)

    def send_dispatch(self, given: Given) -> Callable[[], None]:
        """The send half of a low-latency dispatch; the hook receives."""
        assert isinstance(self.ep, LowLatency)
        assert not isinstance(given.x, tuple)
        return self.ep.dispatch(given.x, given.topk_idx, given.topk_weights, return_hook=True)[1]

    def combine(
        self, y: torch.Tensor, brought: DispatchResult, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back, weighted and summed."""
        combine: Any = self.ep.combine
        sums: torch.Tensor = combine(y, brought, out=out)
        return sums

    def send_combine(
        self, y: torch.Tensor, brought: Any, out: torch.Tensor | None = None
    ) -> Callable[[], None]:
        """The send half of a low-latency combine; the hook receives."""
        assert isinstance(self.ep, LowLatency)
        return self.ep.combine(y, brought, out=out, return_hook=True)[1]

    def await_sent(self) -> None:
        """Waits until peers on other hosts have what calls that have ended have sent."""
        await_sent(self.ep.memory)

    def check(
        self, brought: DispatchResult, expectation: Expectation, capacity: int | None = None
    ) -> None:
        """Compares with the oracle."""
        expectation.received(
            _on_host(brought), self._alignment, capacity, zero_padding=self._zero_padding
        )

    def outputs(self, brought: DispatchResult, expectation: Expectation) -> torch.Tensor:
        """What the experts make of each row; NaN elsewhere."""
        return expectation.outputs(_on_host(brought)).to(self.device)

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Compares with the oracle."""
        expectation.combined(out)

    def synchronize(self) -> None:
        """Waits for what is enqueued, and raises what it found wrong."""
        self.ep.synchronize()

    def metrics(self) -> dict[str, Any]:
        """What has been counted for the calls."""
        return self.ep.metrics()

    def close(self) -> None:
        """Lets the memory go."""
        self.ep.close()


class TokenMajor:
    """One row for each (token, rank), DeepEP's order, through the mode below the native face.
    Construction is collective.

    Args:
        group: the ranks.
        settings: of high throughput, with a backend.
        config: of the library.
    """

    def __init__(self, group: Any, settings: BenchSettings, config: Config) -> None:
        ranks = as_group(group)
        choice = choose(ranks, config)
        self._experts, self._ranks, self.device = settings.experts, ranks.size, choice.device
        # On the host rows come into tensors of their own.
        self._options = {} if choice.backend == "host" else {"in_place": bool(settings.in_place)}
        self._memory: GpuPeerMemory | SymmetricMemory
        # The two take and give alike.
        self._mode: Any
        if choice.backend == "cuda":
            results = _result_bytes(settings)
            nbytes = CudaHighThroughput.required_bytes(ranks.size, config, results)
            self._memory = memory = memory_of_gpus(ranks, nbytes, config)
        else:
            nbytes = high_throughput.HostHighThroughput.staging_bytes(ranks.size, config)
            self._memory = SymmetricMemory(ranks, nbytes, config)
        try:
            if choice.backend == "cuda":
                self._mode = CudaHighThroughput(
                    memory, config, max_tokens=settings.tokens, result_bytes=results
                )
            else:
                assert isinstance(self._memory, SymmetricMemory)
                self._mode = high_throughput.HostHighThroughput(self._memory, 0, nbytes)
        except BaseException:
            self._memory.close()
            raise
        self.memory_bytes = self._memory.bytes_per_rank
        self.network: str = getattr(self._memory, "network", "")  # GPUs' memory has none

    def dispatch(self, given: Given, capacity: int | None = None) -> Any:
        """Sends ``given``, by a new routing; with the layout that ``deep_ep`` callers ask for."""
        dispatch_layout(given.topk_idx, self._experts, self._ranks)
        return self._mode.dispatch(
            given.x,
            given.topk_idx,
            given.topk_weights,
            num_experts=self._experts,
            layout="token_major",
            capacity=capacity,
            **self._options,
        )

    def dispatch_again(self, given: Given, previous: Any) -> Any:
        """Sends the rows of ``given`` by the routing of ``previous``."""
        return self._mode.dispatch_cached(
            given.x, previous.plan, layout="token_major", **self._options
        )

    def combine(
        self, y: torch.Tensor, brought: Any, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Brings ``y`` back and sums it."""
        sums: torch.Tensor = self._mode.combine(y, brought.plan, layout="token_major", out=out)[0]
        return sums

    def check(self, brought: Any, expectation: Expectation, capacity: int | None = None) -> None:
        """Compares with the oracle."""
        expectation.token_major(_rows_on_host(brought), capacity)

    def outputs(self, brought: Any, expectation: Expectation) -> torch.Tensor:
        """What this rank makes of each row; NaN behind them."""
        return expectation.token_major_outputs(_rows_on_host(brought)).to(self.device)

    def check_combined(self, out: torch.Tensor, expectation: Expectation) -> None:
        """Compares with the oracle."""
        expectation.token_major_combined(out)

    def synchronize(self) -> None:
        """Waits for what is enqueued, and raises what it found wrong."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._mode.check()

    def metrics(self) -> dict[str, Any]:
        """What has been counted for the calls."""
        return collect({}, *counting_cores(self._memory))

    def close(self) -> None:
        """Lets the memory go."""
        self._memory.close()


def _rows_on_host(brought: Any) -> TokenMajorRows:
    plan, scales, weights = brought.plan, brought.scales, brought.plan.topk_weights
    return TokenMajorRows(
        tokens=brought.tokens.cpu(),
        scales=None if scales is None else scales.cpu(),
        count=int(plan.source_prefix[-1]),
        source_rank=brought.row_source_rank.cpu(),
        source_token=brought.row_source_token.cpu(),
        topk_idx=plan.topk_idx.cpu(),
        topk_weights=None if weights is None else weights.cpu(),
        tokens_per_expert=plan.tokens_per_expert.cpu(),
    )
