"""The calls as ``torch.compile`` traces them: operators, and a DispatchResult of what they
return.

Imported where something is traced, as it imports the compiler, which takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fanfold.operators import calls
from fanfold.operators.define import TRACEABLE
from fanfold.operators.handles import HandleSource, source_of
from fanfold.results import DispatchResult, HighThroughputResult, LowLatencyResult

__all__ = [
    "between_graphs",
    "traceable",
    "traced_combine",
    "traced_dispatch",
    "traced_weights",
]


_REASON = (
    "Fanfold makes this call outside of graphs: it was given something that operators do not "
    "take, or it is in a checkpoint inside of a compiled function; docs/nn.md, torch.compile"
)


def _make(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return call(*args, **options)


between_graphs: Callable[..., Any]
"""Makes a call between two graphs of a compiled function, which with ``fullgraph=True`` raises."""
try:
    between_graphs = torch.compiler.disable(_make, reason=_REASON)
except TypeError:  # before PyTorch 2.7
    between_graphs = torch.compiler.disable(_make)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _in_checkpoint() -> bool:
    """Whether the code being traced is what ``torch.utils.checkpoint`` will run again. PyTorch
    cannot compute an ordered operator again in a graph (2.13). Without a graph around it, the
    checkpoint runs as it does without compiling, and what is in it is compiled by itself."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
        while tracer is not None:
            if "tag_activation_checkpoint" in str(tracer.source_target):
                return True
            tracer = tracer.parent
    except (ImportError, AttributeError):  # another PyTorch; its own error says what it cannot do
        pass
    return False


def traceable(dispatcher: Any, *received: DispatchResult | None) -> bool:
    """Whether operators can make this call. They cannot for a dispatcher of the user's own,
    nor with what was dispatched outside of compiled code."""
    if not TRACEABLE or _in_checkpoint():
        return False
    registration = getattr(dispatcher, "registration", None)
    if registration is None or registration.kind is not type(dispatcher):
        return False
    return all(given is None or isinstance(given.source, HandleSource) for given in received)


def traced_dispatch(
    dispatcher: Any,
    name: str,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    *,
    previous: HighThroughputResult | None = None,
    capacity: int | None = None,
    trained: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, DispatchResult]:
    """A dispatch by the operator.

    Args:
        dispatcher: registered.
        name: of its registration: for its own calls, or for those of its base class.
        x, topk_idx, topk_weights, previous, capacity: see the dispatcher's ``dispatch``.
        trained: refuse if there is no backward pass.

    Returns:
        Rows and weights as autograd knows them, and what arrived, without gradients.
    """
    weighted = topk_weights is not None
    handle_before, rows = None, capacity
    if previous is not None:
        handle_before, rows = previous.source.handle, previous.tokens.shape[0]  # type: ignore[attr-defined]
        weighted, capacity = previous.weights is not None, previous.capacity
    handle, tokens, scales, row_weights, counts, offsets = calls.dispatch(
        x, topk_idx, topk_weights, handle_before, name, rows, weighted, trained
    )
    weights = row_weights if weighted else None
    kind = LowLatencyResult if dispatcher.mode == "low_latency" else HighThroughputResult
    received = kind(
        tokens=tokens.detach(),
        scales=scales if tokens.dtype is torch.float8_e4m3fn else None,
        weights=None if weights is None else weights.detach(),
        tokens_per_expert=counts,
        offsets=offsets,
        num_tokens=x.shape[0],
        owner=getattr(dispatcher, "owner", dispatcher),
        source=source_of(dispatcher.mode, handle, offsets, counts, capacity),
    )
    return tokens, weights, received


def traced_combine(
    y: torch.Tensor,
    received: DispatchResult,
    weights: torch.Tensor | None,
    *,
    weighted: bool,
    bias: torch.Tensor | None = None,
    logfmt: bool = False,
    trained: bool = False,
) -> torch.Tensor:
    """A combine by the operator; see the dispatcher's ``combine``.

    Args:
        y, received, bias, logfmt: as there.
        weights: of the rows, where high throughput takes them; None otherwise.
        weighted: multiply by them, or by those that low latency has.
        trained: refuse if there is no backward pass.
    """
    handle = received.source.handle  # type: ignore[attr-defined]
    out: torch.Tensor = calls.combine(
        y, handle, weights, bias, received.num_tokens, weighted, logfmt, trained
    )
    return out


def traced_weights(row_values: torch.Tensor, received: DispatchResult, top_k: int) -> torch.Tensor:
    """``HighThroughput.combine_weights`` by the operator."""
    handle = received.source.handle  # type: ignore[attr-defined]
    values: torch.Tensor = calls.combine_weights(row_values, handle, received.num_tokens, top_k)
    return values
