"""The SwiGLU experts of a layer over the rows that a dispatch brought, eager and compiled."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from fanfold.errors import UsageError
from fanfold.formats import dequantize
from fanfold.operators import HandleSource, define, opened
from fanfold.results import DispatchResult

__all__ = ["swiglu_experts"]

Ranges = list[tuple[int, int]]


def swiglu_experts(
    tokens: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, received: DispatchResult
) -> torch.Tensor:
    """Each local expert's output for its rows, in their ranges.

    Args:
        tokens: the rows, as ``functional.dispatch`` returned them.
        w_in: ``[E_l, 2 * intermediate, hidden]``, gate above up.
        w_out: ``[E_l, hidden, intermediate]``.
        received: where the rows are.

    Returns:
        bfloat16, shaped like ``tokens``. What lies in no expert's place is not written.
    """
    if is_dynamo_compiling() and isinstance(received.source, HandleSource):
        return _compiled_experts(tokens, w_in, w_out, received)
    y: torch.Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        tokens, w_in, w_out, received, torch.is_grad_enabled()
    )
    return y


class _Experts(torch.autograd.Function):
    """The local SwiGLU experts over the received rows, each on its slice of the one allocation.

    Written out, because autograd would cut the rows into tensors of their own and join them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        received: DispatchResult,
        train: bool,
    ) -> torch.Tensor:
        # Read once: on a GPU each time would wait for it. And nothing of `received` but this is
        # kept, as its rows are the checkpointing's to keep or to let go.
        ctx.ranges = received.expert_ranges()
        train = train and any(ctx.needs_input_grad)
        y, projected = _forward(received.tokens, received.scales, w_in, w_out, ctx.ranges, train)
        ctx.save_for_backward(tokens, w_in, w_out, projected)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, w_in, w_out, projected = ctx.saved_tensors
        return *_backward(tokens, w_in, w_out, projected, grad_y, ctx.ranges), None, None


def _forward(
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    ranges: Ranges,
    train: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs, and where one trains the first products, which the backward pass needs."""
    y = tokens.new_empty(tokens.shape, dtype=torch.bfloat16)
    projected = w_in.new_empty((tokens.shape[0], w_in.shape[1])) if train else None
    for expert, place in enumerate(ranges):
        rows = _in_dtype(tokens, scales, expert, place, w_in.dtype)
        hidden = rows @ w_in[expert].T
        if projected is not None:
            _rows_at(place, projected).copy_(hidden)
        gate, up = hidden.chunk(2, dim=-1)
        _rows_at(place, y).copy_((F.silu(gate) * up) @ w_out[expert].T)
    return y, projected


def _backward(
    tokens: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    projected: torch.Tensor,
    grad_y: torch.Tensor,
    ranges: Ranges,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the rows and of both weights."""
    # Padding rows are sent to nobody, so nothing reads their gradient.
    grad_tokens = torch.empty_like(tokens)
    grad_in, grad_out = torch.empty_like(w_in), torch.empty_like(w_out)
    for expert, place in enumerate(ranges):
        rows, grad, hidden = (
            _rows_at(place, tensor).to(w_in.dtype) for tensor in (tokens, grad_y, projected)
        )
        gate, up = hidden.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        torch.mm(grad.T, silu * up, out=grad_out[expert])
        grad_middle = grad @ w_out[expert]
        grad_gate = grad_middle * up * (sigmoid + silu * (1 - sigmoid))
        grad_hidden = torch.cat([grad_gate, grad_middle * silu], dim=-1)
        torch.mm(grad_hidden.T, rows, out=grad_in[expert])
        _rows_at(place, grad_tokens).copy_(grad_hidden @ w_in[expert])
    return grad_tokens, grad_in, grad_out


def _rows_at(place: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
    """A view of the rows of one local expert, whose range ``DispatchResult.expert_ranges`` says."""
    begin, count = place
    return tensor.flatten(0, tensor.dim() - 2)[begin : begin + count]


def _in_dtype(
    tokens: torch.Tensor,
    all_scales: torch.Tensor | None,
    expert: int,
    place: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The rows of one local expert in the dtype of the weights."""
    rows = _rows_at(place, tokens)
    if all_scales is None:
        return rows.to(dtype)
    if all_scales.dim() == 3:  # low latency: packed scales have no flat view
        scales = all_scales[expert, : rows.shape[0]]
    else:
        scales = _rows_at(place, all_scales)
    return dequantize(rows, scales).to(dtype)


# ---- inside torch.compile -----------------------------------------------------------------------


def _compiled_experts(
    tokens: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, received: DispatchResult
) -> torch.Tensor:
    device = tokens.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    train = torch.is_grad_enabled() and (
        tokens.requires_grad or w_in.requires_grad or w_out.requires_grad
    )
    handle = received.source.handle  # type: ignore[attr-defined]
    y: torch.Tensor = _experts(tokens, received.scales, w_in, w_out, handle, train, autocast)[0]
    return y


def _run(
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    handle: torch.Tensor,
    train: bool,
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A graph runs without autocast; operators that it traced have it in their dtypes.
    context: Any = contextlib.nullcontext()
    if autocast is not None:
        context = torch.autocast(tokens.device.type, autocast)
    with context:
        ranges = opened(handle).received.expert_ranges()
        y, projected = _forward(tokens, scales, w_in, w_out, ranges, train)
    return y, w_in.new_empty((0,)) if projected is None else projected


def _fake(
    tokens: torch.Tensor,
    scales: torch.Tensor | None,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    handle: torch.Tensor,
    train: bool,
    autocast: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del scales, w_out, handle, autocast
    shape = (tokens.shape[0], w_in.shape[1]) if train else (0,)
    return tokens.new_empty(tokens.shape, dtype=torch.bfloat16), w_in.new_empty(shape)


# Not ordered: it talks to nobody.
_experts, _definition = define(
    "swiglu_experts",
    "(Tensor tokens, Tensor? scales, Tensor w_in, Tensor w_out, Tensor handle, bool train,"
    " ScalarType? autocast) -> (Tensor, Tensor)",
    _run,
    _fake,
    ordered=False,
)


def _run_backward(
    tokens: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    projected: torch.Tensor,
    grad_y: torch.Tensor,
    handle: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    ranges = opened(handle).received.expert_ranges()
    return _backward(tokens, w_in, w_out, projected, grad_y, ranges)


def _fake_backward(
    tokens: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    projected: torch.Tensor,
    grad_y: torch.Tensor,
    handle: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    del projected, grad_y, handle
    return torch.empty_like(tokens), torch.empty_like(w_in), torch.empty_like(w_out)


_backward_of_experts, _backward_definition = define(
    "swiglu_experts_backward",
    "(Tensor tokens, Tensor w_in, Tensor w_out, Tensor projected, Tensor grad_y, Tensor handle)"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
    ordered=False,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tokens, _, w_in, w_out, handle, *_ = inputs
    ctx.save_for_backward(tokens, w_in, w_out, output[1], handle)


def _after(
    ctx: Any, grad_y: torch.Tensor, grad_projected: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    del grad_projected  # nobody outside sees what is projected
    tokens, w_in, w_out, projected, handle = ctx.saved_tensors
    grad_tokens, grad_in, grad_out = _backward_of_experts(
        tokens, w_in, w_out, projected, grad_y, handle
    )
    return grad_tokens, None, grad_in, grad_out, None, None, None


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del ctx, inputs, output


def _refuse_second_derivative(ctx: Any, *grads: torch.Tensor) -> None:
    del ctx, grads
    raise UsageError("the experts of nn.MoE have no second derivatives")


_definition.register_autograd(_after, setup_context=_keep)
_backward_definition.register_autograd(_refuse_second_derivative, setup_context=_keep_nothing)
