"""How an operator is defined: its namespace, and the order of operators that other ranks see."""

from __future__ import annotations

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
    definition.register_fake(fake)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    if ordered and TRACEABLE:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        _register_effectful_op(operator, _EffectType.ORDERED)
    _definitions.append(definition)
    return operator, definition
