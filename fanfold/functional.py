"""Differentiable dispatch and combine::

    tokens, weights, received = functional.dispatch(ep, x, topk_idx, topk_weights)
    y = experts(tokens)                                  # row i of y from row i of tokens
    out = functional.combine(ep, y, received, weights)

As linear maps of their rows the two are each other's transpose, so each one's backward pass is a
call of the other::

    dispatch   row(t, e) = x[t]                      grad x[t] = sum over e of grad row(t, e)
               w(t, e) = sum of weights[t, k]        grad weights[t, k] = grad w(t, e)
               over the k with topk_idx[t, k] = e    for the e = topk_idx[t, k]
    combine    out[t] = sum over e of w(t, e) y(t, e)
               grad y(t, e) = w(t, e) grad out[t]    grad w(t, e) = <y(t, e), grad out[t]>
               with a bias b: out[t] += b[t]         grad b[t] = grad out[t]

Rounding. Rows travel as bfloat16 in both directions. dispatch itself rounds nothing, as ``x`` is
bfloat16. combine, and dispatch's backward pass, which is an unweighted combine of the row
gradients, sum in fp32 over the experts of one rank, round that sum to bfloat16, then sum over ranks
in fp32 and round once more. In combine's backward pass the gradient of ``out`` arrives exactly;
its product with the weight is taken in fp32 and rounded to bfloat16 once, and the weight's gradient
is an fp32 sum over the columns. Weights and their gradients stay fp32 on the whole way. The
gradients are those of the exact sums: rounding counts as the identity.

Backward passes are collective, as the calls are: every rank must run them, in the same order. That
is so by itself where all ranks build the same graph, tokens or none: a rank that received no rows
must still let the loss depend on its (empty) tensors, and inputs that require gradients on one rank
must do so on all. A rank that skips its backward pass makes the others raise PeerTimeout.
Gradients of gradients are not available.

With a capacity the CPU waits for a GPU in neither pass, so a CUDA graph can hold both. Rows that
hold no token are then part of every tensor. Of these, combine's backward pass gives ``y`` the
gradient zero, and neither pass reads what a caller or autograd left in them. But on GPUs nobody
writes those behind ``received.offsets[-1]`` in ``tokens``: experts must either leave them out, as a
grouped product does that has the offsets, or compute row by row; a sum over all rows, such as the
gradient of a parameter that all share, takes in what lies there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from fanfold.operators import Dispatcher
from fanfold.operators.calls import (
    check_exact,
    check_trainable,
    check_weights,
    gradients_of_combine,
    gradients_of_dispatch,
    options_of,
)
from fanfold.renaming import Renaming
from fanfold.results import DispatchResult, HighThroughputResult

__all__ = ["Dispatcher", "combine", "dispatch"]

_NAMES = Renaming({"received.weights": "weights"})


def dispatch(
    ep: Dispatcher,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, DispatchResult]:
    """Sends each token to the ranks that hold its experts. Collective, and so is its backward pass.

        >>> ep = fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> x = torch.ones((4, 64), dtype=torch.bfloat16, device=ep.device, requires_grad=True)
        >>> topk_idx = torch.tensor([[0, 5]] * 4, device=ep.device)
        >>> tokens, weights, received = fanfold.functional.dispatch(ep, x, topk_idx)
        >>> fanfold.functional.combine(ep, tokens * 3, received).sum().backward()
        >>> float(x.grad[0, 0])
        6.0
        >>> ep.close()

    Args:
        ep: a LowLatency or a HighThroughput; the latter if a gradient is wanted.
        x: ``[T, hidden]`` bfloat16, contiguous.
        topk_idx: ``[T, top_k]`` int64, -1 for none. An expert named twice in a row gets the token
            once, with the sum of both weights, and each of the two gets the sum's gradient.
        topk_weights: ``[T, top_k]`` float32, or None.
        capacity: high throughput: rows to allocate, so that no size depends on what arrives and on
            GPUs neither pass makes the CPU wait.

    Returns:
        The received rows ``[rows, hidden]`` (low latency: ``[E_l, C, hidden]``), their weights
        (float32, the same leading dimensions; None if there were none), and what :func:`combine`
        needs. The first two carry gradients; ``received.tokens`` and ``received.weights`` are the
        same values without. ``rows`` is ``capacity`` if that is given, else
        ``received.offsets[-1]``, up to which each row holds a token or is padding, which is zero
        (see ``HighThroughput.use_zero_padding``). Rows behind are zero on the host, not written on
        GPUs; their weights are 0.

    Raises:
        UsageError: a gradient is wanted of a LowLatency, or of rows that travel as fp8.
        ArgumentError, PeerRefused, PeerTimeout: as ``HighThroughput.dispatch``.
    """
    trained = _wants_gradient(x=x, topk_weights=topk_weights)
    if is_dynamo_compiling():
        from fanfold.operators import functional as compiled

        return compiled.dispatch(dispatch, ep, x, topk_idx, topk_weights, capacity, trained)
    if not trained:
        options = options_of(ep, "dispatch", capacity=capacity)
        received = ep.dispatch(x, topk_idx, topk_weights, **options)
        return received.tokens, received.weights, received
    check_trainable(ep.mode, "dispatch")
    tokens, weights, received = _Dispatch.apply(ep, x, topk_idx, topk_weights, capacity)  # type: ignore[no-untyped-call]
    return tokens, weights, received


def combine(
    ep: Dispatcher,
    y: torch.Tensor,
    received: DispatchResult,
    weights: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Brings the experts' outputs back and sums them for each token. Collective, and so is its
    backward pass.

        >>> with fanfold.LowLatency(num_experts=8, top_k=1, hidden=64, max_tokens=16) as ep:
        ...     x = torch.ones((4, 64), dtype=torch.bfloat16, device=ep.device)
        ...     topk_idx = torch.zeros((4, 1), dtype=torch.int64, device=ep.device)
        ...     tokens, _, received = fanfold.functional.dispatch(ep, x, topk_idx)
        ...     out = fanfold.functional.combine(ep, tokens, received)
        >>> torch.equal(out, x)
        True

    Args:
        ep: what dispatched.
        y: bfloat16, shaped like ``received.tokens``: the output of each row in its place. Padding
            rows are not read.
        received: what :func:`dispatch` returned.
        weights: float32, leading dimensions of ``y``: what each row is multiplied by, as a rule
            the weights that :func:`dispatch` returned. None takes the plain sum: nothing is
            weighted that is not passed here, as its gradient would be lost silently. In low latency
            it must be the very tensor that :func:`dispatch` returned, or None.
        bias: high throughput: ``[num_tokens, hidden]`` bfloat16 that each sum starts from: a
            residual, or what a shared expert says.

    Returns:
        ``[num_tokens, hidden]`` bfloat16; zeros, or the bias, for a token without experts.

    Raises:
        UsageError: a gradient is wanted of a LowLatency, or of rows that travelled as fp8.
        ArgumentError, PeerRefused, PeerTimeout: as ``HighThroughput.combine``.
    """
    trained = _wants_gradient(y=y, weights=weights, bias=bias)
    if is_dynamo_compiling():
        from fanfold.operators import functional as compiled

        return compiled.combine(combine, ep, y, received, weights, bias, trained)
    if trained:
        check_trainable(ep.mode, "combine")
        return _Combine.apply(ep, y, received, weights, bias)  # type: ignore[no-any-return, no-untyped-call]
    check_weights(ep, received, weights)
    return _combine(ep, y, received, weights, bias)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ep: Dispatcher,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        capacity: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, DispatchResult]:
        options = options_of(ep, "dispatch", capacity=capacity)
        received = ep.dispatch(x, topk_idx, topk_weights, **options)
        assert isinstance(received, HighThroughputResult)
        check_exact(received)
        ctx.ep, ctx.received = ep, received.without_rows()
        # The outputs are tensors of their own: if `received` held them, it would hold the graph
        # that holds it, and nothing of it could ever be freed.
        weights = None if received.weights is None else received.weights.detach()
        return received.tokens.detach(), weights, received

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_tokens: torch.Tensor, grad_weights: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_topk = gradients_of_dispatch(
            ctx.ep,
            ctx.received,
            grad_tokens if ctx.needs_input_grad[1] else None,
            grad_weights if ctx.needs_input_grad[3] else None,
        )
        return None, grad_x, None, grad_topk, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ep: Dispatcher,
        y: torch.Tensor,
        received: DispatchResult,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(received, HighThroughputResult)
        check_exact(received)
        ctx.ep, ctx.received = ep, received.without_rows()
        ctx.save_for_backward(y if ctx.needs_input_grad[3] else None, weights)
        return _combine(ep, y, received, weights, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        grad_bias = grad_out if ctx.needs_input_grad[4] else None
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[3]):
            return None, None, None, None, grad_bias
        wanted = (ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        grad_y, grad_weights = gradients_of_combine(
            ctx.ep, ctx.received, grad_out, y, weights, wanted
        )
        return None, grad_y, None, grad_weights, grad_bias


def _combine(
    ep: Dispatcher,
    y: torch.Tensor,
    received: DispatchResult,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    if weights is not None:
        if torch.is_tensor(weights):  # what is none is refused below, on all ranks
            weights = weights.detach()
        received = dataclasses.replace(received, weights=weights)
    with _NAMES:
        options = options_of(ep, "combine", bias=bias)
        out: torch.Tensor = ep.combine(y, received, weighted=weights is not None, **options)
        return out


def _wants_gradient(**tensors: object) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors.values()
    )
