"""The MoE layer over several ranks, against the same layer in plain PyTorch in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fanfold.bench.dispatchers import AnyDispatcher, open_dispatcher
from fanfold.errors import ArgumentError, UsageError
from fanfold.geometry import Mode
from fanfold.high_throughput import HighThroughput
from fanfold.low_latency import LowLatency
from fanfold.nn import MoE, MoEOptions, average_gradients
from fanfold.nn.sharding import local_part
from fanfold.results import DispatchResult

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 3, 48, 40


@dataclass(frozen=True)
class Problem:
    """A layer and each rank's tokens."""

    options: MoEOptions
    tokens: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each rank's x and the gradient of its output."""
        generator = torch.Generator().manual_seed(7)
        return [
            (
                torch.randn((tokens, HIDDEN), generator=generator),
                torch.randn((tokens, HIDDEN), generator=generator),
            )
            for tokens in self.tokens
        ]


PROBLEMS = {
    "softmax": Problem(MoEOptions(seed=3), (40, 33)),
    "raw sigmoid": Problem(MoEOptions(score="sigmoid", renormalize=False, balance=1.0), (21, 40)),
    "shared": Problem(MoEOptions(score="sigmoid", shared_intermediate=24), (11, 0, 30, 7)),
    "latent": Problem(MoEOptions(latent=32, shared_intermediate=16, balance=0.5), (25, 25)),
    "bfloat16": Problem(MoEOptions(dtype=torch.bfloat16, latent=16, balance=0.0), (64, 50)),
    "alone": Problem(MoEOptions(), (50,)),
}


def open_ep(
    group: object,
    options: MoEOptions,
    kind: type | None = None,
    mode: Mode = "high_throughput",
    **settings: object,
) -> Any:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": options.latent or HIDDEN}
    sizes |= {"max_tokens": 64} | settings
    return open_dispatcher(mode, group, **sizes) if kind is None else kind(group, **sizes)


def make_layer(ep: AnyDispatcher, options: MoEOptions) -> MoE:
    return MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=ep, options=options)


def train_once(group: object, problem: Problem, alignment: int = 1) -> dict[str, object]:
    """One forward and backward pass of a rank, gradients averaged."""
    with open_ep(group, problem.options, expert_alignment=alignment) as ep:
        layer = make_layer(ep, problem.options)
        x, grad = problem.inputs()[ep.rank]
        x.requires_grad_()
        out = layer(x)
        ((out * grad).sum() + layer.balance_loss).backward()
        average_gradients(layer)
        named = dict(layer.named_parameters())
        return {
            "out": out.detach(),
            "grad_x": x.grad,
            "balance": float(layer.balance_loss.detach()),
            "parameters": {name: local_part(p) for name, p in named.items()},
            "gradients": {name: local_part(p.grad) for name, p in named.items()},
            "local": {name for name, p in named.items() if getattr(p, "expert_parallel", False)},
        }


def plain_layer(
    full: dict[str, torch.Tensor], x: torch.Tensor, problem: Problem
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer for one rank's tokens with all experts at hand: output and balance loss."""
    options = problem.options
    dtype = options.dtype
    logits = x @ full["router.weight"].float().T
    scores = logits.softmax(-1) if options.score == "softmax" else torch.sigmoid(logits)
    weights, idx = torch.topk(scores, TOP_K)
    if options.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    wide = x.to(dtype)
    rows = (wide @ full["latent_in.weight"].T if options.latent else x).bfloat16()
    routed = torch.zeros(rows.shape)
    local = EXPERTS // problem.ranks
    for rank in range(problem.ranks):
        part = torch.zeros(rows.shape)
        for expert in range(rank * local, (rank + 1) * local):
            gate, up = (rows.to(dtype) @ full["w_in"][expert].T).split(INTERMEDIATE, dim=1)
            y = ((F.silu(gate) * up) @ full["w_out"][expert].T).bfloat16()
            part = part + (weights * (idx == expert)).sum(1, keepdim=True) * y.float()
        routed = routed + part.bfloat16().float()
    out = routed.bfloat16()
    if options.latent:
        out = out.to(dtype) @ full["latent_out.weight"].T
    out = out.float()
    if options.shared_intermediate:
        gate, up = (wide @ full["shared.w_in.weight"].T).chunk(2, dim=1)
        out = out + ((F.silu(gate) * up) @ full["shared.w_out.weight"].T).float()
    if x.shape[0] == 0:
        return out, torch.zeros(())
    share = F.one_hot(idx, EXPERTS).float().mean((0, 1))
    mean_score = (scores / scores.sum(1, keepdim=True)).mean(0)
    return out, options.balance * EXPERTS * (share * mean_score).sum()


def all_parameters(results: list[dict[str, object]]) -> dict[str, torch.Tensor]:
    """The ranks' parameters as one process would hold them."""
    return {
        name: torch.cat([result["parameters"][name] for result in results])
        if name in results[0]["local"]
        else value
        for name, value in results[0]["parameters"].items()
    }


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Rounding to bf16 errs by 1 in 512; both round alike, so few values differ by a step."""
    error = (got.float() - want.float()).norm()
    assert error <= 0.01 * want.float().norm() + 1e-6, f"{what}: off by {error}"


@pytest.mark.parametrize("name", PROBLEMS)
def test_layer_and_gradients_are_those_of_plain_pytorch(pools, name):
    problem = PROBLEMS[name]
    results = pools(problem.ranks).run(train_once, problem)
    full = {k: v.clone().requires_grad_() for k, v in all_parameters(results).items()}
    loss = torch.zeros(())
    inputs = problem.inputs()
    for rank, (x, grad) in enumerate(inputs):
        out, balance = plain_layer(full, x.requires_grad_(), problem)
        assert_near(results[rank]["out"], out, f"output of rank {rank}")
        assert results[rank]["balance"] == pytest.approx(balance.item(), rel=1e-4, abs=1e-7)
        loss = loss + (out * grad).sum() + balance
    loss.backward()
    for rank, (x, _) in enumerate(inputs):
        assert_near(results[rank]["grad_x"], x.grad, f"gradient of rank {rank}'s input")
    for parameter, value in full.items():
        got = results[0]["gradients"][parameter]
        if parameter in results[0]["local"]:
            got = torch.cat([result["gradients"][parameter] for result in results])
        assert_near(got * problem.ranks, value.grad, f"gradient of {parameter}")


def test_replicated_gradients_are_the_same_on_all_ranks(pools):
    problem = PROBLEMS["shared"]
    results = pools(problem.ranks).run(train_once, problem)
    for name in set(results[0]["gradients"]) - results[0]["local"]:
        for result in results[1:]:
            assert torch.equal(result["gradients"][name], results[0]["gradients"][name])


def test_padding_between_experts_changes_nothing(pools):
    problem = PROBLEMS["softmax"]
    packed = pools(2).run(train_once, problem)
    padded = pools(2).run(train_once, problem, 16)
    for one, other in zip(packed, padded, strict=True):
        assert torch.equal(one["out"], other["out"])
        for name, gradient in one["gradients"].items():
            assert torch.equal(gradient, other["gradients"][name])


def initial_parameters(group: object, options: MoEOptions) -> dict[str, object]:
    with open_ep(group, options) as ep:
        layer = make_layer(ep, options)
        named = dict(layer.named_parameters())
        return {
            "parameters": {name: local_part(p) for name, p in named.items()},
            "local": {name for name, p in named.items() if getattr(p, "expert_parallel", False)},
        }


def test_initial_weights_depend_on_the_seed_and_not_on_the_ranks(pools):
    options = MoEOptions(latent=32, shared_intermediate=16, seed=5)
    one, two, four = (
        all_parameters(pools(ranks).run(initial_parameters, options)) for ranks in (1, 2, 4)
    )
    other = all_parameters(pools(1).run(initial_parameters, MoEOptions(latent=32, seed=6)))
    assert set(one) == {
        "router.weight", "w_in", "w_out", "latent_in.weight", "latent_out.weight",
        "shared.w_in.weight", "shared.w_out.weight",
    }  # fmt: skip
    for name, value in one.items():
        assert torch.equal(value, two[name])
        assert torch.equal(value, four[name])
        assert name not in other or not torch.equal(value, other[name])
    assert not torch.equal(one["w_in"][0], one["w_in"][1])
    assert float(one["w_in"].std()) == pytest.approx(32**-0.5, rel=0.05)


def test_only_the_routed_experts_are_marked(pools):
    for result in pools(2).run(initial_parameters, MoEOptions(latent=32, shared_intermediate=16)):
        assert result["local"] == {"w_in", "w_out"}


def infer(group: object, settings: dict[str, object], tokens: tuple[int, ...]) -> torch.Tensor:
    options = MoEOptions(shared_intermediate=16)
    with open_ep(group, options, **settings) as ep:
        layer = make_layer(ep, options)
        x, _ = Problem(options, tokens).inputs()[ep.rank]
        with torch.no_grad():
            return layer(x)


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "high_throughput", "dispatch_dtype": "fp8"},
        {"mode": "low_latency", "dispatch_dtype": "fp8"},
        {"mode": "low_latency", "dispatch_dtype": "fp8", "scale_format": "ue8m0"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_inference_with_fp8_rows_is_near_that_with_bf16(pools, settings):
    tokens = (30, 0, 9, 64)
    exact = pools(4).run(infer, {}, tokens)
    for got, want in zip(pools(4).run(infer, settings, tokens), exact, strict=True):
        error = (got - want).norm()
        assert error <= 0.06 * want.norm()  # e4m3 errs by up to 1 in 16, by 1 in 45 in the mean
        assert not len(want) or error > 0


def change_over(group: object) -> tuple[bool, str]:
    options = MoEOptions()
    with open_ep(group, options) as training, open_ep(group, options, mode="low_latency") as fast:
        layer = make_layer(training, options)
        x, _ = Problem(options, (20, 31)).inputs()[training.rank]
        with torch.no_grad():
            before = layer(x)
            layer.dispatcher = fast
            after = layer(x.reshape(1, -1, HIDDEN))
        with pytest.raises(UsageError) as caught:
            layer(x)
        return torch.equal(before, after[0]), str(caught.value)


def test_a_trained_layer_changes_over_to_low_latency_bit_for_bit(pools):
    for same, message in pools(2).run(change_over):
        assert same
        assert "no_grad" in message


def swap_for_another_group(group: object) -> str:
    options = MoEOptions()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with open_ep(group, options) as together, open_ep(alone, options) as apart:
        layer = make_layer(together, options)
        with pytest.raises(ArgumentError) as caught:
            layer.dispatcher = apart
        assert layer.dispatcher is together
        return caught.value.argument


def test_experts_cannot_move_to_another_split_of_the_ranks(pools):
    arguments = pools(2).run(swap_for_another_group)
    assert arguments == ["dispatcher.experts_per_rank", "dispatcher.rank"]


def count(group: object, tokens: tuple[int, ...]) -> dict[str, object]:
    options = MoEOptions()
    with open_ep(group, options) as ep:
        layer = make_layer(ep, options)
        x, _ = Problem(options, tokens).inputs()[ep.rank]
        chosen, _, _ = layer.router(x)
        layer(x.requires_grad_()).sum().backward()
        result = {"chosen": chosen, **dataclasses.asdict(layer.statistics)}
        layer.statistics.reset()
        assert layer.statistics.bytes_sent == 0
        assert layer.statistics.expert_rows.tolist() == [0] * ep.experts_per_rank
        return result


def test_statistics_count_rows_and_bytes(pools):
    tokens = (12, 0, 31, 5)
    results = pools(4).run(count, tokens)
    chosen = torch.cat([result["chosen"] for result in results])
    rows = torch.cat([result["expert_rows"] for result in results])
    assert rows.tolist() == torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for rank, result in enumerate(results):
        pairs = {
            (token, expert // 2)
            for token, experts in enumerate(result["chosen"].tolist())
            for expert in experts
            if expert // 2 != rank
        }
        assert result["tokens"] == tokens[rank]
        # Forward and backward pass each send a row there and bring one back.
        assert result["bytes_sent"] == result["bytes_returned"] == 2 * len(pairs) * HIDDEN * 2
        assert result["dispatch_seconds"] > 0
        assert result["combine_seconds"] > 0


class Reads(TorchFunctionMode):
    """Notes what would wait for a GPU if tensors were there."""

    WAITING = frozenset({
        "__bool__", "__float__", "__index__", "__int__", "bincount", "cpu", "item", "nonzero",
        "numpy", "repeat_interleave", "tolist", "unique",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.WAITING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Aside:
    """Hides the reads of its own calls, which are the host backend's."""

    reads: Reads

    def _hidden(self, call, *args, **options):
        before = len(self.reads.names)
        result = call(*args, **options)
        del self.reads.names[before:]
        return result

    def dispatch(self, *args: object, **options: object) -> DispatchResult:
        return self._hidden(super().dispatch, *args, **options)

    def combine(self, *args: object, **options: object) -> torch.Tensor:
        return self._hidden(super().combine, *args, **options)

    def combine_weights(self, *args: object) -> torch.Tensor:
        return self._hidden(super().combine_weights, *args)


class LowLatencyAside(Aside, LowLatency):
    pass


class HighThroughputAside(Aside, HighThroughput):
    pass


ASIDE = {"low_latency": LowLatencyAside, "high_throughput": HighThroughputAside}


@pytest.mark.parametrize("mode", ["high_throughput", "low_latency"])
def test_a_layer_reads_one_tensor_in_its_forward_pass_and_none_in_its_backward_pass(mode):
    options = MoEOptions(shared_intermediate=16)
    with open_ep(None, options, kind=ASIDE[mode]) as ep, Reads() as ep.reads:
        layer = make_layer(ep, options).requires_grad_(mode == "high_throughput")
        x = torch.ones((30, HIDDEN))
        for _ in range(2):
            out = layer(x)
        assert ep.reads.names == ["tolist"] * 2
        if mode == "high_throughput":
            (out.sum() + layer.balance_loss).backward()
            assert ep.reads.names == ["tolist"] * 2
        assert layer.statistics.expert_rows.sum() == 2 * 30 * TOP_K


@pytest.mark.parametrize("capacity", [None, 200])
def test_where_rows_lie_is_read_once_unless_a_graph_may_write_it_again(capacity):
    """A CUDA graph is one with a capacity: its replays fill the tensors of one plan."""
    options = MoEOptions()
    with (
        open_ep(None, options, kind=HighThroughputAside, expert_alignment=4) as ep,
        Reads() as ep.reads,
    ):
        idx = torch.arange(60).reshape(20, 3) % 7
        received = ep.dispatch(torch.ones((20, HIDDEN)).bfloat16(), idx, capacity=capacity)
        again = ep.dispatch(torch.ones((20, HIDDEN)).bfloat16(), previous=received)
        for brought in (received, dataclasses.replace(received, weights=None), again):
            rows = [brought.expert(expert).shape[0] for expert in range(EXPERTS)]
            assert rows == [9, 9, 9, 9, 8, 8, 8, 0]
            assert [count for _, count in brought.expert_ranges()] == rows
        counts = received.source.dispatched.plan.tokens_per_expert
        counts[7] = 3
        assert len(received.expert(7)) == (0 if capacity is None else 3)
        assert capacity is not None or ep.reads.names == ["tolist"] * 2


def test_sizes_that_are_not_the_dispatchers_are_refused():
    options = MoEOptions()
    with open_ep(None, options) as ep:
        for sizes, name in [
            ((HIDDEN + 8, INTERMEDIATE, EXPERTS, TOP_K), "dispatcher.hidden"),
            ((HIDDEN, INTERMEDIATE, EXPERTS * 2, TOP_K), "dispatcher.num_experts"),
            ((HIDDEN, INTERMEDIATE, EXPERTS, TOP_K + 1), "dispatcher.top_k"),
            ((HIDDEN, 0, EXPERTS, TOP_K), "intermediate"),
        ]:
            with pytest.raises(ArgumentError) as caught:
                MoE(*sizes, dispatcher=ep, options=options)
            assert caught.value.argument == name
    with pytest.raises(ArgumentError, match="score"):
        MoEOptions(score="relu")
    with pytest.raises(ArgumentError, match="dtype"):
        MoEOptions(dtype=torch.int64)


def test_a_layer_prints_its_sizes_and_keeps_the_dtype_of_its_input():
    options = MoEOptions()
    with open_ep(None, options) as ep:
        layer = make_layer(ep, options)
        assert "num_experts=8, top_k=3, local_experts=0..7" in repr(layer)
        for dtype in (torch.float32, torch.bfloat16):
            assert layer(torch.zeros((2, 3, HIDDEN), dtype=dtype)).dtype == dtype


def test_a_layer_may_change_its_dtype_and_run_under_autocast():
    options = MoEOptions(latent=32, shared_intermediate=16)
    x = torch.randn((50, HIDDEN), generator=torch.Generator().manual_seed(2))
    with open_ep(None, options) as ep:
        layer = make_layer(ep, options)
        exact = layer(x)
        routing = layer.router(x)[:2]
        with torch.autocast("cpu", torch.bfloat16):
            assert all(map(torch.equal, layer.router(x)[:2], routing))
            near = layer(x)
            (near.float().sum() + layer.balance_loss).backward()
        assert (near - exact).norm() <= 0.03 * exact.norm()
        layer.to(torch.bfloat16)
        assert (layer(x) - exact).norm() <= 0.05 * exact.norm()
        assert layer.w_in.dtype == torch.bfloat16
