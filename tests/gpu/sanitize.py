"""Small rounds of one rank in this process, for compute-sanitizer (tools/sanitize_gpu.sh).

Use: python tests/gpu/sanitize.py [low-latency | high-throughput | formats]...    all by default;
     exits with 1 if a result is wrong, with 2 if there is no GPU
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fanfold.formats import ScaleFormat, quantize
from tests.distributed import routings
from tests.distributed.cuda_rounds import run_case
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
from tests.gpu.test_high_throughput_cuda import LAYOUTS, opened
from tests.kernels.rows import unusual_rows

# A kernel under the sanitizer is a hundred times slower.
TIMEOUT_S = 600.0


def check_round(group: dist.ProcessGroup, case: Case) -> None:
    """Two rounds, whole and with hooks, and a graph of one; all must be right."""
    device = own_device()
    (answer,) = answers(group, [case])
    mine = tokens_of(case, 0).to(device)
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
    small = case_of(1, max_tokens=16, experts_per_rank=5, top_k=3, hidden=1040)
    cases = [small.but(dtype=dtype, scale_format=scales) for dtype, scales in FORMATS]
    cases += [
        small.but(routing="duplicates", specials=True),
        small.but(hidden=256, tokens=(0,)),
        small.but(logfmt=True, weighted=False),
        small.but(hidden=7168, dtype="fp8", top_k=5, tokens=(7,)),
    ]
    for case in cases:
        check_round(group, case)
        print(f"right: {case}", flush=True)


def high_throughput(group: dist.ProcessGroup) -> None:
    """Plans, dispatches by new plans and old ones, and combines of all kinds, in both layouts."""
    small = routings.Case(tokens=(41,), experts_per_rank=5, top_k=3, hidden=528, alignment=4)
    fp8 = {"dtype": torch.float8_e4m3fn, "scales": 5}
    cases = [
        dataclasses.replace(small, biases=2),
        dataclasses.replace(small, weighted=False, style="holes", slack=3),
        dataclasses.replace(small, style="duplicates", **fp8),
        dataclasses.replace(small, style="one_expert", weighted=False, biases=1, **fp8),
        dataclasses.replace(small, style="none"),
        dataclasses.replace(small, tokens=(0,)),
        dataclasses.replace(small, tokens=(9,), hidden=7168, top_k=8, experts_per_rank=64),
    ]
    for case in cases:
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
                run_case(mode, case, 0, layout, in_place)
            print(f"right: {layout} {'in place ' if in_place else ''}{case}", flush=True)


def formats(group: dist.ProcessGroup) -> None:
    """Rows quantised, of which the last segment is whole, short, or ends within 16 bytes."""
    del group
    for rows, hidden in ((0, 512), (1, 8), (50, 136), (33, 512), (20, 2880), (300, 128)):
        for scale_format in ScaleFormat:
            x = unusual_rows(rows, hidden)
            ours = quantize(x.to(own_device()), scale_format)
            for what, got, wanted in zip(
                ("values", "scales"), ours, quantize(x, scale_format), strict=True
            ):
                assert_same(what, got.view(torch.uint8), wanted.view(torch.uint8))
            print(f"right: {rows} rows of {hidden}, {scale_format.value}", flush=True)


PARTS = {"low-latency": low_latency, "high-throughput": high_throughput, "formats": formats}


def main() -> int:
    """Runs the small cases of the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    if torch.cuda.device_count() == 0:
        print("no GPU")
        return 2
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    for part in parts:
        PARTS[part](group)
    del group
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
