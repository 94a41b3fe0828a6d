"""Memory for what plans and dispatches bring."""

from __future__ import annotations

import torch

from fanfold.backends.allocator import Allocator
from fanfold.backends.high_throughput.in_place import Kinds, Results
from fanfold.backends.high_throughput.kernels import DispatchKind, Sizes
from fanfold.backends.high_throughput.plan import (
    CudaDispatched,
    CudaPlan,
    PlanParts,
    copied_words,
)
from fanfold.backends.high_throughput.protocol import Rows
from fanfold.backends.high_throughput.repeats import RepeatedDispatch

__all__ = ["Room"]


class Room:
    """Allocates on one GPU, for the current stream.

    Args:
        device: the GPU.
        most_batches: of a source in a plan.
        results: where rows in place are.
    """

    def __init__(self, device: torch.device, most_batches: int, results: Results) -> None:
        self.device, self._most_batches, self._results = device, most_batches, results
        self._allocator = Allocator(device)
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of one or two dimensions that holds anything."""
        strides = (1,) if len(shape) == 1 else (max(shape[1], 1), 1)
        # The short way takes no torch.Size.
        return self._allocator.empty()(tuple(shape), strides, dtype)

    def plan(self, sizes: Sizes, tokens: int, capacity: int | None) -> CudaPlan:
        """A plan of which nothing is known yet."""
        local = sizes.experts // sizes.ranks
        parts = PlanParts.of(sizes.ranks, local, sizes.top_k, tokens, self._most_batches)
        return CudaPlan(
            ranks=sizes.ranks,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            tokens=tokens,
            capacity=capacity,
            received=None,
            expert_rows=None,
            block=self.empty((parts.end,), torch.int64),
            parts=parts,
            source_token=self._nothing,
        )

    def dispatched(self, plan: CudaPlan, x: Rows, kind: DispatchKind) -> CudaDispatched:
        """What a dispatch brings, also into the plan if that is new."""
        expert_major, new, weighted = kind.expert_major, kind.new_routing, kind.weighted
        count = plan.row_count(kind.layout)
        tokens, row_scales = self._rows(count, x, kind)
        sources = self.empty((2 + new, count), torch.int32)
        if new:
            arriving = plan.row_count("token_major")
            entries = (arriving, plan.top_k)
            plan.source_token = sources[2, :arriving]
            if expert_major:
                plan.rows_of = self.empty(entries, torch.int32)
            else:
                plan.topk_idx = self.empty(entries, torch.int64)
            if weighted and not expert_major:
                plan.topk_weights = self.empty(entries, torch.float32)
        if new and weighted and expert_major:
            plan.row_weights = self.empty((count,), torch.float32)
        return self._dispatched(plan, tokens, row_scales, sources, expert_major)

    def again(self, repeated: RepeatedDispatch, plan: CudaPlan) -> CudaDispatched:
        """The same for a cached dispatch that looks like an earlier one."""
        kinds = tuple(zip(repeated.shapes, repeated.dtypes, strict=True))
        tokens, scales = self._rows_of(kinds, repeated.in_place)
        sources = self.empty((2, repeated.shapes[0][0]), torch.int32)
        return self._dispatched(plan, tokens, scales, sources, repeated.expert_major)

    def _dispatched(
        self,
        plan: CudaPlan,
        tokens: torch.Tensor,
        scales: torch.Tensor | None,
        sources: torch.Tensor,
        expert_major: bool,
    ) -> CudaDispatched:
        weights = counts = None
        if expert_major:
            weights = plan.row_weights
            counts = self.empty((copied_words(plan.local_experts),), torch.int64)
        return CudaDispatched(tokens, scales, plan, weights, sources, counts)

    def _rows(
        self, count: int, x: Rows, kind: DispatchKind
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = x if isinstance(x, tuple) else (x,)
        kinds = tuple(((count, part.shape[1]), part.dtype) for part in parts)
        return self._rows_of(kinds, kind.in_place)

    def _rows_of(self, kinds: Kinds, in_place: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of these shapes and dtypes, and scales if there are two."""
        made = self._results.rows(kinds) if in_place else [self.empty(*each) for each in kinds]
        return made[0], made[1] if len(made) > 1 else None
