"""DeepEP's second interface where a rank's input is bad, or ranks disagree: all learn it, and
the next calls work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fanfold.errors import ArgumentError, FanfoldError, PeerRefused
from fanfold.group import as_group
from tests.conformance import test_deep_ep_elastic as programs
from tests.conformance.deep_ep_reference import Case, arrivals, inputs
from tests.conformance.test_deep_ep_elastic import CASE, Pools, arguments, open_buffer
from tests.conformance.test_deep_ep_high_throughput import outputs
from tests.distributed.layers import caught

pytestmark = pytest.mark.placements("threads")

BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "num_experts": ({"num_experts": None}, "num_experts is None, but must be the number of"),
    "num_experts, uneven": ({"num_experts": 9}, "num_experts is 9, but must be a multiple of the"),
    "num_experts, a word": ({"num_experts": "8"}, "num_experts is '8' (type str)"),
    "topk_idx": ({"topk_idx": None}, "topk_idx is None, but must be given"),
    "tokens": ({"num_max_tokens_per_rank": 5}, "x.shape[0] is"),
    "no tokens": ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank is 0"),
    "expert_alignment": ({"expert_alignment": 0}, "expert_alignment is 0"),
    "num_sms": ({"num_sms": -1}, "num_sms is -1"),
    "many sms": ({"num_sms": 1 << 31}, "num_sms is 2147483648, but must be an integer from 0 to"),
    "num_qps": ({"num_qps": 1.0}, "num_qps is 1.0 (type float)"),
    "do_cpu_sync": ({"do_cpu_sync": 1}, "do_cpu_sync is 1 (type int)"),
    "do_handle_copy": ({"do_handle_copy": 3}, "do_handle_copy is 3 (type int)"),
    "do_expand": ({"do_expand": "yes"}, "do_expand is 'yes' (type str)"),
    "event": ({"previous_event": 3}, "previous_event is 3 (type int)"),
    "epilogue": ({"previous_event_before_epilogue": 3}, "previous_event_before_epilogue is 3"),
    "stats": (
        {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32, device="cpu")},
        "cumulative_local_expert_recv_stats.shape is (3,)",
    ),
    "x": ({"x": [1, 2]}, "x is a list of 2"),
}
BAD_REUSES: dict[str, tuple[dict[str, Any], str]] = {
    "handle": ({"handle": (1, 2)}, "handle is"),
    "topk_idx": (
        {"topk_idx": inputs(CASE, 0).topk_idx}, "topk_idx is given, but must be None with a handle"
    ),
    "num_experts": ({"num_experts": 16}, "num_experts is 16, but must be None or 8"),
    "expert_alignment": ({"expert_alignment": 2}, "expert_alignment is 2, but must be None or 1"),
    "do_cpu_sync": ({"do_cpu_sync": True}, "do_cpu_sync is True, but must be False or None"),
    "do_expand": ({"do_expand": True}, "do_expand is True, but must be False"),
    "tokens": ({"x": inputs(CASE, 0).x[:3]}, "x.shape[0] is 3, but must be 7"),
    "weights": (
        {"topk_weights": inputs(CASE, 0).topk_weights[:, :2]}, "topk_weights.shape is (7, 2)"
    ),
}  # fmt: skip


FEWER = 20  # tokens of a rank in a call: its ElasticBuffer may have more

NEARLY: dict[str, tuple[dict[str, Any], str]] = {
    "one for True": ({"do_cpu_sync": 1}, "do_cpu_sync is 1 (type int)"),
    "True for one": ({"expert_alignment": True}, "expert_alignment is True"),
    "a float": ({"num_sms": 0.0}, "num_sms is 0.0"),
    "a list": ({"expert_alignment": [1]}, "expert_alignment is a list of 1"),
    "tokens": (
        {
            "x": torch.ones((FEWER + 1, 256), dtype=torch.bfloat16, device="cpu"),
            "topk_idx": torch.zeros((FEWER + 1, CASE.top_k), dtype=torch.int64, device="cpu"),
            "topk_weights": torch.zeros((FEWER + 1, CASE.top_k), dtype=torch.float32, device="cpu"),
        },
        f"x.shape[0] is {FEWER + 1}, but must be at most num_max_tokens_per_rank = {FEWER}",
    ),
    "rows": (
        {"topk_idx": torch.zeros((1, CASE.top_k), dtype=torch.int64, device="cpu")},
        "topk_idx.shape is",
    ),
}  # fmt: skip


def _refused(
    group: dist.ProcessGroup, changes: dict[str, Any], reuses: bool, combines: bool
) -> str:
    """What rank 0's bad call says there, or that another rank refused; then that calls go on."""
    rank = as_group(group).rank
    buffer = open_buffer(group)
    good = arguments(CASE, rank)
    handle = buffer.dispatch(**good)[3]
    said = ""
    mine = {"x": good["x"], "handle": handle} if reuses else good
    if combines:
        mine = {"x": outputs(CASE, rank), "handle": handle}
    try:
        call = buffer.combine if combines else buffer.dispatch
        call(**{**mine, **(changes if rank == 0 else {})})
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
    rows = buffer.dispatch(good["x"], handle=handle)[0]
    buffer.destroy()
    assert len(rows) == len(arrivals(CASE, rank).source_rank)
    return said


def check_refusals(said: list[str], wanted: str) -> None:
    assert said[0].startswith(f"{ArgumentError.__name__}: {wanted}"), said[0]
    for other in said[1:]:
        assert other.startswith(f"{PeerRefused.__name__}: rank 0 refused"), other


@pytest.mark.parametrize("bad", BAD_DISPATCHES)
def test_a_bad_dispatch_is_refused_on_all_ranks(pools: Pools, bad: str) -> None:
    changes, wanted = BAD_DISPATCHES[bad]
    check_refusals(pools(4).run(_refused, changes, False, False), wanted)


def known_then_bad(group: Any, changes: dict[str, Any]) -> str:
    """What rank 0's call is found to be that asks for the same as the one before it, or nearly."""
    rank = as_group(group).rank
    buffer = programs.open_buffer(group)
    good = {**arguments(CASE, rank), "do_cpu_sync": True, "do_handle_copy": True}
    good["num_max_tokens_per_rank"] = FEWER
    buffer.dispatch(**good)
    error = caught(lambda: buffer.dispatch(**{**good, **(changes if rank == 0 else {})}))
    buffer.dispatch(**good)
    buffer.destroy()
    return "" if error is None else f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("nearly", NEARLY)
def test_a_call_that_is_nearly_like_the_one_before(pools: Pools, nearly: str) -> None:
    changes, wanted = NEARLY[nearly]
    check_refusals(pools(4).run(known_then_bad, changes), wanted)


@pytest.mark.parametrize("bad", BAD_REUSES)
def test_a_bad_reuse_is_refused_on_all_ranks(pools: Pools, bad: str) -> None:
    changes, wanted = BAD_REUSES[bad]
    check_refusals(pools(4).run(_refused, changes, True, False), wanted)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"handle": None}, "handle is None"),
        ({"x": inputs(CASE, 0).x[:0]}, "x.shape[0] is 0"),
        ({"bias": inputs(CASE, 0).x[:1]}, "bias.shape is (1, 256)"),
        ({"num_sms": -3}, "num_sms is -3"),
        (
            {"topk_weights": torch.zeros((1, 2), dtype=torch.float32, device="cpu")},
            "topk_weights.shape is (1, 2)",
        ),
    ],
)
def test_a_bad_combine_is_refused_on_all_ranks(
    pools: Pools, changes: dict[str, Any], wanted: str
) -> None:
    check_refusals(pools(4).run(_refused, changes, False, True), wanted)


def _weights_on_some(group: dist.ProcessGroup) -> str:
    """What ranks find of which the first alone gives weights with a handle; their rows are as long
    as those of the weights might be."""
    rank = as_group(group).rank
    case = Case(experts=8, top_k=3, hidden=32, tokens=(7, 4, 20, 9))
    good = arguments(case, rank)
    buffer = open_buffer(group)
    handle = buffer.dispatch(**good)[3]
    weights = good["topk_weights"] if rank == 0 else None
    try:
        for _ in range(2):
            buffer.dispatch(good["x"], handle=handle, topk_weights=weights)
    except FanfoldError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.destroy()
    return ""


def test_weights_with_a_handle_come_from_all_ranks_or_none(pools: Pools) -> None:
    said = pools(4).run(_weights_on_some)
    assert all(said)
    assert any("must be the same on all ranks" in each for each in said), said


def _more_than_room(group: dist.ProcessGroup) -> str:
    """Ranks that do not agree about the most tokens; the first has room for too few."""
    rank = as_group(group).rank
    buffer = open_buffer(group)
    good = {**arguments(CASE, 0), "x": inputs(CASE, 0).x * (1 + rank)}
    tokens = 2 if rank == 0 else 7
    for name in ("x", "topk_idx", "topk_weights"):
        good[name] = good[name][:tokens]
    try:
        buffer.dispatch(**good, do_cpu_sync=False, num_max_tokens_per_rank=tokens)
    except FanfoldError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        buffer.destroy()
    return ""


def test_more_rows_than_room_for_them(pools: Pools) -> None:
    check_refusals(
        pools(4).run(_more_than_room),
        "the room for rows, by num_max_tokens_per_rank, is 8, but must be at least the",
    )
