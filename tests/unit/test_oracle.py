"""The oracle against small cases worked out by hand, and the generators' promises."""

from __future__ import annotations

import math

import pytest
import torch

from fanfold.bench import oracle
from fanfold.bench.check import CheckFailed, same_bits
from fanfold.bench.workload import Batch, Workload, expert_output
from fanfold.errors import ArgumentError


def batch(topk_idx, topk_weights=None, hidden=4):
    topk_idx = torch.tensor(topk_idx)
    tokens = topk_idx.shape[0]
    weights = torch.ones(topk_idx.shape) if topk_weights is None else torch.tensor(topk_weights)
    x = torch.arange(tokens * hidden).view(tokens, hidden).bfloat16()
    return Batch(x, topk_idx, weights)


# Two ranks, four experts: rank 0 holds 0 and 1, rank 1 holds 2 and 3.
TWO = [
    batch([[0, 2], [3, -1], [-1, -1]], [[0.5, 0.25], [0.125, 9.0], [9.0, 9.0]]),
    batch([[1, 0], [2, 2]], [[0.5, 1.0], [0.25, 0.5]]),
]


def test_arrivals_come_by_source_rank_then_token():
    first, second = (oracle.arrivals(TWO, rank, 4) for rank in range(2))
    assert first.source_rank.tolist() == [0, 1]
    assert first.source_token.tolist() == [0, 0]
    assert first.row.tolist() == [0, 3]
    assert first.topk_idx.tolist() == [[0, -1], [1, 0]]
    assert first.topk_weights.tolist() == [[0.5, 0.0], [0.5, 1.0]]
    assert second.source_rank.tolist() == [0, 0, 1]
    assert second.source_token.tolist() == [0, 1, 1]
    assert second.row.tolist() == [0, 1, 4]


def test_a_duplicate_expert_counts_once_with_the_sum_of_its_weights():
    second = oracle.arrivals(TWO, 1, 4)
    assert second.tokens_per_expert.tolist() == [2, 1]  # token 1 of rank 1 names expert 2 twice
    assert second.topk_idx[2].tolist() == [0, 0]
    assert second.expert_weight.tolist() == [[0.25, 0.0], [0.0, 0.125], [0.75, 0.0]]


@pytest.mark.parametrize(
    ("alignment", "offsets", "arrival", "expert", "weight"),
    [
        (1, [0, 2, 3], [0, 2, 1], [0, 0, 1], [0.25, 0.75, 0.125]),
        (
            4,
            [0, 4, 8],
            [0, 2, -1, -1, 1, -1, -1, -1],
            [0, 0, -1, -1, 1, -1, -1, -1],
            [0.25, 0.75, 0, 0, 0.125, 0, 0, 0],
        ),
    ],
)
def test_expert_major_pads_each_expert(alignment, offsets, arrival, expert, weight):
    layout = oracle.expert_major(oracle.arrivals(TWO, 1, 4), alignment)
    assert layout.offsets.tolist() == offsets
    assert layout.arrival.tolist() == arrival
    assert layout.expert.tolist() == expert
    assert layout.weight.tolist() == weight
    gathered = layout.gather(torch.tensor([10.0, 20.0, 30.0]), padding=-5.0)
    assert gathered.tolist() == [-5.0 if a < 0 else 10.0 * (a + 1) for a in arrival]


def test_nothing_arrives():
    empty = [batch([[-1, -1]]), Batch(torch.empty(0, 4).bfloat16(), torch.empty(0, 2).long(),
                                      torch.empty(0, 2))]  # fmt: skip
    arrived = oracle.arrivals(empty, 1, 4)
    assert arrived.tokens_per_expert.tolist() == [0, 0]
    layout = oracle.expert_major(arrived, 8)
    assert layout.offsets.tolist() == [0, 0, 0]
    assert layout.gather(arrived.source_rank, padding=-1).tolist() == []


def test_combine_adds_experts_then_ranks():
    # One column of interest: y of expert e for token t is 10 * t + e.
    def output(tokens, experts):
        return (10.0 * tokens + experts).unsqueeze(1).expand(-1, 4).bfloat16()

    out = oracle.combine(TWO[0], output, 2, 4)
    assert out[:, 0].tolist() == [0.5 * 0 + 0.25 * 2, 0.125 * 13, 0.0]
    unweighted = oracle.combine(TWO[0], output, 2, 4, weighted=False)
    assert unweighted[:, 0].tolist() == [0.0 + 2.0, 13.0, 0.0]
    biases = [torch.full((3, 4), 1.0).bfloat16(), torch.full((3, 4), 2.0).bfloat16()]
    biased = oracle.combine(TWO[0], output, 2, 4, weighted=False, biases=biases)
    assert biased[:, 0].tolist() == [5.0, 16.0, 3.0]
    # Expert 2 twice for token 1 of rank 1: once, with both weights.
    assert oracle.combine(TWO[1], output, 2, 4)[1, 0].item() == 0.75 * 12


def test_combine_rounds_each_rank_to_bfloat16():
    # 256 + 1 is 256 in bfloat16 (8 bits), so a 1 on the rank of the 256 is lost and two 1 on
    # another rank are not.
    values = torch.tensor([256.0, 1.0, 1.0, 1.0])

    def output(tokens, experts):
        return values[experts].unsqueeze(1).expand(-1, 4).bfloat16()

    together = oracle.combine(batch([[0, 1]]), output, 2, 4)
    assert together[0, 0].item() == 256.0
    apart = oracle.combine(batch([[0, 1, 2, 3]]), output, 2, 4)
    assert apart[0, 0].item() == 258.0


def test_combine_sums_in_order_of_the_first_lane():
    # In float32 (2**24 + 1) + 1 loses both ones, 1 + 1 + 2**24 loses none.
    values = torch.tensor([2.0**24, 1.0, 1.0])

    def output(tokens, experts):
        return values[experts].unsqueeze(1).expand(-1, 4).bfloat16()

    def total(order):
        _, sums = oracle._expert_sums(batch([order]), output, 0, 3, True)
        return sums[0, 0].item()

    assert total([0, 1, 2]) == 2.0**24
    assert total([1, 2, 0]) == 2.0**24 + 2
    assert total([1, 2, 0, 1]) == 2.0**24 + 4  # (1 + 1) * 1, then 1: 3 rounds up to a multiple of 2


def test_combine_rows_adds_in_rank_order():
    parts = [
        (torch.tensor([0, 2]), torch.tensor([[1.0], [2.0]]).bfloat16()),
        (torch.tensor([2]), torch.tensor([[4.0]]).bfloat16()),
    ]
    assert oracle.combine_rows((3, 1), parts).flatten().tolist() == [1.0, 0.0, 6.0]


def test_combine_rows_adds_the_rounded_sums_of_far_hosts_where_their_first_ranks_are():
    """256 and 1 and 1: bfloat16 has 256 and 258, and 257 is rounded to the former."""

    def part(*values):
        rows = {token: value for token, value in enumerate(values) if value is not None}
        tokens = torch.tensor(list(rows), dtype=torch.int64)
        return tokens, torch.tensor(list(rows.values()), dtype=torch.bfloat16).view(-1, 1)

    none = None
    parts = [
        part(256.0, 1.0, 2**24, none),
        part(1.0, 256.0, -(2.0**24), none),
        part(1.0, 1.0, 1.0, -0.0),
        part(none, 1.0, 1.0, none),
    ]

    def combined(far_hosts):
        return oracle.combine_rows((4, 1), parts, far_hosts=far_hosts).flatten().tolist()

    assert combined([]) == [258.0, 260.0, 2.0, 0.0]
    # 256 + 2; 1 + bf16(257) + 1... of ranks 0 and 1 one by one, then those of ranks 2 and 3.
    assert combined([[2, 3]]) == [258.0, 260.0, 2.0, 0.0]
    # bf16(257) + 1 + 0 = 257; bf16(257) + 1 + 1 = 258.
    assert combined([[0, 1]]) == [256.0, 258.0, 2.0, 0.0]
    # The sum of ranks 1 and 3 comes second, where rank 1's row would: 2**24 + bf16(1 - 2**24) + 1.
    assert combined([[1, 3]])[2] == 1.0
    biases = (torch.full((4, 1), 0.5, dtype=torch.bfloat16),)
    assert oracle.combine_rows((4, 1), parts, biases, [[0, 1]])[3].item() == 0.5


def test_combine_passes_on_which_hosts_are_far():
    """A token of four experts on four ranks, two on each host: 1 + bf16(256 + 1)."""
    own = batch([[0, 1, 2, 3]], hidden=1)
    values = torch.tensor([1.0, 1.0, 256.0, 1.0]).bfloat16()

    def output(tokens, experts):
        return values[experts].unsqueeze(1).expand(-1, own.x.shape[1])

    assert oracle.combine(own, output, 4, 4).tolist() == [[260.0]]
    assert oracle.combine(own, output, 4, 4, far_hosts=[[2, 3]]).tolist() == [[258.0]]


def test_fp8_scale_and_values():
    x = torch.zeros(2, 130).bfloat16()
    x[0, 0], x[0, 1], x[0, 128] = 448.0, -17.0, 7.0
    rows = oracle.quantize_fp8(x)
    assert rows.scales.tolist() == [
        [1.0, pytest.approx(7.0 / 448.0)],
        [pytest.approx(1e-4 / 448.0)] * 2,
    ]
    # Between 16 and 32 e4m3 has steps of 2: 17 is halfway and goes to the even 16.
    assert rows.values.float()[0, [0, 1, 128]].tolist() == [448.0, -16.0, 448.0]
    assert oracle.dequantize_fp8(rows)[0, 128].item() == pytest.approx(7.0)
    assert oracle.dequantize_fp8(rows).shape == (2, 130)


def test_fp8_power_of_two():
    x = torch.zeros(3, 128).bfloat16()
    x[0, 0], x[1, 0], x[2, 0] = 448.0, 450.0, 0.0
    rows = oracle.quantize_fp8(x, power_of_two=True)
    assert rows.scales.flatten().tolist() == [1.0, 2.0, 2.0**-22]
    assert math.ceil(math.log2(1e-4 / 448)) == -22
    assert rows.values.float()[:, 0].tolist() == [448.0, 224.0, 0.0]  # 225 goes to the even


def test_ue8m0_bytes():
    scales = torch.tensor([[1.0, 2.0, 0.5, 2.0**-22, 2.0**3]])
    packed = oracle.pack_ue8m0(scales)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[127 | 128 << 8 | 126 << 16 | 105 << 24, 130]]
    high = oracle.pack_ue8m0(torch.tensor([[1.0, 1.0, 1.0, 2.0]]))  # the top byte is 128
    assert high.item() % 2**32 == 127 | 127 << 8 | 127 << 16 | 128 << 24


def test_logfmt_keeps_ends_zero_and_signs():
    sums = torch.zeros(1, 130)
    sums[0, :5] = torch.tensor([4.0, -1.0, 0.0, 2.0**-40, 1.5])
    sums[0, 128:] = torch.tensor([0.75, -0.75])
    decoded, step = oracle._logfmt(sums)
    assert decoded[0, 0].item() == 4.0  # log2 is 2, a bfloat16
    assert decoded[0, 2].item() == 0.0
    assert decoded[0, 3].item() == pytest.approx(2.0**-30, rel=0.05)  # 32 octaves below the top
    assert decoded[0, 1].item() == pytest.approx(-1.0, rel=0.05)
    assert step[0, 0].item() == pytest.approx(32.0 / 510.0)
    assert decoded[0, 128:].tolist() == [
        pytest.approx(0.75, rel=0.005),
        pytest.approx(-0.75, rel=0.005),
    ]


def test_logfmt_combine_states_its_tolerance():
    def output(tokens, experts):
        return (1.0 + experts).unsqueeze(1).expand(-1, 4).bfloat16()

    combined = oracle.combine_logfmt(TWO[0], output, 2, 4)
    exact = oracle.combine(TWO[0], output, 2, 4).float()
    assert ((combined.values - exact).abs() <= combined.tolerance).all()
    assert (combined.tolerance[0] < 0.1 * exact[0]).all()


@pytest.mark.parametrize("value", [0.3, -0.3, 1.0, -1.0, 0.0, 1e-30, -1e-30, 3e38])
def test_bf16_floor(value):
    x = torch.tensor([value])
    lower = oracle._bf16_floor(x)
    assert lower.item() <= x.item()
    assert lower.bfloat16().float().item() == lower.item()
    next_up = (lower.bfloat16().view(torch.int16).int() + (1 if lower >= 0 else -1)).short()
    if lower != 0:
        assert next_up.view(torch.bfloat16).float().item() > x.item()


def test_same_bits_says_what_differs():
    a = torch.tensor([[1.0, 2.0]]).bfloat16()
    same_bits("rows", a, a.clone())
    with pytest.raises(CheckFailed, match=r"rows: 1 of 2 values are wrong.*\(0, 1\): 2\.0 instead"):
        same_bits("rows", a, torch.tensor([[1.0, 3.0]]).bfloat16())
    with pytest.raises(CheckFailed, match="shape"):
        same_bits("rows", a, a[:, :1])
    with pytest.raises(CheckFailed):  # bits, not values
        same_bits("rows", torch.tensor([0.0]), torch.tensor([-0.0]))


# ---- workloads ----------------------------------------------------------------------------------


def make(**changes):
    sizes = {"ranks": 4, "tokens": 50, "hidden": 16, "top_k": 3, "experts": 8, "seed": 5}
    return Workload(**{**sizes, **changes})


def test_batches_are_the_same_everywhere_and_differ_by_rank_and_seed():
    one, again = make().batch(2), make().batch(2)
    assert torch.equal(one.x, again.x)
    assert torch.equal(one.topk_idx, again.topk_idx)
    assert not torch.equal(one.x, make().batch(1).x)
    assert not torch.equal(one.topk_idx, make(seed=6).batch(2).topk_idx)


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_experts_of_a_token_are_distinct(routing):
    topk_idx = make(routing=routing, top_k=8).batch(0).topk_idx
    assert torch.equal(topk_idx.sort(1).values, torch.arange(8).expand(50, 8))


def test_skewed_routing_is_skewed():
    workload = make(routing="skewed", tokens=2000, top_k=1, experts=64)
    load = torch.bincount(
        torch.cat([workload.batch(rank).topk_idx.flatten() for rank in range(4)]), minlength=64
    ).sort(descending=True)
    assert load.values[0] > 5 * load.values[32]
    assert load.values.sum() == 8000


def test_one_expert_gets_all():
    topk_idx = make(routing="one_expert").batch(1).topk_idx
    assert (topk_idx[:, 0] == 5).all()
    assert (topk_idx[:, 1:] == -1).all()


def test_shares_of_none_and_duplicates():
    assert (make(none_share=1.0).batch(0).topk_idx == -1).all()
    topk_idx = make(duplicate_share=1.0).batch(0).topk_idx
    assert (topk_idx == topk_idx[:, :1]).all()
    assert len({make(uneven=True).batch(rank).x.shape[0] for rank in range(4)}) > 1


@pytest.mark.parametrize(
    ("changes", "argument"), [({"routing": "round"}, "routing"), ({"top_k": 9}, "top_k")]
)
def test_workload_refuses(changes, argument):
    with pytest.raises(ArgumentError) as caught:
        make(**changes)
    assert caught.value.argument == argument


def test_expert_output_tells_experts_apart():
    y = expert_output(torch.ones(3, 2), torch.tensor([0, 1, 60]))
    assert y.dtype == torch.bfloat16
    assert y[:, 0].tolist() == [1.0, 1.015625, 1.9375]
