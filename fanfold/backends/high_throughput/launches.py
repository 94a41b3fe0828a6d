"""The kernels of the high-throughput mode on one GPU, loaded, with the arguments that all calls of
a kind share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from fanfold import _core, jit
from fanfold.backends.high_throughput import kernels
from fanfold.backends.high_throughput.grid import Grid, with_transfer
from fanfold.backends.high_throughput.kernels import CombineKind, DispatchKind, Kernel, Sizes
from fanfold.backends.high_throughput.protocol import MOST_SMS
from fanfold.config import Config
from fanfold.errors import ArgumentError
from fanfold.geometry import check_integer
from fanfold.memory import BetweenHosts, GpuPeerMemory, PeerMemory
from fanfold.memory.cuda import are_threads, own_sms
from fanfold.memory.gin import by_gin

__all__ = ["AllLaunches", "Call", "Launches", "ctas_bounds", "grid_of"]

Arguments = TypeVar(
    "Arguments",
    _core.CudaPlanArgs,
    _core.CudaHighThroughputDispatchArgs,
    _core.CudaHighThroughputCombineArgs,
)
_UNASKED_SHARED_BYTES = 48 << 10


@dataclass(frozen=True)
class Call(Generic[Arguments]):
    """All calls of one kind; every call fills in the rest of ``args`` and launches them.

    Attributes:
        args: those that all calls share; the tensors are of the last call.
        launch: of arguments, on a stream.
    """

    args: Arguments
    launch: Callable[[Arguments, int], None]


class Launches:
    """Makes each kind of call once.

    Args:
        core: fills in arguments.
        device: whose kernels are loaded.
        config: of the compiler's cache.
        grid: CTAs of each kernel.
        early: whether a kernel may come to the GPU before the one before it has ended.
        between: what is between hosts, if ranks are on several.
    """

    def __init__(
        self,
        core: _core.CudaHighThroughput,
        device: torch.device,
        config: Config,
        grid: Grid,
        *,
        early: bool = True,
        between: BetweenHosts | None = None,
    ) -> None:
        self._core, self._device, self._config, self._grid = core, device, config, grid
        self._early, self._gin = early, None if between is None else between.gin
        properties = torch.cuda.get_device_properties(device.index)
        most = getattr(properties, "shared_memory_per_block_optin", kernels.MOST_SHARED_BYTES)
        self._most_shared_bytes = int(most)
        self._plans: dict[tuple[Sizes, int], Call[_core.CudaPlanArgs]] = {}
        self._dispatches: dict[DispatchKind, Call[_core.CudaHighThroughputDispatchArgs]] = {}
        self._combines: dict[CombineKind, Call[_core.CudaHighThroughputCombineArgs]] = {}

    def new_routing(
        self, sizes: Sizes, alignment: int, kind: DispatchKind
    ) -> tuple[Call[_core.CudaPlanArgs], Call[_core.CudaHighThroughputDispatchArgs]]:
        """Plans and the dispatches by them. What nobody has compiled before is compiled at the same
        time."""
        known = (sizes, alignment) in self._plans or kind in self._dispatches
        if not known and not torch.cuda.is_current_stream_capturing():
            dispatch = kernels.dispatch_kernel(self._transferred(kind), self._most_shared_bytes)
            sources = [kernels.plan_kernel(sizes).source, dispatch.source]
            sources = [by_gin(source, self._gin) for source in sources]
            jit.load_all(sources, self._device.index, self._config)
        return self.plan(sizes, alignment), self.dispatch(kind)

    def plan(self, sizes: Sizes, alignment: int) -> Call[_core.CudaPlanArgs]:
        """Plans of layers of these sizes, with experts' rows aligned."""
        known = self._plans.get((sizes, alignment))
        if known is None:
            shape = _core.CudaHighThroughputShape(
                _core.CudaHighThroughputPhase.PLAN, sizes.experts, sizes.top_k
            )
            shape.alignment = alignment
            ctas, senders = self._grid.of_plan()
            args = self._core.plan_arguments(shape, ctas, senders)
            known = Call(args, self._load(kernels.plan_kernel(sizes), ctas))
            self._plans[sizes, alignment] = known
        return known

    def dispatch(self, kind: DispatchKind) -> Call[_core.CudaHighThroughputDispatchArgs]:
        """Dispatches of one kind."""
        known = self._dispatches.get(kind)
        if known is None:
            transferred = self._transferred(kind)
            kernel = kernels.dispatch_kernel(transferred, self._most_shared_bytes)
            ctas, senders = self._grid.of_dispatch(transferred)
            args = self._core.dispatch_arguments(kernels.core_shape(transferred), ctas, senders)
            known = self._dispatches[kind] = Call(args, self._load(kernel, ctas))
        return known

    def _transferred(self, kind: DispatchKind) -> DispatchKind:
        return with_transfer(kind, self._config.dispatch_transfer)

    def combine(self, kind: CombineKind) -> Call[_core.CudaHighThroughputCombineArgs]:
        """Combines of one kind."""
        known = self._combines.get(kind)
        if known is None:
            shape = kernels.core_shape(kind)
            ctas, senders = self._grid.of_combine(kind)
            args = self._core.combine_arguments(shape, ctas, senders)
            args.lag, args.last_lag = kernels.lags(kind, ctas, args.slots)
            kernel = kernels.combine_kernel(kind, ctas, self._most_shared_bytes)
            known = Call(args, self._load(kernel, ctas))
            self._combines[kind] = known
        return known

    def _load(self, kernel: Kernel, ctas: int) -> Callable[[Arguments, int], None]:
        source = by_gin(kernel.source, self._gin)
        jit.refuse_in_capture(source)
        loaded = jit.load(source, self._device.index, self._config)
        if kernel.shared_bytes > _UNASKED_SHARED_BYTES:
            loaded.allow_shared_bytes(kernel.shared_bytes)
        shape = _core.CudaLaunch(ctas, source.threads, kernel.shared_bytes, early=self._early)

        def launch(args: Arguments, stream: int) -> None:
            args.launch(loaded, shape, stream)

        return launch


class AllLaunches:
    """The kernels of each grid that calls have taken.

    Args:
        core: fills in arguments.
        memory: of the ranks.
        config: of the compiler's cache.
        grid: of the beginning.
    """

    def __init__(
        self, core: _core.CudaHighThroughput, memory: GpuPeerMemory, config: Config, grid: Grid
    ) -> None:
        self._core, self._memory, self._config, self._grid = core, memory, config, grid
        self._of: dict[Grid, Launches] = {}
        self._by_sms: dict[int, Launches] = {}

    def with_sms(self, sms: int | None) -> Launches:
        """Those that take ``sms`` SMs, as far as there are so many; None for the first grid."""
        known = self._by_sms.get(sms) if type(sms) is int else None
        if known is not None:
            return known
        grid = self._grid
        if sms is not None:
            check_integer("sms", sms, 1, MOST_SMS)
            least, most = ctas_bounds(self._memory)
            grid = Grid(self._memory.ranks, most, min(max(sms, least), most))
        known = self._with(grid)
        if sms is not None:
            self._by_sms[sms] = known
        return known

    def _with(self, grid: Grid) -> Launches:
        known = self._of.get(grid)
        if known is None:
            device = self._memory.device
            early = not are_threads(self._memory.group)  # it would hold SMs that they may need
            between = self._memory.between
            known = Launches(self._core, device, self._config, grid, early=early, between=between)
            self._of[grid] = known
        return known


def ctas_bounds(memory: PeerMemory) -> tuple[int, int]:
    """The fewest and the most CTAs that a kernel may have."""
    sms = own_sms(memory)
    return 1 + int(memory.ranks > 1), min(sms, _core.CUDA_HIGH_THROUGHPUT_MOST_CTAS)


def grid_of(memory: PeerMemory, config: Config, ctas: int | None, senders: int | None) -> Grid:
    """The CTAs that were asked for, else those of the configuration, else the model's."""
    most = ctas_bounds(memory)[1]
    if ctas is None and config.ctas is not None:
        ctas = min(config.ctas, most)
        # The setting's senders belong to its CTAs.
        senders = config.senders if senders is None and ctas == config.ctas else senders
    if ctas is None and senders is not None:
        ctas = min(kernels.DEFAULT_MOST_CTAS, most)  # a number of senders is of some number of CTAs
    if ctas is not None and ctas > most:
        raise ArgumentError("ctas", ctas, f"at most {most} on this GPU")
    return Grid(memory.ranks, most, ctas, senders)
