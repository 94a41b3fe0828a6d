"""A small model with MoE layers, and the same model in plain PyTorch with all experts at hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fanfold import nn
from fanfold.bench.dispatchers import AnyDispatcher, open_dispatcher
from fanfold.geometry import Mode
from fanfold.nn import MoE, MoEOptions

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 3, 48, 40, 24


def plain_moe(
    full: Callable[[str], torch.Tensor], x: torch.Tensor, options: MoEOptions, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer for one rank's tokens with all experts at hand: output and balance loss.

    Args:
        full: a parameter of the layer by its name, all experts in it.
        x: ``[T, hidden]``.
        options: of the layer.
        ranks: that share the experts, as each rounds its own sum.
    """
    dtype = options.dtype
    logits = x.float() @ full("router.weight").float().T
    scores = logits.softmax(-1) if options.score == "softmax" else torch.sigmoid(logits)
    weights, idx = torch.topk(scores, TOP_K)
    if options.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    wide = x.to(dtype)
    rows = (wide @ full("latent_in.weight").T if options.latent else x).bfloat16()
    routed = torch.zeros(rows.shape)
    local = EXPERTS // ranks
    for rank in range(ranks):
        part = torch.zeros(rows.shape)
        for expert in range(rank * local, (rank + 1) * local):
            gate, up = (rows.to(dtype) @ full("w_in")[expert].T).split(INTERMEDIATE, dim=1)
            y = ((F.silu(gate) * up) @ full("w_out")[expert].T).bfloat16()
            part = part + (weights * (idx == expert)).sum(1, keepdim=True) * y.float()
        routed = routed + part.bfloat16().float()
    out = routed.bfloat16()
    if options.latent:
        out = out.to(dtype) @ full("latent_out.weight").T
    out = out.float()
    if options.shared_intermediate:
        gate, up = (wide @ full("shared.w_in.weight").T).chunk(2, dim=1)
        out = out + ((F.silu(gate) * up) @ full("shared.w_out.weight").T).float()
    if x.shape[0] == 0:
        return out, torch.zeros(())
    share = F.one_hot(idx, EXPERTS).float().mean((0, 1))
    mean_score = (scores / scores.sum(1, keepdim=True)).mean(0)
    return out, options.balance * EXPERTS * (share * mean_score).sum()


class PlainMoE(torch.nn.Module):
    """``plain_moe`` as a module, with the parameters of a ``MoE`` that holds all experts."""

    def __init__(self, moe: MoE, ranks: int) -> None:
        super().__init__()
        self.moe, self.ranks = moe, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, self.balance_loss = plain_moe(self.moe.get_parameter, x, self.moe.options, self.ranks)
        return out.to(x.dtype)


class Model(torch.nn.Module):
    """Two MoE layers between two linear ones."""

    def __init__(
        self,
        ep: AnyDispatcher,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = torch.nn.ModuleList(
            MoE(
                HIDDEN,
                INTERMEDIATE,
                EXPERTS,
                TOP_K,
                dispatcher=ep,
                options=MoEOptions(seed=seed, balance=0.1, shared_intermediate=16, dtype=dtype),
                device_mesh=mesh,
                **settings,
            )
            for seed in (1, 2)
        )
        self.last = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        for seed, part in enumerate((self.first, self.last)):
            values = nn.seeded_normal((HIDDEN, HIDDEN), HIDDEN**-0.5, seed, "linear")
            part.weight = torch.nn.Parameter(values)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and the sum of the balance losses."""
        x = self.first(x)
        for moe in self.moe:
            x = x + moe(x)
        return self.last(x), torch.stack([moe.balance_loss for moe in self.moe]).sum()


def open_ep(group: object, mode: Mode = "high_throughput", **settings: object) -> Any:
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 64}
    return open_dispatcher(mode, group, **(sizes | settings))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of a rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randn((TOKENS, HIDDEN), generator=generator),
        torch.randn((TOKENS, HIDDEN), generator=generator),
    )


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x, target = batch(step, rank)
    out, balance = model(x)
    return F.mse_loss(out, target) + balance


@dataclass(frozen=True)
class Training:
    """How ranks train.

    Attributes:
        wrapper: "ddp", "fsdp", or "average" for ``average_gradients``.
        replicas: of the experts.
        micro: passes whose gradients are added up for one step.
        optimizer: "sgd", or options of AdamW.
        max_norm: to clip gradients to.
    """

    wrapper: str
    replicas: int = 1
    micro: int = 1
    max_norm: float = 1e9
    steps: int = 4


def optimizer_of(groups: object, **adam: object) -> torch.optim.Optimizer:
    if adam:
        return torch.optim.AdamW(groups, lr=0.01, **adam)
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def wrap(model: Model, wrapper: str) -> torch.nn.Module:
    """``model`` for data parallelism over the world."""
    if wrapper == "average":
        return model
    experts = nn.prepare_data_parallel(model)
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for moe in model.moe:
        fully_shard(moe, mesh=mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh, ignored_params=experts)


def open_replicated(group: dist.ProcessGroup, replicas: int) -> tuple[object, DeviceMesh | None]:
    """The group of a dispatcher whose experts have replicas, and the mesh of its layers."""
    if replicas == 1:
        return group, None
    shape = (replicas, dist.get_world_size(group) // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "expert_parallel"))
    return mesh.get_group("expert_parallel"), mesh


def train(group: dist.ProcessGroup, how: Training) -> dict[str, Any]:
    """A rank's training: its parameters as all ranks together have them, and the norms."""
    experts_group, mesh = open_replicated(group, how.replicas)
    with open_ep(experts_group) as ep:
        inner = Model(ep, mesh)
        model = wrap(inner, how.wrapper)
        optimizer = optimizer_of(nn.parameter_groups(inner))
        norms = []
        for step in range(how.steps):
            optimizer.zero_grad()
            for micro in range(how.micro):
                last = micro == how.micro - 1
                ddp_waits = how.wrapper == "ddp" and not last
                with model.no_sync() if ddp_waits else nullcontext():
                    number = step * how.micro + micro
                    (loss_of(model, number, dist.get_rank(group)) / how.micro).backward()
            if how.wrapper == "average":
                nn.average_gradients(inner)
            norms.append(float(nn.clip_grad_norm_(inner.parameters(), how.max_norm)))
            optimizer.step()
        return {"parameters": whole(inner), "norms": norms}


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, those that are spread over the ranks put together. Collective."""
    return {name: whole_tensor(value) for name, value in model.named_parameters()}


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def train_dense(how: Training, ranks: int) -> dict[str, Any]:
    """The same on this process alone, in plain PyTorch: the loss is the mean of the ranks'."""
    with open_ep(None) as ep:
        model = Model(ep)
    dense = Model.__new__(Model)
    torch.nn.Module.__init__(dense)
    dense.first, dense.last = model.first, model.last
    dense.moe = torch.nn.ModuleList(PlainMoE(moe, ranks // how.replicas) for moe in model.moe)
    optimizer = optimizer_of(model.parameters())
    norms = []
    for step in range(how.steps):
        optimizer.zero_grad()
        for micro in range(how.micro):
            number = step * how.micro + micro
            losses = [loss_of(dense, number, rank) for rank in range(ranks)]
            (torch.stack(losses).mean() / how.micro).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), how.max_norm)))
        optimizer.step()
    return {"parameters": whole(model), "norms": norms}
