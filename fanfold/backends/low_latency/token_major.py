"""Low latency with token-major rows: a token comes to a rank once, and beside its row which of the
rank's experts it names, as DeepEP's ``ElasticBuffer`` has them. Of GPUs on one host."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from fanfold import _core, jit
from fanfold.backends.allocator import Blank, blank
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
from fanfold.cpu_words import CpuWords
from fanfold.deferred_free import free_when_idle
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import ScaleFormat, scale_columns
from fanfold.geometry import Geometry, check_aligned, check_integer, check_tensor
from fanfold.lending import address_of
from fanfold.memory import GpuPeerMemory
from fanfold.stream_order import StreamOrder

__all__ = ["CudaTokenMajor", "RowOptions", "TokenMajorRows", "takes_rows"]

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


@dataclass(frozen=True, slots=True)
class RowOptions:
    """What may be asked of a dispatch of token-major rows.

    Attributes:
        most_tokens: of a rank in this call, the same on all ranks; N is R times as many. The
            geometry's if None.
        alignment: what :attr:`TokenMajorRows.expert_ends` round up to.
        scales_by_columns: whether scales have strides ``(1, N rounded up to 4)``.
        counts_for_cpu: whether :meth:`CudaTokenMajor.await_counts` follows.
    """

    most_tokens: int | None = None
    alignment: int = 1
    scales_by_columns: bool = False
    counts_for_cpu: bool = False


_NO_OPTIONS = RowOptions()


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the parts of :attr:`TokenMajorRows.words` begin; the table of combine is at 0.

    Attributes:
        own_topk, sources, counts: those parts.
        total: of all words.
    """

    own_topk: int
    sources: int
    counts: int
    total: int

    @classmethod
    def of(cls, geometry: Geometry, table_words: int, most: int) -> _Places:
        """The places of calls of ``most`` tokens of a rank."""
        sources = table_words + 2 * most * geometry.top_k
        counts = sources + geometry.ranks * most * (2 + geometry.top_k)
        return cls(table_words, sources, counts, counts + _counts(geometry))


def _counts(geometry: Geometry) -> int:
    return geometry.ranks + 2 * geometry.experts_per_rank + 1


@dataclass(slots=True)
class TokenMajorRows:
    """What one dispatch brings to this rank. R ranks, E_l local experts, K top-k; N rows of room,
    of which the first ``rank_ends[-1]`` are there, ordered by source rank, then source token.

    Attributes:
        tokens: ``[N, hidden]`` bfloat16 or float8_e4m3fn.
        scales: ``[N, hidden / 128]`` float32 of fp8 rows, else None.
        topk_idx: ``[N, K]`` int64: local expert ids, -1 for experts elsewhere and for none.
        topk_weights: ``[N, K]`` float32, 0 where topk_idx is -1; None if no weights came along.
        words: int32: all else that the kernel leaves. Callers seldom look into it, so its parts
            are views that are made when somebody asks for them.
        geometry: of the call.
        routing: what combine needs.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    words: torch.Tensor
    geometry: Geometry
    routing: CudaRouting
    _places: _Places

    @property
    def own_topk_idx(self) -> torch.Tensor:
        """``[T, K]`` int64: a copy of what this rank's dispatch was given."""
        begin, shape = self._places.own_topk, (self.routing.tokens, self.geometry.top_k)
        return self.words[begin:][: 2 * shape[0] * shape[1]].view(torch.int64).view(shape)

    @property
    def sources(self) -> torch.Tensor:
        """``[N, 2 + K]`` int32: source rank * most_tokens + source token; the row; -1."""
        places = self._places
        return self.words[places.sources : places.counts].view(-1, 2 + self.geometry.top_k)

    @property
    def rank_ends(self) -> torch.Tensor:
        """``[R]`` int32: rows received from ranks 0 to r."""
        return self._counts(0, self.geometry.ranks)

    @property
    def expert_rows(self) -> torch.Tensor:
        """``[E_l]`` int32: rows of each local expert."""
        return self._counts(self.geometry.ranks, self.geometry.experts_per_rank)

    @property
    def expert_ends(self) -> torch.Tensor:
        """``[E_l]`` int32: rows of the experts up to e, those of each rounded up."""
        local = self.geometry.experts_per_rank
        return self._counts(self.geometry.ranks + local, local)

    @property
    def aborted(self) -> torch.Tensor:
        """``[1]`` int32: 1 if a rank has refused the call: then no rows came, and combine does
        nothing."""
        return self.words[-1:]

    def _counts(self, begin: int, count: int) -> torch.Tensor:
        return self.words[self._places.counts + begin :][:count]


@dataclass(slots=True)
class _Kind:
    """What dispatches of one kind share; every call fills in the rest of ``args``, of which
    ``into`` says where token-major rows go. The other fields are what a dispatch allocates, the
    scales by rows and by columns."""

    launch: Launch
    args: _core.CudaDispatchArgs
    into: _core.CudaTokenRows
    places: _Places
    tokens: Blank
    scales: tuple[Blank, Blank] | None
    topk_idx: Blank
    topk_weights: Blank | None


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
        self._counts_of: Plan | None = None
        self._counts: CpuWords
        self._kinds_of: Plan | None = None
        self._kinds: dict[tuple[bool, bool, int], _Kind] = {}
        self._biased_of: Plan | None = None
        self._biased: Launch

    @property
    def geometry(self) -> Geometry | None:
        """For which the memory of all ranks is ready; None before the first call."""
        return None if self._plan is None else self._plan.geometry

    def lay_out(self, geometry: Geometry, *, scaled: bool) -> None:
        """Prepares the memory of all ranks for calls of a geometry, and loads kernels. Collective;
        the CPU waits."""
        self._plan_of(geometry, partial(self._sources, geometry, scaled))

    def suits(self, x: object, topk_idx: object) -> bool:
        """Whether a dispatch of these rows, or of these values and scales, is of that geometry.
        False may also be for want of a fast way to know."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        plan = self._plan
        return plan is not None and plan.fast_path.suits_token_rows(values, scales, topk_idx)

    def dispatch_rows(
        self,
        geometry: Geometry,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        options: RowOptions = _NO_OPTIONS,
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
            options: of this call.
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
            most = geometry.max_tokens if options.most_tokens is None else options.most_tokens
            kind = self._kind(plan, scaled, topk_weights is not None, most)
            args, into = kind.args, kind.into
            values, scales = x if scaled and len(x) == 2 else (x, None)
            tokens = plan.fast_path.token_rows(args, values, scales, topk_idx, topk_weights)
            if not 0 <= tokens <= most:
                tokens = self._check_sent(args, geometry, x, topk_idx, topk_weights, most)
            args.expert_totals, into.alignment = address_of(expert_totals), options.alignment
            into.cpu_counts = self._cpu_counts(plan).address if options.counts_for_cpu else 0
            stream = self._follow()
            received = self._room(plan, kind, tokens, stream, options.scales_by_columns)
        except BaseException as error:
            self.refuse_dispatch(error)
            raise
        self._last_routing = received.routing
        kind.launch(args, stream)
        return received

    def await_counts(self) -> tuple[int, list[int]]:
        """Waits for the dispatch before, which was to leave its counts for the CPU: how many rows
        came, and :attr:`TokenMajorRows.expert_ends`.

        Raises:
            PeerRefused, PeerTimeout: what its kernel found.
            UsageError: it was aborted, for a reason that has been raised already; or it did not
                end in time.
        """
        plan = self._plan
        assert plan is not None
        stream = torch.cuda.current_stream(self.device)
        counts = self._cpu_counts(plan).wait(stream, self._config.timeout_s)
        if counts[-1] or self._reports.fatal():
            self.check()
            raise UsageError("a dispatch was aborted; an earlier call has raised the reason")
        geometry = plan.geometry
        return counts[geometry.ranks - 1], counts[-1 - geometry.experts_per_rank : -1]

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
            tokens, hidden = own.tokens, geometry.hidden
            biases = () if bias is None else check_biases(bias, (tokens, hidden), self.device)
            for number, each in enumerate(biases):
                check_aligned(f"bias[{number}]", each)
            launch, args = self._combining(plan, bool(biases))
            out = self._allocator.empty()((tokens, hidden), (hidden, 1), torch.bfloat16)
            if not plan.fast_path.combine_rows(args, tokens, rows, y, out):
                self._check_outputs(args, geometry, y, tokens, rows)
                args.out = out.data_ptr()
            args.table = table_of(own)
            if biases:
                first, second = (*biases, None)[:2]
                args.set_biases(address_of(first), address_of(second))
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
        return self._kinds.get(key) or self._new_kind(plan, *key)

    def _new_kind(self, plan: Plan, scaled: bool, weighted: bool, most: int) -> _Kind:
        geometry = plan.geometry
        check_integer("most_tokens", most, 0, geometry.max_tokens)
        launch = self._loader.load(kernels.token_major_kernel(geometry, scaled=scaled))
        encoding = kernels.TOKEN_MAJOR_FP8 if scaled else kernels.TOKEN_MAJOR_BF16
        signed = encoding | _SIGNATURE_BIT | most << _MOST_TOKENS_SHIFT
        args = plan.core.dispatch_arguments(signed, int(weighted))
        into = args.token_rows
        into.most_tokens = most
        rows, hidden, top_k = geometry.ranks * most, geometry.hidden, geometry.top_k
        by_rows = blank(torch.float32, rows, _blocks(hidden))
        by_columns = (by_rows[0], (1, max(-(-rows // 4) * 4, 1)), torch.float32)
        kind = _Kind(
            launch,
            args,
            into,
            _Places.of(geometry, plan.layout.words, most),
            tokens=blank(torch.float8_e4m3fn if scaled else torch.bfloat16, rows, hidden),
            scales=(by_rows, by_columns) if scaled else None,
            topk_idx=blank(torch.int64, rows, top_k),
            topk_weights=blank(torch.float32, rows, top_k) if weighted else None,
        )
        self._kinds[scaled, weighted, most] = kind
        return kind

    def _cpu_counts(self, plan: Plan) -> CpuWords:
        if self._counts_of is not plan:
            self._counts_of, self._counts = plan, CpuWords(_counts(plan.geometry))
            # Kernels in flight may outlive this object, and write there.
            end = weakref.finalize(self, free_when_idle, self.device, (self._counts,))
            end.atexit = False
        return self._counts

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
        args: _core.CudaDispatchArgs,
        geometry: Geometry,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        most: int,
    ) -> int:
        """Puts the tensors of a dispatch into ``args``; the number of its tokens."""
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
        if tokens > most:
            raise ArgumentError("x.shape[0]", tokens, f"at most most_tokens = {most}")
        check_aligned("x", values)
        experts, ranks = geometry.num_experts, geometry.ranks
        check_routing(topk_idx, topk_weights, tokens, experts, ranks, self.device)
        if topk_idx.shape[1] != geometry.top_k:
            raise ArgumentError("topk_idx.shape[1]", topk_idx.shape[1], str(geometry.top_k))
        args.tokens, args.x, args.topk_idx = tokens, values.data_ptr(), topk_idx.data_ptr()
        args.topk_weights = address_of(topk_weights)
        if scales is not None:
            args.set_scales(scales.data_ptr(), *scales.stride())
        return tokens

    def _check_outputs(
        self,
        args: _core.CudaCombineArgs,
        geometry: Geometry,
        y: torch.Tensor,
        tokens: int,
        rows: int,
    ) -> None:
        """Puts the outputs of experts into ``args``."""
        self._check_devices(y=y)
        check_tensor("y", y, (rows, geometry.hidden), (torch.bfloat16,), device=self.device)
        check_aligned("y", y)
        row = 2 * geometry.hidden
        args.tokens, args.y = tokens, y.data_ptr()
        args.expert_stride, args.row_stride = geometry.expert_capacity * row, row

    def _room(
        self, plan: Plan, kind: _Kind, tokens: int, stream: int, by_columns: bool
    ) -> TokenMajorRows:
        """Allocates the result of a dispatch of so many own tokens, and writes the addresses into
        the kernel's arguments."""
        empty, args, into, places = self._allocator.empty(), kind.args, kind.into, kind.places
        rows, topk_idx = empty(*kind.tokens), empty(*kind.topk_idx)
        scales = None
        if kind.scales is not None:
            shape, strides, dtype = kind.scales[by_columns]
            scales = empty(shape, strides, dtype)
            args.scales = scales.data_ptr()
            into.set_scale_strides(*strides)
        weights = None if kind.topk_weights is None else empty(*kind.topk_weights)
        words = empty((places.total,), (1,), torch.int32)
        begin = args.table = words.data_ptr()
        args.rows, into.topk_idx = rows.data_ptr(), topk_idx.data_ptr()
        into.topk_weights = address_of(weights)
        into.own_topk, into.sources = begin + 4 * places.own_topk, begin + 4 * places.sources
        into.counts = begin + 4 * places.counts
        routing = CudaRouting(words, plan.layout, tokens, False, stream)
        geometry = plan.geometry
        return TokenMajorRows(rows, scales, topk_idx, weights, words, geometry, routing, places)
