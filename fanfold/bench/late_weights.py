"""Low latency whose weights come with combine, as the DeepEP face has them, for the bench."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fanfold.backends.choose import choose
from fanfold.backends.opening import open_low_latency
from fanfold.bench.settings import BenchSettings
from fanfold.config import Config
from fanfold.formats import RowFormat
from fanfold.geometry import Geometry
from fanfold.group import as_group
from fanfold.results import LowLatencyResult, LowLatencySource

__all__ = ["LateWeights"]


@dataclass(slots=True)
class _Source(LowLatencySource):
    """Of a dispatch without weights: those that its combine brings, ``[T, K]`` float32."""

    late_weights: torch.Tensor


class LateWeights:
    """The backend of low latency, called as :class:`fanfold.LowLatency` is: the weights
    that a dispatch is given stay here until its combine. Construction is collective.

    Args:
        group: the ranks.
        settings: of low latency, with a backend.
        config: of the library.

    Attributes:
        device: where tensors must be.
        memory: the ranks' symmetric memory.
    """

    def __init__(self, group: Any, settings: BenchSettings, config: Config) -> None:
        ranks = as_group(group)
        geometry = self._geometry = Geometry(
            ranks.size, settings.experts, settings.top_k, settings.hidden, settings.tokens
        )
        self._row_format = RowFormat.of(settings.dtype)
        choice = choose(ranks, config)
        self.device = choice.device
        self.memory, self._mode = open_low_latency(
            ranks, choice, geometry, config, late_weights=True
        )
        begins = (
            torch.arange(geometry.experts_per_rank + 1, dtype=torch.int64, device="cpu")
            * geometry.expert_capacity
        )
        self._offsets = begins.to(self.device)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        return_hook: bool = False,
    ) -> Any:
        """Sends ``[T, hidden]`` bfloat16 by ``[T, K]`` int64; the ``[T, K]`` float32 stay here.

        Returns:
            What arrived, or with ``return_hook`` what will have arrived, and the hook.
        """
        dispatched, hook = self._mode.dispatch(
            self._geometry, x, topk_idx, row_format=self._row_format, return_hook=return_hook
        )
        received = LowLatencyResult.of(dispatched, topk_idx, self._offsets, self, hook is None)
        received.source = _Source(dispatched, topk_idx, topk_weights)
        return received if hook is None else (received, hook)

    def combine(
        self,
        y: torch.Tensor,
        received: LowLatencyResult,
        *,
        out: torch.Tensor,
        return_hook: bool = False,
    ) -> Any:
        """Brings ``y`` and the weights of the dispatch, and sums into ``out``.

        Returns:
            ``out``, and with ``return_hook`` the hook.
        """
        source = received.source
        assert isinstance(source, _Source)
        result, hook = self._mode.combine(
            self._geometry,
            y,
            source.dispatched.routing,
            source.topk_idx,
            late_weights=source.late_weights,
            out=out,
            return_hook=return_hook,
        )
        return result if hook is None else (result, hook)

    def synchronize(self) -> None:
        """Waits for what is enqueued, and raises what it found wrong."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._mode.check()

    def close(self) -> None:
        """Lets the memory go."""
        self.memory.close()
