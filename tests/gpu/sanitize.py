"""Small rounds for compute-sanitizer (tools/sanitize_gpu.sh).

Use: python tests/gpu/sanitize.py [--ranks N] [PART]...
     PART is low-latency, few-tokens, high-throughput, formats, grouped-gemm or fused-moe; all by
     default.
     One rank, in this process, or several with a process each, which time-slice the GPUs where
     there are fewer: what goes to peers and comes from them does not run in one alone. Exits
     with 1 if a result is wrong, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fanfold import _core
from fanfold.backends.high_throughput.layout import dispatch_layout
from fanfold.deep_ep import elastic_calls
from fanfold.formats import ScaleFormat, quantize
from fanfold.fused_moe.tuning import FORMS
from fanfold.group import as_group
from tests.distributed import routings
from tests.distributed.cuda_rounds import run_case
from tests.environment import environment
from tests.gpu import fused_moe_rounds
from tests.gpu.low_latency_rounds import like_the_host
from tests.gpu.support import (
    FORMATS,
    Case,
    answers,
    assert_combined,
    assert_received,
    assert_same,
    case_of,
    open_layer,
    own_device,
    tokens_of,
)
from tests.gpu.test_deep_ep_elastic_cuda import _conformance, _random_case, small_case
from tests.gpu.test_few_tokens_cuda import _few
from tests.gpu.test_high_throughput_cuda import LAYOUTS, opened
from tests.grouped_gemms import check, random_case
from tests.kernels.rows import unusual_rows

# A kernel under the sanitizer is a hundred times slower.
TIMEOUT_S = 600.0


def tell(group: dist.ProcessGroup, what: str) -> None:
    """Says, on one rank, what has been right."""
    if as_group(group).rank == 0:
        print(f"right: {what}", flush=True)


def check_round(group: dist.ProcessGroup, case: Case) -> None:
    """Two rounds, one whole and one with hooks; both must be right."""
    device = own_device()
    (answer,) = answers(group, [case])
    mine = tokens_of(case, as_group(group).rank).to(device)
    with open_layer(group, case, timeout_s=TIMEOUT_S) as ep:
        received = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        y = answer.spread(received.tokens, device)
        outs = [ep.combine(y, received, logfmt=case.logfmt)]
        late, hook = ep.dispatch(mine.x, mine.topk_idx, mine.topk_weights, return_hook=True)
        hook()
        out, hook = ep.combine(y, late, logfmt=case.logfmt, return_hook=True)
        hook()
        outs.append(out)
        ep.synchronize()
    for each in (received, late):
        assert_received(each, answer)
    for out in outs:
        assert_combined(out, answer)


def low_latency(group: dist.ProcessGroup) -> None:
    """All small cases of low latency."""
    ranks = as_group(group).size
    small = case_of(ranks, max_tokens=16, experts_per_rank=5, top_k=3, hidden=1040)
    cases = [small.but(dtype=dtype, scale_format=scales) for dtype, scales in FORMATS]
    cases += [
        small.but(routing="duplicates", specials=True),
        small.but(hidden=256, tokens=(0,) * ranks),
        small.but(logfmt=True, weighted=False),
        small.but(hidden=7168, dtype="fp8", top_k=5, tokens=(7,) * ranks),
    ]
    for case in cases:
        check_round(group, case)
        tell(group, f"{case}")
    for case in (small, small.but(routing="duplicates")):
        like_the_host(group, case, True, timeout_s=TIMEOUT_S)
        tell(group, f"late weights {case}")
    # So few CTAs that one has more tokens than warps, and than it looks at together.
    many = small.but(hidden=256, max_tokens=150, tokens=(150,) * ranks)
    like_the_host(group, many, True, timeout_s=TIMEOUT_S, ctas=ranks + 1)
    tell(group, f"late weights, few CTAs {many}")


def few_tokens(group: dist.ProcessGroup) -> None:
    """ElasticBuffer's dispatches of few tokens: random routings, fp8 rows, biases."""
    ranks = as_group(group).size
    programs: list[tuple[Any, ...]] = []
    for seed, alignment in ((0, 1), (1, 8), (2, 128)):
        case = _random_case(random.Random(seed), ranks, seed)
        programs += [("_plain", case, case, sync, alignment) for sync in (False, True)]
    programs += [("_fp8", small_case(ranks), False, sync) for sync in (False, True)]
    programs.append(("_biases", small_case(ranks)))
    for program in programs:
        routes = mock.patch.object(elastic_calls, "_route_few", wraps=elastic_calls._route_few)
        with environment(FANFOLD_TIMEOUT_S=str(TIMEOUT_S)), routes as routed:
            _few(group, _conformance, *program)
        assert routed.called
        tell(group, f"{program}")


def check_layout(case: routings.Case, rank: int) -> None:
    """Where a rank's tokens go, against the host."""
    topk_idx = routings.Round(case, rank).own.topk_idx
    there = dispatch_layout(topk_idx.to(own_device()), case.experts, case.ranks)
    for name, wanted in vars(dispatch_layout(topk_idx, case.experts, case.ranks)).items():
        assert_same(name, getattr(there, name), wanted)


def high_throughput(group: dist.ProcessGroup) -> None:
    """Layouts, plans, dispatches by new plans and old ones, and combines of all kinds, in both
    orders of rows."""
    rank, ranks = as_group(group).rank, as_group(group).size
    tokens = tuple((41, 0, 23, 9)[n % 4] for n in range(ranks))
    small = routings.Case(tokens=tokens, experts_per_rank=5, top_k=3, hidden=528, alignment=4)
    fp8 = {"dtype": torch.float8_e4m3fn, "scales": 5}
    cases = [
        dataclasses.replace(small, biases=2),
        dataclasses.replace(small, weighted=False, style="holes", slack=3),
        dataclasses.replace(small, style="duplicates", **fp8),
        dataclasses.replace(small, style="one_expert", weighted=False, biases=1, **fp8),
        dataclasses.replace(small, style="none"),
        dataclasses.replace(small, tokens=(0,) * ranks),
        dataclasses.replace(small, tokens=(9,) * ranks, hidden=7168, top_k=8, experts_per_rank=64),
    ]
    for case in cases:
        check_layout(case, rank)
        # The fewest slots that a ring may have.
        row_bytes = 2 * case.hidden + 8 * case.top_k + 4 * case.scales
        ring_bytes = 4 * 8 * (-(-row_bytes // 128) * 128)
        for layout, in_place in itertools.product(LAYOUTS, (False, True)):
            with opened(
                group,
                ring_bytes=ring_bytes,
                timeout_s=TIMEOUT_S,
                result_bytes=routings.results_of(case),
            ) as mode:
                run_case(mode, case, rank, layout, in_place)
            tell(group, f"{layout} {'in place ' if in_place else ''}{case}")


def formats(group: dist.ProcessGroup) -> None:
    """Rows quantised, of which the last segment is whole, short, or ends within 16 bytes."""
    for rows, hidden in ((0, 512), (1, 8), (50, 136), (33, 512), (20, 2880), (300, 128)):
        for scale_format in ScaleFormat:
            x = unusual_rows(rows, hidden)
            ours = quantize(x.to(own_device()), scale_format)
            for what, got, wanted in zip(
                ("values", "scales"), ours, quantize(x, scale_format), strict=True
            ):
                assert_same(what, got.view(torch.uint8), wanted.view(torch.uint8))
            tell(group, f"{rows} rows of {hidden}, {scale_format.value}")


def grouped_products(group: dist.ProcessGroup) -> None:
    """Random grouped GEMMs: both forms, tiles of both heights, groups without rows."""
    for number in range(12):
        case = dataclasses.replace(random_case(number), columns=320, depth=384)
        assert check(case, own_device()) < 5e-5
        tell(group, f"{case}")


# Of a fused layer. Each takes several tiles then, and a tool does not look at hundreds that wait.
FUSED_CTAS = 16


@mock.patch.object(_core, "CUDA_FUSED_MOE_MOST_CTAS", FUSED_CTAS)
def fused_layers(group: dist.ProcessGroup) -> None:
    """Whole MoE layers: pairs and single blocks of rows, odd columns, masks; every form with its
    kinds of sums, and a count of the routing that CTAs share."""
    for number, changes in enumerate(
        (
            {},
            {"top_k": 9, "hidden": 128, "intermediate": 128, "max_tokens": 1},
            {"hidden": 1152, "intermediate": 384, "max_tokens": 160},
            {"fast_accumulation": True, "activation_clamp": 1.0},
        )
    ):
        fused_moe_rounds.few(group, number, **changes)
        tell(group, f"{changes}")
    for form, fast in itertools.product(FORMS, (False, True)):
        if fast and form == "swap_ab":  # adds FP32 sums, too
            continue
        sizes = {"hidden": 1152, "max_tokens": 128, "fast_accumulation": fast}
        fused_moe_rounds.few(group, 4, tuning=FORMS[form], **sizes)
        tell(group, f"{form} {sizes}")
    fused_moe_rounds.shared_count(group)
    tell(group, "a shared count of the routing")


PARTS = {
    "low-latency": low_latency,
    "few-tokens": few_tokens,
    "high-throughput": high_throughput,
    "formats": formats,
    "grouped-gemm": grouped_products,
    "fused-moe": fused_layers,
}


def run_rank(rank: int, ranks: int, part: str, meeting: str) -> None:
    """What one rank does; it ends by itself, as its sanitizer tells what it found only then."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    PARTS[part](group)
    del group
    dist.destroy_process_group()


def main() -> int:
    """Runs the small cases of the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    if torch.cuda.device_count() == 0:
        print("there is no GPU (nvidia-smi)")
        return 2
    if torch.cuda.device_count() < args.ranks:
        os.environ["FANFOLD_SHARE_GPUS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            given = (args.ranks, part, f"{folder}/{part}")
            if args.ranks == 1:
                run_rank(0, *given)
            else:
                torch.multiprocessing.spawn(run_rank, given, args.ranks)
            # Behind the end of all ranks: it is said of none that failed.
            print(f"right: all of {part} with {args.ranks} ranks", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
