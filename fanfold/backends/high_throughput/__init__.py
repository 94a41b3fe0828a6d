"""The high-throughput mode: dispatch and combine for training and prefill.

Rows arrive packed, either expert by expert (the layout of contiguous grouped matrix products) or
once per (token, rank); a routing can be reused; tensors of any length stream through a fixed
amount of shared memory. Protocol, layout and arithmetic: ``docs/high_throughput.md``.

R ranks, E experts, E_l = E / R local experts, T own tokens, K top_k, N rows received: one for each
token of any rank that names a local expert, ordered by source rank, then source token.
"""

from __future__ import annotations

from fanfold.backends.high_throughput.host import Dispatched, HostHighThroughput, Plan
from fanfold.backends.high_throughput.layout import Layout, dispatch_layout
from fanfold.backends.high_throughput.protocol import RowOrder, Rows

__all__ = [
    "Dispatched",
    "HostHighThroughput",
    "Layout",
    "Plan",
    "RowOrder",
    "Rows",
    "dispatch_layout",
]
