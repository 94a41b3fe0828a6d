"""What a type checker makes of a user's program: mypy --strict, against the installed package."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fanfold

GOOD = """
    import torch
    import fanfold
    from fanfold import DispatchResult, HighThroughput, Hook, LowLatency, deep_ep, functional
    from fanfold.nn import MoE, MoEOptions

    def native(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, late: bool) -> None:
        config = fanfold.Config.resolve(backend="host", late_peers="mask", timeout_s=5.0)
        with LowLatency(
            None, num_experts=8, top_k=2, hidden=64, max_tokens=16,
            dispatch_dtype="fp8", scale_format="ue8m0", config=config,
        ) as ep:
            received = ep.dispatch(x, idx, weights)
            reveal_type(received.tokens)
            rows, hook = ep.dispatch(x, idx, return_hook=True)
            hook()
            reveal_type(ep.combine(rows.tokens, received))
            later = ep.combine(rows.tokens, received, return_hook=late)
            reveal_type(later)
        reveal_type(ep.mode)
        reveal_type(config.late_peers)

    def layers(ep: HighThroughput, x: torch.Tensor, idx: torch.Tensor) -> fanfold.nn.MoE:
        tokens, weights, received = functional.dispatch(ep, x, idx)
        reveal_type(functional.combine(ep, tokens, received, weights))
        options = MoEOptions(score="sigmoid", dtype=torch.bfloat16)
        layer = MoE(64, 32, 8, 2, dispatcher=ep, options=options)
        reveal_type(layer.dispatcher)
        reveal_type(layer.balance_loss)
        return layer

    def drop_in(buffer: deep_ep.Buffer, x: torch.Tensor, idx: torch.Tensor) -> Hook | None:
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, 16, 8)
        reveal_type(counts)
        reveal_type(event)
        reveal_type(buffer.low_latency_combine(x, idx, x, handle)[0])
        return hook

    def failed(error: fanfold.PeerTimeout) -> tuple[int, float]:
        return error.peer, error.seconds

    def keep(received: DispatchResult) -> list[tuple[int, int]]:
        return received.expert_ranges()
"""

REVEALED = [
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor | tuple[torch._tensor.Tensor, def ()]",
    "Literal['low_latency']",
    "Literal['raise'] | Literal['mask']",
    "torch._tensor.Tensor",
    "fanfold.base_dispatcher.BaseDispatcher | fanfold.fused_moe.layer.FusedMoE",
    "torch._tensor.Tensor",
    "torch._tensor.Tensor",
    "fanfold.deep_ep.events.EventOverlap",
    "torch._tensor.Tensor",
]

# Each is one mistake: the code that mypy names it by, and the line.
WRONG = [
    ("attr-defined", "fanfold.LowLatancy"),
    ("attr-defined", "fanfold.nn.Moe"),
    ("arg-type", 'fanfold.Config.resolve(backend="cdua")'),
    ("arg-type", 'fanfold.Config.resolve(late_peers="wait")'),
    ("arg-type", 'fanfold.Config.resolve(timeout_s="5")'),
    ("call-arg", "fanfold.Config.resolve(time_out=5.0)"),
    ("call-arg", "fanfold.LowLatency(None, expert_alignment=8, **sizes)"),
    ("call-overload", "ep.dispatch(x, x, capacity=8)"),
    ("arg-type", "fanfold.HighThroughput(3, **sizes)"),
    ("arg-type", 'fanfold.HighThroughput(None, dispatch_dtype="int8", **sizes)'),
    ("arg-type", 'fanfold.LowLatency(None, scale_format="e8m0", **sizes)'),
    ("arg-type", 'fanfold.nn.MoEOptions(score="relu")'),
    ("arg-type", 'fanfold.nn.MoEOptions(dtype="bf16")'),
    ("comparison-overlap", 'ep.mode == "fast"'),
    ("comparison-overlap", 'ep.config.backend == "gpu"'),
    ("call-overload", "ep.dispatch([1.0])"),
    ("call-overload", "ep.combine(x)"),
    ("arg-type", "fanfold.functional.dispatch(x, x, x)"),
    ("arg-type", "buffer.low_latency_dispatch(x, x, 16, num_experts='8')"),
    ("call-arg", "buffer.low_latency_dispatch(x, x, 16, 8, max_tokens=16)"),
    ("arg-type", "fanfold.deep_ep.EventOverlap(x)"),
]

BAD = """
    from typing import Any
    import torch
    import fanfold
    import fanfold.deep_ep, fanfold.nn

    def wrong(
        ep: fanfold.LowLatency, buffer: fanfold.deep_ep.Buffer, x: torch.Tensor
    ) -> None:
        sizes: dict[str, Any] = {}
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    """What mypy says about the two programs: file, line, text."""
    # The folder holds no copy of the package, so mypy takes the installed one, by its py.typed.
    folder = tmp_path_factory.mktemp("user")
    wrong = [f"        {line}" for _, line in WRONG]
    (folder / "good.py").write_text(textwrap.dedent(GOOD))
    (folder / "bad.py").write_text(textwrap.dedent("\n".join([BAD.rstrip(), *wrong])) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "good.py", "bad.py"]
    result = subprocess.run(
        [*command, "--show-error-codes", "--no-pretty", "--hide-error-context"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.stderr == ""
    said = re.findall(r"^(\w+)\.py:(\d+): (.*)$", result.stdout, re.MULTILINE)
    assert said, result.stdout
    return [(file, int(line), text) for file, line, text in said]


def test_good_program(findings: list[tuple[str, int, str]]) -> None:
    notes = [text for file, _, text in findings if file == "good"]
    assert [note for note in notes if not note.startswith("note: Revealed type is")] == []
    assert [note.split('"')[1] for note in notes] == REVEALED


def test_wrong_lines(findings: list[tuple[str, int, str]]) -> None:
    first = len(textwrap.dedent(BAD).rstrip().splitlines()) + 1
    for place, (code, line) in enumerate(WRONG):
        said = [text for file, at, text in findings if (file, at) == ("bad", first + place)]
        assert any(text.startswith("error:") and text.endswith(f"[{code}]") for text in said), (
            line,
            said,
        )
    others = [each for each in findings if each[0] == "bad" and each[1] < first]
    assert others == []


def test_discovery_imports_nothing() -> None:
    program = "import sys, fanfold; print(*dir(fanfold)); assert 'torch' not in sys.modules"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    shown = result.stdout.split()
    assert set(fanfold.__all__) <= set(shown)
    assert {"Any", "TYPE_CHECKING", "importlib"}.isdisjoint(shown)


def test_every_public_name_is_there() -> None:
    for name in fanfold.__all__:
        assert getattr(fanfold, name) is getattr(fanfold, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fanfold.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_help_shows_the_classes() -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import fanfold, pydoc; print(pydoc.plain(pydoc.render_doc(fanfold)))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in ("class LowLatency", "class Config", "class PeerTimeout", "class DispatchResult"):
        assert name in result.stdout
    assert Path(fanfold.__file__).with_name("py.typed").exists()
