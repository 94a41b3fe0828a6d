"""What the low-latency mode's backends share: their interface, what calls bring, and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.compiler import is_dynamo_compiling

from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import BF16_ROWS, Formats, RowFormat
from fanfold.geometry import Geometry, check_tensor, check_topk, is_plain
from fanfold.representation import show_fields, worded

__all__ = [
    "NO_STATISTICS",
    "AnyRouting",
    "CudaRouting",
    "DeviceCheck",
    "Dispatched",
    "Hook",
    "LateRouting",
    "LowLatencyBackend",
    "ReadyRows",
    "Routing",
    "RoutingLayout",
    "Statistics",
    "anywhere",
    "check_global_scale",
    "check_outputs",
    "check_own",
    "check_result",
    "check_tokens",
    "hook_if_asked",
    "once",
]

Hook = Callable[[], None]
DeviceCheck = Callable[..., None]
"""Raises ArgumentError for the first of some tensors (by name) that is not where it must be."""


def anywhere(**tensors: object) -> None:
    """The DeviceCheck that leaves it to others."""


# What one call makes has slots and is not frozen: making it is part of every call's time.


@dataclass(slots=True)
class Routing:
    """Where the tokens of all ranks go, as this rank needs it to combine on the host backend. R
    ranks, E_l local experts, C = R * M rows of room for each, M max_tokens, K top_k.

    Attributes:
        ranges: ``[E_l, R]`` int64: rows of each local expert from each source rank, count in the
            low and first row in the high 32 bits.
        source_tokens: ``[E_l, C]`` int32: each row's token index at its source.
        source_counts: ``[R]`` int32: tokens of each source rank.
        experts: ``[R, M, K]`` int16: the sources' ``topk_idx``.
        weights: ``[R, M, K]`` float32: their ``topk_weights``, or None if they had none.
    """

    ranges: torch.Tensor
    source_tokens: torch.Tensor
    source_counts: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor | None

    __repr__ = show_fields

    def unweighted(self) -> Routing:
        """The same without weights: combine then takes plain sums."""
        return dataclasses.replace(self, weights=None)


@dataclass(slots=True)
class LateRouting:
    """What is needed of a routing where the weights come with combine.

    Attributes:
        ranges, source_tokens: as in :class:`Routing`. Callers have them and may have written to
            them.
        aborted: on GPUs ``[1]`` int64 of the mode's own, whether a rank has refused the dispatch;
            None where it is lost, as with a handle made of copies: then the first of ``ranges``
            says so.
    """

    ranges: torch.Tensor
    source_tokens: torch.Tensor
    aborted: torch.Tensor | None = None

    __repr__ = show_fields

    def unweighted(self) -> LateRouting:
        """The same: it has no weights."""
        return self


@dataclass(frozen=True)
class RoutingLayout:
    """The parts of :attr:`CudaRouting.block`: the ranges, then the kernels' table, then the source
    tokens, then the weights of the rows, if there are any. Sizes and places are in int32.

    Attributes:
        ranges: ``(E_l, R)``.
        rows: ``(E_l, C)``.
        table_at, source_tokens_at, row_weights_at: where those parts begin; each on a boundary of
            256 bytes. A block without weights ends at the last of them.
        words: of a whole block with weights.
    """

    ranges: tuple[int, int]
    rows: tuple[int, int]
    table_at: int
    source_tokens_at: int
    row_weights_at: int
    words: int

    @classmethod
    def of(cls, geometry: Geometry, table_bytes: int) -> RoutingLayout:
        """The layout for a geometry whose table takes ``table_bytes``."""
        local, capacity = geometry.experts_per_rank, geometry.expert_capacity
        table_at = _align(2 * local * geometry.ranks)
        source_tokens_at = table_at + _align(-(-table_bytes // 4))
        row_weights_at = source_tokens_at + _align(local * capacity)
        return cls(
            (local, geometry.ranks),
            (local, capacity),
            table_at,
            source_tokens_at,
            row_weights_at,
            row_weights_at + local * capacity,
        )

    @classmethod
    def of_table(cls, geometry: Geometry, table_bytes: int) -> RoutingLayout:
        """The layout of a block that holds the table alone, as of token-major rows."""
        words = _align(-(-table_bytes // 4))
        return cls((0, geometry.ranks), (0, geometry.expert_capacity), 0, words, words, words)


def _align(words: int) -> int:
    return -(-words // 64) * 64


@dataclass(slots=True)
class CudaRouting:
    """The same as :class:`Routing` on a GPU. Callers seldom look into it, so its tensors are views
    that are made when somebody asks for them.

    Attributes:
        block: int32, on the GPU: all that dispatch leaves for combine.
        layout: where the parts of ``block`` lie.
        tokens: of this rank's own call.
        weighted: whether combine multiplies by the weights in the block's table.
        stream: on which the block was allocated.
    """

    block: torch.Tensor
    layout: RoutingLayout
    tokens: int
    weighted: bool
    stream: int

    __repr__ = show_fields

    @property
    def ranges(self) -> torch.Tensor:
        """As in :class:`Routing`."""
        shape = self.layout.ranges
        return self.block[: 2 * shape[0] * shape[1]].view(torch.int64).view(shape)

    @property
    def source_tokens(self) -> torch.Tensor:
        """As in :class:`Routing`."""
        return self._of_rows(self.layout.source_tokens_at)

    @property
    def row_weights(self) -> torch.Tensor:
        """``[E_l, C]`` float32, of a dispatch with weights."""
        return self._of_rows(self.layout.row_weights_at).view(torch.float32)

    def _of_rows(self, begin: int) -> torch.Tensor:
        local, capacity = shape = self.layout.rows
        return self.block[begin : begin + local * capacity].view(shape)

    def unweighted(self) -> CudaRouting:
        """The same without weights: combine then takes plain sums."""
        return CudaRouting(self.block, self.layout, self.tokens, False, self.stream)


AnyRouting = Routing | CudaRouting | LateRouting
"""What a backend's dispatch leaves for its combine."""


@dataclass(slots=True)
class Dispatched:
    """What one dispatch brings to this rank. C = R * M rows of room for each local expert.

    Attributes:
        tokens: ``[E_l, C, hidden]`` bfloat16 or float8_e4m3fn, or of nvfp4 rows ``[E_l, C,
            hidden / 2]`` uint8. Of expert e the first ``counts[e]`` rows are valid, by source rank,
            then source token; the rest is not written.
        scales: None, or ``[E_l, C, blocks]`` float32, or ``[E_l, C, ceil(blocks / 4)]`` int32
            (UE8M0), stored with C innermost as grouped matrix products read them; of nvfp4 rows
            float8_e4m3fn of the shape :func:`fanfold.formats.nvfp4_scale_shape`.
        counts: ``[E_l]`` int32.
        routing: where the rows came from, and what combine needs.
        own_weights: the :attr:`row_weights`, unless they are in the routing's block and nobody has
            asked for them yet.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    routing: AnyRouting
    own_weights: torch.Tensor | None = None

    __repr__ = show_fields

    @property
    def row_weights(self) -> torch.Tensor | None:
        """``[E_l, C]`` float32, or None if no weights came along; the same tensor each time."""
        routing = self.routing
        if self.own_weights is None and isinstance(routing, CudaRouting) and routing.weighted:
            self.own_weights = routing.row_weights
        return self.own_weights

    @property
    def source_tokens(self) -> torch.Tensor:
        """``[E_l, C]`` int32: each row's token index at its source; the routing has it."""
        return self.routing.source_tokens


@dataclass(frozen=True)
class Statistics:
    """Tensors that a call adds to; None where not wanted.

    Attributes:
        expert_totals: ``[E_l]`` int32: rows received by each local expert.
        wait_ns: ``[R]`` int64: nanoseconds waited for each source rank.
    """

    expert_totals: torch.Tensor | None = None
    wait_ns: torch.Tensor | None = None

    __repr__ = show_fields

    def check(self, geometry: Geometry, device: torch.device) -> None:
        """Raises ArgumentError for a tensor of another shape or dtype or not on ``device``."""
        totals, wait_ns = self.expert_totals, self.wait_ns
        shape = (geometry.experts_per_rank,)
        if totals is not None and not is_plain(totals, shape, torch.int32, device):
            check_tensor("expert_totals", totals, shape, (torch.int32,), device=device)
        shape = (geometry.ranks,)
        if wait_ns is not None and not is_plain(wait_ns, shape, torch.int64, device):
            check_tensor("wait_ns", wait_ns, shape, (torch.int64,), device=device)


NO_STATISTICS = Statistics()
"""Nothing to add to."""


@dataclass(frozen=True)
class ReadyRows:
    """Outputs of a combine that begins before all of them are written, and which are. Of each
    expert, rows from ``b * block_rows`` on, ``block_rows`` of them, are written once the signal
    ``e * blocks + b``, as an int32, has reached ``ready_at``. E_l local experts, C = R * M.

    Attributes:
        y: the outputs, as ``LowLatencyBackend.combine`` takes them.
        signals: int32 or uint32, contiguous, ``E_l * blocks(C)`` at least. On a GPU another kernel
            adds to them, with release; on the host another thread.
        block_rows: from 1 to C.
        ready_at: what a signal reaches.
        sms: how many SMs the send half takes at most, on a GPU.
    """

    y: torch.Tensor
    signals: torch.Tensor
    block_rows: int
    ready_at: int
    sms: int

    __repr__ = show_fields

    def blocks(self, capacity: int) -> int:
        """Signals of each expert, whose rows are ``capacity``."""
        return -(-capacity // self.block_rows)


class LowLatencyBackend(Protocol):
    """The low-latency mode, whatever it runs on.

    On the host a call has done its work when it returns; on a GPU it has enqueued it on the current
    stream, and the CPU waits for nothing. What the kernels of a call find wrong (an expert index
    out of range, a peer that is late or has refused) is raised by the next call, or by
    :meth:`check`.
    """

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""

    def dispatch(
        self,
        geometry: Geometry,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        formats: Formats = BF16_ROWS,
        global_scale: torch.Tensor | None = None,
        statistics: Statistics = NO_STATISTICS,
        return_hook: bool = False,
    ) -> tuple[Dispatched, Hook | None]:
        """Sends this rank's tokens and receives those of all ranks for its experts. Collective.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous, T up to ``geometry.max_tokens``; free for reuse
                when this returns (on a GPU: for work that follows on the stream).
            topk_idx: ``[T, K]`` int64, -1 for none.
            topk_weights: ``[T, K]`` float32, or None if they come only with combine.
            formats: of the rows (fp8 and nvfp4 quantise each token once, here), and how fp8 scales
                are rounded and stored.
            global_scale: of nvfp4 rows, float32 of one element; None with other rows.
            statistics: tensors to add to.
            return_hook: send only, and return a function that receives. Hooks must be called in the
                order of their sends, each once.

        Returns:
            What arrives, and the hook; None in its place without ``return_hook``.

        Raises:
            ArgumentError: bad input; nothing was sent, and peers raise PeerRefused. From here or
                from the hook, and on all ranks: they disagree about geometry, formats or
                whether weights come along.
            PeerRefused: another rank refused its input; from here or from the hook.
            PeerTimeout: a peer is late; from here or from the hook.
            UsageError: two dispatches are in flight already, or the geometry changes while a call
                is in flight or a rank is masked; peers raise PeerRefused for the latter.
        """

    def combine(
        self,
        geometry: Geometry,
        y: torch.Tensor | ReadyRows,
        routing: AnyRouting,
        topk_idx: torch.Tensor | None,
        *,
        late_weights: torch.Tensor | None = None,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        wait_ns: torch.Tensor | None = None,
        return_hook: bool = False,
    ) -> tuple[torch.Tensor, Hook | None]:
        """Sends the experts' outputs back and sums them for each token. Collective.

        Args:
            y: ``[E_l, C, hidden]`` bfloat16, last dimension contiguous: outputs of the rows that
                dispatch brought, in their places. Or :class:`ReadyRows`, of which each row is read
                once it is written, whatever the other ranks bring; on a GPU only with
                ``late_weights``.
            routing: what dispatch brought; without its weights the sum is unweighted; with
                ``late_weights`` only its ``ranges`` are used, so a :class:`LateRouting` will do.
            topk_idx: ``[T, K]`` int64 of this rank's own tokens, as dispatched; None where the
                routing is a :class:`CudaRouting`, which has what it takes.
            late_weights: ``[T, K]`` float32 weights of this rank's own tokens where dispatch
                carried none; all ranks must bring them or none.
            logfmt: send rows as LogFMT-10 (5/8 of the bytes; about 1% error per value). On GPUs
                all ranks do or none.
            out: ``[T, hidden]`` bfloat16, contiguous; made if not given. On a GPU it shares no
                memory with ``y``.
            wait_ns: ``[R]`` int64 nanoseconds, added to.
            return_hook: as in :meth:`dispatch`.

        Returns:
            The ``[T, hidden]`` bfloat16 result: for each token the weighted sum over its experts,
            summed per rank in fp32 and rounded to bfloat16, then over ranks likewise. A token
            without experts gives zeros. With ``return_hook`` it is complete once the hook has run.

        Raises:
            ArgumentError, PeerTimeout, UsageError: as :meth:`dispatch`.
            SignalTimeout: a signal of :class:`ReadyRows` did not come; it ends the mode, as a
                PeerTimeout does.
        """

    def check(self) -> None:
        """Raises what earlier calls have found wrong since; does not wait for them."""

    def quiesce(self) -> None:
        """Returns when every peer has read everything sent so far. No call may be in flight."""

    def reset(self) -> None:
        """Gives up the calls in flight, whose hooks raise UsageError from then on, and returns when
        every peer has read everything sent so far. Collective. On a GPU it initialises the memory
        of the mode, for which the CPU waits."""

    def set_masked(self, rank: int, masked: bool) -> None:
        """Masks a rank (nothing is sent to it or awaited from it), or unmasks it. Local."""

    def masked(self) -> torch.Tensor:
        """``[R]`` int32 on :attr:`device`: 1 for each masked rank."""

    def refuse_dispatch(self, error: BaseException, geometry: Geometry | None = None) -> None:
        """Aborts this dispatch on all ranks because of ``error``, found by a layer above.

        Args:
            error: what was found.
            geometry: of the dispatch, where it may be another than the last call's and is known:
                on a GPU the peers then agree about it, and raise FanfoldError.
        """

    def refuse_combine(
        self,
        error: BaseException,
        routing: AnyRouting | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """Aborts this combine on all ranks because of ``error``, found by a layer above.

        Args:
            error: what was found.
            routing: of the combine, where it is known: its rows are what the peers send.
            geometry: as in :meth:`refuse_dispatch`.
        """


def check_tokens(
    geometry: Geometry,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless these are tokens that ``LowLatencyBackend.dispatch`` takes.

    On a GPU the entries of ``topk_idx`` are left to the kernels, as reading them would wait.
    """
    check_tensor("x", x, ("tokens", geometry.hidden), (torch.bfloat16,), device=device)
    tokens = x.shape[0]
    if tokens > geometry.max_tokens:
        raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {geometry.max_tokens}")
    _check_choices(geometry, topk_idx, tokens, device)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,),
                     device=device)  # fmt: skip


def check_global_scale(row_format: RowFormat, global_scale: object, device: torch.device) -> None:
    """Raises ArgumentError unless ``global_scale`` is what rows of this format need: one float32
    on ``device`` with nvfp4, None otherwise."""
    if row_format is not RowFormat.NVFP4:
        if global_scale is not None:
            bound = "left out: only nvfp4 rows have one"
            raise ArgumentError("global_scale", worded(global_scale), bound)
        return
    if global_scale is None:
        bound = "given with nvfp4 rows: float32, of one element, for example 448 * 6 / amax(|x|)"
        raise ArgumentError("global_scale", None, bound)
    shape = () if isinstance(global_scale, torch.Tensor) and global_scale.dim() == 0 else (1,)
    check_tensor("global_scale", global_scale, shape, (torch.float32,), device=device)


def check_outputs(
    geometry: Geometry,
    y: torch.Tensor,
    ranges: torch.Tensor,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless ``y`` and ``ranges`` fit ``LowLatencyBackend.combine``."""
    shape = (geometry.experts_per_rank, geometry.expert_capacity, geometry.hidden)
    check_tensor("y", y, shape, (torch.bfloat16,), device=device, contiguous=False)
    if y.stride(2) != 1:
        bound = "contiguous in the last dimension: call .contiguous()"
        raise ArgumentError("y.stride()", y.stride(), bound)
    check_tensor("ranges", ranges, (shape[0], geometry.ranks), (torch.int64,), device=device)


def check_own(
    geometry: Geometry,
    topk_idx: torch.Tensor,
    late_weights: torch.Tensor | None,
    device: torch.device,
) -> int:
    """The number of own tokens of a combine, after the checks of what describes them."""
    check_tensor("topk_idx", topk_idx, ("tokens", geometry.top_k), (torch.int64,), device=device)
    tokens = topk_idx.shape[0]
    if tokens > geometry.max_tokens:
        raise ArgumentError(
            "topk_idx.shape[0]", tokens, f"at most max_tokens = {geometry.max_tokens}"
        )
    if late_weights is not None:
        _check_choices(geometry, topk_idx, tokens, device)
        check_tensor("topk_weights", late_weights, tuple(topk_idx.shape), (torch.float32,),
                     device=device)  # fmt: skip
    return tokens


def check_result(
    out: torch.Tensor | None, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """The tensor that combine writes to: ``out`` if it is given and right, else a new one."""
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    return check_tensor("out", out, shape, (torch.bfloat16,), device=device)


def _check_choices(
    geometry: Geometry, topk_idx: torch.Tensor, tokens: int, device: torch.device
) -> None:
    if device.type == "cpu":
        check_topk(topk_idx, tokens, geometry.top_k, geometry.num_experts, device)
    else:
        shape = (tokens, geometry.top_k)
        check_tensor("topk_idx", topk_idx, shape, (torch.int64,), device=device)


def hook_if_asked(hook: Hook, return_hook: bool) -> Hook | None:
    """``hook``, or None after it has been called."""
    if return_hook:
        return hook
    hook()
    return None


def once(receive: Hook, ready: Hook | None = None) -> Hook:
    """``receive``, which may run once; a second call is a mistake that would wait forever.

    Args:
        receive: the receive half of a call.
        ready: raises where it is too early for that; the hook can then be called again.
    """
    called = False

    def run() -> None:
        nonlocal called
        if called:
            raise UsageError("this receive hook has been called already; each may be called once")
        if ready is not None:
            ready()
        called = True
        receive()

    # Nothing here refers to itself: a cycle would keep the call's tensors, the symmetric memory and
    # the group until the garbage collector comes.
    def hook() -> None:
        if is_dynamo_compiling():  # no operator; it leaves the graph here, not somewhere inside
            torch.compiler.disable(run)()
        else:
            run()

    return hook
