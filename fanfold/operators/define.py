"""How an operator is defined: its namespace, and the order of operators that other ranks see."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["NAMESPACE", "TRACEABLE", "define"]

TRACEABLE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)
"""Whether this PyTorch keeps the order of operators in backward graphs too. Where it does not,
compiled functions call dispatch and combine between two graphs."""


def _free_namespace() -> str:
    """``fanfold``, or another name where a copy of this library has defined operators already.

    PyTorch replaces an operator that is defined again, and graphs of the other copy, or of this
    module before it was reloaded, would call operators that do not know their objects."""
    name, copies = "fanfold", 1
    while hasattr(getattr(torch.ops, name), "dispatch"):
        copies += 1
        name = f"fanfold_{copies}"
    return name


NAMESPACE = _free_namespace()

# An operator ends with its definition. Reloading this module runs it in the same dictionary, and
# graphs that were compiled before must still run.
_definitions: list[object] = globals().get("_definitions", [])


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    ordered: bool = True,
) -> tuple[Any, Any]:
    """Defines an operator.

    Args:
        name: without the namespace.
        schema: its parameters and results, as PyTorch writes them. Results are new memory.
        run: what it does with tensors.
        fake: the shapes, strides and dtypes of its results.
        ordered: it talks to other ranks: compilers neither drop it, nor repeat it, nor move it
            before or behind another such operator.

    Returns:
        The operator, and the definition, which takes a backward pass.
    """
    options: dict[str, Any] = {}
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if unsafe is not None:
        # The CPU's part of a call must run at every call, and a replay would leave it out.
        options["tags"] = (unsafe, torch.Tag.needs_fixed_stride_order)
    definition = torch.library.custom_op(
        f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema, **options
    )
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    if ordered and TRACEABLE:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(operator, _EffectType.ORDERED)
        fake = _keeping_order(operator, fake)
    definition.register_fake(fake)
    _definitions.append(definition)
    return operator, definition


def _keeping_order(operator: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, which also tells Inductor how to lower the operator. That is due once Inductor is
    there, and before it lowers: it traces with fake tensors first. Importing it takes seconds."""

    @functools.wraps(fake)
    def run(*args: Any, **options: Any) -> Any:
        lowering = sys.modules.get("torch._inductor.lowering")
        if lowering is not None and operator not in getattr(lowering, "lowerings", {operator}):
            _lower_in_order(operator, lowering)
        return fake(*args, **options)

    return run


def _lower_in_order(operator: Any, lowering: Any) -> None:
    """Makes Inductor keep ``operator`` behind the ordered one before it.

    Inductor notes that dependency by the name of the operator's buffer and looks for it by the name
    of its operation (2.13), so it never finds it, and reorders backward graphs. Ranks whose graphs
    are not the same, as their sizes are not, then disagree about the order of their calls."""
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils import _pytree as pytree

    if "additional_star_deps" not in GraphLowering.__init__.__code__.co_names:
        return  # an earlier version, whose kernels with effects know the one before them

    def lower(*args: Any, **options: Any) -> Any:
        before = len(V.graph.operations)
        results = pytree.tree_map(
            lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node,
            ir.FallbackKernel.create(operator, *args, **options),
        )
        for previous in V.graph.effectful_ops.values():
            for operation in V.graph.operations[before:]:
                waits_for = V.graph.additional_star_deps[operation.get_operation_name()]
                waits_for.add(previous.get_name())
        return results

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
