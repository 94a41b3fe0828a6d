"""The handwritten stub of the core names exactly what the core has."""

from __future__ import annotations

import ast
from pathlib import Path

import fanfold
from fanfold import _core


def _public(names: object) -> set[str]:
    return {name for name in dir(names) if not name.startswith("_")}


def _stub() -> dict[str, set[str]]:
    path = Path(fanfold.__file__).parent / "_core.pyi"
    names: dict[str, set[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = set()
        elif isinstance(node, ast.ClassDef):
            members: set[str] = set()
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    members.add(member.name)
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    members.add(member.target.id)
                elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
                    members.add(member.targets[0].id)
            names[node.name] = {name for name in members if not name.startswith("_")}
    return names


def test_names() -> None:
    stub = _stub()
    assert set(stub) == _public(_core)
    for name, members in stub.items():
        thing = getattr(_core, name)
        if isinstance(thing, type):
            inherited = {"name", "value"} if hasattr(thing, "__members__") else set()
            assert members == _public(thing) - inherited, name
