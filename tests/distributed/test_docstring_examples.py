"""The examples in the public docstrings run, and every public class and function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import torch
import torch.distributed as dist

import fanfold
from fanfold.launch import RankPool

MODULES = (
    "fanfold",
    "fanfold.deep_ep",
    "fanfold.deep_gemm",
    "fanfold.fused_moe",
    "fanfold.functional",
    "fanfold.metrics",
    "fanfold.nn",
)


def public_objects() -> dict[str, Any]:
    """The public classes and functions, by their full names. Exceptions are raised, not used."""
    found: dict[str, Any] = {}
    for module in MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            value = getattr(home, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            is_protocol = getattr(value, "_is_protocol", False)
            if is_protocol or (inspect.isclass(value) and issubclass(value, (Exception, Warning))):
                continue
            found[f"{module}.{name}"] = value
    return found


def failures_of(group: dist.ProcessGroup, names: list[str]) -> dict[str, str]:
    """What each docstring's examples print that they should not; without examples, that."""
    objects, said = public_objects(), {}
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for name in names:
        scope = {"fanfold": fanfold, "torch": torch, "dist": dist, "group": group}
        text = inspect.getdoc(objects[name]) or ""
        test = doctest.DocTestParser().get_doctest(text, scope, name, None, None)
        lines: list[str] = [] if test.examples else ["it has no example"]
        doctest.DocTestRunner(optionflags=flags).run(test, out=lines.append)
        if lines:
            said[name] = "".join(lines)
    return said


def test_examples() -> None:
    names = sorted(public_objects())
    assert {"fanfold.LowLatency", "fanfold.nn.MoE", "fanfold.deep_ep.Buffer"} <= set(names)
    with RankPool(1) as pool:  # a process of its own, as DeepEP's examples need a group
        assert pool.run(failures_of, names) == [{}]
