"""Expert-parallel dispatch and combine for training and prefill; see :class:`HighThroughput`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch.compiler import is_dynamo_compiling

from fanfold.backends.choose import choose
from fanfold.backends.high_throughput import Rows
from fanfold.backends.high_throughput.in_place import bytes_for_rows
from fanfold.backends.high_throughput.patterns import DispatchPattern
from fanfold.backends.high_throughput.protocol import MOST_ALIGNMENT, MOST_ROWS
from fanfold.backends.opening import open_high_throughput
from fanfold.base_dispatcher import (
    BaseDispatcher,
    GroupLike,
    RowDtype,
    check_formats,
    checked_config,
)
from fanfold.config import Config
from fanfold.copying import not_copied
from fanfold.errors import ArgumentError
from fanfold.formats import RowFormat, ScaleFormatName
from fanfold.geometry import Geometry, check_flag, check_integer, check_tensor
from fanfold.group import as_group, together
from fanfold.memory.host import SymmetricMemory
from fanfold.operators import Shapes, register
from fanfold.refusal import Refusing
from fanfold.renaming import Renaming
from fanfold.representation import worded
from fanfold.results import HighThroughputResult, HighThroughputSource

__all__ = ["HighThroughput", "Rows"]

# The backend's calls take a plan where those of this class take a result.
_DISPATCH = Renaming({"plan": "previous", "the plan": "the earlier dispatch"})
_COMBINE_NAMES = {
    "plan": "received",
    "the plan": "the received rows",
    "row_weights": "received.weights",
}
_COMBINE = Renaming(_COMBINE_NAMES)
_COMBINE_WEIGHTS = Renaming({**_COMBINE_NAMES, "topk_weights": "row_values"})


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments; several layers may use one.",
)
class HighThroughput(BaseDispatcher):
    """Dispatch and combine for training and prefill: many tokens, gradients, reusable routing.

    Rows arrive packed expert by expert, the layout of contiguous grouped GEMMs. Tensors of any
    length stream through little memory. If each rank has a GPU of its own as current CUDA device,
    of compute capability 9.0 or later, the calls run there, and the CPU waits for the number of
    rows that arrive; with a ``capacity`` or ``previous`` it waits for nothing, and CUDA graphs can
    hold the calls. Otherwise they run on the host; tensors of other devices are copied there and
    back, which is slow. Construction is collective.

        >>> import fanfold, torch
        >>> with fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=4096) as ep:
        ...     x = torch.randn(100, 64, device=ep.device).bfloat16()
        ...     topk_weights, topk_idx = torch.rand(100, 8, device=ep.device).topk(2)
        ...     received = ep.dispatch(x, topk_idx, topk_weights)
        ...     y = received.tokens * 2                      # your experts
        ...     out = ep.combine(y, received)
        >>> received.tokens.shape, out.shape
        (torch.Size([200, 64]), torch.Size([100, 64]))

    Args:
        group: a ``torch.distributed`` group of any backend; the default group if None, and this
            process alone if there is none.
        num_experts: experts of all ranks; a multiple of the ranks, up to 32767. Rank r holds
            experts ``r * num_experts / ranks`` onwards.
        top_k: experts per token, 1 to 32.
        hidden: columns of a row, from 16; a row must be a multiple of 16 bytes.
        max_tokens: most tokens one rank passes to one call.
        dispatch_dtype: ``"bf16"`` or ``"fp8"`` (or their torch dtypes): how rows travel to the
            experts. They always return as bfloat16.
        scale_format: of fp8 rows: ``"float32"``, ``"power_of_two"`` or ``"ue8m0"``.
        expert_alignment: each expert's rows are padded to a multiple of this, with zeros; see
            :meth:`use_zero_padding`.
        in_place_rows: on GPUs, memory for this many rows, with their padding, into which peers
            write in a dispatch in place.
        config: the settings; resolved from the environment if None.

    Attributes:
        device: where the calls work: this rank's GPU, which takes tensors of its own only, or the
            CPU, which takes tensors of any device.
        memory: what the ranks share.

    It cannot be copied or pickled (CopyError).

    Raises:
        ArgumentError: a size out of bounds, or ranks that disagree about one (naming both values);
            on all ranks alike.
        UnavailableError: the ranks cannot share memory, or ``config.backend`` is ``"cuda"`` and
            they cannot run on their GPUs.
    """

    mode: ClassVar[Literal["high_throughput"]] = "high_throughput"  # type: ignore[misc]

    def __init__(
        self,
        group: GroupLike = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dispatch_dtype: RowDtype = "bf16",
        scale_format: ScaleFormatName = "float32",
        expert_alignment: int = 1,
        in_place_rows: int = 0,
        config: Config | None = None,
    ) -> None:
        super().__init__("dispatch", "combine", "combine_weights")
        with together(as_group(group)) as self._group:
            self.config = checked_config(config)
            self.geometry = Geometry(self._group.size, num_experts, top_k, hidden, max_tokens)
            self._formats = check_formats(hidden, dispatch_dtype, scale_format)
            if self._formats[0] is RowFormat.NVFP4:
                bound = "'bf16' or 'fp8' in high throughput; nvfp4 rows need LowLatency"
                raise ArgumentError("dispatch_dtype", repr("nvfp4"), bound)
            check_integer("expert_alignment", expert_alignment, 1, MOST_ALIGNMENT)
            check_integer("in_place_rows", in_place_rows, 0, MOST_ROWS)
            self._agree(
                self._formats,
                scale_format=scale_format,
                expert_alignment=expert_alignment,
                in_place_rows=in_place_rows,
            )
            self.expert_alignment, self._in_place_rows = expert_alignment, in_place_rows
            self._choice = choose(self._group, self.config, "high_throughput", may_cross_hosts=True)
            result_bytes = 0
            if in_place_rows:
                result_bytes = bytes_for_rows(in_place_rows, hidden, *self._formats)
            self.memory, self._backend = open_high_throughput(
                self._group,
                self._choice,
                max_tokens,
                self.config,
                result_bytes=result_bytes,
                quantize_to=self._formats[1] if self._formats[0] is RowFormat.FP8 else None,
            )
        shapes = Shapes.of(self.geometry, "high_throughput", self._formats, expert_alignment)
        self.registration = register(self, shapes, base=HighThroughput)
        # Of the last dispatch by a known routing, and by a new one: tensors that look the same are
        # not checked again.
        self._accepted: dict[bool, DispatchPattern] = {}

    def __enter__(self) -> HighThroughput:
        return self

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        previous: HighThroughputResult | None = None,
        capacity: int | None = None,
        in_place: bool = False,
    ) -> HighThroughputResult:
        """Sends each token to the ranks that hold its experts. Collective.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous, 0 <= T <= max_tokens; T may differ between
                ranks. Quantised here if rows travel as fp8; then also a pair of fp8 values
                ``[T, hidden]`` and their scales ``[T, S]`` (float32 or int32, any strides), sent as
                they are.
            topk_idx: ``[T, top_k]`` int64, -1 for none. A token goes to an expert once, however
                often its row names the expert, with the sum of those weights.
            topk_weights: ``[T, top_k]`` float32. They travel along for a weighted combine.
            previous: reuse the routing of this earlier dispatch, and its capacity; topk_idx,
                topk_weights and capacity must then be None.
            capacity: rows to allocate, so that no size depends on what arrives; the result counts
                the rows that fit.
            in_place: the fastest path on GPUs. Tokens and scales of the result lie in memory of
                this object, into which peers write: they are valid until the next dispatch in place
                on this rank begins, or :meth:`close`. On all ranks or on none; the same as False on
                the host.

        Returns:
            The received rows.

        Raises:
            ArgumentError: bad input: nothing was sent, the call is aborted on all ranks (the others
                raise PeerRefused), and this object stays usable. Or ranks that disagree about the
                call, for example weights on some only: the call is aborted on all likewise.
            PeerRefused: another rank refused its input; this object stays usable.
            PeerTimeout: a peer did not arrive in time; close this object.
            UsageError: closed, or failed earlier.

        On a GPU a later call raises what the kernels find: PeerTimeout by any call, a bad index, a
        capacity too small or PeerRefused by a combine or :meth:`check`.
        """
        if is_dynamo_compiling():
            from fanfold.operators import native

            return native.dispatch(  # type: ignore[no-any-return]
                self, x, topk_idx, topk_weights, previous=previous,
                capacity=capacity, in_place=in_place,
            )  # fmt: skip
        self._check_open()
        self._calls["dispatch"] += 1
        backend = self._backend
        with Refusing(lambda error: backend.refuse_dispatch(error, self._plan_of(previous))):
            _check_previous(previous, topk_idx, topk_weights, capacity)
            if in_place and self._in_place_rows == 0:
                bound = "False, as this HighThroughput has no in_place_rows"
                raise ArgumentError("in_place", True, bound)
            in_place = in_place and not self._choice.across_hosts
            if previous is not None:
                self._check_own("previous", previous, HighThroughputResult)
            seen = self._looks_accepted(x, topk_idx, topk_weights)
            if not seen:
                self._check_dispatch(x, topk_idx, topk_weights)
        if previous is not None:
            with _DISPATCH:
                dispatched = backend.dispatch_cached(
                    x, self._plan_of(previous), layout="expert_major", in_place=in_place
                )
        else:
            assert topk_idx is not None
            dispatched = backend.dispatch(
                x,
                topk_idx,
                topk_weights,
                num_experts=self.num_experts,
                layout="expert_major",
                expert_alignment=self.expert_alignment,
                capacity=capacity,
                in_place=in_place,
            )
        if not seen:
            self._accepted[topk_idx is None] = DispatchPattern.of(x, topk_idx, topk_weights)
        return HighThroughputResult(
            tokens=dispatched.tokens,
            scales=dispatched.scales,
            weights=dispatched.row_weights,
            tokens_per_expert=dispatched.tokens_per_expert,
            offsets=dispatched.offsets,
            num_tokens=dispatched.plan.tokens,
            owner=self,
            source=HighThroughputSource(dispatched),
        )

    def combine(
        self,
        y: torch.Tensor,
        received: HighThroughputResult,
        *,
        weighted: bool = True,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the experts' outputs to the tokens' ranks and sums them per token. Collective.

        The sum is taken in fp32: per rank over its experts in top-k order, rounded to bfloat16,
        then over ranks in order, rounded again. Products are rounded before they are added.

        Args:
            y: bfloat16, shaped like ``received.tokens``: the output of each row in its place.
            received: what dispatch returned; may be combined more than once.
            weighted: multiply each row by its routing weight, if dispatch had weights.
            bias: ``[num_tokens, hidden]`` bfloat16 that each sum starts from.
            out: ``[num_tokens, hidden]`` bfloat16 to write to, in other memory than ``y`` if on a
                GPU; made if None.

        Returns:
            ``[num_tokens, hidden]`` bfloat16; zeros, or the bias, for a token without experts.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as :meth:`dispatch`.
        """
        if is_dynamo_compiling():
            from fanfold.operators import native

            return native.combine(  # type: ignore[no-any-return]
                self, y, received, weighted=weighted, bias=bias, out=out
            )
        self._check_open()
        self._calls["combine"] += 1
        with Refusing(partial(self._refuse_combine_of, received)):
            self._check_own("received", received, HighThroughputResult)
            weights = received.weights if weighted else None
            tensors = {"received": received.tokens, "y": y, "received.weights": weights}
            self._backend.check_devices(**tensors, bias=bias, out=out)
            shape = (received.tokens.shape[0], self.hidden)
            check_tensor("y", y, shape, (torch.bfloat16,))
        with _COMBINE:
            result, _ = self._backend.combine(
                y,
                self._plan_of(received),
                layout="expert_major",
                row_weights=weights,
                bias=bias,
                out=out,
            )
        return result

    def combine_weights(
        self, row_values: torch.Tensor, received: HighThroughputResult
    ) -> torch.Tensor:
        """Returns one number of each row to the top-k entry it came from. Collective.

        The gradient of the routing weights needs it.

        Args:
            row_values: ``[rows]`` float32.
            received: what dispatch returned.

        Returns:
            ``[num_tokens, top_k]`` float32; 0 where topk_idx is -1.
        """
        if is_dynamo_compiling():
            from fanfold.operators import native

            return native.combine_weights(self, row_values, received)  # type: ignore[no-any-return]
        self._check_open()
        self._calls["combine_weights"] += 1
        with Refusing(partial(self._refuse_combine_of, received)):
            self._check_own("received", received, HighThroughputResult)
            self._backend.check_devices(received=received.tokens, row_values=row_values)
        with _COMBINE_WEIGHTS:
            return self._backend.combine_weights(
                row_values, self._plan_of(received), layout="expert_major"
            )

    def use_sms(self, sms: int | None) -> None:
        """On GPUs: sets how many SMs calls from here on take, to leave the others to what runs
        beside them. Local: ranks need not take the same number. On the host it changes nothing.

        Args:
            sms: from 1; at least 2 are taken with other ranks, and at most 64 or those there are.
                None for the initial number: ``config.ctas``, or as many as keep the link busy, at
                most 24.

        Raises:
            ArgumentError: ``sms`` is no such number.
            UsageError: closed.
        """
        self._check_open()
        self._backend.use_sms(sms)

    def use_zero_padding(self, zeros: bool) -> None:
        """Sets whether the padding rows of dispatches from here on are zeros, as at first. With
        False GPUs store nothing in them, which saves the time of as many rows: they may hold
        anything, NaN too. Their weights are 0 and their source is -1 either way. Local: ranks need
        not agree. A captured CUDA graph keeps what it was captured with. The host always stores
        zeros.

        GEMMs whose output rows depend on one input row each need no zeros. A gradient of an
        expert's weights does, if it sums over all rows of the expert.

        Args:
            zeros: False to store nothing.

        Raises:
            ArgumentError: ``zeros`` is no bool.
            UsageError: closed.
        """
        self._check_open()
        self._backend.use_zero_padding(check_flag("zeros", zeros))

    def check(self) -> None:
        """See :meth:`BaseDispatcher.check`."""
        self._check_open()
        self._backend.check()

    def refuse_dispatch(self, error: BaseException) -> None:
        """See :meth:`BaseDispatcher.refuse_dispatch`."""
        if not self._closed:
            self._backend.refuse_dispatch(error)

    def refuse_combine(self, error: BaseException) -> None:
        """See :meth:`BaseDispatcher.refuse_combine`."""
        if not self._closed:
            self._backend.refuse_combine(error)

    def _unreached(self) -> torch.Tensor:
        masked = self._masked()
        if not isinstance(self.memory, SymmetricMemory) or not self.memory.hosts.several:
            return masked
        gateways = [self.memory.core.gateway_to(peer) for peer in range(self.ranks)]
        return masked | masked[gateways]

    def _plan_of(self, received: object) -> Any:
        """The backend's plan behind a result of this object's dispatch; None for anything else."""
        if not isinstance(received, HighThroughputResult) or received.owner is not self:
            return None
        source = received.source
        assert isinstance(source, HighThroughputSource)
        return source.dispatched.plan

    def _refuse_combine_of(self, received: object, error: BaseException) -> None:
        self._backend.refuse_combine(error, self._plan_of(received))

    def _looks_accepted(
        self, x: Rows, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> bool:
        """Whether the last dispatch of this kind was of tensors that look the same."""
        known = self._accepted.get(topk_idx is None)
        return known is not None and known.addresses(x, topk_idx, topk_weights) is not None

    def _check_dispatch(
        self, x: Rows, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> None:
        """Raises ArgumentError unless these are rows of a dispatch and, where it is new, a routing
        for them. The backend checks what every layer needs."""
        self._backend.check_devices(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        self._check_rows(x)
        if topk_idx is not None:
            shape = ((x[0] if isinstance(x, tuple) else x).shape[0], self.top_k)
            check_tensor("topk_idx", topk_idx, shape, (torch.int64,))

    def _check_rows(self, x: object) -> None:
        """Raises ArgumentError unless these are rows of a dispatch."""
        row_format = self._formats[0]
        shape = ("tokens", self.hidden)
        if isinstance(x, tuple):
            if row_format is not RowFormat.FP8:
                raise ArgumentError("x", worded(x), "a torch.Tensor, as dispatch_dtype is bf16")
            if len(x) != 2:
                raise ArgumentError("x", worded(x), "a torch.Tensor, or a pair (values, scales)")
            values = check_tensor("x[0]", x[0], shape, (torch.float8_e4m3fn,))
        else:
            values = check_tensor("x", x, shape, (torch.bfloat16,))
        if values.shape[0] > self.max_tokens:
            bound = f"at most max_tokens = {self.max_tokens}"
            raise ArgumentError("x.shape[0]", values.shape[0], bound)


def _check_previous(
    previous: object,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    capacity: int | None,
) -> None:
    if previous is None:
        if topk_idx is None:
            raise ArgumentError("topk_idx", "None", "given, unless previous is")
        return
    routing = {"topk_idx": topk_idx, "topk_weights": topk_weights, "capacity": capacity}
    for name, value in routing.items():
        if value is not None:
            raise ArgumentError(name, "given", "None where previous is, whose routing has its own")
