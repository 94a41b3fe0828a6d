"""Input that a layer must refuse, and values that are no numbers: on all ranks, in both modes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fanfold.errors import ArgumentError, PeerRefused
from fanfold.launch import RankPool
from fanfold.nn import MoE
from tests.distributed.layers import Shape, caught, good_call

pytestmark = pytest.mark.placements("threads")

MODES = ("low_latency", "high_throughput")

# What rank 1 passes to the layer, and what it is told.
INPUTS: dict[str, tuple[object, str]] = {
    "other hidden": (torch.zeros((4, 16)), r"x.shape is (4, 16), but must be (..., 32)"),
    "merged tokens": (torch.zeros((2, 2, 8)), "x.shape is (2, 2, 8)"),
    "integers": (torch.zeros((4, 32), dtype=torch.int64), "x.dtype is torch.int64"),
    "scalar": (torch.zeros(()), "x.shape is ()"),
    "list": ([[0.0] * 32], "x is a list"),
}


def _layer(group: dist.ProcessGroup, mode: str, name: str) -> tuple[str, str]:
    shape = Shape(mode=mode)
    with shape.open(group) as ep, torch.no_grad():
        layer = MoE(shape.hidden, 16, shape.num_experts, shape.top_k, dispatcher=ep)
        good = good_call(shape, ep.rank).x.float()
        before = layer(good)
        x = INPUTS[name][0] if ep.rank == 1 else good
        error = caught(lambda: layer(x))  # type: ignore[arg-type]
        assert torch.equal(layer(good), before)
        return type(error).__name__, str(error)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INPUTS)
def test_layers_refuse_bad_input_on_all_ranks(
    pools: Callable[[int], RankPool], mode: str, name: str
) -> None:
    for rank, (kind, text) in enumerate(pools(2).run(_layer, mode, name)):
        assert kind == (ArgumentError if rank == 1 else PeerRefused).__name__
        assert INPUTS[name][1] in text


def _expert(group: dist.ProcessGroup, mode: str) -> None:
    shape = Shape(mode=mode)
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        leading = received.tokens.shape[:-1]
        for wrong in ((leading[0] + 1, *leading[1:], 32), (3,), (), (*leading[:-1], 1, 1)):
            with pytest.raises(ArgumentError, match=r"of\.shape"):
                received.expert(0, of=torch.zeros(wrong))
        with pytest.raises(ArgumentError, match="of is a list"):
            received.expert(0, of=[])  # type: ignore[arg-type]
        count = int(received.tokens_per_expert[1])
        assert received.weights is not None
        assert received.expert(1, of=received.weights).shape == (count,)
        wide = torch.zeros((*leading, 2, 5))
        received.expert(1, of=wide).fill_(1.0)
        assert int(wide.sum()) == count * 10
        # A view, also where rows do not lie one behind the other.
        turned = torch.zeros((*leading[:-1], 7, leading[-1])).mT
        received.expert(1, of=turned).fill_(1.0)
        assert int(turned.sum()) == count * 7


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_an_expert(pools: Callable[[int], RankPool], mode: str) -> None:
    pools(2).run(_expert, mode)


def _weights(group: dist.ProcessGroup, mode: str, value: float) -> None:
    """A weight of token 2 that is no number makes its own output that, and no other's."""
    shape = Shape(mode=mode)
    with shape.open(group) as ep:
        call = good_call(shape, ep.rank)
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        good = ep.combine(received.tokens, received)
        if ep.rank == 0:
            call.topk_weights[2, 1] = value
            call.x[2, 5] = 0.0
        received = ep.dispatch(call.x, call.topk_idx, call.topk_weights)
        out = ep.combine(received.tokens, received)
        if ep.rank == 0:
            wanted = call.x[2].float() * value  # 0 times infinity is no number
            wanted = torch.where(call.x[2] == 0, torch.nan, wanted)
            assert torch.equal(out[2].isnan(), wanted.isnan())
            assert torch.equal(out[2].isinf(), wanted.isinf())
            assert torch.equal(out[2].sign().nan_to_num(), wanted.sign().nan_to_num())
            out[2] = good[2]
        assert torch.equal(out, good)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers(
    pools: Callable[[int], RankPool], mode: str, value: float
) -> None:
    pools(2).run(_weights, mode, value)
