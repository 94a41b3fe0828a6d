"""Low latency with token-major rows: a token comes to a rank once, and beside its row which of the
rank's experts it names, as DeepEP's ``ElasticBuffer`` has them. Of GPUs on one host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from fanfold import _core, jit
from fanfold.backends.high_throughput.protocol import (
    Rows,
    check_biases,
    check_routing,
    check_rows,
)
from fanfold.backends.low_latency import kernels
from fanfold.backends.low_latency.cuda import CudaLowLatency
from fanfold.backends.low_latency.outputs import table_of
from fanfold.backends.low_latency.plan import Launch, Plan
from fanfold.backends.low_latency.protocol import CudaRouting, DeviceCheck, anywhere
from fanfold.config import Config
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import ScaleFormat, scale_columns
from fanfold.geometry import Geometry, check_aligned, check_integer, check_tensor
from fanfold.lending import address_of
from fanfold.memory import GpuPeerMemory
from fanfold.stream_order import StreamOrder

__all__ = ["CudaTokenMajor", "TokenMajorRows", "takes_rows"]

_SIGNATURE_BIT = 16  # of the encoding of token-major rows, by which ranks notice other ones
_MOST_TOKENS_SHIFT = 8


def takes_rows(x: Rows) -> bool:
    """Whether such rows can be token-major: bfloat16, or float8_e4m3fn with a float32 scale for
    each 128 columns. Others may hold bit patterns that no row in the memory may have."""
    if not isinstance(x, tuple):
        return x.dtype == torch.bfloat16
    values, scales = x
    if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        return False
    return values.dim() == 2 and scales.dim() == 2 and scales.shape[1] == _blocks(values.shape[1])


def _blocks(hidden: int) -> int:
    return scale_columns(hidden, ScaleFormat.FLOAT32)


@dataclass(slots=True)
class TokenMajorRows:
    """What one dispatch brings to this rank. R ranks, E_l local experts, K top-k; N rows of room,
    of which the first ``rank_ends[-1]`` are there, ordered by source rank, then source token.

    Attributes:
        tokens: ``[N, hidden]`` bfloat16 or float8_e4m3fn.
        scales: ``[N, hidden / 128]`` float32 of fp8 rows, else None.
        topk_idx: ``[N, K]`` int64: local expert ids, -1 for experts elsewhere and for none.
        topk_weights: ``[N, K]`` float32, 0 where topk_idx is -1; None if no weights came along.
        sources: ``[N, 2 + K]`` int32: source rank * most_tokens + source token; the row; -1.
        counts: int32: :attr:`rank_ends`, :attr:`expert_rows`, :attr:`expert_ends`; last whether a
            rank has refused the call: then no rows came, and combine does nothing.
        ranks: R.
        routing: what combine needs.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    sources: torch.Tensor
    counts: torch.Tensor
    ranks: int
    routing: CudaRouting

    @property
    def rank_ends(self) -> torch.Tensor:
        """``[R]`` int32: rows received from ranks 0 to r."""
        return self.counts[: self.ranks]

    @property
    def expert_rows(self) -> torch.Tensor:
        """``[E_l]`` int32: rows of each local expert."""
        return self.counts[self.ranks : self.ranks + self._local]

    @property
    def expert_ends(self) -> torch.Tensor:
        """``[E_l]`` int32: rows of the experts up to e, those of each rounded up."""
        return self.counts[self.ranks + self._local : -1]

    @property
    def _local(self) -> int:
        return (len(self.counts) - 1 - self.ranks) // 2


@dataclass(slots=True)
class _Kind:
    """Dispatches of one kind."""

    launch: Launch
    args: _core.CudaDispatchArgs


class CudaTokenMajor(CudaLowLatency):
    """Token-major calls over a symmetric memory of GPUs of one host, of
    ``cuda_required_bytes(geometry, late_weights=False, token_major=True)`` bytes. The calls are
    :meth:`dispatch_rows` and :meth:`combine_rows`; in all else it is the low-latency mode.

    Args:
        memory, config, check_devices, order: as of :class:`CudaLowLatency`.
    """

    _token_major = True

    def __init__(
        self,
        memory: GpuPeerMemory,
        config: Config,
        check_devices: DeviceCheck = anywhere,
        order: StreamOrder | None = None,
    ) -> None:
        super().__init__(memory, config, False, check_devices, order)
        if self._between is not None:
            raise UsageError("token-major low latency is for ranks of one host")
        self._check_devices = check_devices
        self._kinds_of: Plan | None = None
        self._kinds: dict[tuple[bool, bool, int], _Kind] = {}
        self._biased_of: Plan | None = None
        self._biased: Launch

    @property
    def geometry(self) -> Geometry | None:
        """For which the memory of all ranks is ready; None before the first call."""
        return None if self._plan is None else self._plan.geometry

    def dispatch_rows(
        self,
        geometry: Geometry,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        most_tokens: int | None = None,
        alignment: int = 1,
        scales_by_columns: bool = False,
        expert_totals: torch.Tensor | None = None,
    ) -> TokenMajorRows:
        """Sends this rank's tokens and receives those of all ranks for its experts. Collective.

        Args:
            geometry: of the calls.
            x: ``[T, hidden]`` bfloat16, contiguous; or such float8_e4m3fn with ``[T, hidden /
                128]`` float32 scales of any strides, which travel as they are.
            topk_idx: ``[T, K]`` int64, -1 for none. A token that names an expert twice counts there
                once; both entries arrive.
            topk_weights: ``[T, K]`` float32, on all ranks or on none.
            most_tokens: of a rank in this call, the same on all ranks; N is R times as many. The
                geometry's if None.
            alignment: what ``expert_ends`` round up to.
            scales_by_columns: whether scales have strides ``(1, N rounded up to 4)``.
            expert_totals: ``[E_l]`` int32, to which the rows of each expert are added.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as
                :meth:`LowLatencyBackend.dispatch`.
        """
        if self._looks or self._reports.fatal():
            self._check_before()
        scaled = isinstance(x, tuple)
        plan = self._plan
        if plan is None or plan.geometry is not geometry or self._stale is not None:
            plan = self._plan_of(geometry, partial(self._sources, geometry, scaled))
        try:
            most = geometry.max_tokens if most_tokens is None else most_tokens
            kind = self._kind(plan, scaled, topk_weights is not None, most)
            args = kind.args
            values, scales = self._check_sent(geometry, x, topk_idx, topk_weights, most)
            stream = self._follow()
            received = self._room(plan, values, most, topk_weights is not None, stream)
            if scaled:
                received.scales = self._room_for_scales(geometry, most, scales_by_columns)
            self._fill(args, received, most, alignment)
            args.expert_totals = address_of(expert_totals)
            args.tokens, args.x, args.topk_idx = len(values), values.data_ptr(), topk_idx.data_ptr()
            args.topk_weights = address_of(topk_weights)
            if scales is not None:
                args.set_scales(scales.data_ptr(), *scales.stride())
        except BaseException as error:
            self.refuse_dispatch(error)
            raise
        self._last_routing = received.routing
        kind.launch(args, stream)
        return received

    def combine_rows(
        self,
        geometry: Geometry,
        y: torch.Tensor,
        routing: CudaRouting,
        rows: int,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        """``[T, hidden]`` bfloat16: the sum in fp32 of the biases, then over ranks, in order, of a
        token's rows of ``y``, rounded once. Collective.

        Args:
            geometry: of the dispatch.
            y: ``[rows, hidden]`` bfloat16, contiguous: a row for each that the dispatch brought.
            routing: of the dispatch.
            rows: N of the dispatch, or, where the CPU knows it, the number of rows that came.
            bias: up to two ``[T, hidden]`` bfloat16; ranks need not agree about them.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as
                :meth:`LowLatencyBackend.combine`.
        """
        if self._looks or self._reports.fatal():
            self._check_before()
        plan = self._plan
        if plan is None or plan.geometry is not geometry or self._stale is not None:
            plan = self._plan_of(geometry, partial(self._sources, geometry, False))
        try:
            own = self._own_routing(plan, routing, None)
            self._check_devices(y=y)
            check_tensor("y", y, (rows, geometry.hidden), (torch.bfloat16,), device=self.device)
            shape = (own.tokens, geometry.hidden)
            biases = check_biases(bias, shape, self.device)
            for number, each in enumerate(biases):
                check_aligned(f"bias[{number}]", each)
            check_aligned("y", y)
            out = self._empty(shape, torch.bfloat16)
            launch, args = self._combining(plan, bool(biases))
            row = 2 * geometry.hidden
            args.tokens, args.y, args.out = own.tokens, y.data_ptr(), out.data_ptr()
            args.expert_stride, args.row_stride = geometry.expert_capacity * row, row
            args.table = table_of(own)
            first, second = (*(each.data_ptr() for each in biases), 0, 0)[:2]
            args.set_biases(first, second)
        except BaseException as error:
            self.refuse_combine(error, routing)
            raise
        stream = self._follow()
        self._keep((own.block,), own.stream, stream)
        launch(args, stream)
        if self._reports.passing():
            self.check()
        return out

    # ---- parts of calls -------------------------------------------------------------------------

    def _sources(self, geometry: Geometry, scaled: bool) -> list[jit.KernelSource]:
        dispatch = kernels.token_major_kernel(geometry, scaled=scaled)
        return [dispatch, *self._loader.combine_sources(geometry, False)]

    def _kind(self, plan: Plan, scaled: bool, weighted: bool, most: int) -> _Kind:
        """Ranks that disagree about any of it notice."""
        if self._kinds_of is not plan:
            self._kinds_of, self._kinds = plan, {}
        key = (scaled, weighted, most)
        known = self._kinds.get(key)
        if known is None:
            launch = self._loader.load(kernels.token_major_kernel(plan.geometry, scaled=scaled))
            encoding = kernels.TOKEN_MAJOR_FP8 if scaled else kernels.TOKEN_MAJOR_BF16
            signed = encoding | _SIGNATURE_BIT | most << _MOST_TOKENS_SHIFT
            known = _Kind(launch, plan.core.dispatch_arguments(signed, int(weighted)))
            self._kinds[key] = known
        return known

    def _any_dispatch(self, plan: Plan) -> tuple[Launch, _core.CudaDispatchArgs]:
        if self._kinds_of is plan and self._kinds:
            kind = next(iter(self._kinds.values()))
        else:
            kind = self._kind(plan, False, False, plan.geometry.max_tokens)
        return kind.launch, kind.args.copy()

    def _combining(self, plan: Plan, biased: bool) -> tuple[Launch, _core.CudaCombineArgs]:
        call = self._combine_call(plan, False, False)
        if not biased:
            return call.launch, call.args
        if self._biased_of is not plan:
            source = kernels.combine_kernel(plan.geometry, late=False, logfmt=False, biased=True)
            self._biased_of, self._biased = plan, self._loader.load(source)
        return self._biased, call.args

    def _check_sent(
        self,
        geometry: Geometry,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        most: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values and scales."""
        parts = x if isinstance(x, tuple) else (x,)
        named = {f"x[{n}]" if len(parts) > 1 else "x": part for n, part in enumerate(parts)}
        self._check_devices(**named, topk_idx=topk_idx, topk_weights=topk_weights)
        values, scales = check_rows(x, self.device)
        if not takes_rows(x):
            bound = "bfloat16, or float8_e4m3fn with a float32 scale for each 128 columns"
            raise ArgumentError("x", "rows of another format", bound)
        tokens, hidden = values.shape
        if hidden != geometry.hidden:
            raise ArgumentError("x.shape[1]", hidden, str(geometry.hidden))
        check_integer("most_tokens", most, 0, geometry.max_tokens)
        if tokens > most:
            raise ArgumentError("x.shape[0]", tokens, f"at most most_tokens = {most}")
        check_aligned("x", values)
        experts, ranks = geometry.num_experts, geometry.ranks
        check_routing(topk_idx, topk_weights, tokens, experts, ranks, self.device)
        if topk_idx.shape[1] != geometry.top_k:
            raise ArgumentError("topk_idx.shape[1]", topk_idx.shape[1], str(geometry.top_k))
        return values, scales

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _room(
        self, plan: Plan, values: torch.Tensor, most: int, weighted: bool, stream: int
    ) -> TokenMajorRows:
        """For what a dispatch brings, but for scales."""
        geometry = plan.geometry
        rows, top_k = geometry.ranks * most, geometry.top_k
        block = self._empty((plan.layout.words,), torch.int32)
        return TokenMajorRows(
            tokens=self._empty((rows, geometry.hidden), values.dtype),
            scales=None,
            topk_idx=self._empty((rows, top_k), torch.int64),
            topk_weights=self._empty((rows, top_k), torch.float32) if weighted else None,
            sources=self._empty((rows, 2 + top_k), torch.int32),
            counts=self._empty((geometry.ranks + 2 * geometry.experts_per_rank + 1,), torch.int32),
            ranks=geometry.ranks,
            routing=CudaRouting(block, plan.layout, len(values), False, stream),
        )

    def _room_for_scales(self, geometry: Geometry, most: int, by_columns: bool) -> torch.Tensor:
        rows, blocks = geometry.ranks * most, _blocks(geometry.hidden)
        if not by_columns:
            return self._empty((rows, blocks), torch.float32)
        strides = (1, max(-(-rows // 4) * 4, 1))
        return torch.empty_strided((rows, blocks), strides, dtype=torch.float32, device=self.device)

    @staticmethod
    def _fill(
        args: _core.CudaDispatchArgs, received: TokenMajorRows, most: int, alignment: int
    ) -> None:
        """Tells the kernel where everything goes."""
        args.rows, args.scales = received.tokens.data_ptr(), address_of(received.scales)
        args.counts, args.table = received.expert_rows.data_ptr(), table_of(received.routing)
        rows = args.token_rows
        rows.topk_idx, rows.sources = received.topk_idx.data_ptr(), received.sources.data_ptr()
        rows.topk_weights = address_of(received.topk_weights)
        rows.rank_ends = received.rank_ends.data_ptr()
        rows.expert_ends = received.expert_ends.data_ptr()
        rows.aborted = received.counts[-1:].data_ptr()
        rows.most_tokens, rows.alignment = most, alignment
        if received.scales is not None:
            rows.set_scale_strides(*received.scales.stride())
