"""The high-throughput calls of the native face: on the ranks' GPUs, or on the host, through whose
memory tensors of other devices then go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fanfold.config import Config
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.formats import RowFormat, ScaleFormat, quantize
from fanfold.geometry import Geometry, check_integer, check_tensor
from fanfold.group import Group
from fanfold.high_throughput import HighThroughput, Rows
from fanfold.high_throughput.cuda import LEAST_CAPABILITY, MOST_SMS, CudaHighThroughput
from fanfold.high_throughput.in_place import bytes_for_rows
from fanfold.placement import Placement, place
from fanfold.received import HighThroughputSource, Received
from fanfold.refusal import Refusing
from fanfold.renaming import Renaming
from fanfold.representation import worded
from fanfold.staging import Staging, named_tensors
from fanfold.symmetric import SymmetricMemory
from fanfold.symmetric_cuda import CudaSymmetricMemory

__all__ = ["HighThroughputCalls", "place_high_throughput"]

# Of the mode, whose calls take a plan where those of the face take a Received.
_DISPATCH = Renaming({"plan": "previous", "the plan": "the earlier dispatch"})
_COMBINE = Renaming(
    {
        "plan": "received",
        "the plan": "the Received",
        "row_weights": "received.weights",
        "lane_weights": "row_values",
    }
)


class HighThroughputCalls:
    """The calls of one ExpertParallel. Construction is collective.

    Args:
        owner: that ExpertParallel.
        group, geometry, config: its own.
        formats: how rows travel.
        expert_alignment: the rows of each expert are padded to a multiple of this.
        in_place_rows: rows for which there is memory in place.
        check_received: raises for what is no result of the owner's dispatch.

    Attributes:
        device: where the mode works.
        memory: the ranks' symmetric memory.
    """

    memory: SymmetricMemory | CudaSymmetricMemory

    def __init__(
        self,
        owner: object,
        group: Group,
        geometry: Geometry,
        config: Config,
        formats: tuple[RowFormat, ScaleFormat],
        expert_alignment: int,
        in_place_rows: int,
        check_received: Callable[..., None],
    ) -> None:
        self._owner, self._geometry = owner, geometry
        self._formats, self._alignment = formats, expert_alignment
        self._check_received = check_received
        self._in_place_rows = in_place_rows
        self._placement = place_high_throughput(group, config)
        self.device = self._placement.device
        if self._placement.backend == "host":
            nbytes = HighThroughput.staging_bytes(group.size, config)
            self.memory = SymmetricMemory(group, nbytes, config)
            self._mode: HighThroughput | CudaHighThroughput = HighThroughput(self.memory, 0, nbytes)
            return
        result_bytes = self._result_bytes()
        nbytes = CudaHighThroughput.required_bytes(group.size, config, result_bytes)
        self.memory = CudaSymmetricMemory(group, nbytes)
        try:
            self._mode = CudaHighThroughput(
                self.memory,
                config,
                max_tokens=geometry.max_tokens,
                result_bytes=result_bytes,
                check_place=self._placement.check,
            )
        except BaseException:
            self.memory.close()
            raise

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        previous: Received | None,
        capacity: int | None,
        in_place: bool,
        return_hook: bool,
    ) -> Received:
        """See :meth:`ExpertParallel.dispatch`."""
        mode = self._mode
        with Refusing(self._refusal_of(previous, mode.refuse_dispatch)):
            refuse_given(return_hook=return_hook or None)
            _check_previous(previous, topk_idx, topk_weights, capacity)
            if in_place and self._in_place_rows == 0:
                bound = "False, as this ExpertParallel has no in_place_rows"
                raise ArgumentError("in_place", True, bound)
            if previous is not None:
                self._check_received(previous, "previous")
            staging = self._staging(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
            x, topk_idx, topk_weights = staging.host((x, topk_idx, topk_weights))
            x = self._prepare_rows(x)
            if topk_idx is not None:
                shape = ((x[0] if isinstance(x, tuple) else x).shape[0], self._geometry.top_k)
                check_tensor("topk_idx", topk_idx, shape, (torch.int64,), device=self.device)
        # On the host rows come into tensors of their own.
        on_gpu = isinstance(mode, CudaHighThroughput)
        options: dict[str, Any] = {"in_place": in_place} if on_gpu else {}
        if previous is not None:
            plan = _source(previous).dispatched.plan
            with _DISPATCH:
                dispatched = mode.dispatch_cached(x, plan, layout="expert_major", **options)  # type: ignore[arg-type]
        else:
            assert topk_idx is not None
            dispatched = mode.dispatch(
                x,
                topk_idx,
                topk_weights,
                num_experts=self._geometry.num_experts,
                layout="expert_major",
                expert_alignment=self._alignment,
                capacity=capacity,
                **options,
            )
        counts, offsets = dispatched.tokens_per_expert, dispatched.offsets
        assert counts is not None
        assert offsets is not None
        return Received(
            tokens=staging.back(dispatched.tokens),
            scales=staging.back(dispatched.scales),
            weights=staging.back(dispatched.row_weights),
            tokens_per_expert=staging.back(counts),
            offsets=staging.back(offsets),
            num_tokens=dispatched.plan.tokens,
            owner=self._owner,
            source=HighThroughputSource(dispatched),
        )

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        weighted: bool,
        bias: torch.Tensor | None,
        logfmt: bool,
        out: torch.Tensor | None,
        return_hook: bool,
    ) -> torch.Tensor:
        """See :meth:`ExpertParallel.combine`."""
        with Refusing(self._refusal_of(received, self._mode.refuse_combine)):
            self._check_received(received, "received")
            shape = (received.tokens.shape[0], self._geometry.hidden)
            weights = received.weights if weighted else None
            tensors = {"received": received.tokens, "y": y, "received.weights": weights}
            staging = self._staging(**tensors, bias=bias, out=out)
            y, weights, bias = staging.host((y, weights, bias))
            check_tensor("y", y, shape, (torch.bfloat16,), device=self.device)
            refuse_given(logfmt=logfmt or None, return_hook=return_hook or None)
            if staging.needed and out is not None:
                shape = (received.num_tokens, self._geometry.hidden)
                check_tensor("out", out, shape, (torch.bfloat16,))
        with _COMBINE:
            result, _ = self._mode.combine(
                y,
                _source(received).dispatched.plan,  # type: ignore[arg-type]  # of this very mode
                layout="expert_major",
                row_weights=weights,
                bias=bias,
                out=None if staging.needed else out,
            )
        return staging.result(result, out)

    def combine_weights(self, row_values: torch.Tensor, received: Received) -> torch.Tensor:
        """See :meth:`ExpertParallel.combine_weights`."""
        with Refusing(self._refusal_of(received, self._mode.refuse_combine)):
            self._check_received(received, "received")
            staging = self._staging(received=received.tokens, row_values=row_values)
            staged = staging.host(row_values)
        plan = _source(received).dispatched.plan
        with _COMBINE:
            values = self._mode.combine_weights(staged, plan, layout="expert_major")  # type: ignore[arg-type]
        return staging.back(values)

    def refuse_dispatch(self, error: BaseException) -> None:
        """See :meth:`ExpertParallel.refuse_dispatch`."""
        self._mode.refuse_dispatch(error)

    def use_sms(self, sms: int | None) -> None:
        """See :meth:`ExpertParallel.use_sms`."""
        if isinstance(self._mode, CudaHighThroughput):
            self._mode.use_sms(sms)
        elif sms is not None:
            check_integer("sms", sms, 1, MOST_SMS)

    def check(self) -> None:
        """See :meth:`ExpertParallel.check`."""
        self._mode.check()

    def _result_bytes(self) -> int:
        """Of the memory for dispatches in place."""
        if self._in_place_rows == 0:
            return 0
        return bytes_for_rows(self._in_place_rows, self._geometry.hidden, *self._formats)

    def _refusal_of(
        self, received: object, refuse: Callable[..., None]
    ) -> Callable[[BaseException], None]:
        """``refuse`` for a call with what a dispatch brought: on GPUs such a call is none if that
        dispatch was void, which only its plan tells."""
        if not isinstance(self._mode, CudaHighThroughput):
            return refuse
        own = isinstance(received, Received) and received.owner is self._owner
        return lambda error: refuse(error, _source(received).dispatched.plan if own else None)  # type: ignore[arg-type]

    def _staging(self, **tensors: object) -> Staging:
        """The way of a call's tensors to where the mode works; on GPUs they must be there."""
        if self._placement.backend == "host":
            return Staging(**tensors)
        for name, value in tensors.items():
            self._placement.check(**dict(named_tensors(name, value)))
        return Staging()

    def _prepare_rows(self, x: Rows) -> Rows:
        """``x`` as it is sent: quantised here if rows travel as fp8."""
        row_format, scale_format = self._formats
        hidden, most = self._geometry.hidden, self._geometry.max_tokens
        if isinstance(x, tuple):
            if row_format is not RowFormat.FP8:
                raise ArgumentError("x", worded(x), "a torch.Tensor, as dispatch_dtype is bf16")
            if len(x) != 2:
                raise ArgumentError("x", worded(x), "a torch.Tensor, or a pair (values, scales)")
            values = x[0]
            check_tensor(
                "x[0]", values, ("tokens", hidden), (torch.float8_e4m3fn,), device=self.device
            )
        else:
            dtypes = (torch.bfloat16,)
            values = check_tensor("x", x, ("tokens", hidden), dtypes, device=self.device)
        if values.shape[0] > most:
            raise ArgumentError("x.shape[0]", values.shape[0], f"at most max_tokens = {most}")
        if row_format is RowFormat.FP8 and not isinstance(x, tuple):
            return quantize(x, scale_format)
        return x


def place_high_throughput(group: Group, config: Config) -> Placement:
    """As :func:`fanfold.placement.place`; GPUs older than the mode's kernels are no place for it.

    Raises:
        ArgumentError, UnavailableError: as there; and the latter if ``"cuda"`` was asked for and a
            GPU is too old. On all ranks.
    """
    placement = place(group, config)
    if placement.backend == "host" or placement.capability >= LEAST_CAPABILITY:
        return placement
    least, oldest = (".".join(map(str, c)) for c in (LEAST_CAPABILITY, placement.capability))
    obstacle = (
        f"high throughput needs compute capability {least}, and the oldest GPU of these ranks has "
        f"{oldest}"
    )
    if config.backend == "cuda":
        source = config.source_of("backend")
        raise UnavailableError(f"the setting backend is 'cuda' (from {source}), but {obstacle}")
    return Placement("host", torch.device("cpu"), obstacle)


def _source(received: Received) -> HighThroughputSource:
    source = received.source
    assert isinstance(source, HighThroughputSource)
    return source


def refuse_given(**arguments: object) -> None:
    """Raises ArgumentError for the first argument that the mode at hand cannot honour."""
    for name, value in arguments.items():
        if value is not None:
            raise ArgumentError(name, "given", "left out in this mode")


def _check_previous(
    previous: Received | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    capacity: int | None,
) -> None:
    if previous is None:
        if topk_idx is None:
            raise ArgumentError("topk_idx", "None", "given, unless previous is")
        return
    routing = {"topk_idx": topk_idx, "topk_weights": topk_weights, "capacity": capacity}
    for name, value in routing.items():
        if value is not None:
            raise ArgumentError(name, "given", "None where previous is, whose routing has its own")
