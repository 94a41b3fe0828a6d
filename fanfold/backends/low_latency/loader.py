"""Loads the low-latency kernels and launches them, each on its grid."""

from __future__ import annotations

import torch

from fanfold import _core, jit
from fanfold.backends.low_latency import kernels
from fanfold.backends.low_latency.plan import Arguments, Launch, Plan
from fanfold.backends.low_latency.protocol import ReadyRows, RoutingLayout
from fanfold.config import Config
from fanfold.errors import UsageError
from fanfold.formats import Formats
from fanfold.geometry import Geometry
from fanfold.memory import BetweenHosts
from fanfold.memory.gin import by_gin
from fanfold.stream_order import StreamOrder

__all__ = ["Loader"]


class Loader:
    """Loads kernels for one mode.

    Args:
        device: of the mode, with an index.
        config: says where compiled kernels are kept.
        grid: of all kernels but those that wait for outputs.
        order: of the mode's calls.
        between: what is between hosts, if ranks are on several.
        late_weights: whether the routing weights come with combine.
        early: whether kernels are launched before the one in front of them has ended.
        token_major: whether rows come once for each token and rank.
    """

    def __init__(
        self,
        device: torch.device,
        config: Config,
        grid: kernels.Grid,
        order: StreamOrder,
        between: BetweenHosts | None,
        *,
        late_weights: bool,
        early: bool,
        token_major: bool = False,
    ) -> None:
        self._index = device.index
        self._config = config
        self._grid = grid
        self._order = order
        self._late = late_weights
        self._early = early
        self._across_hosts = between is not None
        self._gin = None if between is None else between.gin
        self._token_major = token_major

    def calls(
        self, place: _core.CudaLowLatencyPlace, geometry: _core.LowLatencyGeometry
    ) -> tuple[_core.CudaLowLatency, int, int]:
        """What makes the arguments of a geometry's calls; from which byte on its memory must hold
        the sentinel at first, and how many bytes it takes."""
        grid, late, token_major = self._grid, self._late, self._token_major
        calls = _core.CudaLowLatency(place, geometry, late, grid.ctas, grid.senders, token_major)
        return calls, *_core.cuda_low_latency_bytes(geometry, late, token_major)

    def layout(self, geometry: Geometry, core: _core.LowLatencyGeometry) -> RoutingLayout:
        """Of the routings that a geometry's dispatches leave; ``core`` is the same geometry."""
        table_bytes = 0 if self._late else _core.cuda_table_bytes(core)
        made = RoutingLayout.of_table if self._token_major else RoutingLayout.of
        return made(geometry, table_bytes)

    def sources(self, geometry: Geometry, formats: Formats) -> list[jit.KernelSource]:
        """Of the kernels of dispatches with such rows, and of combines without LogFMT."""
        late, across = self._late, self._across_hosts
        made = kernels.kernel_sources(geometry, *formats, late_weights=late, across_hosts=across)
        return [by_gin(source, self._gin) for source in made]

    def dispatch_source(self, geometry: Geometry, formats: Formats) -> jit.KernelSource:
        """Of the kernel of dispatches with such rows."""
        return kernels.dispatch_kernel(geometry, *formats, across_hosts=self._across_hosts)

    def combine_sources(self, geometry: Geometry, logfmt: bool) -> list[jit.KernelSource]:
        """Of the one kernel of combines."""
        across, logfmt = self._across_hosts, bool(logfmt)
        made = kernels.combine_kernel(geometry, late=self._late, logfmt=logfmt, across_hosts=across)
        return [by_gin(made, self._gin)]

    def load(self, source: jit.KernelSource, ctas: int | None = None) -> Launch:
        """The launch of a kernel on ``ctas`` CTAs; None: on the mode's grid."""
        source = by_gin(source, self._gin)
        jit.refuse_in_capture(source)
        kernel = jit.load(source, self._index, self._config)
        on = ctas or self._grid.ctas
        threads, early, order = source.threads, self._early, self._order

        def launch(args: Arguments, stream: int) -> None:
            args.launch(kernel, on, threads, stream, early)
            if order.marks:
                order.mark(stream)

        return launch

    def ready_send(
        self, plan: Plan, args: _core.CudaCombineArgs, ready: ReadyRows, logfmt: bool
    ) -> Launch:
        """The launch of a combine's send half that waits for outputs, on few SMs: the others are
        left to the kernels that write them. Sets in ``args`` what it waits for.

        Raises:
            UsageError: the routing weights come with dispatch.
        """
        if not self._late:
            raise UsageError("only a combine with weights of its own can wait for outputs")
        blocks = ready.blocks(plan.geometry.expert_capacity)
        args.wait_for(ready.signals.data_ptr(), ready.block_rows, blocks, ready.ready_at)
        self._order.marks = True  # the next such call then follows the call before it alone
        key = (bool(logfmt), min(ready.sms, self._grid.ctas))
        if key not in plan.ready_sends:
            source = kernels.combine_kernel(
                plan.geometry,
                late=True,
                logfmt=key[0],
                awaits_signals=True,
                across_hosts=self._across_hosts,
            )
            plan.ready_sends[key] = self.load(source, key[1])
        return plan.ready_sends[key]
