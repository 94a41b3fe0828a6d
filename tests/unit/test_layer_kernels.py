"""The kernels that are compiled before a high-throughput layer's first call are those that its
calls need. The calls run on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fanfold.backends.high_throughput.kernels import Sizes
from fanfold.backends.high_throughput.layer_kernels import Layer, shared_bytes_of
from fanfold.cli import jit
from fanfold.errors import ArgumentError
from fanfold.formats import RowFormat, ScaleFormat
from tests.distributed.cuda_rounds import run_case
from tests.distributed.routings import Case, results_of
from tests.emulation.high_throughput import ROOMY_RING, World, emulated
from tests.emulation.world import Builder

CTAS = 2
LAYOUTS = ("expert_major", "token_major")
BF16 = Case(tokens=(9, 13), experts_per_rank=2, top_k=2, hidden=32)
FP8 = dataclasses.replace(BF16, dtype=torch.float8_e4m3fn, scales=1)


def layer_of(case: Case, scale_format: ScaleFormat = ScaleFormat.UE8M0) -> Layer:
    return Layer(
        Sizes(case.ranks, case.experts, case.top_k),
        case.hidden,
        RowFormat.FP8 if case.scales else RowFormat.BF16,
        scale_format,
    )


@pytest.mark.timeout(200)
def test_calls_need_no_others(builder: Builder) -> None:
    builder = Builder(builder.folder)  # one that has loaded nothing yet
    with emulated(builder, CTAS):
        world = World(FP8.ranks, ROOMY_RING, result_bytes=results_of(FP8))
        unweighted = dataclasses.replace(FP8, weighted=False, biases=2)
        for how in itertools.product(LAYOUTS, (False, True)):
            for case in (FP8, unweighted):
                world.run(lambda rank, mode, one=case, how=how: run_case(mode, one, rank, *how))
        expected = layer_of(FP8).kernels(LAYOUTS)
    names = {source: name for name, source in expected.items()}
    used = {names[source] for source in builder._loaded}
    # The rounds make no cached dispatch of bf16 rows, quantise nothing and ask for no layout.
    left = {"quantise", "layout", *(name for name in expected if name.endswith("bf16"))}
    # Nor do they combine on many SMs, nor in every way: with biases only as below.
    left |= {
        name
        for name in expected
        if name.startswith("combine token_major") and not name.endswith("few SMs")
    }
    left |= {"combine expert_major topk_weights", "combine expert_major weighted"}
    left |= {f"combine expert_major weighted{more} biased" for more in ("", " topk_weights")}
    assert set(expected) - used == left


def test_names() -> None:
    layer = layer_of(FP8)
    both = layer.kernels(LAYOUTS)
    assert len(both) == 37
    assert len(set(both.values())) == len(both)
    assert both["quantise"].entry == "fanfold::formats::quantize"
    assert dict(both["quantise"].pairs)["kPackScales"] == 1
    one = layer.kernels(["token_major"])
    assert one.items() <= both.items()
    assert {name for name in one if "expert_major" in name} == set()
    bf16 = layer_of(BF16).kernels(["expert_major"])
    assert list(bf16) == [
        "refusal", "plan", "layout", "dispatch expert_major new weighted",
        "dispatch expert_major new", "dispatch expert_major cached",
        "dispatch expert_major in place new weighted",
        "dispatch expert_major in place new", "dispatch expert_major in place cached",
        "combine expert_major", "combine expert_major biased",
        "combine expert_major topk_weights", "combine expert_major topk_weights biased",
        "combine expert_major weighted", "combine expert_major weighted biased",
        "combine expert_major weighted topk_weights",
        "combine expert_major weighted topk_weights biased",
        "combine expert_major topk_weights alone",
    ]  # fmt: skip


@pytest.mark.parametrize("transfer", [None, "push", "pull"])
def test_dispatches_move_rows_as_is_set(
    monkeypatch: pytest.MonkeyPatch, transfer: str | None
) -> None:
    """By themselves expert-major ones of two ranks pull."""
    if transfer is not None:
        monkeypatch.setenv("FANFOLD_DISPATCH_TRANSFER", transfer)
    asked = argparse.Namespace(
        mode="high-throughput", ranks=2, experts=256, top_k=8, hidden=7168, dtype="bf16",
        scales="float32", layout="both", arch="sm_90a",
    )  # fmt: skip
    found = jit._high_throughput(asked)
    pulls = {name: dict(each.pairs).get("kPulls") for name, each in found.items()}
    assert pulls["dispatch expert_major cached"] == int(transfer != "push")
    assert pulls["dispatch token_major cached"] == int(transfer == "pull")
    assert pulls["dispatch expert_major in place cached"] == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"sizes": Sizes(1025, 1025, 1)}, "from 1 to 1024"),
        ({"sizes": Sizes(0, 8, 1)}, "from 1 to 1024"),
        ({"sizes": Sizes(2, 7, 1)}, "divisible by the 2 ranks"),
        ({"sizes": Sizes(2, 4096, 1)}, "num_experts"),
        ({"sizes": Sizes(2, 8, 33)}, "top_k"),
        ({"hidden": 40}, "a multiple of 16"),
    ],
)
def test_sizes_that_cannot_be(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        dataclasses.replace(layer_of(FP8), **changes)


def test_shared_memory_of_architectures() -> None:
    assert shared_bytes_of("sm_90a") == shared_bytes_of("sm_100a") == 227 << 10
    assert shared_bytes_of("sm_120a") == 99 << 10
