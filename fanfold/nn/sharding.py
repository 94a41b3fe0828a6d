"""Parameters of experts as DTensors: which ranks hold which experts, in words that PyTorch's own
tools understand (checkpoints, optimizers, ``full_tensor``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fanfold.base_dispatcher import BaseDispatcher
from fanfold.errors import ArgumentError, UsageError
from fanfold.fused_moe import FusedMoE
from fanfold.group import Group, agree, as_group, process_group

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # before PyTorch 2.5
    from torch.distributed._tensor import (  # type: ignore[attr-defined]
        DTensor,
        Replicate,
        Shard,
    )

__all__ = [
    "AnyDispatcher",
    "DTensor",
    "ShardedExperts",
    "agree_on_layer",
    "copy_whole",
    "local_part",
    "open_mesh",
    "parameter_device",
]

AnyDispatcher = BaseDispatcher | FusedMoE
"""What a layer runs through."""

MESH_NAMES = ("expert_parallel",)

# Modules of PyTorch that wrap a model for data parallelism.
_WRAPPERS = {
    "DistributedDataParallel": ("torch.nn.parallel.distributed",),
    "fully_shard": ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp"),
}


def parameter_device(
    ep: AnyDispatcher, device: torch.device | str | None, device_mesh: DeviceMesh | None
) -> torch.device:
    """Where the parameters of a layer are made.

    Args:
        ep: the layer's; its device is the last resort.
        device: asked for; None for PyTorch's default device if one is set, else for the device of
            the mesh if there is one.
        device_mesh: the layer's, or None.

    Raises:
        ArgumentError: ``device`` is not of the type that ``device_mesh`` has.
    """
    default = torch.get_default_device()
    if device is None and default.type != "cpu":
        device = default
    types = {ep.device.type} if device_mesh is None else {device_mesh.device_type}
    if device is None:
        return ep.device if ep.device.type in types else torch.device(*types)
    device = torch.device(device)
    if device_mesh is not None and device.type not in types | {"meta"}:
        raise ArgumentError(
            "device", device, f"of the device_mesh's type, {device_mesh.device_type}"
        )
    return device


def open_mesh(
    ep: AnyDispatcher, device: torch.device, device_mesh: DeviceMesh | None
) -> DeviceMesh | None:
    """The mesh over which the experts are spread: its last dimension is the group of ``ep``.

    Args:
        ep: says which ranks hold the experts.
        device: of the parameters.
        device_mesh: the caller's, checked; None makes one of the group.

    Returns:
        None if one rank holds all experts, or there is no torch.distributed group to make one of.

    Raises:
        ArgumentError: the last dimension of ``device_mesh`` is not the group, or it has more than
            two dimensions.
    """
    group = process_group(ep._group)
    if device_mesh is None:
        if group is None or ep.ranks == 1:
            return None
        kind = ep.device.type if device.type == "meta" else device.type
        with torch.device("cpu"):
            return DeviceMesh.from_group(group, kind, mesh_dim_names=MESH_NAMES)
    if not isinstance(device_mesh, DeviceMesh):
        raise ArgumentError(
            "device_mesh", f"a {type(device_mesh).__name__}", "a DeviceMesh or None"
        )
    if device_mesh.ndim not in (1, 2):
        bound = "1 (the ranks that share the experts) or 2 (replicas, those ranks)"
        raise ArgumentError("device_mesh.ndim", device_mesh.ndim, bound)
    theirs = dist.get_process_group_ranks(device_mesh.get_group(device_mesh.ndim - 1))
    ours = list(range(ep.ranks)) if group is None else dist.get_process_group_ranks(group)
    if theirs != ours:
        raise ArgumentError(
            "device_mesh",
            f"one whose last dimension has the ranks {theirs} here",
            f"one whose last dimension has those of the dispatcher, {ours}",
        )
    return device_mesh


def agree_on_layer(
    ep: AnyDispatcher,
    device_mesh: DeviceMesh | None,
    values: dict[str, object],
    error: Exception | None,
) -> None:
    """Returns if every rank that holds a part or a replica of a layer makes the same. Collective.

    Args:
        ep: whose ranks share the experts.
        device_mesh: as the caller gave it; a dimension before its last one has replicas.
        values: what must be the same.
        error: of this rank.

    Raises:
        Exception: ``error``, this rank's own.
        FanfoldError: another rank's error.
        ArgumentError: for the first fact that differs.
    """
    groups = [ep._group]
    if isinstance(device_mesh, DeviceMesh) and device_mesh.ndim == 2:
        groups.append(as_group(device_mesh.get_group(0)))
    for group in groups:
        error = _disagreement(group, values, error)
    if error is not None:
        raise error


def _disagreement(
    group: Group, values: dict[str, object], error: Exception | None
) -> Exception | None:
    """What ``agree`` raises."""
    try:
        with torch.device("cpu"):  # it makes tensors of its own
            agree(group, values, error)
    except Exception as refused:
        return refused
    return None


class ShardedExperts(torch.nn.Module):
    """A module with parameters of experts: ``[num_experts, ...]`` of which each rank has its part.

    Attributes:
        mesh: over which they are spread; None if they are plain tensors, of the local experts.
        expert_ranks: how many ranks share the experts, without replicas. If one, and without a
            mesh, its parameters are like all others, to DDP and FSDP2 too.
        gradient_ranks: None if a backward pass gives them the gradient of the sum of the ranks'
            losses; else the number of ranks of whose losses it gives that of the mean.
    """

    mesh: DeviceMesh | None = None
    expert_ranks: int = 1
    gradient_ranks: int | None = None

    def expert_names(self) -> tuple[str, ...]:
        """Names of the parameters of experts, all of which this module holds itself."""
        raise NotImplementedError

    def expert_parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of experts."""
        for name in self.expert_names():
            yield getattr(self, name)

    def spread_over(self) -> list[int]:
        """The ranks that hold the experts, replicas included: global ones if there is a mesh, else
        those of the group."""
        if self.mesh is None:
            return list(range(self.expert_ranks))
        ranks: list[int] = self.mesh.mesh.flatten().tolist()
        return ranks

    @property
    def differ(self) -> bool:
        """Whether the parameters differ from rank to rank."""
        return self.mesh is not None or self.expert_ranks > 1

    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same experts, if the mesh has any."""
        return self.mesh.get_group(0) if self.mesh is not None and self.mesh.ndim == 2 else None

    def mean_gradient(self, gradient: torch.Tensor, ranks: int) -> torch.Tensor:
        """``gradient`` of this rank's experts, summed over the replicas, divided by ``ranks``.
        Collective where there are replicas."""
        gradient = gradient / ranks
        if (replicas := self.replicas()) is not None:
            dist.all_reduce(gradient, group=replicas)
        return gradient

    def make_expert_parameter(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.nn.Parameter:
        """An uninitialised parameter whose local part has ``shape``, local experts first."""
        local = torch.empty(shape, dtype=dtype, device=device)
        parameter = torch.nn.Parameter(self._spread(local))
        if self.differ:
            parameter.expert_parallel = True  # type: ignore[attr-defined]
        return parameter

    def local_weights(self) -> tuple[torch.Tensor, ...]:
        """The local experts' parameters as plain tensors, for a forward pass."""
        self._check_wrapper()
        return tuple(self._local_weight(parameter) for parameter in self.expert_parameters())

    def _local_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        local: torch.Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if self.gradient_ranks is None or self.gradient_ranks == 1:
            return local
        return _MeanGradient.apply(local, self)  # type: ignore[no-any-return, no-untyped-call]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """See ``torch.nn.Module``.

        Raises:
            UsageError: DDP or FSDP2 asks, but nobody prepared this module for them.
        """
        # Both ask every module for its own parameters, one by one, before they do anything; of
        # parameters like these they say later what says nothing of the cause.
        if not recurse and self.differ and self.gradient_ranks is None:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            for wrapper, rooms in _WRAPPERS.items():
                if asking.startswith(rooms):
                    raise UsageError(
                        f"{wrapper} is to wrap a {type(self).__name__} whose experts differ from "
                        "rank to rank, and would overwrite or average them; call "
                        "fanfold.nn.prepare_data_parallel(model, group) before wrapping the model "
                        "(docs/nn.md, data parallelism)"
                    )
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def _check_wrapper(self) -> None:
        """DDP averages over as many ranks as the layer was prepared for."""
        ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        if ddp is None or not self.differ:
            return
        ranks = dist.get_world_size(ddp.process_group)
        if ranks != (self.gradient_ranks or 1):
            raise UsageError(
                f"DistributedDataParallel over {ranks} ranks runs a {type(self).__name__} that was "
                f"prepared for {self.gradient_ranks or 1}; call "
                "fanfold.nn.prepare_data_parallel(model, group) with the group that DDP is given"
            )

    def _spread(self, local: torch.Tensor) -> torch.Tensor:
        """The local experts' part as a part of all."""
        if self.mesh is None:
            return local
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        """Takes plain tensors too, of all experts or of the local ones."""
        for name in self.expert_names():
            value = state_dict.get(prefix + name)
            if self.mesh is None or not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor):
                continue
            parameter = getattr(self, name)
            experts = parameter.to_local().shape[0]
            if value.shape == parameter.shape:
                begin = self.mesh.get_local_rank(self.mesh.ndim - 1) * experts
                value = value[begin : begin + experts]
            if value.shape[0] == experts:
                state_dict[prefix + name] = self._spread(value)
        super()._load_from_state_dict(state_dict, prefix, *args, **options)
        self._mark()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What ``to``, ``cuda`` and ``half`` do; DTensors lose their marks in it."""
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return result

    def _mark(self) -> None:
        if self.differ:
            for parameter in self.expert_parameters():
                parameter.expert_parallel = True  # type: ignore[attr-defined]


class _MeanGradient(torch.autograd.Function):
    """The identity whose backward pass takes the mean over the ranks' losses."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, owner: ShardedExperts) -> torch.Tensor:
        ctx.owner = owner
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.owner.mean_gradient(gradient, ctx.owner.gradient_ranks), None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, a plain tensor in the same memory; another tensor as it is.
    It has no gradient."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


@torch.no_grad()
def copy_whole(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Sets ``parameter`` to ``whole``, of which it may hold a part (as FSDP2 makes it)."""
    if isinstance(parameter, DTensor):
        everywhere = [Replicate()] * parameter.device_mesh.ndim
        whole = whole.to(parameter.to_local().device)
        spread = DTensor.from_local(whole, parameter.device_mesh, everywhere, run_check=False)
        whole = spread.redistribute(placements=parameter.placements)
    parameter.copy_(whole)
