"""What the backends of high throughput share: their protocol, and the checks of their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch

from fanfold.errors import ArgumentError
from fanfold.formats import ScaleFormat, quantize
from fanfold.geometry import (
    MAX_TOKENS,
    MAX_TOP_K,
    Geometry,
    check_hidden,
    check_integer,
    check_tensor,
    check_topk,
)
from fanfold.representation import worded

__all__ = [
    "MOST_ALIGNMENT",
    "MOST_ROWS",
    "MOST_SMS",
    "DeviceCheck",
    "HighThroughputBackend",
    "RowOrder",
    "Rows",
    "anywhere",
    "apart",
    "check_apart",
    "check_biases",
    "check_capacity",
    "check_layout",
    "check_outputs",
    "check_returned_weights",
    "check_routing",
    "check_rows",
    "quantized",
]

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows to send: ``[T, hidden]``, or such values of a 1-byte dtype and their ``[T, S]`` scales."""

RowOrder = Literal["expert_major", "token_major"]

DeviceCheck = Callable[..., None]
"""Raises ArgumentError for the first of some tensors (by name) that is not where it must be."""

MOST_ROWS = 2**31 - 1  # row numbers are int32
MOST_ALIGNMENT = 1 << 20

MOST_SMS = 1 << 30
"""Most that can be asked for; a GPU gives what it has."""


class HighThroughputBackend(Protocol):
    """What every backend of high throughput does. Every call is collective.

    R ranks, E experts, E_l = E / R local experts, T own tokens, K top_k, N rows received: one for
    each token of any rank that names a local expert, ordered by source rank, then source token.

    All calls raise, besides what they say:

    - ArgumentError for bad input: nothing was sent, and the call is aborted on all ranks; also for
      ranks that disagree about the call, the experts, top_k, the bytes of a row, its scales, or
      whether weights travel;
    - PeerRefused on every other rank in those cases; the next call works;
    - PeerTimeout if a peer does not arrive in time or has ended: only UsageError from then on;
    - UsageError if the memory is closed or has failed.

    On a GPU the kernels find some of this; a later call, or :meth:`check`, raises it.
    """

    @property
    def device(self) -> torch.device:
        """Where the backend works."""

    def check_devices(self, **tensors: object) -> None:
        """Raises ArgumentError for tensors (by name) that one call cannot take from their device.
        Passes over arguments that are no tensors."""

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        num_experts: int,
        layout: RowOrder = "expert_major",
        expert_alignment: int = 1,
        capacity: int | None = None,
        in_place: bool = False,
    ) -> Any:
        """Sends each token once to every rank that holds one of its experts.

        Args:
            x: ``[T, hidden]`` contiguous, bfloat16 or any dtype whose row is a multiple of 16
                bytes; or a pair of values ``[T, hidden]`` of a 1-byte dtype, contiguous, and scales
                ``[T, S]`` float32 or int32 of any strides. Free for reuse when this returns.
            topk_idx: ``[T, K]`` int64, -1 for none. A token goes to an expert once, however often
                it is named.
            topk_weights: ``[T, K]`` float32, on all ranks or on none.
            num_experts: of all ranks; a multiple of the ranks.
            layout: ``"expert_major"``: a row for each (token, local expert), sorted by expert;
                ``"token_major"``: a row for each (token, rank).
            expert_alignment: the rows of each expert are padded to a multiple of this.
            capacity: rows to allocate, instead of what arrives; more arriving rows than that are
                bad input of this rank.
            in_place: on GPUs, peers write into memory of the backend where the rows stay until the
                next dispatch in place begins. On all ranks or none. On the host the same as False.

        Returns:
            :class:`Dispatched`, or on GPUs :class:`CudaDispatched`.
        """

    def dispatch_cached(
        self,
        x: Rows,
        plan: Any,
        *,
        layout: RowOrder,
        in_place: bool = False,
    ) -> Any:
        """Sends other rows by the routing of an earlier dispatch: no counts, no routing travel.

        Args:
            x: as in :meth:`dispatch`, of ``plan.tokens`` rows of any width.
            plan: of the same earlier dispatch on every rank.
            layout: as in :meth:`dispatch`; need not be the earlier one.
            in_place: as in :meth:`dispatch`.
        """

    def combine(
        self,
        y: torch.Tensor,
        plan: Any,
        *,
        layout: RowOrder,
        row_weights: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Brings rows back to the tokens they came from and sums them.

        Expert-major, each rank first sums a token's rows: 0 + row_weights * y, in top-k order, in
        fp32, products rounded before they are added; then rounds to bfloat16. The token's rank adds
        what the ranks send in fp32, in rank order, to the bias or 0, and rounds once more.

        Args:
            y: ``[rows, hidden]`` bfloat16, contiguous, in the places dispatch gave the rows (with a
                capacity, rows beyond those that arrived may be left out).
            plan: of the dispatch, the same on every rank.
            layout: which of the two orders ``y`` is in.
            row_weights: expert-major: ``[rows]`` float32 factors; 1 if None.
            topk_weights: numbers that travel back to the top-k slots they came from, summed over
                ranks: expert-major ``[rows]`` float32 (each slot gets its row's), token-major
                ``[N, K]`` float32. On all ranks or on none.
            bias: one or two ``[T, hidden]`` bfloat16 that each sum starts from, added in order.
            out: ``[T, hidden]`` bfloat16, contiguous; made if not given.

        Returns:
            ``[T, hidden]`` bfloat16, zero (or the bias) for a token without experts; and with
            topk_weights ``[T, K]`` float32, else None.
        """

    def combine_weights(
        self, topk_weights: torch.Tensor, plan: Any, *, layout: RowOrder
    ) -> torch.Tensor:
        """Like :meth:`combine` for ``topk_weights`` alone: no rows travel.

        Returns:
            ``[T, K]`` float32; 0 where no rank sends anything.
        """

    def use_sms(self, sms: int | None) -> None:
        """Has calls from here on take another number of SMs; None for that of the beginning. Local.
        On the host it changes nothing.

        Args:
            sms: from 1.
        """

    def use_zero_padding(self, zeros: bool) -> None:
        """Has dispatches from here on, as in the beginning, store zeros in the rows between
        experts; or nothing, which on GPUs saves the time of as many rows. Local. On the host there
        are always zeros.
        """

    def check(self) -> None:
        """Raises what earlier calls have found wrong since; does not wait for them."""

    def refuse_dispatch(self, error: BaseException, plan: object = None) -> None:
        """Aborts this dispatch on all ranks because of ``error``, which a layer above found.

        Args:
            error: what was found.
            plan: of a cached dispatch: on GPUs, if the plan is of an aborted call, no rank makes
                this one.
        """

    def refuse_combine(self, error: BaseException, plan: object = None) -> None:
        """Aborts this combine on all ranks, as :meth:`refuse_dispatch` does a dispatch."""


def anywhere(**tensors: object) -> None:
    """The DeviceCheck that leaves it to others."""


def check_layout(layout: object) -> None:
    """Raises ArgumentError unless ``layout`` is a :data:`RowOrder`."""
    if layout not in ("expert_major", "token_major"):
        raise ArgumentError("layout", repr(layout), "'expert_major' or 'token_major'")


def quantized(x: Rows, scale_format: ScaleFormat | None) -> Rows:
    """``x`` as it travels: fp8 values and scales, if ``scale_format`` names scales and ``x`` has
    none yet."""
    return x if scale_format is None or isinstance(x, tuple) else quantize(x, scale_format)


def check_rows(x: object, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values and scales that ``x`` consists of, after all checks of ``dispatch``."""
    if not isinstance(x, tuple):
        return _check_values("x", x, device), None
    if len(x) != 2:
        raise ArgumentError("x", worded(x), "a torch.Tensor, or a pair of them (values, scales)")
    values = _check_values("x[0]", x[0], device)
    if values.itemsize != 1:
        raise ArgumentError("x[0].dtype", values.dtype, "a 1-byte dtype, as it comes with scales")
    dtypes = (torch.float32, torch.int32)
    shape = (values.shape[0], "scales")
    scales = check_tensor("x[1]", x[1], shape, dtypes, device=device, contiguous=False)
    if not 1 <= scales.shape[1] <= values.shape[1]:
        raise ArgumentError("x[1].shape[1]", scales.shape[1], f"from 1 to {values.shape[1]}")
    return values, scales


def _check_values(name: str, values: object, device: torch.device) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        raise ArgumentError(name, worded(values), "a torch.Tensor of shape (tokens, hidden)")
    check_tensor(name, values, ("tokens", "hidden"), (values.dtype,), device=device)
    check_integer(f"{name}.shape[0]", values.shape[0], 0, MAX_TOKENS)
    check_hidden(values.shape[1], values.itemsize, f"{name}.shape[1]")
    return values


def check_routing(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    tokens: int | None,
    num_experts: int,
    ranks: int,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless this is a routing that ``dispatch`` takes.

    On a GPU the entries of ``topk_idx`` are left to the kernels, as reading them would wait.
    """
    shape = ("tokens" if tokens is None else tokens, "top_k")
    check_tensor("topk_idx", topk_idx, shape, (torch.int64,), device=device)
    top_k = topk_idx.shape[1]
    check_integer("topk_idx.shape[1]", top_k, 1, MAX_TOP_K)
    check_integer("topk_idx.shape[0]", topk_idx.shape[0], 0, MAX_TOKENS)
    Geometry(ranks, num_experts, top_k, hidden=16, max_tokens=0)
    if device.type == "cpu":
        check_topk(topk_idx, topk_idx.shape[0], top_k, num_experts, device)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), (torch.float32,),
                     device=device)  # fmt: skip


def check_capacity(capacity: int | None, needed: int) -> None:
    """Raises ArgumentError if more rows arrive than there is room for."""
    if capacity is not None and capacity < needed:
        raise ArgumentError("capacity", capacity, f"at least the {needed} rows that arrive")


def check_outputs(
    y: torch.Tensor,
    allowed: Sequence[int],
    layout: RowOrder,
    row_weights: torch.Tensor | None,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless these are outputs that ``combine`` takes.

    Args:
        y: the outputs.
        allowed: the numbers of rows that it may have.
        layout: which order they are in.
        row_weights: their factors, or None.
        device: where they must be.
    """
    check_tensor("y", y, ("rows", "hidden"), (torch.bfloat16,), device=device)
    check_hidden(y.shape[1], 2, "y.shape[1]")
    _check_row_count("y", y, allowed)
    if row_weights is None:
        return
    if layout == "token_major":
        raise ArgumentError("row_weights", "given", "None in token-major order")
    check_tensor("row_weights", row_weights, (y.shape[0],), (torch.float32,), device=device)


def _check_row_count(name: str, tensor: torch.Tensor, allowed: Sequence[int]) -> None:
    if tensor.shape[0] not in allowed:
        bound = " or ".join(str(rows) for rows in allowed)
        raise ArgumentError(f"{name}.shape[0]", tensor.shape[0], f"{bound}, the rows of the plan")


def check_returned_weights(
    topk_weights: torch.Tensor,
    allowed: Sequence[int],
    layout: RowOrder,
    rows: int | None,
    top_k: int,
    device: torch.device,
) -> None:
    """Raises ArgumentError unless ``combine`` takes these ``topk_weights``.

    Args:
        topk_weights: the numbers.
        allowed: how many rows they may have.
        layout: which order they are in.
        rows: of the outputs that they come with; None if they come alone.
        top_k: K.
        device: where they must be.
    """
    count = allowed[0] if rows is None and len(allowed) == 1 else "rows" if rows is None else rows
    shape = (count,) if layout == "expert_major" else (count, top_k)
    check_tensor("topk_weights", topk_weights, shape, (torch.float32,), device=device)
    _check_row_count("topk_weights", topk_weights, allowed)


def apart(at: int, nbytes: int, other_at: int, other_bytes: int) -> bool:
    """Whether so many bytes at two addresses have none in common."""
    return at + nbytes <= other_at or other_at + other_bytes <= at


def check_apart(name: str, tensor: torch.Tensor, what: str, other: torch.Tensor) -> None:
    """Raises ArgumentError where ``tensor`` shares memory with ``other``, which rows leave or come
    to in the same call."""
    # From the first element to the last, whatever the strides.
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = sum((count - 1) * stride for count, stride in steps) + 1 if tensor.numel() else 0
    nbytes = span * tensor.itemsize
    if not apart(tensor.data_ptr(), nbytes, other.data_ptr(), other.nbytes):
        raise ArgumentError(name, f"in the memory of {what}", "apart from it, as rows move there")


def check_biases(
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None,
    shape: tuple[int, int],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """The tensors that each sum starts from."""
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    if len(biases) > 2:
        raise ArgumentError("bias", f"a tuple of {len(biases)}", "at most two tensors")
    for place, rows in enumerate(biases):
        name = f"bias[{place}]" if isinstance(bias, tuple) else "bias"
        check_tensor(name, rows, shape, (torch.bfloat16,), device=device)
    return biases
