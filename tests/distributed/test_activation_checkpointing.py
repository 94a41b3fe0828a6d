"""MoE layers under torch.utils.checkpoint: the same gradients, nothing kept, calls in step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fanfold.high_throughput import HighThroughput
from fanfold.nn import MoE, MoEOptions
from fanfold.nn.sharding import local_part
from fanfold.results import HighThroughputResult

HIDDEN, TOKENS = 48, (20, 0)
FORWARD = ["dispatch", "combine"]
BACKWARD = ["dispatch again", "combine", "combine_weights"]


class Watched(HighThroughput):
    """Notes its calls, and the memory of the rows that they bring."""

    def __init__(self, group: object) -> None:
        super().__init__(group, num_experts=8, top_k=3, hidden=HIDDEN, max_tokens=64)
        self.calls: list[str] = []
        self.rows: list[StorageWeakRef] = []

    def dispatch(self, *args: object, **options: object) -> HighThroughputResult:
        received = super().dispatch(*args, **options)
        self.calls.append("dispatch again" if options.get("previous") else "dispatch")
        self.rows.append(StorageWeakRef(received.tokens.untyped_storage()))
        return received

    def combine(self, *args: object, **options: object) -> torch.Tensor:
        self.calls.append("combine")
        return super().combine(*args, **options)

    def combine_weights(self, *args: object) -> torch.Tensor:
        self.calls.append("combine_weights")
        return super().combine_weights(*args)


class Noted(torch.autograd.Function):
    """The identity, which saves a tensor for nothing but to see whether it is freed."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, seen: list[weakref.ref]) -> torch.Tensor:
        saved = torch.ones(1)
        seen.append(weakref.ref(saved))
        ctx.save_for_backward(saved)
        return x * 1

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Block(torch.nn.Module):
    """A layer with something before and behind it; returns its balance loss, too."""

    def __init__(self, ep: HighThroughput, seed: int) -> None:
        super().__init__()
        options = MoEOptions(seed=seed, balance=1.0, shared_intermediate=8)
        self.moe = MoE(HIDDEN, 40, 8, 3, dispatcher=ep, options=options)
        self.seen: list[weakref.ref] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.moe(Noted.apply(x, self.seen)).tanh()
        return x + out, self.moe.balance_loss


def plain(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return block(x)


def checkpointed(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, _ = checkpoint(block, x, use_reentrant=False)
    return out, block.moe.balance_loss


def to_the_end(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with set_checkpoint_early_stop(False):
        return checkpointed(block, x)


def reentrant(block: Block, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return checkpoint(block, x, use_reentrant=True)


@dataclass
class Step:
    """What a rank saw of one training step."""

    results: list[torch.Tensor] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    kept_by_forward: list[bool] = field(default_factory=list)
    kept_by_backward: list[bool] = field(default_factory=list)
    same_loss: bool = False


Run = Callable[[Block, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def train(group: object, run: Run, backwards: int = 1) -> Step:
    """A step through two blocks: output, balance loss and gradients."""
    step = Step()
    with Watched(group) as ep:
        blocks = [Block(ep, seed) for seed in (1, 2)]
        generator = torch.Generator().manual_seed(ep.rank)
        x = torch.randn((TOKENS[ep.rank], HIDDEN), generator=generator).requires_grad_()
        gc.disable()
        out, balance = x, torch.zeros(())
        for block in blocks:
            out, loss = run(block, out)
            balance = balance + loss
        step.kept_by_forward = [not rows.expired() for rows in ep.rows]
        kept = [block.moe.balance_loss for block in blocks]
        for turn in range(backwards):
            (out.square().sum() + balance).backward(retain_graph=turn + 1 < backwards)
        step.same_loss = all(b.moe.balance_loss is k for b, k in zip(blocks, kept, strict=True))
        del kept, loss
        seen = [ref() is not None for block in blocks for ref in block.seen]
        step.kept_by_backward = [not rows.expired() for rows in ep.rows] + seen
        gc.enable()
        step.calls = ep.calls
        step.results = [out.detach(), balance.detach(), x.grad]
        grads = [p.grad for block in blocks for p in block.parameters()]
        step.results += map(local_part, grads)
    return step


@pytest.mark.parametrize(
    ("run", "backwards"),
    [(checkpointed, 1), (checkpointed, 2), (to_the_end, 1), (reentrant, 1), (reentrant, 2)],
)
def test_checkpoints_change_no_bit_and_keep_nothing(pools, run, backwards):
    expected = pools(2).run(train, plain, backwards)
    steps = pools(2).run(train, run, backwards)
    assert steps[0].calls == steps[1].calls == 2 * FORWARD + backwards * 2 * (FORWARD + BACKWARD)
    for step, want in zip(steps, expected, strict=True):
        assert all(map(torch.equal, step.results, want.results))
        assert len(step.results) == len(want.results) > 10
        assert not any(step.kept_by_forward)
        assert not any(step.kept_by_backward)
        assert step.same_loss


def test_without_checkpoints_nothing_outlives_the_backward_pass(pools):
    steps = pools(2).run(train, plain)
    assert steps[0].calls == steps[1].calls == 2 * FORWARD + 2 * BACKWARD
    assert all(steps[0].kept_by_forward)  # or the tests above would see nothing
    for step in steps:
        assert not any(step.kept_by_backward)
        assert step.same_loss


def forgotten(group: object) -> list[bool]:
    """Whether the balance loss has a gradient if a checkpoint does not return it."""
    with Watched(group) as ep:
        block = Block(ep, 1)
        x = torch.ones((4, HIDDEN)).requires_grad_()
        having = []
        for reentrant in (False, True):
            checkpoint(lambda x: block(x)[0], x, use_reentrant=reentrant)
            having.append(block.moe.balance_loss.requires_grad)
        return having


def test_a_reentrant_checkpoint_must_return_the_balance_loss(pools):
    # As documented: if this fails, PyTorch has changed, and docs/nn.md can.
    assert pools(2).run(forgotten) == [[True, False]] * 2
