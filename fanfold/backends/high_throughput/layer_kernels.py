"""All kernels that the calls of a layer may need, for who compiles them before the first call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fanfold import _core, quantizing
from fanfold.backends.high_throughput.grid import with_transfer
from fanfold.backends.high_throughput.kernels import (
    MOST_SHARED_BYTES,
    WEIGHTS_ALONE_ROW_BYTES,
    CombineKind,
    DispatchKind,
    Sizes,
    combine_kernel,
    dispatch_kernel,
    layout_kernel,
    plan_kernel,
)
from fanfold.backends.high_throughput.protocol import RowOrder
from fanfold.formats import RowFormat, ScaleFormat, scale_columns
from fanfold.geometry import Geometry, check_hidden, check_integer
from fanfold.jit import KernelSource
from fanfold.renaming import Renaming

__all__ = ["Layer", "shared_bytes_of"]

_CONSUMER_SHARED_BYTES = 99 << 10


def shared_bytes_of(arch: str) -> int:
    """Dynamic shared memory that a CTA may have on an architecture, such as ``"sm_90a"``."""
    return _CONSUMER_SHARED_BYTES if arch.startswith("sm_12") else MOST_SHARED_BYTES


@dataclass(frozen=True)
class Layer:
    """What the kernels of a layer are made for.

    Attributes:
        sizes: its ranks, experts and top-k.
        hidden: columns of a row.
        row_format: of the rows that go to the experts; results are bf16.
        scale_format: of fp8 rows.
        transfer: how dispatches move rows, as the setting ``dispatch_transfer``.
    """

    sizes: Sizes
    hidden: int
    row_format: RowFormat
    scale_format: ScaleFormat
    transfer: str = "auto"

    def __post_init__(self) -> None:
        """Checks the sizes as calls do.

        Raises:
            ArgumentError: for the first one that does not hold.
        """
        _core.cuda_high_throughput_bytes(self.sizes.ranks, 0)
        most = _core.CUDA_HIGH_THROUGHPUT_MOST_EXPERTS
        check_integer("num_experts", self.sizes.experts, 1, most)
        Geometry(self.sizes.ranks, self.sizes.experts, self.sizes.top_k, self.hidden, 0)
        check_hidden(self.hidden, self.row_format.dtype.itemsize)

    def kernels(
        self, layouts: Sequence[RowOrder], most_shared_bytes: int = MOST_SHARED_BYTES
    ) -> dict[str, KernelSource]:
        """The kernels of calls in these layouts, each by what it does.

        Raises:
            ArgumentError: rows do not fit the shared memory.
        """
        with Renaming({"bytes of a row": f"hidden is {self.hidden}, so bytes of a row"}):
            return self._kernels(layouts, most_shared_bytes)

    def _kernels(
        self, layouts: Sequence[RowOrder], most_shared_bytes: int
    ) -> dict[str, KernelSource]:
        ranks, most_ctas = self.sizes.ranks, _core.CUDA_HIGH_THROUGHPUT_MOST_CTAS
        refusal = Sizes(ranks, ranks, 1)  # as the mode loads when it is opened
        found = {
            "refusal": plan_kernel(refusal).source,
            "plan": plan_kernel(self.sizes).source,
            "layout": layout_kernel(self.sizes).source,
        }
        for layout in layouts:
            for what, dispatch in self._dispatches(layout):
                moved = with_transfer(dispatch, self.transfer)
                found[what] = dispatch_kernel(moved, most_shared_bytes).source
            for what, combine in self._combines(layout):
                many, few = (
                    combine_kernel(combine, ctas, most_shared_bytes).source
                    for ctas in (most_ctas, 1)
                )
                found[what] = many
                if few != many:
                    found[f"{what}, few SMs"] = few
        if self.row_format is RowFormat.FP8:
            found["quantise"] = quantizing.kernel_source(
                self.hidden,
                power_of_two=self.scale_format is not ScaleFormat.FLOAT32,
                packed=self.scale_format is ScaleFormat.UE8M0,
            )
        return found

    def _dispatches(self, layout: RowOrder) -> Iterator[tuple[str, DispatchKind]]:
        start, expert_major = f"dispatch {layout}", layout == "expert_major"
        bf16 = (2 * self.hidden, 0)
        rows = bf16
        if self.row_format is RowFormat.FP8:
            rows = (self.hidden, scale_columns(self.hidden, self.scale_format))
            # Gradients go back to the experts as they are.
            yield (
                f"{start} cached bf16",
                DispatchKind(self.sizes, *bf16, expert_major, False, False),
            )
        for place in ("", " in place"):
            for what, new, weighted in (
                (" new weighted", True, True),
                (" new", True, False),
                (" cached", False, False),
            ):
                kind = DispatchKind(self.sizes, *rows, expert_major, new, weighted, bool(place))
                yield start + place + what, kind

    def _combines(self, layout: RowOrder) -> Iterator[tuple[str, CombineKind]]:
        start, expert_major = f"combine {layout}", layout == "expert_major"
        kinds = itertools.product((False, True) if expert_major else (False,), (False, True))
        for (weighted, returns), biased in itertools.product(kinds, (False, True)):
            words = [
                start,
                *["weighted"] * weighted,
                *["topk_weights"] * returns,
                *["biased"] * biased,
            ]
            row_bytes = 2 * self.hidden
            kind = CombineKind(self.sizes, row_bytes, expert_major, weighted, returns, biased)
            yield " ".join(words), kind
        alone = CombineKind(self.sizes, WEIGHTS_ALONE_ROW_BYTES, expert_major, False, True)
        yield f"{start} topk_weights alone", alone
