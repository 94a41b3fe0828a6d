"""What several ranks do with FusedMoE on GPUs, against its exact reference. Ranks are processes, or
threads on one GPU (:mod:`tests.gpu.one_gpu`), whose rules all keep."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fanfold
from fanfold.errors import FanfoldError, PeerRefused, PeerTimeout, UsageError
from fanfold.formats import quantize
from fanfold.fused_moe import ExpertWeights, FusedMoeTuning, difference
from fanfold.fused_moe.tuning import FORMS
from fanfold.group import Group, as_group
from tests.distributed.fused_layers import FusedShape, FusedTokens, expected, tokens_of, weights_of
from tests.gpu.one_gpu import capture, meet, wait

__all__ = [
    "BAD",
    "CLOSE",
    "FAST",
    "TOKENS",
    "absent",
    "all_there",
    "bad_entry",
    "bursts",
    "check_absence",
    "check_refusals",
    "few",
    "geometries",
    "graphs",
    "large",
    "refused",
    "repeated",
    "shared_count",
    "shared_expert",
    "slots_here",
    "there",
    "tuning_of",
    "weights_there",
]  # fmt: skip

# What the kernel is at: activations that round the other way, approximate divisions.
CLOSE = 5e-5
FAST = 2e-4  # random terms
TOKENS = 1000  # seeds of tokens; with those of weights a row of both would be the same
BAD = 1
"""The rank that errs or never calls."""


def shape_of(ranks: int, **changes: Any) -> FusedShape:
    made = FusedShape(ranks * 3, 4, 384, 256, max_tokens=160)
    return dataclasses.replace(made, **changes)


def there(call: FusedTokens) -> FusedTokens:
    """The same on the GPU."""
    return FusedTokens(call.x.cuda(), call.topk_idx.cuda(), call.topk_weights.cuda())


def all_there(group: Group, calls: Sequence[FusedTokens]) -> list[FusedTokens]:
    """The same on the GPU, once all ranks have theirs there: a copy may wait until the kernel of
    another thread's rank ends, which may wait for this one. Collective."""
    moved = [there(call) for call in calls]
    meet(group)
    return moved


def weights_there(weights: ExpertWeights) -> ExpertWeights:
    """The same on the GPU."""
    tensors = (weights.l1, weights.l1_scales, weights.l2, weights.l2_scales)
    return ExpertWeights(*(tensor.cuda() for tensor in tensors))


def tuning_of(fast: bool) -> FusedMoeTuning | None:
    """With ``fast`` the form whose sums stay in the tensor cores for any number of tokens; the
    swapped form adds FP32 sums. Otherwise the layer chooses."""
    return FORMS["rows"] if fast else None


def slots_here(group: Group, call: FusedTokens, num_experts: int) -> torch.Tensor:
    """How many slots each expert of this rank receives from all ranks' calls. Collective."""
    chosen = torch.cat([idx.flatten() for idx in group.all_gather(call.topk_idx)])
    counts = torch.bincount(chosen[chosen >= 0], minlength=num_experts)
    local = num_experts // group.size
    return counts[group.rank * local :][:local].int()


class Layer:
    """A layer of one rank with the weights of its experts."""

    def __init__(self, group: Any, shape: FusedShape, seed: int = 0, **changes: Any) -> None:
        self.shape, self.group = shape, group
        self.moe = shape.open(group, **changes)
        assert self.moe.backend == "cuda"
        self.weights = weights_of(shape, seed)
        part = self.weights.shard(group.rank, group.size)
        self.here = weights_there(part)
        wait()

    def run(
        self, call: FusedTokens, out: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        out = torch.full_like(call.x, float("nan")) if out is None else out
        rest = (call.topk_idx, call.topk_weights, self.here)
        return self.moe.forward(call.x, *rest, out=out, **options)

    def run_and_check(self, call: FusedTokens, out: torch.Tensor) -> None:
        """What the call finds is raised, by itself if the GPU is quick."""
        self.run(call, out)
        wait()
        self.moe.check()

    def check(self, call: FusedTokens, *, on_gpu: bool = False) -> torch.Tensor:
        """The result of a call of the CPU's tensors, which is right; by a reference on the GPU,
        which threads may not wait for, if asked for."""
        local = self.moe.experts_per_rank
        statistics = torch.full((local,), 5, dtype=torch.int32, device="cuda")
        (mine,) = all_there(self.group, [call])
        y = self.run(mine, statistics=statistics)
        wait()
        self.moe.check()  # a call that was given up says so, before its result is found wrong
        if on_gpu:
            weights = weights_there(self.weights)
            wanted = expected(self.shape, mine, weights).cpu()
        else:
            wanted = expected(self.shape, call, self.weights)
        close = FAST if self.shape.fast_accumulation else CLOSE
        assert difference(y.cpu(), wanted) < close, (self.shape, self.moe.rank, len(y))
        assert torch.equal(statistics.cpu(), self.slots(call) + 5)
        return y

    def slots(self, call: FusedTokens) -> torch.Tensor:
        """What the statistics of this rank count in a call of the CPU's tensors. Collective."""
        return slots_here(self.group, call, self.shape.num_experts)

    def close(self) -> None:
        wait()
        self.moe.check()
        meet(self.group)
        self.moe.close()


def few(
    given: Any,
    seed: int,
    *,
    tuning: FusedMoeTuning | None = None,
    masked: float = 0.2,
    **changes: Any,
) -> None:
    """Three calls of one small layer."""
    group = as_group(given)
    shape = shape_of(group.size, **{"max_tokens": 20, **changes})
    layer = Layer(group, shape, seed, tuning=tuning)
    for number in range(3):
        tokens = 0 if number == group.rank else shape.max_tokens
        layer.check(tokens_of(shape, tokens, TOKENS + number * 10 + group.rank, masked=masked))
    layer.close()


def shared_count(given: Any) -> None:
    """Calls with so many entries that CTAs share their count (kSharedCountEntries in
    fused_moe/route.cuh), few of them slots. In some calls a rank has no tokens and shares none."""
    few(given, 0, masked=0.97, top_k=32, hidden=128, intermediate=128, max_tokens=1100)


def geometries(given: Any, first: int) -> None:
    """In each form, and in those that every rank chooses by its tokens."""
    group = as_group(given)
    for seed in range(first, first + 6):
        draw = random.Random(seed)
        form = [*FORMS, None][seed % 4]
        shape = FusedShape(
            num_experts=group.size * draw.choice([1, 2, 5, 30]),
            top_k=draw.choice([1, 2, 6, 8, 11, 32]),
            # Up to 1024 columns are one group.
            hidden=128 * (9 if form == "groups" else draw.choice([1, 2, 3, 4, 9])),
            intermediate=128 * draw.choice([1, 2, 3]),
            max_tokens=draw.choice([1, 20, 150]),
            activation_clamp=draw.choice([None, 0.25, 1.0]),
            fast_accumulation=draw.random() < 0.3,
        )
        layer = Layer(group, shape, seed, tuning=None if form is None else FORMS[form])
        for number in range(3):
            masked, skewed = draw.choice([0.0, 0.3, 1.0]), draw.random() < 0.3
            counts = [draw.choice([0, 1, shape.max_tokens]) for _ in range(group.size)]
            call = tokens_of(
                shape, counts[group.rank], TOKENS + number * 10 + group.rank, masked=masked,
                skewed=skewed,
            )  # fmt: skip
            layer.check(call)
        layer.close()


def repeated(given: Any, rounds: int, fast: bool = False) -> None:
    group = as_group(given)
    shape = shape_of(group.size, fast_accumulation=fast)
    layer = Layer(group, shape, tuning=tuning_of(fast))
    calls = [tokens_of(layer.shape, n, TOKENS + n + group.rank) for n in (160, 0, 7, 64, 129)]
    first = [layer.check(call) for call in calls]
    calls = all_there(group, calls)
    differs = torch.zeros((), dtype=torch.int32, device="cuda")
    for number in range(rounds):
        place = number % len(calls)
        y = layer.run(calls[place])
        differs += (y.view(torch.int16) != first[place].view(torch.int16)).any().int()
        if number % 32 == 0:
            wait()
    wait()
    assert int(differs) == 0
    layer.close()


def bursts(given: Any, replays: int) -> None:
    """Graphs of 64 calls, between which a rank does nothing. Each rank has an order of its own, so
    in most calls the ranks have different numbers of tokens."""
    group = as_group(given)
    layer = Layer(group, shape_of(group.size))
    calls = [tokens_of(layer.shape, n, TOKENS + n + group.rank) for n in (0, 1, 7, 30)]
    ys = [layer.check(call).cpu() for call in calls]
    slots = torch.stack([layer.slots(call) for call in calls]).sum(0, dtype=torch.int32)
    calls = [there(call) for call in calls]
    tokens = [quantize(call.x) for call in calls]
    statistics = torch.zeros(slots.shape, dtype=torch.int32, device="cuda")
    order = [*range(len(calls))] * 16
    random.Random(group.rank).shuffle(order)
    outs = [torch.empty_like(calls[n].x) for n in order]

    def burst() -> torch.Tensor:
        for n, out in zip(order, outs, strict=True):
            rest = (calls[n].topk_idx, calls[n].topk_weights, layer.here)
            layer.moe.forward(tokens[n], *rest, statistics=statistics, out=out)
        return outs[0]

    graph, _ = capture(group, burst)
    meet(group)
    for _ in range(replays):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        wait()
        for n, out in zip(order, outs, strict=True):
            assert torch.equal(out.cpu(), ys[n])
    assert torch.equal(statistics.cpu(), 16 * replays * slots)
    layer.close()
    del graph


def graphs(given: Any, fast: bool = False) -> None:
    group = as_group(given)
    shape = shape_of(group.size, fast_accumulation=fast)
    layer = Layer(group, shape, tuning=tuning_of(fast))
    calls = [tokens_of(layer.shape, 50, TOKENS + 10 * n + group.rank) for n in range(3)]
    ys = [layer.check(call) for call in calls]
    slots = torch.stack([layer.slots(call) for call in calls]).sum(0, dtype=torch.int32)
    calls = all_there(group, calls)
    fixed = FusedTokens(*(tensor.clone() for tensor in vars(calls[0]).values()))
    out = torch.empty_like(fixed.x)
    rest = (fixed.topk_idx, fixed.topk_weights, layer.here)
    statistics = torch.zeros(slots.shape, dtype=torch.int32, device="cuda")
    layer.moe.forward(fixed.x, *rest, out=out)

    def three() -> torch.Tensor:
        for _ in range(3):
            layer.moe.forward(fixed.x, *rest, statistics=statistics, out=out)
        return out

    graph, _ = capture(group, three)
    meet(group)
    for _ in range(4):
        for call, y in zip(calls, ys, strict=True):
            for to, tensor in zip(vars(fixed).values(), vars(call).values(), strict=True):
                to.copy_(tensor)
            out.fill_(float("nan"))
            graph.replay()
            again = layer.run(call)
            wait()
            assert torch.equal(out.cpu(), y.cpu())
            assert torch.equal(again.cpu(), y.cpu())
    assert torch.equal(statistics.cpu(), 4 * 3 * slots)
    layer.close()
    del graph


def shared_expert(given: Any) -> None:
    group = as_group(given)
    layer = Layer(group, shape_of(group.size))
    one = dataclasses.replace(layer.shape, num_experts=1, intermediate=384)
    shared = weights_of(one, 9)
    here = weights_there(shared)
    wait()
    call = tokens_of(layer.shape, 20 + group.rank, TOKENS + group.rank)
    layer.moe.prepare_shared_expert(384)
    (mine,) = all_there(group, [call])
    # Ranks need not agree about it.
    options: dict[str, Any] = {} if group.rank == BAD else {"shared_expert": here}
    for _ in range(3):
        y = layer.run(mine, **options)
    wait()
    wanted_with = {"shared_expert": shared} if options else {}
    assert difference(y.cpu(), expected(layer.shape, call, layer.weights, **wanted_with)) < CLOSE
    layer.close()


def unprepared(given: Any) -> None:
    """A shared expert whose kernel would be loaded while others' kernels may run."""
    group = as_group(given)
    layer = Layer(group, shape_of(group.size))
    one = dataclasses.replace(layer.shape, num_experts=1, intermediate=512)
    shared = weights_of(one, 9)
    here = weights_there(shared)
    wait()
    call = tokens_of(layer.shape, 20, TOKENS + group.rank)
    with pytest.raises(UsageError, match=r"call prepare_shared_expert\(512\) on all of them"):
        layer.run(there(call), shared_expert=here)
    wait()
    with contextlib.suppress(PeerRefused):
        layer.moe.check()
    layer.check(call)
    layer.close()


def refused(ranks: Any) -> list[str]:
    group = as_group(ranks)
    layer = Layer(group, shape_of(group.size))
    call = tokens_of(layer.shape, 30, TOKENS + group.rank)
    y = layer.check(call)
    said = []
    given = call
    if group.rank == BAD:
        # Not on the GPU: a kernel's first launch may wait there for other ranks' kernels.
        given = dataclasses.replace(call, topk_weights=call.topk_weights.double())
    for _ in range(3):
        (bad,) = all_there(group, [given])
        try:
            layer.run(bad)
            wait()
            layer.moe.check()
        except FanfoldError as error:
            said.append(f"{type(error).__name__}: {error}")
        # On the rank that refuses, too, its kernel waits for the others, who may not launch theirs
        # while a copy from the CPU waits behind it.
        wait()
        assert torch.equal(layer.check(call).cpu(), y.cpu())
    layer.close()
    return said


def check_refusals(rank: int, said: list[str]) -> None:
    """What :func:`refused` has to return on ``rank``."""
    assert len(said) == 3
    for number, message in enumerate(said):
        if rank == BAD:
            assert message.startswith("ArgumentError: topk_weights.dtype is torch.float64")
        else:
            assert message.startswith(f"PeerRefused: rank {BAD} refused its input to fused_moe")
            assert message.endswith(f"call {2 + 2 * number}; its own exception says why")


def absent(given: Any) -> str:
    group = as_group(given)
    config = fanfold.Config.resolve(timeout_s=1.0)
    layer = Layer(group, shape_of(group.size), config=config)
    call = tokens_of(layer.shape, 30, TOKENS + group.rank)
    layer.check(call)
    (mine,) = all_there(group, [call])
    if group.rank == BAD:
        return ""
    layer.run(mine)
    wait()
    for _ in range(2):
        with pytest.raises(PeerTimeout) as raised:
            layer.moe.check()
    assert raised.value.peer == BAD
    return str(raised.value)


def check_absence(found: list[str]) -> None:
    """What :func:`absent` has to return on all ranks."""
    for rank, message in enumerate(found):
        if rank != BAD:
            start = f"rank {rank} waited 1 s for rank {BAD} in fused_moe: expected 2, have 1"
            assert message.startswith(start)


def large(given: Any, fast: bool = False) -> None:
    """Rows enough for pairs of blocks, groups of columns and a shared count of the routing."""
    group = as_group(given)
    sizes = (group.size * 8, 8, 2048, 1024)
    shape = FusedShape(*sizes, max_tokens=4200, fast_accumulation=fast)
    layer = Layer(group, shape)
    for tokens in (4200 - 100 * group.rank, 300, 0):
        layer.check(tokens_of(shape, tokens, TOKENS + tokens, masked=0.0), on_gpu=True)
    layer.close()


def bad_entry(given: Any) -> None:
    group = as_group(given)
    layer = Layer(group, shape_of(group.size))
    call = tokens_of(layer.shape, 30, TOKENS + group.rank, masked=0.0)
    if group.rank == BAD:
        call.topk_idx[3, 2] = layer.shape.num_experts
    (there_too,) = all_there(group, [call])
    y = torch.empty_like(there_too.x)
    if group.rank == BAD:
        with pytest.raises(fanfold.ArgumentError, match=r"topk_idx\[3, 2\] of call 1 is"):
            layer.run_and_check(there_too, y)
        call.topk_idx[3, 2] = -1
    else:
        layer.run(there_too, y)
    wait()
    assert difference(y.cpu(), expected(layer.shape, call, layer.weights)) < CLOSE
    layer.close()
