"""Data parallelism around layers whose experts are spread: gradients, optimizers, DDP, FSDP2."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from fanfold.errors import ArgumentError, FanfoldError
from fanfold.nn.sharding import DTensor, ShardedExperts, local_part

__all__ = [
    "average_gradients",
    "clip_grad_norm_",
    "expert_parameters",
    "parameter_groups",
    "prepare_data_parallel",
]


def expert_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of ``module`` that differ from rank to rank: those of the MoE layers' routed
    experts, and others that carry the attribute ``expert_parallel = True``.

        >>> ep = fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> layer = fanfold.nn.MoE(64, 128, num_experts=8, top_k=2, dispatcher=ep)
        >>> len(fanfold.nn.expert_parameters(layer))  # one rank has all experts: none differ
        0
        >>> ep.close()
    """
    return [parameter for parameter, _ in _expert_owners(module).values()]


def parameter_groups(module: torch.nn.Module) -> list[dict[str, list[torch.nn.Parameter]]]:
    """Parameter groups for an optimizer, such as ``AdamW(parameter_groups(model), fused=True)``.

    PyTorch's fused and foreach optimizers refuse a group that mixes DTensors with plain tensors,
    or DTensors of several meshes. The groups are the same on any number of ranks, so a checkpoint
    of the optimizer loads on another number too.

        >>> ep = fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> layer = fanfold.nn.MoE(64, 128, num_experts=8, top_k=2, dispatcher=ep)
        >>> optimizer = torch.optim.AdamW(fanfold.nn.parameter_groups(layer), lr=1e-3)
        >>> ep.close()

    Returns:
        Two groups, each in the order of ``module.parameters()``: first what every rank holds alike
        or FSDP2 takes care of, then the parameters of the MoE layers' routed experts, and others
        that carry the attribute ``expert_parallel = True``. Without the latter, one group.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, ShardedExperts)]
    routed = {id(parameter) for layer in layers for parameter in layer.expert_parameters()}
    groups: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = ([], [])
    for parameter in module.parameters():
        expert = id(parameter) in routed or getattr(parameter, "expert_parallel", False)
        groups[expert].append(parameter)
    return [{"params": parameters} for parameters in groups if parameters]


def prepare_data_parallel(
    module: torch.nn.Module, group: dist.ProcessGroup | None = None
) -> set[torch.nn.Parameter]:
    """Prepares ``module`` for DDP, or for FSDP2, over the ranks that share its experts.

        experts = fanfold.nn.prepare_data_parallel(model)
        model = torch.nn.parallel.DistributedDataParallel(model)
        torch.distributed.fsdp.fully_shard(model, ignored_params=experts)     # or this

    Both average the gradients of replicated parameters over the ranks and would spoil those of the
    experts, which differ from rank to rank. From now on DDP leaves the experts alone, and a
    backward pass gives them the gradient of the mean of the ranks' losses, as everything else has
    it: nobody has to call :func:`average_gradients`. Where experts have replicas, that backward
    pass sums their gradients over these.

        >>> ep = fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> layer = fanfold.nn.MoE(64, 128, num_experts=8, top_k=2, dispatcher=ep)
        >>> sorted(fanfold.nn.prepare_data_parallel(layer))  # one rank: nothing differs
        []
        >>> ep.close()

    Args:
        module: the very module that DDP will wrap.
        group: over whose ranks DDP or FSDP2 averages; the default group if None.

    Returns:
        The experts' parameters, for ``fully_shard``'s ``ignored_params``.

    Raises:
        ArgumentError: the group is not the ranks that share a layer's experts, replicas included.
    """
    owners = _expert_owners(module)
    ranks = _check_group(owners, group)
    for layer in _layers(module):
        layer.gradient_ranks = ranks
    names = [name for name, parameter in module.named_parameters() if id(parameter) in owners]
    # DDP looks for parameters of the outermost module under a name that begins with a dot, too.
    names += [f".{name}" for name in names if "." not in name]
    before = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, [*before, *names]
    )
    return {parameter for parameter, _ in owners.values()}


def average_gradients(module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Makes every gradient that of the mean of the ranks' losses. Collective.

    For data parallelism over the very ranks that share the experts, replicas of experts included.
    Gradients of replicated parameters are averaged in one all-reduce. Those of parameters marked
    ``expert_parallel`` are divided by the number of ranks: an expert's gradient is the sum over all
    ranks' tokens already. Only where experts have replicas they are summed over these first. A
    module that :func:`prepare_data_parallel` prepared has the experts' gradients right already,
    and so are gradients that FSDP2 has reduced, which are DTensors. Without torch.distributed there
    is one rank and nothing to do.

        >>> ep = fanfold.HighThroughput(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> layer = fanfold.nn.MoE(64, 128, num_experts=8, top_k=2, dispatcher=ep)
        >>> layer(torch.randn((5, 64), device=ep.device)).sum().backward()
        >>> fanfold.nn.average_gradients(layer)  # over the ranks; here there is one
        >>> ep.close()

    Args:
        module: the same on all ranks; parameters without a gradient are passed over, and must be
            the same ones on all ranks.
        group: the default group if None.

    Raises:
        ArgumentError: the group is not the ranks that share a layer's experts, replicas included.
    """
    if not dist.is_initialized():
        return
    owners = _expert_owners(module)
    ranks = _check_group(owners, group)
    replicated = []
    for parameter in module.parameters():
        if parameter.grad is None:
            continue
        if id(parameter) not in owners:
            if not isinstance(parameter.grad, DTensor):
                replicated.append(parameter.grad)
            continue
        layer = owners[id(parameter)][1]
        local = local_part(parameter.grad)
        if layer is None:
            local.div_(ranks)
        elif layer.gradient_ranks is None:
            local.copy_(layer.mean_gradient(local, ranks))
    if not replicated:
        return
    flat = torch.cat([grad.flatten().float() for grad in replicated])
    dist.all_reduce(flat, group=group)
    flat.div_(ranks)
    pieces = flat.split([grad.numel() for grad in replicated])
    for grad, piece in zip(replicated, pieces, strict=True):
        grad.copy_(piece.view_as(grad))


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clips gradients to a norm over all parameters of all ranks. Collective.

    What ``torch.nn.utils.clip_grad_norm_`` does, which refuses a mixture of DTensors and plain
    tensors. Every expert and every part that FSDP2 made counts once, wherever it is, and so does a
    replicated parameter. Call it when gradients are averaged.

        >>> linear = torch.nn.Linear(4, 4, bias=False, device="cpu")
        >>> linear(torch.ones((1, 4), device="cpu")).sum().backward()
        >>> float(fanfold.nn.clip_grad_norm_(linear.parameters(), 2.0))
        4.0
        >>> round(float(linear.weight.grad.norm()), 3)
        2.0

    Args:
        parameters: the same on all ranks; those without a gradient are passed over.
        max_norm: of all gradients together, afterwards.
        norm_type: p of the p-norm, ``inf`` included.
        error_if_nonfinite: raise if the norm is not finite.

    Returns:
        The norm before, a scalar, equal on all ranks.

    Raises:
        FanfoldError: the norm is not finite, and ``error_if_nonfinite`` is set; no gradient has
            changed. It is raised on all ranks.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = [parameter.grad for parameter in given if parameter.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    kinds: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        kind = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        kinds.setdefault(kind, []).append(grad)
    first = local_part(grads[0]).device
    norms = [_norm_of(alike, norm_type).to(first) for alike in kinds.values()]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise FanfoldError(
            f"the norm of the gradients is {float(total)}, so they cannot be clipped; look for the "
            "first loss that is not finite, or pass error_if_nonfinite=False"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in map(local_part, grads):
        grad.mul_(factor.to(grad.device))
    return total


def _norm_of(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients that are spread alike, over all ranks."""
    norms = [
        torch.linalg.vector_norm(local_part(grad), norm_type, dtype=_at_least_float32(grad.dtype))
        for grad in grads
    ]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if not isinstance(grads[0], DTensor):
        return norm
    biggest = norm_type == float("inf")
    operation = dist.ReduceOp.MAX if biggest else dist.ReduceOp.SUM
    for dim, placement in enumerate(grads[0].placements):
        if placement.is_partial():
            raise ArgumentError("parameters", "with gradients not yet summed", "summed over ranks")
        if placement.is_replicate():
            continue
        if not biggest:
            norm = norm**norm_type
        dist.all_reduce(norm, operation, group=grads[0].device_mesh.get_group(dim))
        if not biggest:
            norm = norm ** (1 / norm_type)
    return norm


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _layers(module: torch.nn.Module) -> list[ShardedExperts]:
    """Those whose experts differ from rank to rank."""
    layers = [layer for layer in module.modules() if isinstance(layer, ShardedExperts)]
    return [layer for layer in layers if layer.differ]


def _expert_owners(
    module: torch.nn.Module,
) -> dict[int, tuple[torch.nn.Parameter, ShardedExperts | None]]:
    """Parameters of experts by their id, and the layer of each, if one of this library has it."""
    owners: dict[int, tuple[torch.nn.Parameter, ShardedExperts | None]] = {
        id(parameter): (parameter, None)
        for parameter in module.parameters()
        if getattr(parameter, "expert_parallel", False)
    }
    for layer in _layers(module):
        owners |= {id(p): (p, layer) for p in layer.expert_parameters()}
    return owners


def _check_group(
    owners: dict[int, tuple[torch.nn.Parameter, ShardedExperts | None]],
    group: dist.ProcessGroup | None,
) -> int:
    """The size of ``group``, over which gradients are averaged.

    Raises:
        ArgumentError: a layer's experts are spread over other ranks.
    """
    if not dist.is_initialized():
        return 1
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    for layer in dict.fromkeys(layer for _, layer in owners.values() if layer is not None):
        spread = layer.spread_over()
        if layer.mesh is None and len(spread) == len(ranks):  # spread without torch.distributed
            continue
        if sorted(spread) != sorted(ranks):
            raise ArgumentError(
                "group",
                f"the ranks {ranks}",
                f"the ranks {spread} that share the experts of a MoE layer; if it has several "
                "replicas, give them to the layer: MoE(..., device_mesh=init_device_mesh(device, "
                "(replicas, ranks), mesh_dim_names=('replicate', 'expert_parallel')))",
            )
    return len(ranks)
