"""``HybridEPBuffer`` against loops over tokens, bit for bit."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fanfold.deep_ep import HybridEPBuffer, HybridEPHandle
from fanfold.errors import CopyError, FanfoldError
from fanfold.group import as_group
from tests.conformance import deep_ep_reference as reference
from tests.conformance.test_deep_ep_elastic import Pools
from tests.conformance.test_deep_ep_elastic_refusals import check_refusals
from tests.distributed.routings import host_of_ranks
from tests.environment import environment

pytestmark = pytest.mark.placements("threads")


@dataclass(frozen=True)
class Layer:
    """One geometry with random input on each rank."""

    tokens: tuple[int, ...]  # of each rank
    local: int = 3  # experts of a rank
    hidden: int = 64
    share: float = 0.3  # of the experts that a token goes to
    pad: int | None = None
    by: str = "map"  # or "indices", or "indices and map of probs"
    room: int | None = None  # for rows; the CPU waits for nothing then
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.local


@dataclass
class Own:
    """What one rank passes to dispatch."""

    x: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor


def own_of(layer: Layer, rank: int) -> Own:
    generator = torch.Generator().manual_seed(1000 * layer.seed + rank)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

    tokens = layer.tokens[rank]
    x = (numbers(tokens, layer.hidden) * 4 - 2).to(torch.bfloat16)
    chosen = numbers(tokens, layer.experts) < layer.share
    # No more than 32 experts of a token.
    chosen &= torch.cumsum(chosen, 1, dtype=torch.int64) <= 32
    return Own(x, chosen, numbers(tokens, layer.experts))


def routing_of(layer: Layer, rank: int) -> dict[str, Any]:
    """The arguments of dispatch_with_permute that say where tokens go."""
    own = own_of(layer, rank)
    if layer.by == "map":
        return {"routing_map": own.routing_map, "probs": own.probs}
    top_k = min(layer.experts, 32)
    idx = torch.full((layer.tokens[rank], top_k), -1, dtype=torch.int64, device="cpu")
    weights = torch.zeros(idx.shape, dtype=torch.float32, device="cpu")
    for token, chosen in enumerate(own.routing_map):
        experts = chosen.nonzero().flatten()
        idx[token, : len(experts)] = experts
        weights[token, : len(experts)] = own.probs[token, experts]
    routing: dict[str, Any] = {"topk_idx": idx, "num_of_experts": layer.experts}
    if layer.by == "indices":  # of any integers and strides
        strides = (1, len(idx) or 1)
        narrow = torch.empty_strided(idx.shape, strides, dtype=torch.int32, device="cpu")
        routing["topk_idx"] = narrow.copy_(idx)
    return {
        **routing,
        **({"topk_weights": weights} if layer.by == "indices" else {"probs": own.probs}),
    }


class Sorted:
    """The rows of one rank, counted one by one."""

    def __init__(self, layer: Layer, rank: int) -> None:
        self.counts, self.row_of, at = [], dict[tuple[int, int, int], int](), 0
        owns = [own_of(layer, peer) for peer in range(layer.ranks)]
        for expert in range(rank * layer.local, (rank + 1) * layer.local):
            begin = at
            for source, own in enumerate(owns):
                for token in own.routing_map[:, expert].nonzero().flatten().tolist():
                    self.row_of[expert, source, token] = at
                    at += 1
            pad = layer.pad or 1
            at = -(-at // pad) * pad
            self.counts.append(at - begin)
        self.rows = at

    def gather(self, of_ranks: list[torch.Tensor]) -> torch.Tensor:
        """The rows of these tokens, each rank's tensor given, zero in between."""
        rows = of_ranks[0].new_zeros((self.rows, *of_ranks[0].shape[1:]))
        for (_, source, token), row in self.row_of.items():
            rows[row] = of_ranks[source][token]
        return rows


def outputs_of(layer: Layer, rank: int) -> torch.Tensor:
    """What the experts of ``rank`` make of their rows."""
    rows = Sorted(layer, rank).gather([own_of(layer, peer).x for peer in range(layer.ranks)])
    factor = torch.arange(len(rows), dtype=torch.float32, device="cpu").remainder(7) - 2.5 + rank
    return (rows.float() * factor.unsqueeze(1)).to(torch.bfloat16)


def part_of(layer: Layer, peer: int, rank: int, token: int) -> torch.Tensor:
    """What ``peer`` sends back for a token of ``rank``: the sum over its experts, rounded."""
    there, y = Sorted(layer, peer), outputs_of(layer, peer)
    part = torch.zeros(layer.hidden, dtype=torch.float32, device="cpu")
    for expert in range(peer * layer.local, (peer + 1) * layer.local):
        row = there.row_of.get((expert, rank, token))
        if row is not None:
            part += y[row].float()
    return part.to(torch.bfloat16).float()


def combined(layer: Layer, rank: int) -> torch.Tensor:
    """The sums of this rank's tokens, in rank order, rounded; another host's ranks are summed, and
    rounded, there."""
    out = torch.zeros((layer.tokens[rank], layer.hidden), dtype=torch.float32, device="cpu")
    host = host_of_ranks(layer.ranks)
    for token in range(layer.tokens[rank]):
        for there in dict.fromkeys(host):
            own = there == host[rank]
            total = out[token] if own else torch.zeros_like(out[token])
            for peer in (peer for peer in range(layer.ranks) if host[peer] == there):
                total += part_of(layer, peer, rank, token)
            if not own:
                out[token] += total.to(torch.bfloat16).float()
    return out.to(torch.bfloat16)


def numbers_of(rows: int, rank: int) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.float32, device="cpu") + 1000 * rank


def returned(layer: Layer, rank: int) -> torch.Tensor:
    """The numbers of all ranks' rows, at the tokens and experts of the rows."""
    back = torch.zeros((layer.tokens[rank], layer.experts), dtype=torch.float32, device="cpu")
    for peer in range(layer.ranks):
        there = Sorted(layer, peer)
        numbers = numbers_of(there.rows, peer)
        for (expert, source, token), row in there.row_of.items():
            if source == rank:
                back[token, expert] = numbers[row]
    return back


def open_buffer(group: dist.ProcessGroup, layer: Layer, **options: Any) -> HybridEPBuffer:
    with environment(FANFOLD_TIMEOUT_S="20"):
        return HybridEPBuffer(group, layer.hidden, max(layer.tokens), layer.local, **options)


def sizes_of(layer: Layer) -> dict[str, Any]:
    """The arguments of dispatch_with_permute that say how rows lie."""
    room = {} if layer.room is None else {"num_permuted_tokens": layer.room, "non_blocking": True}
    return {"pad_multiple": layer.pad, **room}


def _round(group: dist.ProcessGroup, layer: Layer) -> None:
    rank, everybody = as_group(group).rank, range(layer.ranks)
    own, wanted = own_of(layer, rank), Sorted(layer, rank)
    buffer = open_buffer(group, layer, num_sms_dispatch_api=4)
    routing, sizes = routing_of(layer, rank), sizes_of(layer)
    rows, probs, scales, counts, handle = buffer.dispatch_with_permute(
        hidden=own.x, scaling_factor=None, num_of_experts_per_rank=layer.local, **routing, **sizes
    )
    again = buffer.dispatch_with_permute(
        hidden=own.x * 2, handle=handle, pad_multiple=layer.pad,
        num_permuted_tokens=counts.sum() if layer.room is None else layer.room,
    )  # fmt: skip
    y = rows.new_zeros(rows.shape)
    y[: wanted.rows] = outputs_of(layer, rank)
    out, nothing = buffer.combine_with_unpermute(hidden=y, handle=handle)
    summed, back = buffer.combine_with_unpermute(
        hidden=y, probs=numbers_of(len(y), rank), handle=handle, pad_multiple=layer.pad
    )
    # Nobody waits any more for a rank that finds something wrong.
    assert counts.dtype == torch.int64
    assert counts.tolist() == wanted.counts
    for found, factor in ((rows, 1), (again[0], 2)):
        assert found.shape == (wanted.rows if layer.room is None else layer.room, layer.hidden)
        xs = [own_of(layer, peer).x * factor for peer in everybody]
        assert torch.equal(found[: wanted.rows], wanted.gather(xs))
    of_tokens = Sorted(layer, rank).gather
    expected = of_tokens([own_of(layer, peer).probs for peer in everybody])
    assert probs is not None
    for (expert, _, _), row in wanted.row_of.items():
        assert probs[row] == expected[row, expert]
    padding = torch.ones(wanted.rows, dtype=torch.bool, device="cpu")
    padding[list(wanted.row_of.values())] = False
    assert not probs[: wanted.rows][padding].any()
    assert scales is again[1] is again[2] is nothing is None
    assert again[3].tolist() == wanted.counts
    assert again[4] is handle
    assert isinstance(handle, HybridEPHandle)
    assert len(handle) == 9
    received = len({(source, token) for _, source, token in wanted.row_of})
    assert (handle[3].tolist(), handle[6], handle[-1].tolist()) == ([received], len(own.x), [0])
    assert torch.equal(out, combined(layer, rank))
    assert torch.equal(summed, out)
    assert torch.equal(back, returned(layer, rank))


LAYER = Layer(tokens=(7, 0, 20, 9))
WIDE = Layer(tokens=(5, 3), local=40, share=0.35, seed=4)  # more experts than a token may have


@pytest.mark.parametrize("by", ["map", "indices", "indices and map of probs"])
@pytest.mark.parametrize(("pad", "room"), [(None, None), (16, None), (None, 300), (8, 400)])
def test_round(pools: Pools, by: str, pad: int | None, room: int | None) -> None:
    pools(4).run(_round, replace(LAYER, by=by, pad=pad, room=room))


def test_more_experts_than_a_token_may_have(pools: Pools) -> None:
    pools(2).run(_round, WIDE)


@given(
    layer=st.builds(
        Layer,
        tokens=st.lists(st.integers(0, 12), min_size=1, max_size=4).map(tuple),
        local=st.integers(1, 12),
        hidden=st.sampled_from([16, 24, 128]),
        share=st.sampled_from([0.0, 0.2, 1.0]),
        pad=st.sampled_from([None, 1, 3, 128]),
        by=st.sampled_from(["map", "indices"]),
        seed=st.integers(0, 100),
    )
)
def test_random_layers(pools: Pools, layer: Layer) -> None:
    pools(layer.ranks).run(_round, layer)


def _fp8(group: dist.ProcessGroup) -> None:
    layer, rank = replace(LAYER, hidden=256, pad=8), as_group(group).rank
    pairs = [reference.fp8(own_of(layer, peer).x, True) for peer in range(layer.ranks)]
    buffer = open_buffer(group, layer, use_fp8=True)
    values, scales = pairs[rank]
    routing = routing_of(layer, rank)
    rows, _, row_scales, _, handle = buffer.dispatch_with_permute(
        hidden=values, scaling_factor=scales, pad_multiple=8, **routing
    )
    again = buffer.dispatch_with_permute(hidden=values, scaling_factor=scales, handle=handle)
    wanted = Sorted(layer, rank)
    for found, found_scales in ((rows, row_scales), (again[0], again[2])):
        expected = wanted.gather([pair[0].view(torch.uint8) for pair in pairs])
        assert torch.equal(found.view(torch.uint8), expected)
        assert torch.equal(found_scales, wanted.gather([pair[1] for pair in pairs]))


def test_fp8(pools: Pools) -> None:
    pools(4).run(_fp8)


def _without_probs(group: dist.ProcessGroup) -> None:
    rank = as_group(group).rank
    buffer, own = open_buffer(group, LAYER), own_of(LAYER, rank)
    rows, probs, _, _, handle = buffer.dispatch_with_permute(
        hidden=own.x, routing_map=own.routing_map, use_host_meta=True
    )
    assert probs is None
    # Gradients need not be contiguous, nor of memory of their own.
    ones = own.x.new_ones(()).expand(own.x.shape)
    again = buffer.dispatch_with_permute(hidden=ones, handle=handle)[0]
    assert int(again.sum()) == len(Sorted(LAYER, rank).row_of) * LAYER.hidden
    y = outputs_of(LAYER, rank).T.contiguous().T
    out, _ = buffer.combine_with_unpermute(hidden=y, handle=handle)
    assert torch.equal(out, combined(LAYER, rank))
    assert len(rows) == Sorted(LAYER, rank).rows


def test_without_probs(pools: Pools) -> None:
    pools(4).run(_without_probs)


def _overwrites(group: dist.ProcessGroup, by: str) -> None:
    """What a caller writes over what it was given, or has given, changes nothing."""
    rank = as_group(group).rank
    buffer, own = open_buffer(group, LAYER), own_of(LAYER, rank)
    routing = routing_of(replace(LAYER, by=by), rank)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(hidden=own.x, **routing)
    kept = rows.clone()
    for tensor in (rows, probs, counts, handle[3], handle[-1], *routing.values()):
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(1)
    again = buffer.dispatch_with_permute(hidden=own.x, handle=handle)
    out, back = buffer.combine_with_unpermute(
        hidden=outputs_of(LAYER, rank), probs=numbers_of(len(kept), rank), handle=handle
    )
    assert torch.equal(again[0], kept)
    again[3].fill_(1)
    counts = buffer.dispatch_with_permute(hidden=own.x, handle=handle)[3]
    assert counts.tolist() == Sorted(LAYER, rank).counts
    assert torch.equal(out, combined(LAYER, rank))
    assert torch.equal(back, returned(LAYER, rank))


@pytest.mark.parametrize("by", ["map", "indices and map of probs"])
def test_what_a_caller_overwrites_changes_nothing(pools: Pools, by: str) -> None:
    pools(4).run(_overwrites, by)


# ---- where a rank's input is bad ----------------------------------------------------------------

BAD_DISPATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "no routing": ({"routing_map": None}, "routing_map is None, but must be given, or topk_idx"),
    "map": ({"routing_map": own_of(LAYER, 0).probs}, "routing_map.dtype is torch.float32"),
    "rows": ({"routing_map": own_of(LAYER, 0).routing_map[:3]}, "routing_map.shape is (3, 12)"),
    "probs": ({"probs": own_of(LAYER, 0).probs[:, :5]}, "probs.shape is (7, 5)"),
    "both": ({"topk_idx": own_of(LAYER, 0).routing_map}, "topk_idx is given, but must be None"),
    "experts": ({"num_of_experts": 8}, "num_of_experts is 8, but must be None or 12, as"),
    "local": ({"num_of_experts_per_rank": 4}, "num_of_experts is 12, but must be 4 * 4"),
    "pad": ({"pad_multiple": 0}, "pad_multiple is 0, but must be an integer from 1"),
    "room": ({"non_blocking": True}, "num_permuted_tokens is None"),
    "little room": ({"num_permuted_tokens": 2}, "num_permuted_tokens is 2, but must be at least"),
    "blocking": ({"non_blocking": 1}, "non_blocking is 1 (type int), but must be a bool"),
    "hidden": ({"hidden": 3}, "hidden is 3"),
    "scales": ({"scaling_factor": own_of(LAYER, 0).probs}, "hidden.dtype is torch.bfloat16"),
    "indices": (
        {"routing_map": None, "probs": None, "topk_idx": own_of(LAYER, 0).routing_map.long() + 11,
         "num_of_experts": 12},
        "topk_idx[0, ",
    ),
    "weights": (
        {"routing_map": None, "probs": None, "topk_idx": own_of(LAYER, 0).routing_map.long(),
         "num_of_experts": 12, "topk_weights": own_of(LAYER, 0).probs.double()},
        "topk_weights.dtype is torch.float64",
    ),
    "a place": ({"probs": own_of(LAYER, 0).probs.to("meta")}, "probs.device is meta"),
    "no experts": (
        {"routing_map": None, "topk_idx": own_of(LAYER, 0).routing_map.long()},
        "num_of_experts is None, but must be the number of experts",
    ),
}  # fmt: skip
BAD_REUSES: dict[str, tuple[dict[str, Any], str]] = {
    "handle": ({"handle": (1,) * 9}, "handle is a tuple of 9"),
    "map": ({"routing_map": own_of(LAYER, 0).routing_map}, "routing_map is given, but must be"),
    "probs": ({"probs": own_of(LAYER, 0).probs}, "probs is given, but must be None with a handle"),
    "rows": ({"num_permuted_tokens": 3}, "num_permuted_tokens is 3, but must be None or"),
    "pad": ({"pad_multiple": 4}, "pad_multiple is 4, but must be None or 1, as for the handle"),
    "tokens": ({"hidden": own_of(LAYER, 0).x[:3]}, "hidden.shape[0] is 3, but must be 7"),
}
BAD_COMBINES: dict[str, tuple[dict[str, Any], str]] = {
    "handle": ({"handle": None}, "handle is None, but must be the very object"),
    "pad": ({"pad_multiple": 4}, "pad_multiple is 4, but must be None or 1"),
    "rows": ({"hidden": own_of(LAYER, 0).x[:1]}, "hidden.shape[0] is 1"),
    "hidden": ({"hidden": 3}, "hidden is 3"),
    "probs": ({"probs": own_of(LAYER, 0).probs}, "probs.shape is"),
}


def _refused(
    group: dist.ProcessGroup, kind: str, changes: dict[str, Any], sms: int | None = None
) -> str:
    """What rank 0's bad call says there, or that another rank refused; then that calls go on."""
    rank = as_group(group).rank
    buffer, own, said = open_buffer(group, LAYER), own_of(LAYER, rank), ""
    good: dict[str, Any] = {"hidden": own.x, **routing_of(LAYER, rank)}
    rows, *_, handle = buffer.dispatch_with_permute(**good)
    if kind != "dispatch":
        good = {"hidden": own.x if kind == "reuse" else rows, "handle": handle}
    call = buffer.combine_with_unpermute if kind == "combine" else buffer.dispatch_with_permute
    if rank == 0:
        buffer.num_sms_dispatch_api = buffer.num_sms_combine_api = sms
    try:
        call(**{**good, **(changes if rank == 0 else {})})
    except FanfoldError as error:
        said = f"{type(error).__name__}: {error}"
    buffer.num_sms_dispatch_api = None
    assert torch.equal(buffer.dispatch_with_permute(hidden=own.x, handle=handle)[0], rows)
    return said


@pytest.mark.parametrize("bad", BAD_DISPATCHES)
def test_a_bad_dispatch_is_refused_on_all_ranks(pools: Pools, bad: str) -> None:
    changes, wanted = BAD_DISPATCHES[bad]
    check_refusals(pools(4).run(_refused, "dispatch", changes), wanted)


@pytest.mark.parametrize("bad", BAD_REUSES)
def test_a_bad_reuse_is_refused_on_all_ranks(pools: Pools, bad: str) -> None:
    changes, wanted = BAD_REUSES[bad]
    check_refusals(pools(4).run(_refused, "reuse", changes), wanted)


@pytest.mark.parametrize("bad", BAD_COMBINES)
def test_a_bad_combine_is_refused_on_all_ranks(pools: Pools, bad: str) -> None:
    changes, wanted = BAD_COMBINES[bad]
    check_refusals(pools(4).run(_refused, "combine", changes), wanted)


@pytest.mark.parametrize("kind", ["dispatch", "reuse", "combine"])
def test_a_bad_number_of_sms_is_refused_on_all_ranks(pools: Pools, kind: str) -> None:
    name = "num_sms_combine_api" if kind == "combine" else "num_sms_dispatch_api"
    check_refusals(pools(4).run(_refused, kind, {}, 0), f"{name} is 0, but must be")


def _too_many(group: dist.ProcessGroup) -> str:
    rank = as_group(group).rank
    buffer, own = open_buffer(group, WIDE), own_of(WIDE, rank)
    if rank == 0:
        own.routing_map[2] = True
    try:
        buffer.dispatch_with_permute(hidden=own.x, routing_map=own.routing_map)
    except FanfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_token_of_too_many_experts(pools: Pools) -> None:
    wanted = "routing_map[2].sum() is 80, but must be at most 32 experts of a token"
    check_refusals(pools(2).run(_too_many), wanted)


# ---- making one ---------------------------------------------------------------------------------

# The parameters on DeepEP's branch hybrid-ep, those that it calls deprecated too, in order and with
# their defaults, and the two that newer versions have for fused permutation.
REQUIRED = inspect.Parameter.empty
CONSTRUCTOR = {
    "group": REQUIRED,
    "hidden_dim": REQUIRED,
    "max_num_of_tokens_per_rank": REQUIRED,
    "num_local_experts": REQUIRED,
    "use_fp8": False,
    "num_sms_dispatch_api": None,
    "num_sms_combine_api": None,
    "num_sms_preprocessing_api": None,
    "load_cached_kernels": False,
    "use_shared_buffer": True,
    "enable_custom_allgather": False,
    "num_of_hybrid_ep_ranks_per_nvlink_domain": None,
    "use_mnnvl": None,
}


DISPATCH = {
    "hidden": REQUIRED,
    "topk_idx": None,
    "topk_weights": None,
    "num_of_experts_per_rank": None,
    "num_of_experts": None,
    "use_fp8": None,
    "routing_map": None,
    "probs": None,
    "scaling_factor": None,
    "num_permuted_tokens": None,
    "pad_multiple": None,
    "handle": None,
    "non_blocking": False,
    "fuse_permute_dispatch": False,
    "num_dispatched_tokens": None,
    "use_host_meta": None,
}
COMBINE = {
    "hidden": REQUIRED,
    "probs": None,
    "handle": None,
    "pad_multiple": None,
    "fuse_unpermute_combine": False,
    "num_dispatched_tokens": None,
}


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (HybridEPBuffer, CONSTRUCTOR),
        (HybridEPBuffer.dispatch_with_permute, {"self": REQUIRED, **DISPATCH}),
        (HybridEPBuffer.combine_with_unpermute, {"self": REQUIRED, **COMBINE}),
    ],
)
def test_signatures_are_those_of_deep_ep(call: Any, wanted: dict[str, Any]) -> None:
    parameters = inspect.signature(call).parameters
    assert {name: each.default for name, each in parameters.items()} == wanted


def _made(group: dist.ProcessGroup, changes: list[dict[str, Any]]) -> str:
    sizes = {"hidden_dim": 64, "max_num_of_tokens_per_rank": 8, "num_local_experts": 2}
    try:
        HybridEPBuffer(group, **{**sizes, **changes[as_group(group).rank]})
    except FanfoldError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"hidden_dim": 0}, "hidden_dim is 0"),
        ({"max_num_of_tokens_per_rank": "9"}, "max_num_of_tokens_per_rank is '9' (type str)"),
        ({"num_local_experts": 1 << 30}, "num_local_experts is 1073741824"),
        ({"num_sms_dispatch_api": 0}, "num_sms_dispatch_api is 0"),
        ({"num_sms_combine_api": 1.5}, "num_sms_combine_api is 1.5 (type float)"),
        ({"num_of_hybrid_ep_ranks_per_nvlink_domain": 0}, "ranks_per_nvlink_domain is 0"),
        ({"num_local_experts": 3}, "must be the same on all ranks"),
    ],
)
def test_bad_options_end_it_on_all_ranks(
    pools: Pools, changes: dict[str, Any], wanted: str
) -> None:
    for said in pools(2).run(_made, [changes, {}]):
        assert wanted in said


def _attributes(group: dist.ProcessGroup) -> None:
    ranks = as_group(group)
    buffer = open_buffer(group, LAYER, num_sms_dispatch_api=20, use_mnnvl=True)
    assert (buffer.group, buffer.rank, buffer.group_size) == (group, ranks.rank, ranks.size)
    hosts, of_host = buffer.num_of_nodes, buffer.num_of_hybrid_ep_ranks_per_nvlink_domain
    assert hosts == len(set(host_of_ranks(ranks.size)))
    assert hosts * of_host == ranks.size
    host = host_of_ranks(ranks.size)
    assert buffer.node_rank == list(dict.fromkeys(host)).index(host[ranks.rank])
    assert buffer.local_rank == host[: ranks.rank].count(host[ranks.rank])
    assert (buffer.num_sms_dispatch_api, buffer.num_sms_combine_api) == (20, None)
    config = buffer.config
    assert (config.hidden_dim, config.max_num_of_tokens_per_rank) == (64, 20)
    assert (config.num_of_experts_per_rank, config.num_of_nodes) == (3, hosts)
    other = buffer.update_template_config(hidden_dim=8, num_of_tokens_per_rank=40)
    assert (other.hidden_dim, other.max_num_of_tokens_per_rank) == (8, 40)
    assert buffer.update_template_config(num_of_tokens_per_rank=4) == config
    buffer.empty_jit_cache()
    assert f"rank={ranks.rank}" in repr(buffer)
    for copies in (copy.copy, copy.deepcopy):
        with pytest.raises(CopyError):
            copies(buffer)


def test_attributes(pools: Pools) -> None:
    pools(4).run(_attributes)
