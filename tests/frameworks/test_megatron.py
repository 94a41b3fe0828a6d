"""Megatron-LM's own token dispatchers: the flexible one, which calls ``deep_ep``, against the one
of all-to-all, forward and backward. ``make test-frameworks`` installs what they need."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fanfold.launch import RankPool

pytestmark = [pytest.mark.frameworks, pytest.mark.placements("processes")]

Pools = Callable[[int], RankPool]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """One layer, whose experts multiply their rows by a number."""

    tokens: tuple[int, ...]  # of each rank
    local: int = 4  # experts of a rank
    top_k: int = 3
    hidden: int = 64
    capacity_factor: float | None = None  # of each expert; what is beyond is dropped
    padded: bool = False  # and each expert gets as many tokens of every rank
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.local


LAYERS = [
    Layer(tokens=(10, 11)),
    Layer(tokens=(6, 0, 17, 9), top_k=5, seed=1),
    Layer(tokens=(33, 5), local=24, top_k=2, hidden=256, seed=2),  # more than 32 experts
    Layer(tokens=(16, 16), capacity_factor=1.0, seed=3),
]
PADDED = Layer(tokens=(16, 16), capacity_factor=1.0, padded=True, seed=4)


class NoStream:
    """What Megatron asks a stream of a GPU for, where there is none."""

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Megatron's all-to-all takes for granted that there is a GPU: it asks for streams, makes
    tensors on the current device, and counts of rows are lists only once they were copied there."""
    all_to_all = dist.all_to_all_single

    def of_lists(output: Any, given: Any, *splits: Any, **options: Any) -> Any:
        options |= dict(zip(("output_split_sizes", "input_split_sizes"), splits, strict=False))
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                options[name] = value.tolist()
        return all_to_all(output, given, **options)

    stream = NoStream()
    with (
        mock.patch.object(dist, "all_to_all_single", of_lists),
        mock.patch.multiple(
            torch.cuda,
            Stream=NoStream,
            current_device=lambda: CPU,
            current_stream=lambda *_: stream,
            stream=contextlib.nullcontext,
        ),
    ):
        yield


def dispatcher_of(group: dist.ProcessGroup, layer: Layer, kind: str) -> Any:
    """Megatron's dispatcher: ``alltoall``, or the flexible one over ``deepep`` or ``hybridep``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else could be installed
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.transformer_config import TransformerConfig
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    flexible = kind != "alltoall"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=layer.hidden,
        num_attention_heads=4,
        num_moe_experts=layer.experts,
        moe_router_topk=layer.top_k,
        moe_router_dtype="fp32",
        moe_expert_capacity_factor=layer.capacity_factor,
        moe_pad_expert_input_to_capacity=layer.padded,
        moe_token_dispatcher_type="flex" if flexible else "alltoall",
        expert_model_parallel_size=ranks,
        bf16=True,
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
        **({"moe_flex_dispatcher_backend": kind} if flexible else {}),
    )
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    groups = ProcessGroupCollection(tp=alone, ep=group, tp_ep=group, expt_tp=alone)
    made = (
        token_dispatcher.MoEFlexTokenDispatcher
        if flexible
        else token_dispatcher.MoEAlltoAllTokenDispatcher
    )
    local = range(rank * layer.local, (rank + 1) * layer.local)
    return made(layer.local, list(local), config, groups)


def inputs_of(layer: Layer, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``[T, 1, hidden]`` and router logits ``[T, E]``, the same on any device."""
    generator = torch.Generator().manual_seed(100 * layer.seed + rank)
    tokens = layer.tokens[rank]
    x = torch.randn((tokens, 1, layer.hidden), generator=generator, dtype=torch.float32, device=CPU)
    logits = torch.randn((tokens, layer.experts), generator=generator, dtype=torch.float32,
                         device=CPU)  # fmt: skip
    return x.to(device, torch.bfloat16).requires_grad_(), logits.to(device).requires_grad_()


def routing_of(layer: Layer, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The map of tokens and experts, and the probabilities of those on it."""
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs, dtype=torch.bool)
    chosen.scatter_(1, probs.topk(layer.top_k).indices, True)
    if layer.capacity_factor is not None:
        room = math.ceil(layer.capacity_factor * len(probs) * layer.top_k / layer.experts)
        if layer.padded:  # as the router fills experts up, the likeliest tokens first
            kept = torch.where(chosen, probs, 0.0).topk(room, dim=0).indices
            return torch.zeros_like(chosen).scatter_(0, kept, True), torch.where(chosen, probs, 0.0)
        # As it drops what an expert has no room for.
        chosen &= torch.cumsum(chosen, 0, dtype=torch.int64) <= room
    return chosen, torch.where(chosen, probs, 0.0)


def _loss(out: torch.Tensor, number: int) -> torch.Tensor:
    """The sum, whose gradient has no memory of its own, or one of other weights."""
    if number % 2:
        return out.sum()
    weights = torch.linspace(-1, 1, out.shape[-1], dtype=torch.float32, device=out.device)
    return (out.float() * weights).sum()


def factor_of(expert: int) -> float:
    return 0.5 + expert / 8


def layer_results(
    group: dist.ProcessGroup, layer: Layer, kind: str, device: torch.device = CPU, rounds: int = 2
) -> list[Results]:
    """The output and the gradients of the layer's input and logits, of each round."""
    rank = dist.get_rank(group)
    results = []
    patched = kind == "alltoall" and device.type == "cpu"
    with on_the_cpu() if patched else contextlib.nullcontext():
        dispatcher = dispatcher_of(group, layer, kind)
        for number in range(rounds):
            x, logits = inputs_of(layer, rank, device)
            chosen, probs = routing_of(layer, logits * (1 + number))
            hidden, sent = dispatcher.dispatch_preprocess(x, chosen, probs)
            hidden, sent = dispatcher.token_dispatch(hidden, sent)
            rows, counts, row_probs = dispatcher.dispatch_postprocess(hidden, sent)
            factors = torch.tensor(
                [factor_of(rank * layer.local + each) for each in range(layer.local)],
                dtype=torch.float32, device=device,
            ).repeat_interleave(counts.long().to(device))  # fmt: skip
            y = (rows.float() * (factors * row_probs).unsqueeze(1)).to(torch.bfloat16)
            y = dispatcher.token_combine(dispatcher.combine_preprocess(y))
            out = dispatcher.combine_postprocess(y)
            _loss(out, number).backward()
            assert x.grad is not None
            assert logits.grad is not None
            found = (out.detach().float(), x.grad.float(), logits.grad)
            results.append(tuple(tensor.cpu() for tensor in found))
    return results


def without_communication(layer: Layer, rank: int, rounds: int = 2) -> list[Results]:
    """The same from plain products, in fp32."""
    results = []
    for number in range(rounds):
        given, logits = inputs_of(layer, rank, CPU)
        x = given.detach().float().requires_grad_()
        chosen, probs = routing_of(layer, logits * (1 + number))
        probs = torch.where(chosen, probs, 0.0)
        factors = torch.tensor(
            [factor_of(expert) for expert in range(layer.experts)], dtype=torch.float32, device=CPU
        )
        out = x * (probs * factors).sum(1).reshape(-1, 1, 1)
        _loss(out, number).backward()
        assert x.grad is not None
        assert logits.grad is not None
        results.append((out.detach(), x.grad, logits.grad))
    return results


def assert_near(found: list[list[Results]], wanted: list[list[Results]]) -> None:
    """Rows and their sums are rounded to bfloat16 on the way, at most three times (2^-9 each)."""
    for rounds, others in zip(found, wanted, strict=True):
        for tensors, expected in zip(rounds, others, strict=True):
            for tensor, reference in zip(tensors, expected, strict=True):
                largest = float(reference.abs().max()) if reference.numel() else 0.0
                torch.testing.assert_close(tensor, reference, rtol=2**-6, atol=2**-7 * largest)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.tokens}-{layer.seed}")
@pytest.mark.parametrize("kind", ["deepep", "hybridep"])
def test_like_its_all_to_all(pools: Pools, layer: Layer, kind: str) -> None:
    wanted = pools(layer.ranks).run(layer_results, layer, "alltoall")
    plain = [without_communication(layer, rank) for rank in range(layer.ranks)]
    assert_near(wanted, plain)
    assert_near(pools(layer.ranks).run(layer_results, layer, kind), wanted)


def test_experts_of_a_fixed_number_of_rows(pools: Pools) -> None:
    """Where Megatron knows how many rows come, the CPU waits for nothing."""
    wanted = pools(PADDED.ranks).run(layer_results, PADDED, "alltoall")
    assert_near(wanted, [without_communication(PADDED, rank) for rank in range(PADDED.ranks)])
    assert_near(pools(PADDED.ranks).run(layer_results, PADDED, "hybridep"), wanted)
