"""Small rounds of one rank in this process, for compute-sanitizer (tools/sanitize_gpu.sh).

Use: python tests/gpu/sanitize.py    exits with 1 if a result is wrong
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.support import (
    FORMATS,
    Case,
    answers,
    assert_combined,
    assert_received,
    case_of,
    open_layer,
    own_device,
    tokens_of,
)

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


def main() -> int:
    """Runs all small cases."""
    if torch.cuda.device_count() == 0:
        print("no GPU")
        return 2
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
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
    del group
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
