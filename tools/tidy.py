#!/usr/bin/env python3
"""Enforces what is agreed about this repository's shape, so that nobody has to remember it.

Run it as `python tools/tidy.py`; it exits with 1 when something was found. What is agreed stands
as data at the top of this file. An exception needs an entry in tools/tidy_ratchet.toml with its
current value; such an entry may only shrink, and one that is no longer needed is a finding too.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cpp_scan import cpp_code, cpp_functions, cpp_lambdas, cpp_loops

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# ---- what is agreed -----------------------------------------------------------------------------

# A part (a module or a package of fanfold/) imports only from layers below its own, or from itself.
PYTHON_LAYERS: tuple[tuple[str, ...], ...] = (
    ("_core", "kernels"),
    ("errors", "gpus", "representation"),
    (
        "geometry",
        "config",
        "copying",
        "deferred_free",
        "group",
        "cpu_words",
        "kernel_reports",
        "kernel_state",
        "late_peers",
        "lending",
        "metrics",
        "pool",
        "stream_order",
        "descriptors",
        "forks",
        "interfaces",
        "refusal",
        "renaming",
    ),
    ("launch", "jit"),
    ("nccl",),
    ("memory",),
    ("quantizing", "thread_ranks"),
    ("formats",),
    ("backends", "grouped_gemm"),
    ("results",),
    ("operators",),
    ("base_dispatcher",),
    ("low_latency", "high_throughput", "deep_ep"),
    ("functional", "fused_moe"),
    ("nn", "bench", "mega_moe"),
    ("simulate", "deep_gemm"),
    ("__init__",),  # what a user imports; the library itself imports from the parts
    ("cli",),
)

# The same for the C++ core; a part is a folder of csrc/ or of fanfold/kernels/.
CPP_LAYERS: tuple[tuple[str, ...], ...] = (
    ("layout",),
    ("base", "device", "nccl"),
    ("memory", "protocol"),
    ("ring", "transport"),
    ("proxy", "gemm", "gin", "nccl_plugin"),
    (
        "host",
        "cuda",
        "hip",
        "formats",
        "low_latency",
        "high_throughput",
        "grouped_gemm",
        "fused_moe",
    ),
    ("bindings",),
)

MAX_FUNCTION_LINES = 60  # without a Python function's docstring
MAX_FILE_LINES = 600
MAX_PARAMETERS = 8  # without self and cls; a dataclass's fields are no parameters
MAX_CPP_COLUMNS = 100  # clang-format leaves comments alone

# Signatures in here are DeepEP's, DeepGEMM's or NCCL's, not ours.
FOREIGN_SIGNATURES = (
    "fanfold/deep_ep/", "fanfold/deep_gemm.py", "fanfold/mega_moe.py",
    "csrc/nccl_plugin/tables.cpp",
)  # fmt: skip

# What is made here names its dtype and its device: a process may have set other defaults
# (torch.set_default_dtype, torch.set_default_device).
NAMED_TENSORS = ("fanfold/", "tests/conformance/")
TENSOR_MAKERS = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
    "empty_permuted", "empty_quantized", "empty_strided", "eye", "frombuffer", "full",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
TENSOR_MAKERS_WITHOUT_DEVICE = ("frombuffer",)
DEFAULT_TENSORS = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor",
    "IntTensor", "ShortTensor", "CharTensor", "ByteTensor", "BoolTensor",
)  # fmt: skip

ENVIRONMENT_HOMES = ("fanfold/config.py", "fanfold/deep_ep/utils/", "fanfold/launch/")
WAIT_HOMES = ("csrc/base/wait.h", "csrc/base/wait.cpp")
DEVICE_CODE = "fanfold/kernels/"
PTX_HOME = "fanfold/kernels/device/"
PEER_HOME = "fanfold/kernels/protocol/"
BANNED_CPP_CALLS = (
    "getenv", "secure_getenv", "exit", "_exit", "quick_exit", "abort", "system", "usleep",
)  # fmt: skip

# Every mode has one stem from the API to the documentation.
STEMS = ("low_latency", "high_throughput")
STEM_FILES = (
    "fanfold/{}.py",
    "csrc/bindings/{}.cpp",
    "csrc/host/{}.cpp",
    "fanfold/kernels/layout/{}.h",
    "tests/distributed/test_{}.py",
    "docs/{}.md",
)

PYTHON_FOLDERS = ("fanfold", "tests", "tools", "benchmarks", "packages", "examples")
DOCUMENTED_FOLDERS = ("fanfold", "tools")
CPP_FOLDERS = ("csrc", "fanfold/kernels", "tests/core", "tests/kernels")
CPP_SUFFIXES = (".cpp", ".hpp", ".h", ".cu", ".cuh")
TEXT_SUFFIXES = (".py", *CPP_SUFFIXES, ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".jsonl")
TEXT_NAMES = ("Makefile", "run", ".clang-format", ".clang-tidy", ".gitignore")
SKIPPED_FOLDERS = (
    ".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    "__pycache__", "build", "dist",
)  # fmt: skip

# Written in pieces, so that this file does not find itself.
UNFINISHED = re.compile(r"\b(TO" + "DO|FIX" + "ME|XX" + r"X)\b")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:wor" + "k|ro" + r"ot)/")

RATCHET = "tools/tidy_ratchet.toml"

# ---- findings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One departure from what is agreed; `rule`, `where` and `value` are what the ratchet keeps."""

    rule: str
    where: str  # stays the same when lines move
    value: int  # the measured size, or how often
    line: int
    message: str

    def __str__(self) -> str:
        path = self.where.split("::")[0].split(" -> ")[0]
        return f"{path}:{self.line}: [{self.rule}] {self.message} ({self.where}, {self.value})"


def counted(rule: str, where: str, lines: list[int], message: str) -> Iterator[Finding]:
    """One finding for all the places of one kind in one file."""
    if lines:
        yield Finding(rule, where, len(lines), lines[0], message)


def files_under(root: Path, folders: Iterable[str], suffixes: tuple[str, ...]) -> Iterator[str]:
    """Paths relative to the root, in order, without builds and environments."""
    for folder in folders:
        for place, below, names in os.walk(root / folder):
            below[:] = sorted(name for name in below if name not in SKIPPED_FOLDERS)
            for name in sorted(names):
                if Path(name).suffix in suffixes:
                    yield (Path(place) / name).relative_to(root).as_posix()


def circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """The groups of nodes that reach each other, each once."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in graph.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return seen

    reach = {node: reachable(node) for node in graph}
    done: set[str] = set()
    for node in sorted(graph):
        if node in reach[node] and node not in done:
            members = [other for other in sorted(reach[node]) if node in reach.get(other, ())]
            done.update(members)
            yield members


def climbs(layers: tuple[tuple[str, ...], ...], source: str, target: str) -> str | None:
    """Why `source` may not use `target`, or None where it may."""
    layer_of = {part: layer for layer, parts in enumerate(layers) for part in parts}
    for part in (source, target):
        if part not in layer_of:
            return f"{part} has no layer; give it one in tools/tidy.py"
    if source == target or layer_of[target] < layer_of[source]:
        return None
    return f"{source} (layer {layer_of[source]}) uses {target} (layer {layer_of[target]})"


# ---- Python -------------------------------------------------------------------------------------

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: str) -> str:
    """`fanfold/jit/cache.py` is `fanfold.jit.cache`, `fanfold/__init__.py` is `fanfold`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer_of(module: str) -> str:
    """The module's or package's name directly under fanfold."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(tree: ast.AST, path: str, modules: set[str]) -> Iterator[tuple[str, int]]:
    """The fanfold modules that a file imports, anywhere in it, with the lines."""
    package = module_name(path)
    if not path.endswith("__init__.py"):
        package = package.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fanfold":
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            if base.split(".")[0] != "fanfold":
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in modules else base), node.lineno


def check_layers(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Imports that climb, and circles."""
    ours = {path: tree for path, tree in trees.items() if path.startswith("fanfold/")}
    paths = {module_name(path): path for path in ours}
    modules = {*paths, "fanfold._core"}
    graph: dict[str, set[str]] = {}
    lines: dict[str, int] = {}
    for path, tree in ours.items():
        source = module_name(path)
        targets = graph.setdefault(source, set())
        for target, line in imported_modules(tree, path, modules):
            targets.add(target)
            lines.setdefault(source, line)
            if reason := climbs(PYTHON_LAYERS, layer_of(source), layer_of(target)):
                yield Finding("layer", f"{path} -> {target}", 1, line, reason)
    for members in circles(graph):
        message = f"import circle: {', '.join(members)}"
        yield Finding("circle", paths[members[0]], len(members), lines[members[0]], message)


def named_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function and method with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}."
            yield name[:-1], node
        elif isinstance(node, ast.ClassDef):
            name = f"{prefix}{node.name}."
        yield from named_functions(node, name)


def function_lines(function: Function) -> int:
    """From `def` to the end, without the docstring: length is about what must be followed."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        first = function.body[0]
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def parameter_count(function: Function) -> int:
    """Parameters of every kind, without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    extra = (arguments.vararg is not None) + (arguments.kwarg is not None)
    first_is_object = bool(named) and named[0].arg in ("self", "cls")
    return len(named) + extra - first_is_object


def check_python_functions(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Functions that are too long or take too much."""
    for name, function in named_functions(tree):
        where = f"{path}::{name}"
        if (length := function_lines(function)) > MAX_FUNCTION_LINES:
            message = f"{name} has {length} lines, at most {MAX_FUNCTION_LINES}"
            yield Finding("function-length", where, length, function.lineno, message)
        public = not any(part.startswith("_") and part != "__init__" for part in name.split("."))
        if path.startswith(FOREIGN_SIGNATURES) and public:
            continue
        if (count := parameter_count(function)) > MAX_PARAMETERS:
            message = f"{name} takes {count} parameters, at most {MAX_PARAMETERS}"
            yield Finding("parameters", where, count, function.lineno, message)


def check_environment(path: str, tree: ast.Module) -> Iterator[Finding]:
    """The environment is read in one place; elsewhere a setting has no name and no origin."""
    if not path.startswith(("fanfold/", "benchmarks/")) or path.startswith(ENVIRONMENT_HOMES):
        return
    banned = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    aliases = {"os"}
    lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {name.asname for name in node.names if name.name == "os" and name.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for name in node.names if name.name in banned]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            of_os = node.value.id in aliases
            lines += [node.lineno] if of_os and node.attr in banned else []
    homes = ", ".join(ENVIRONMENT_HOMES)
    yield from counted("environment", path, sorted(lines), f"the environment belongs to {homes}")


def follows_defaults(call: ast.Call) -> bool:
    """Whether a call makes a tensor and leaves its dtype or its device to the process."""
    function = call.func
    if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "torch":
        return False
    if function.attr in DEFAULT_TENSORS:
        return True
    given = {keyword.arg for keyword in call.keywords}
    if None in given or "out" in given:  # keywords that are passed on, or a tensor that is there
        return False
    on_the_cpu = function.attr in TENSOR_MAKERS_WITHOUT_DEVICE
    wanted = {"dtype"} if on_the_cpu else {"dtype", "device"}
    return function.attr in TENSOR_MAKERS and not wanted <= given


def check_tensors(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Tensors that the process's defaults decide about."""
    if not path.startswith(NAMED_TENSORS):
        return
    lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and follows_defaults(node):
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            makers = (*TENSOR_MAKERS, *DEFAULT_TENSORS)
            lines += [node.lineno for name in node.names if name.name in makers]
    message = "a tensor without a dtype or a device; the process's defaults would decide"
    yield from counted("default-tensor", path, sorted(lines), message)


def check_docstrings(path: str, tree: ast.Module) -> Iterator[Finding]:
    """Public modules, classes, functions and methods say what they are."""
    if not path.startswith(tuple(f"{folder}/" for folder in DOCUMENTED_FOLDERS)):
        return
    if ast.get_docstring(tree) is None:
        yield Finding("docstring", path, 1, 1, "the module has no docstring")

    def visit(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Finding]:
        for node in parent.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            overload = any(ast.unparse(part).endswith("overload") for part in node.decorator_list)
            setter = any(ast.unparse(part).endswith(".setter") for part in node.decorator_list)
            if node.name.startswith("_") or overload or setter:
                continue
            name = f"{prefix}{node.name}"
            if ast.get_docstring(node) is None:
                message = f"{name} is public and has no docstring"
                yield Finding("docstring", f"{path}::{name}", 1, node.lineno, message)
            if isinstance(node, ast.ClassDef):
                yield from visit(node, f"{name}.")

    yield from visit(tree, "")


# ---- C++ ----------------------------------------------------------------------------------------

GENERATED_HEADERS = ("constants.h",)  # made at run time, for the kernels only
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
BANNED_CALL = re.compile(
    r"(?<![\w.>:])(?:(?:std)?::)?(?P<name>" + "|".join(BANNED_CPP_CALLS) + r")\s*\("
)
ENDLESS_LOOP = re.compile(r"\bwhile\s*\(\s*(?:true|1)\s*\)|\bfor\s*\([^;()]*;\s*;[^()]*\)")
PTX = re.compile(r"\basm\b")
PEER_ADDRESS = re.compile(r"(?:\.|->)\s*peers\s*(?:\[|\.)")
# What device code looks at memory with that others write, and what ends such looking.
LOOK = re.compile(r"\b(?:load_(?:relaxed|acquire|volatile)_\w+|phase_is_over(?:_now)?)\s*\(")
BOUND = re.compile(r"\bexpired\s*\(")


def check_cpp_functions(path: str, code: str) -> Iterator[Finding]:
    """Functions that are too long or take too much."""
    for function in (*cpp_functions(code), *cpp_lambdas(code)):
        where = f"{path}::{function.name}"
        length = function.last - function.first + 1
        if length > MAX_FUNCTION_LINES:
            message = f"{function.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
            yield Finding("function-length", where, length, function.first, message)
        if path.startswith(FOREIGN_SIGNATURES):
            continue
        if (count := function.parameters) > MAX_PARAMETERS:
            message = f"{function.name} takes {count} parameters, at most {MAX_PARAMETERS}"
            yield Finding("parameters", where, count, function.first, message)


def check_cpp_text(path: str, text: str, code: str) -> Iterator[Finding]:
    """Calls and loops outside their one home, and long lines."""

    def lines_of(pattern: re.Pattern[str]) -> list[int]:
        return [code.count("\n", 0, match.start()) + 1 for match in pattern.finditer(code)]

    banned = ", ".join(sorted({match.group("name") for match in BANNED_CALL.finditer(code)}))
    message = f"{banned}: settings come from Python, errors are thrown, waits are in base/wait"
    yield from counted("banned-call", path, lines_of(BANNED_CALL), message)
    if not path.startswith(PTX_HOME) and path not in WAIT_HOMES:
        message = f"inline PTX has its names in {PTX_HOME}"
        yield from counted("inline-ptx", path, lines_of(PTX), message)
    if path.startswith(DEVICE_CODE) and not path.startswith(PEER_HOME):
        message = f"only `Peer` of {PEER_HOME} knows the address of another rank's memory"
        yield from counted("peer-address", path, lines_of(PEER_ADDRESS), message)
    if path not in WAIT_HOMES and not path.startswith(DEVICE_CODE):
        message = "a loop without a bound; waits belong to csrc/base/wait.*"
        yield from counted("endless-loop", path, lines_of(ENDLESS_LOOP), message)
    long = [n for n, line in enumerate(text.splitlines(), 1) if len(line) > MAX_CPP_COLUMNS]
    yield from counted("columns", path, long, f"a line is longer than {MAX_CPP_COLUMNS}")


def check_device_waits(codes: dict[str, str]) -> Iterator[Finding]:
    """In device code a loop that looks at memory until it changes asks a bound each time.

    A loop looks, too, by a function that does nothing but look, wherever that is; one that has its
    own bound is no look.
    """
    ours = {path: code for path, code in codes.items() if path.startswith(DEVICE_CODE)}
    looks: dict[str, bool] = {}
    for code in ours.values():
        lines = code.splitlines()
        for function in cpp_functions(code):
            body = "\n".join(lines[function.first - 1 : function.last])
            only_looks = bool(LOOK.search(body)) and not BOUND.search(body)
            name = function.name.rpartition("::")[2]
            # Of several functions of a name all must be looks: which one is called is not known.
            looks[name] = looks.get(name, True) and only_looks
    names = "|".join(sorted(re.escape(name) for name, only_looks in looks.items() if only_looks))
    look = re.compile(f"{LOOK.pattern}|\\b(?:{names})\\s*\\(") if names else LOOK
    for path, code in ours.items():
        found = [
            loop.line
            for loop in cpp_loops(code)
            if look.search(loop.text) and not BOUND.search(loop.text)
        ]
        message = "a wait without a bound; ask `expired` after every look"
        yield from counted("unbounded-wait", path, found, message)


def check_includes(texts: dict[str, str]) -> Iterator[Finding]:
    """Includes that climb, and circles."""
    roots = ("csrc/", "fanfold/kernels/")
    graph: dict[str, set[str]] = {}
    for path, text in texts.items():
        root = next((root for root in roots if path.startswith(root)), None)
        if root is None:
            continue
        source = path.removeprefix(root).split("/")[0]
        targets = graph.setdefault(path, set())
        for match in INCLUDE.finditer(text):
            target = match.group(1)
            if target in GENERATED_HEADERS:
                continue
            line = text.count("\n", 0, match.start()) + 1
            if reason := climbs(CPP_LAYERS, source, target.split("/")[0]):
                yield Finding("layer", f"{path} -> {target}", 1, line, reason)
            targets.update(root + target for root in roots if root + target in texts)
    for members in circles(graph):
        message = f"include circle: {', '.join(members)}"
        yield Finding("circle", members[0], len(members), 1, message)


# ---- the whole tree -----------------------------------------------------------------------------


def check_words(root: Path) -> Iterator[Finding]:
    """Unfinished work and paths of one machine, in every text file."""
    for path in files_under(root, (".",), ("", *TEXT_SUFFIXES)):
        if Path(path).suffix not in TEXT_SUFFIXES and Path(path).name not in TEXT_NAMES:
            continue
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        for rule, pattern, message in (
            ("unfinished", UNFINISHED, "finish it or write an issue"),
            ("machine-path", MACHINE_PATH, "this path exists on one machine"),
        ):
            found = [number for number, line in enumerate(lines, 1) if pattern.search(line)]
            yield from counted(rule, path, found, message)


def check_stems(root: Path) -> Iterator[Finding]:
    """Every mode's stem is there from end to end."""
    for stem in STEMS:
        for pattern in STEM_FILES:
            path = pattern.format(stem)
            # A module that has grown is a package of the same name.
            package = root / path.removesuffix(".py") / "__init__.py"
            if not (root / path).is_file() and not package.is_file():
                yield Finding("stem", path, 1, 1, f"the mode {stem} lacks this file")


def check_file_length(path: str, text: str) -> Iterator[Finding]:
    """Files that nobody can hold in mind."""
    if (length := len(text.splitlines())) > MAX_FILE_LINES:
        message = f"{length} lines, at most {MAX_FILE_LINES}"
        yield Finding("file-length", path, length, 1, message)


def check_tree(root: Path) -> Iterator[Finding]:
    """Everything found under `root`, before the ratchet."""
    trees: dict[str, ast.Module] = {}
    for path in files_under(root, PYTHON_FOLDERS, (".py",)):
        text = (root / path).read_text(encoding="utf-8")
        trees[path] = ast.parse(text, path)
        yield from check_file_length(path, text)
        yield from check_python_functions(path, trees[path])
        yield from check_environment(path, trees[path])
        yield from check_docstrings(path, trees[path])
        yield from check_tensors(path, trees[path])
    yield from check_layers(trees)
    texts: dict[str, str] = {}
    codes: dict[str, str] = {}
    for path in files_under(root, CPP_FOLDERS, CPP_SUFFIXES):
        texts[path] = (root / path).read_text(encoding="utf-8")
        codes[path] = cpp_code(texts[path])
        yield from check_file_length(path, texts[path])
        yield from check_cpp_functions(path, codes[path])
        yield from check_cpp_text(path, texts[path], codes[path])
    yield from check_device_waits(codes)
    yield from check_includes(texts)
    yield from check_stems(root)
    yield from check_words(root)


def apply_ratchet(findings: Iterable[Finding], root: Path) -> Iterator[Finding]:
    """What is not excepted, and the exceptions that are no longer true."""
    path = root / RATCHET
    entries = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    allowed = {(entry["rule"], entry["where"]): entry for entry in entries.get("allowed", ())}
    used: dict[tuple[str, str], int] = {}
    for finding in findings:
        key = (finding.rule, finding.where)
        if key in allowed and finding.value <= allowed[key]["value"]:
            used[key] = max(used.get(key, 0), finding.value)
        else:
            yield finding
            used.setdefault(key, finding.value)
    for (rule, where), entry in allowed.items():
        if not str(entry.get("why", "")).strip():
            message = f"the exception {rule} of {where} says no why"
            yield Finding("ratchet", RATCHET, 1, 1, message)
        now = used.get((rule, where), 0)
        if now < entry["value"]:
            advice = f"lower it to {now}" if now else "remove it"
            message = f"the exception {rule} of {where} allows {entry['value']}: {advice}"
            yield Finding("ratchet", RATCHET, entry["value"], 1, message)


def main() -> int:
    """Prints the findings and says how many there are."""
    parser = argparse.ArgumentParser(description="Check this repository against what is agreed.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    findings = list(apply_ratchet(check_tree(root), root))
    for finding in findings:
        print(finding)
    print(f"tidy: {len(findings)} finding{'' if len(findings) == 1 else 's'}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
