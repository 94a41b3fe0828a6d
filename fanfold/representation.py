"""What ``repr`` shows of Fanfold's objects: sizes and states, never what a tensor holds.

To print a tensor of a GPU the CPU waits for the GPU and copies. So tensors are shown by dtype,
shape and device alone. Nothing here raises: an object may be half made when a debugger shows it.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from typing import Any

__all__ = ["described", "details", "module_repr", "show", "show_fields", "worded"]

_MOST_PARTS = 8
_MOST_CHARACTERS = 200
_ABSENT = object()


def show(value: object) -> str:
    """``value`` in a few words."""
    try:
        return _show(value)
    except Exception:  # what is shown may be half made
        return f"<{type(value).__name__}>"


def _show(value: object) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"<{dtype} {list(value.shape)} on {value.device}>"
    if torch is not None and isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, range) and value.step == 1 and value:
        return f"{value.start}..{value.stop - 1}"
    if type(value) in (tuple, list):
        parts = [show(part) for part in value[:_MOST_PARTS]]  # type: ignore[index]
        more = ["..."] if len(value) > _MOST_PARTS else []  # type: ignore[arg-type]
        return f"({', '.join(parts + more)})"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def details(instance: object, **paths: str) -> str:
    """``name=value`` of each of ``paths``, which say where in ``instance`` a value is, such as
    ``geometry.hidden``. What is not there yet is left out."""
    found = ((name, _at(instance, path)) for name, path in paths.items())
    return ", ".join(f"{name}={show(value)}" for name, value in found if value is not _ABSENT)


def _at(instance: object, path: str) -> object:
    try:
        return operator.attrgetter(path)(instance)
    except Exception:  # a property of what is half made, or closed, may raise anything
        return _ABSENT


def described(instance: object, state: str = "", **paths: str) -> str:
    """The class of ``instance``, its :func:`details` and, behind them, its ``state``."""
    known = details(instance, **paths)
    if not known:
        state = state or "incomplete"
    return f"{type(instance).__name__}({', '.join(part for part in (known, state) if part)})"


def show_fields(instance: Any) -> str:
    """The ``__repr__`` of a dataclass whose fields may be tensors, or absent."""
    stored = getattr(instance, "__dict__", {})
    shown = []
    for field in dataclasses.fields(instance):
        if not field.repr:
            continue
        # Where a property of the same name would wait for the GPU, it keeps its value behind a `_`.
        value = stored.get(field.name, stored.get(f"_{field.name}", _ABSENT))
        if value is _ABSENT:
            value = _at(instance, field.name)
        if value is not _ABSENT:
            shown.append(f"{field.name}={show(value)}")
    return f"{type(instance).__name__}({', '.join(shown) or 'incomplete'})"


def module_repr(module: Any) -> str:
    """The ``__repr__`` of a torch.nn.Module, which has no parts before its constructor ran."""
    try:
        return str(sys.modules["torch"].nn.Module.__repr__(module))
    except Exception:
        return f"{type(module).__name__}(incomplete)"


def worded(value: object) -> str:
    """What an argument is that should have been something else."""
    if value is None:
        return "None"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, (bool, int, float, str)):
        return f"{value!r:.80} (type {type(value).__name__})"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"{article} {name}{size}"
