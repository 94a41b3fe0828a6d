"""The stub that the build generates from the bindings says enough for `mypy --strict`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import fanfold


def test_every_argument_has_a_name_and_every_tuple_its_parts() -> None:
    text = (Path(fanfold.__file__).parent / "_core.pyi").read_text()
    vague = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if any(ast.unparse(decorator).endswith(".setter") for decorator in function.decorator_list):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args]
        unnamed = any(re.fullmatch(r"arg\d*", argument.arg) for argument in arguments)
        types = [argument.annotation for argument in arguments] + [function.returns]
        bare = any(isinstance(kind, ast.Name) and kind.id in ("tuple", "list") for kind in types)
        if unnamed or bare or function.args.vararg is not None:
            vague.append(ast.unparse(function))
    assert vague == []
