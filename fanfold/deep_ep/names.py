"""What the modes' arguments are called in DeepEP's calls, for error messages."""

from __future__ import annotations

from fanfold.renaming import Renaming

__all__ = [
    "ELASTIC",
    "GEOMETRY",
    "HANDLE",
    "HIGH_THROUGHPUT",
    "HYBRID",
    "HYBRID_WEIGHTS",
    "LOW_LATENCY_COMBINE",
    "LOW_LATENCY_DISPATCH",
]

_TOKENS = "num_max_dispatch_tokens_per_rank"
# If ranks disagree, the core names both in its error.
_MOST_TOKENS = {"max_tokens": _TOKENS, f"max_tokens ({_TOKENS})": _TOKENS}

GEOMETRY = Renaming(_MOST_TOKENS)
"""Where a call takes the sizes as arguments."""

LOW_LATENCY_DISPATCH = Renaming(
    {
        **_MOST_TOKENS,
        "hidden": "x.shape[1]",
        "top_k": "topk_idx.shape[1]",
        "expert_totals": "cumulative_local_expert_recv_stats",
        "wait_ns": "dispatch_wait_recv_cost_stats",
        "encoding of rows": "encoding of rows by use_fp8, round_scale and use_nvfp4",
        "global_scale": "x_global_scale",
    }
)

HANDLE = Renaming(
    {
        "max_tokens": f"handle[2] ({_TOKENS})",
        "hidden": "handle[3] (hidden)",
        "num_experts": "handle[4] (num_experts)",
        "top_k": "topk_idx.shape[1]",
    }
)
"""Where the sizes are those of a low-latency handle."""

LOW_LATENCY_COMBINE = Renaming(
    {
        **_MOST_TOKENS,
        "y": "x",
        "ranges": "handle[1] (layout_range)",
        "routing": "handle",
        "top_k": "topk_idx.shape[1]",
        "wait_ns": "combine_wait_recv_cost_stats",
    }
)

HIGH_THROUGHPUT = Renaming(
    {
        "y": "x",
        "plan": "handle",
        "the plan": "the handle",
        "capacity": "num_worst_tokens",
        "max_tokens =": "a Buffer's limit of",
        "ring_bytes": "num_nvl_bytes / num_ranks",
    }
)

ELASTIC = Renaming(
    {
        "y": "x",
        "plan": "handle",
        "the plan": "the handle",
        "capacity": "the room for rows, by num_max_tokens_per_rank,",
        "max_tokens =": "an ElasticBuffer's limit of",
        "most_tokens =": "num_max_tokens_per_rank =",
        "hidden": "x.shape[1]",  # of the first call of few tokens
    }
)

_HYBRID = {
    "x": "hidden",
    "x[0]": "hidden",
    "x[1]": "scaling_factor",
    "y": "hidden",
    "plan": "handle",
    "the plan": "the handle",
    "capacity": "num_permuted_tokens",
    "expert_alignment": "pad_multiple",
    "max_tokens =": "a HybridEPBuffer's limit of",
}

HYBRID = Renaming({**_HYBRID, "topk_weights": "probs"})

HYBRID_WEIGHTS = Renaming(_HYBRID)
"""Where ``topk_weights`` were given instead of ``probs``."""
