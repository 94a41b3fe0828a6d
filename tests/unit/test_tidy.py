"""tools/tidy.py reports each departure from what is agreed, and nothing in a tidy tree."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
STEM_FILES = (
    "fanfold/{}.py",
    "csrc/bindings/{}.cpp",
    "csrc/host/{}.cpp",
    "fanfold/kernels/layout/{}.h",
    "tests/distributed/test_{}.py",
    "docs/{}.md",
)


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def tidy(root: Path) -> list[str]:
    """The lines that tidy prints before its closing one; its exit code must agree with them."""
    command = [sys.executable, str(TOOLS / "tidy.py"), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    *findings, closing = done.stdout.splitlines()
    assert closing.startswith(f"tidy: {len(findings)} finding")
    assert done.returncode == (1 if findings else 0)
    return findings


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree in which everything is as agreed."""
    for stem in ("low_latency", "high_throughput"):
        for pattern in STEM_FILES:
            text = f'"""{stem}."""\n' if pattern.endswith(".py") else ""
            write(tmp_path, pattern.format(stem), text)
    write(tmp_path, "fanfold/errors.py", '"""Errors."""\n')
    write(tmp_path, "fanfold/config.py", '"""Settings."""\nimport os\n\nHOME = os.environ\n')
    write(tmp_path, "csrc/base/wait.cpp", "void spin() {\n  while (true) {\n  }\n}\n")
    return tmp_path


def lines(count: int, indent: str = "    ") -> str:
    return f"{indent}x = 1\n" * count


def many(count: int, form: str = "a{}") -> str:
    return ", ".join(form.format(number) for number in range(count))


def test_a_tidy_tree_has_no_findings(tree: Path) -> None:
    assert tidy(tree) == []


PYTHON_CASES = {
    "import of a higher layer": (
        "fanfold/errors.py",
        '"""E."""\nfrom fanfold import low_latency\n',
        ["[layer] errors (layer 1) uses low_latency (layer 12)"],
    ),
    "import of a neighbour": (
        "fanfold/high_throughput.py",
        '"""H."""\nfrom fanfold.low_latency import dispatch\n',
        ["[layer] high_throughput (layer 12) uses low_latency (layer 12)"],
    ),
    "import inside a function, relative": (
        "fanfold/errors.py",
        '"""E."""\n\n\ndef _late():\n    from .config import HOME\n\n    return HOME\n',
        ["[layer] errors (layer 1) uses config (layer 2)"],
    ),
    "import of the package's face from within": (
        "fanfold/low_latency.py",
        '"""L."""\nimport fanfold\n',
        ["[layer] low_latency (layer 12) uses __init__ (layer 16)"],
    ),
    "a part that is in no list": (
        "fanfold/attic.py",
        '"""A."""\nfrom fanfold import errors\n',
        ["[layer] attic has no layer"],
    ),
    "long function": (
        "fanfold/errors.py",
        f'"""E."""\n\n\ndef _f():\n    """D."""\n{lines(60)}',
        ["[function-length] _f has 61 lines, at most 60"],
    ),
    "function at the limit, with a docstring on top": (
        "fanfold/errors.py",
        f'"""E."""\n\n\ndef _f():\n    """D.\n\n    More.\n    """\n{lines(59)}',
        [],
    ),
    "long method": (
        "tests/unit/test_x.py",
        f"class TestX:\n    def test_y(self):\n{lines(60, ' ' * 8)}",
        ["[function-length] TestX.test_y has 61 lines"],
    ),
    "many parameters": (
        "fanfold/errors.py",
        f'"""E."""\n\n\nclass _A:\n    def f(self, {many(7)}, *, key, **rest):\n        pass\n',
        ["[parameters] _A.f takes 9 parameters, at most 8"],
    ),
    "as many parameters as allowed": (
        "fanfold/errors.py",
        f'"""E."""\n\n\nclass _A:\n    def f(self, {many(8)}):\n        pass\n',
        [],
    ),
    "DeepEP's own signature": (
        "fanfold/deep_ep/buffer.py",
        f'"""B."""\n\n\ndef dispatch({many(14)}):\n    """D."""\n',
        [],
    ),
    "a private function beside DeepEP's": (
        "fanfold/deep_ep/buffer.py",
        f'"""B."""\n\n\ndef _dispatch({many(14)}):\n    pass\n',
        ["[parameters] _dispatch takes 14 parameters"],
    ),
    "tensors that follow the process's defaults": (
        "fanfold/low_latency.py",
        '"""L."""\nimport torch\n\nA = torch.ones(3, device="cpu")\nB = torch.FloatTensor(3)\n',
        ["fanfold/low_latency.py:4: [default-tensor]"],
    ),
    "tensors that follow no defaults": (
        "fanfold/low_latency.py",
        '"""L."""\nimport torch\n\nA = torch.ones(3, dtype=torch.int32, device="cpu")\n',
        [],
    ),
    "makers of tensors under other names": (
        "fanfold/low_latency.py",
        '"""L."""\nfrom torch import zeros\n',
        ["fanfold/low_latency.py:2: [default-tensor]"],
    ),
    "environment, by attribute and alias": (
        "fanfold/low_latency.py",
        '"""L."""\nimport os\nimport os as system\n\nA = os.getenv("A")\nB = system.environ\n',
        ["fanfold/low_latency.py:5: [environment]"],
    ),
    "environment, by name": (
        "fanfold/low_latency.py",
        '"""L."""\nfrom os import environ\n',
        ["fanfold/low_latency.py:2: [environment]"],
    ),
    "module without docstring": (
        "fanfold/errors.py",
        "X = 1\n",
        ["[docstring] the module has no docstring"],
    ),
    "function, class and method without docstring": (
        "fanfold/errors.py",
        '"""E."""\n\n\ndef f():\n    pass\n\n\nclass C:\n    def m(self):\n        pass\n',
        ["[docstring] f is public", "[docstring] C is public", "[docstring] C.m is public"],
    ),
    "long file": (
        "fanfold/errors.py",
        '"""E."""\n' + lines(600, ""),
        ["[file-length] 601 lines, at most 600"],
    ),
}


@pytest.mark.parametrize("case", PYTHON_CASES)
def test_python(tree: Path, case: str) -> None:
    path, text, expected = PYTHON_CASES[case]
    write(tree, path, text)
    findings = tidy(tree)
    assert len(findings) == len(expected), findings
    for finding, part in zip(findings, expected, strict=True):
        assert part in finding


def test_python_circle(tree: Path) -> None:
    write(tree, "fanfold/jit/__init__.py", '"""J."""\nfrom fanfold.jit import cache\n')
    write(tree, "fanfold/jit/cache.py", '"""C."""\nfrom fanfold.jit import nvrtc\n')
    write(tree, "fanfold/jit/nvrtc.py", '"""N."""\nfrom .cache import keep\n')
    (finding,) = tidy(tree)
    assert "[circle] import circle: fanfold.jit.cache, fanfold.jit.nvrtc" in finding


CPP_BODY = "  step();\n"
CPP_UNBALANCED = """// {
/* { */
#define OPEN {
const char* a = "{";
const char b = '{', c = '"';
const int d = 1'000;
void f() {
}
"""
CPP_CASES = {
    "include of a higher layer": (
        "csrc/base/error.h",
        '#include "memory/region.h"\n',
        ["[layer] base (layer 1) uses memory (layer 2)"],
    ),
    "layout includes the core": (
        "fanfold/kernels/layout/row.h",
        '#include "base/error.h"\n',
        ["[layer] layout (layer 0) uses base (layer 1)"],
    ),
    "bindings include everything": (
        "csrc/bindings/low_latency.cpp",
        '#include "host/low_latency.h"\n#include "layout/row.h"\n#include <vector>\n',
        [],
    ),
    "long function": (
        "csrc/base/error.cpp",
        f"namespace fanfold {{\n\nvoid f() {{\n{CPP_BODY * 59}}}\n\n}}\n",
        ["csrc/base/error.cpp:3: [function-length] f has 61 lines"],
    ),
    "function at the limit": (
        "csrc/base/error.cpp",
        f"namespace fanfold {{\n\nvoid f() {{\n{CPP_BODY * 58}}}\n\n}}\n",
        [],
    ),
    "long constructor with initialisers": (
        "csrc/base/error.cpp",
        f"struct A {{\n  A(int b) noexcept : b_{{b}}, c_(b) {{\n{CPP_BODY * 59}  }}\n}};\n",
        ["csrc/base/error.cpp:2: [function-length] A has 61 lines"],
    ),
    "brackets in comments, literals and macros": (
        "csrc/base/error.cpp",
        CPP_UNBALANCED,
        [],
    ),
    "many parameters, nested commas": (
        "csrc/base/error.cpp",
        f"template <int A = 1, int B = 2>\nvoid f(map<int, int> m, {many(8, 'int a{}')}) {{\n}}\n",
        ["[parameters] f takes 9 parameters, at most 8"],
    ),
    "many parameters of a lambda": (
        "csrc/bindings/low_latency.cpp",
        f"void f() {{\n  def([]({many(9, 'int a{}')}) {{ return 0; }});\n}}\n",
        ["[parameters] lambda takes 9 parameters"],
    ),
    "banned calls": (
        "csrc/base/error.cpp",
        'void f() {\n  std::abort();\n  getenv("A");\n}\n',
        ["csrc/base/error.cpp:2: [banned-call] abort, getenv"],
    ),
    "members and other words with a banned name": (
        "csrc/base/error.cpp",
        "// exit()\nvoid f() {\n  a.exit();\n  b->abort();\n  my_exit();\n}\n",
        [],
    ),
    "while (true)": (
        "csrc/host/low_latency.cpp",
        "void f() {\n  while (true) step();\n}\n",
        ["csrc/host/low_latency.cpp:2: [endless-loop]"],
    ),
    "for (;;)": (
        "csrc/host/low_latency.cpp",
        "void f() {\n  for (;;) step();\n}\n",
        ["csrc/host/low_latency.cpp:2: [endless-loop]"],
    ),
    "bounded loops": (
        "csrc/host/low_latency.cpp",
        "void f() {\n  for (int i = 0; i < 3; ++i) step();\n  for (; a < b; ++a) step();\n}\n",
        [],
    ),
    "a kernel that knows a peer's address": (
        "fanfold/kernels/low_latency/dispatch.cu",
        "__device__ void f() {\n  *(args.peers[rank] + at) = 1;\n}\n",
        ["fanfold/kernels/low_latency/dispatch.cu:2: [peer-address]"],
    ),
    "Peer, which knows it": (
        "fanfold/kernels/protocol/peer.cuh",
        "__device__ Peer f() {\n  return Peer(args.peers[rank]);\n}\n",
        [],
    ),
    "inline PTX in a kernel": (
        "fanfold/kernels/low_latency/dispatch.cu",
        'namespace n { __global__ void __launch_bounds__(32) f() {\n  asm volatile("nop;");\n} }\n',
        ["fanfold/kernels/low_latency/dispatch.cu:2: [inline-ptx]"],
    ),
    "inline PTX where it has its names": (
        "fanfold/kernels/device/warp.cuh",
        '__device__ __forceinline__ void nop() {\n  asm volatile("nop;" ::: "memory");\n}\n',
        [],
    ),
    "long kernel with launch bounds": (
        "fanfold/kernels/low_latency/dispatch.cu",
        (
            "namespace n {\n__global__ void __launch_bounds__(32)\n"
            f"    f(int a) {{\n{CPP_BODY * 58}}}\n}}\n"
        ),
        ["fanfold/kernels/low_latency/dispatch.cu:2: [function-length] f has 61 lines"],
    ),
    "a device loop that looks on and on": (
        "fanfold/kernels/low_latency/call.cuh",
        "__device__ void f() {\n  while (v == 0) v = load_relaxed_system(at);\n}\n",
        ["fanfold/kernels/low_latency/call.cuh:2: [unbounded-wait]"],
    ),
    "a device loop that looks by another function": (
        "fanfold/kernels/low_latency/call.cuh",
        (
            "__device__ int look() { return load_acquire_system(at); }\n"
            "__device__ void f() {\n  do {\n    v = look();\n  } while (v == 0);\n}\n"
        ),
        ["fanfold/kernels/low_latency/call.cuh:3: [unbounded-wait]"],
    ),
    "a device loop without a condition": (
        "fanfold/kernels/device/bulk.cuh",
        (
            "__device__ void f() {\n  for (int i = 0;; ++i) {\n"
            "    if (phase_is_over(barrier, 0)) return;\n  }\n}\n"
        ),
        ["fanfold/kernels/device/bulk.cuh:2: [unbounded-wait]"],
    ),
    "a device loop that looks without sleep": (
        "fanfold/kernels/device/bulk.cuh",
        "__device__ void f() {\n  while (!phase_is_over_now(barrier, 0)) continue;\n}\n",
        ["fanfold/kernels/device/bulk.cuh:2: [unbounded-wait]"],
    ),
    "device loops that end": (
        "fanfold/kernels/low_latency/call.cuh",
        (
            "__device__ int await() {\n  while (true) {\n    v = load_relaxed_system(at);\n"
            "    if (deadline.expired(peer, v)) return 0;\n  }\n}\n"
            "__device__ void f() {\n  for (int i = 0; i < 3; ++i) v[i] = load_relaxed_system(at);\n"
            "  while (true) {\n    if (first >= await()) return;\n    first += step;\n  }\n}\n"
        ),
        [],
    ),
    "a long comment": (
        "csrc/base/error.h",
        f"// {'x' * 98}\n",
        ["csrc/base/error.h:1: [columns]"],
    ),
}


@pytest.mark.parametrize("case", CPP_CASES)
def test_cpp(tree: Path, case: str) -> None:
    path, text, expected = CPP_CASES[case]
    write(tree, path, text)
    findings = tidy(tree)
    assert len(findings) == len(expected), findings
    for finding, part in zip(findings, expected, strict=True):
        assert part in finding


def test_include_circle(tree: Path) -> None:
    write(tree, "csrc/host/a.h", '#include "host/b.h"\n')
    write(tree, "csrc/host/b.h", '#include "host/a.h"\n')
    (finding,) = tidy(tree)
    assert "[circle] include circle: csrc/host/a.h, csrc/host/b.h" in finding


@pytest.mark.parametrize("pattern", STEM_FILES)
def test_a_stem_that_breaks_off(tree: Path, pattern: str) -> None:
    path = pattern.format("low_latency")
    (tree / path).unlink()
    assert tidy(tree) == [f"{path}:1: [stem] the mode low_latency lacks this file ({path}, 1)"]


def test_a_stem_may_be_a_package(tree: Path) -> None:
    (tree / "fanfold/low_latency.py").unlink()
    write(tree, "fanfold/low_latency/__init__.py", '"""L."""\n')
    assert tidy(tree) == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "XX" + "X"])
def test_unfinished_work(tree: Path, word: str) -> None:
    write(tree, "docs/guide.md", f"Fine.\n{word}: the rest\n")
    (finding,) = tidy(tree)
    assert finding.startswith("docs/guide.md:2: [unfinished]")


@pytest.mark.parametrize("folder", ["/wor" + "k/", "/ro" + "ot/"])
def test_machine_paths(tree: Path, folder: str) -> None:
    write(tree, ".ci/run", f"cd {folder}main\n")
    (finding,) = tidy(tree)
    assert finding.startswith(".ci/run:1: [machine-path]")
    write(tree, ".ci/run", f"cd some{folder}main\n")
    assert tidy(tree) == []


RATCHET = """
[[allowed]]
rule = "function-length"
where = "fanfold/errors.py::_f"
value = {}
why = "{}"
"""


@pytest.mark.parametrize(
    ("length", "allowed", "why", "expected"),
    [
        (70, 70, "needed", []),
        (71, 70, "needed", ["[function-length] _f has 71 lines"]),
        (69, 70, "needed", ["[ratchet]", "allows 70: lower it to 69"]),
        (50, 70, "needed", ["[ratchet]", "allows 70: remove it"]),
        (70, 70, "", ["[ratchet]", "says no why"]),
    ],
)
def test_the_ratchet_only_shrinks(
    tree: Path, length: int, allowed: int, why: str, expected: list[str]
) -> None:
    write(tree, "fanfold/errors.py", f'"""E."""\n\n\ndef _f():\n{lines(length - 1)}')
    write(tree, "tools/tidy_ratchet.toml", RATCHET.format(allowed, why))
    findings = tidy(tree)
    assert len(findings) == (1 if expected else 0), findings
    for part in expected:
        assert part in findings[0]


def test_the_layers_that_contributors_read_of_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING lists what tidy.py does, and all of it is there."""
    root = TOOLS.parent
    rows = re.findall(
        r"^\| (\d+) \| (.*) \|$", (root / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    listed = {
        name.removesuffix(".py").removesuffix("/"): int(layer)
        for layer, names in rows
        for name in re.findall(r"`([\w./]+)`", names)
    }
    monkeypatch.syspath_prepend(str(TOOLS))
    namespace = runpy.run_path(str(TOOLS / "tidy.py"), run_name="tidy")
    layers = namespace["PYTHON_LAYERS"]
    agreed = {part: layer for layer, parts in enumerate(layers) for part in parts}
    assert listed == {part: agreed[part] for part in agreed if part != "kernels"}
    for part in agreed:
        path = root / "fanfold" / part
        found = path.is_dir() or path.with_suffix(".py").is_file()
        assert found or part == "_core", part
