"""The operators, their fake versions, and their backward passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fanfold.errors import ArgumentError, UsageError
from fanfold.operators.define import define
from fanfold.operators.dispatchers import (
    Dispatcher,
    TrainableDispatcher,
    find,
    handle_of,
    opened,
    shapes_of,
)
from fanfold.results import DispatchResult, HighThroughputResult

__all__ = [
    "aligned",
    "check_exact",
    "check_trainable",
    "check_weights",
    "combine",
    "combine_weights",
    "dispatch",
    "gradients_of_combine",
    "gradients_of_dispatch",
    "options_of",
    "row_sources",
]

Tensors = tuple[torch.Tensor, ...]

# ---- what eager and compiled calls share --------------------------------------------------------


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a call takes it. Autograd and compilers make tensors that nobody can shape as a
    call wants them: views that repeat one element, or begin anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def check_trainable(mode: str, call: str) -> None:
    """Raises UsageError if calls in ``mode`` have no backward pass."""
    if mode != "high_throughput":
        raise UsageError(
            f"functional.{call} in {mode} mode has no backward pass, but an input requires a "
            "gradient: low latency keeps no routing that could be sent over again; train with "
            "fanfold.HighThroughput, or infer under torch.no_grad()"
        )


def check_exact(received: DispatchResult) -> None:
    """Raises UsageError if rows travelled as fp8."""
    if received.scales is not None:
        raise UsageError(
            "rows that travel as fp8 have no backward pass here; train with dispatch_dtype='bf16'"
        )


def check_weights(ep: Dispatcher, received: DispatchResult, weights: torch.Tensor | None) -> None:
    """Raises UsageError if low latency is asked to combine by other weights than it has sent."""
    if ep.mode == "low_latency" and weights is not None and weights is not received.weights:
        raise UsageError(
            "functional.combine got other weights than functional.dispatch returned, but low "
            "latency sent those along with the rows; multiply y by yours and pass None"
        )


def options_of(dispatcher: Dispatcher, call: str, **options: Any) -> dict[str, Any]:
    """The options that were given (are not None), for ``dispatcher.dispatch`` or ``combine``.

    Raises:
        ArgumentError: the dispatcher is a LowLatency, whose calls take none of them. On the other
            ranks PeerRefused.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given and dispatcher.mode == "low_latency":
        name = next(iter(given))
        error = ArgumentError(name, "given", "None with a LowLatency, which has no such option")
        getattr(dispatcher, f"refuse_{call}", _ignore)(error)
        raise error
    return given


def _ignore(error: BaseException) -> None:
    """What refuses calls of a dispatcher that has no way to."""


def gradients_of_dispatch(
    dispatcher: TrainableDispatcher,
    received: DispatchResult,
    grad_tokens: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a dispatch's ``x`` and ``topk_weights``, each if its argument is given."""
    grad_x = grad_topk = None
    if grad_tokens is not None:
        grad_x = dispatcher.combine(aligned(grad_tokens), received, weighted=False)
    if grad_weights is not None:
        grad_topk = dispatcher.combine_weights(aligned(grad_weights), received)
    return grad_x, grad_topk


def gradients_of_combine(
    dispatcher: TrainableDispatcher,
    received: HighThroughputResult,
    grad_out: torch.Tensor,
    y: torch.Tensor | None,
    weights: torch.Tensor | None,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a combine's ``y`` and ``weights``, each if it is wanted; ``y`` is needed for
    the second."""
    rows = dispatcher.dispatch(aligned(grad_out), previous=received).tokens
    unused = received.source_rank < 0
    grad_y = grad_weights = None
    if wanted[0]:
        grad_y = rows if weights is None else (rows * weights.unsqueeze(-1)).to(rows.dtype)
        # Padding has come as zeros; what lies behind it nobody may have written.
        if received.capacity is not None:
            grad_y.masked_fill_(unused.unsqueeze(-1), 0.0)
    if wanted[1]:
        assert y is not None
        dots = (rows.float() * y.float()).sum(-1)
        # Padding rows of y hold anything, also what is not a number.
        grad_weights = dots.masked_fill(unused, 0.0)
    return grad_y, grad_weights


# ---- dispatch -----------------------------------------------------------------------------------


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """What stands for None among an operator's results."""
    return like.new_empty((0,), dtype=torch.float32)


def _dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    previous: torch.Tensor | None,
    dispatcher: str,
    rows: int | None,
    weighted: bool,
    trained: bool,
) -> list[torch.Tensor]:
    if previous is None:
        caller = find(dispatcher)
        if hasattr(caller, "for_routing"):
            caller = caller.for_routing(topk_idx)
        if trained:
            check_trainable(caller.mode, "dispatch")
        received: DispatchResult = caller.dispatch(
            aligned(x),
            topk_idx if topk_idx is None else aligned(topk_idx),
            topk_weights if topk_weights is None else aligned(topk_weights),
            **options_of(caller, "dispatch", capacity=rows),
        )
        if trained:
            check_exact(received)
    else:
        caller = opened(previous).dispatcher
        received = caller.dispatch(aligned(x), previous=opened(previous).received)
    kept = received.without_rows() if isinstance(received, HighThroughputResult) else received
    weights = received.weights if weighted else None
    return [
        handle_of(caller, kept),
        received.tokens,
        _nothing(x) if received.scales is None else received.scales,
        # Later calls read the originals of these, and a graph may reuse the memory of its results.
        _nothing(x) if weights is None else weights.clone(),
        received.tokens_per_expert.clone(),
        received.offsets.clone(),
    ]


def _arriving(most: int) -> Any:
    """A number of rows that only the call will know."""
    context = torch.library.get_ctx()
    try:
        from torch._library.fake_impl import allocate_size

        shapes = context._shape_env
    except (ImportError, AttributeError):
        shapes = None
    if shapes is None:
        return context.new_dynamic_size(max=most)
    # new_dynamic_size asks for torch._dynamo.config.capture_dynamic_output_shape_ops, which would
    # hold for all of the user's code. Nothing here depends on the number.
    return allocate_size(shapes, 0, most)


def _fake_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    previous: torch.Tensor | None,
    dispatcher: str,
    rows: int | None,
    weighted: bool,
    trained: bool,
) -> list[torch.Tensor]:
    del topk_idx, topk_weights, previous, trained
    shapes = shapes_of(dispatcher)
    columns = shapes.scale_columns
    leading: tuple[Any, ...]
    strides: tuple[int, ...]
    if shapes.mode == "low_latency":
        leading = (shapes.experts, shapes.rows)
        strides = (columns * shapes.rows, 1, shapes.rows)
    else:
        count = _arriving(shapes.rows) if rows is None else rows
        leading, strides = (count,), (columns, 1)
    scales = _nothing(x)
    if columns:
        dtype = getattr(torch, shapes.scale_dtype)
        scales = x.new_empty_strided((*leading, columns), strides, dtype=dtype)
    weights = x.new_empty(leading, dtype=torch.float32) if weighted else _nothing(x)
    return [
        torch.empty((1,), dtype=torch.int64, device="cpu"),
        x.new_empty((*leading, shapes.hidden), dtype=getattr(torch, shapes.dtype)),
        scales,
        weights,
        x.new_empty((shapes.experts,), dtype=torch.int32),
        x.new_empty((shapes.experts + 1,), dtype=torch.int64),
    ]


# The results are handle, tokens, scales, weights, tokens_per_expert and offsets. They are a list
# because PyTorch's compiler loses a number of rows that only the call knows if an ordered operator
# has several results (2.13).
dispatch, _dispatch_definition = define(
    "dispatch",
    "(Tensor x, Tensor? topk_idx, Tensor? topk_weights, Tensor? previous, str dispatcher,"
    " SymInt? rows, bool weighted, bool trained)"
    " -> Tensor[]",
    _dispatch,
    _fake_dispatch,
)


def _dispatch_backward(
    handle: torch.Tensor,
    grad_tokens: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    tokens: int,
    top_k: int,
) -> Tensors:
    del tokens, top_k
    given = grad_tokens if grad_tokens is not None else grad_weights
    assert given is not None
    left = opened(handle)
    results = gradients_of_dispatch(left.dispatcher, left.received, grad_tokens, grad_weights)
    return tuple(_nothing(given) if result is None else result for result in results)


def _fake_dispatch_backward(
    handle: torch.Tensor,
    grad_tokens: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    tokens: int,
    top_k: int,
) -> Tensors:
    del handle
    given = grad_tokens if grad_tokens is not None else grad_weights
    assert given is not None
    return (
        _nothing(given)
        if grad_tokens is None
        else grad_tokens.new_empty((tokens, grad_tokens.shape[-1])),
        _nothing(given)
        if grad_weights is None
        else grad_weights.new_empty((tokens, top_k), dtype=torch.float32),
    )


# One operator for both gradients: two would have no order between them.
_backward_of_dispatch, _dispatch_backward_definition = define(
    "dispatch_backward",
    "(Tensor handle, Tensor? grad_tokens, Tensor? grad_weights, SymInt tokens, int top_k)"
    " -> (Tensor, Tensor)",
    _dispatch_backward,
    _fake_dispatch_backward,
)


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, _, _, dispatcher, *_ = inputs
    ctx.save_for_backward(output[0])
    ctx.tokens, ctx.top_k = x.shape[0], shapes_of(dispatcher).top_k


def _after_dispatch(ctx: Any, grads: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    (handle,) = ctx.saved_tensors
    needs_x, _, needs_weights, *_ = ctx.needs_input_grad
    grad_x, grad_weights = _backward_of_dispatch(
        handle,
        grads[1] if needs_x else None,
        grads[3] if needs_weights else None,
        ctx.tokens,
        ctx.top_k,
    )
    return (
        grad_x if needs_x else None, None, grad_weights if needs_weights else None,
        None, None, None, None, None,
    )  # fmt: skip


_dispatch_definition.register_autograd(_after_dispatch, setup_context=_keep_dispatch)

# ---- combine ------------------------------------------------------------------------------------


def _combine(
    y: torch.Tensor,
    handle: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    tokens: int,
    weighted: bool,
    logfmt: bool,
    trained: bool,
) -> torch.Tensor:
    del tokens
    left = opened(handle)
    received, dispatcher = left.received, left.dispatcher
    if trained:
        check_trainable(dispatcher.mode, "combine")
    if weights is not None:
        received = dataclasses.replace(received, weights=aligned(weights))
    options = options_of(dispatcher, "combine", bias=None if bias is None else aligned(bias))
    if logfmt:
        options["logfmt"] = True
    out: torch.Tensor = dispatcher.combine(aligned(y), received, weighted=weighted, **options)
    return out


def _fake_combine(
    y: torch.Tensor,
    handle: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    tokens: int,
    weighted: bool,
    logfmt: bool,
    trained: bool,
) -> torch.Tensor:
    del handle, weights, bias, weighted, logfmt, trained
    return y.new_empty((tokens, y.shape[-1]), dtype=torch.bfloat16)


combine, _combine_definition = define(
    "combine",
    "(Tensor y, Tensor handle, Tensor? weights, Tensor? bias, SymInt tokens, bool weighted,"
    " bool logfmt, bool trained) -> Tensor",
    _combine,
    _fake_combine,
)


def _combine_backward(
    handle: torch.Tensor,
    grad_out: torch.Tensor,
    y: torch.Tensor | None,
    weights: torch.Tensor | None,
    rows: int,
    wants_y: bool,
    wants_weights: bool,
) -> Tensors:
    del rows
    left = opened(handle)
    assert isinstance(left.received, HighThroughputResult)
    wanted = (wants_y, wants_weights)
    results = gradients_of_combine(left.dispatcher, left.received, grad_out, y, weights, wanted)
    return tuple(_nothing(grad_out) if result is None else result for result in results)


def _fake_combine_backward(
    handle: torch.Tensor,
    grad_out: torch.Tensor,
    y: torch.Tensor | None,
    weights: torch.Tensor | None,
    rows: int,
    wants_y: bool,
    wants_weights: bool,
) -> Tensors:
    del handle, y, weights
    return (
        grad_out.new_empty((rows, grad_out.shape[-1])) if wants_y else _nothing(grad_out),
        grad_out.new_empty((rows,), dtype=torch.float32) if wants_weights else _nothing(grad_out),
    )


_backward_of_combine, _combine_backward_definition = define(
    "combine_backward",
    "(Tensor handle, Tensor grad_out, Tensor? y, Tensor? weights, SymInt rows, bool wants_y,"
    " bool wants_weights) -> (Tensor, Tensor)",
    _combine_backward,
    _fake_combine_backward,
)


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    y, handle, weights, *_ = inputs
    ctx.save_for_backward(handle, y if ctx.needs_input_grad[2] else None, weights)
    ctx.rows = y.shape[0]


def _after_combine(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    handle, y, weights = ctx.saved_tensors
    needs_y, _, needs_weights, needs_bias, *_ = ctx.needs_input_grad
    grad_y = grad_weights = None
    if needs_y or needs_weights:
        grad_y, grad_weights = _backward_of_combine(
            handle, grad_out, y, weights, ctx.rows, needs_y, needs_weights
        )
    return (
        grad_y if needs_y else None, None, grad_weights if needs_weights else None,
        grad_out if needs_bias else None, None, None, None, None,
    )  # fmt: skip


_combine_definition.register_autograd(_after_combine, setup_context=_keep_combine)


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del ctx, inputs, output


def _refuse_second_derivative(ctx: Any, *grads: torch.Tensor) -> None:
    del ctx, grads
    raise UsageError(
        "dispatch and combine have no second derivatives; call backward or torch.autograd.grad "
        "without create_graph=True"
    )


for _definition in (_dispatch_backward_definition, _combine_backward_definition):
    _definition.register_autograd(_refuse_second_derivative, setup_context=_keep_nothing)

# ---- the rest of the native face ----------------------------------------------------------------


def _combine_weights(row_values: torch.Tensor, handle: torch.Tensor, tokens: int, top_k: int) -> (
    torch.Tensor
):  # fmt: skip
    del tokens, top_k
    left = opened(handle)
    values: torch.Tensor = left.dispatcher.combine_weights(aligned(row_values), left.received)
    return values


def _fake_combine_weights(
    row_values: torch.Tensor, handle: torch.Tensor, tokens: int, top_k: int
) -> torch.Tensor:
    del handle
    return row_values.new_empty((tokens, top_k), dtype=torch.float32)


combine_weights, _ = define(
    "combine_weights",
    "(Tensor row_values, Tensor handle, SymInt tokens, int top_k) -> Tensor",
    _combine_weights,
    _fake_combine_weights,
)


def _row_sources(handle: torch.Tensor, like: torch.Tensor) -> Tensors:
    received = opened(handle).received
    rank, token = received.source.ranks(received), received.source.tokens(received)
    # A graph may reuse the memory of its results; later calls read the originals.
    return rank.to(like.device, copy=True), token.to(like.device, copy=True)


def _fake_row_sources(handle: torch.Tensor, like: torch.Tensor) -> Tensors:
    del handle
    shape = like.shape[:-1]
    return like.new_empty(shape, dtype=torch.int32), like.new_empty(shape, dtype=torch.int32)


row_sources, _ = define(
    "row_sources",
    "(Tensor handle, Tensor like) -> (Tensor, Tensor)",
    _row_sources,
    _fake_row_sources,
    ordered=False,
)
