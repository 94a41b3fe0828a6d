"""Expert-parallel dispatch and combine for decoding; see :class:`LowLatency`."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from fanfold.backends.choose import choose
from fanfold.backends.low_latency import Hook
from fanfold.backends.opening import open_low_latency
from fanfold.base_dispatcher import (
    BaseDispatcher,
    GroupLike,
    RowDtype,
    check_formats,
    checked_config,
)
from fanfold.config import Config
from fanfold.copying import not_copied
from fanfold.errors import UsageError
from fanfold.formats import ScaleFormatName
from fanfold.geometry import Geometry
from fanfold.group import as_group, together
from fanfold.operators import Shapes, register
from fanfold.refusal import Refusing
from fanfold.results import LowLatencyResult, LowLatencySource

__all__ = ["Hook", "LowLatency"]


@not_copied(
    why="it holds memory that the ranks of its group share",
    instead="Make one in each process with the same arguments; several layers may use one.",
)
class LowLatency(BaseDispatcher):
    """Dispatch and combine for decoding: few tokens per rank, every microsecond counts.

    Each local expert has room for every token of every rank, the layout of masked grouped GEMMs.
    If each rank has a GPU of its own as current CUDA device, the calls run there: they are enqueued
    on the current stream, the CPU waits for nothing, and CUDA graphs can hold them. Otherwise they
    run on the host and take CPU tensors. Construction is collective.

        >>> import fanfold, torch
        >>> with fanfold.LowLatency(num_experts=8, top_k=2, hidden=64, max_tokens=16) as ep:
        ...     x = torch.randn(16, 64, device=ep.device).bfloat16()
        ...     topk_weights, topk_idx = torch.rand(16, 8, device=ep.device).topk(2)
        ...     received = ep.dispatch(x, topk_idx, topk_weights)
        ...     y = received.tokens * 2                      # your experts
        ...     out = ep.combine(y, received)
        >>> out.shape
        torch.Size([16, 64])

    Args:
        group: a ``torch.distributed`` group of any backend; the default group if None, and this
            process alone if there is none.
        num_experts: experts of all ranks; a multiple of the ranks, up to 32767. Rank r holds
            experts ``r * num_experts / ranks`` onwards.
        top_k: experts per token, 1 to 32.
        hidden: columns of a row, from 16; a row must be a multiple of 16 bytes: of 8 columns of
            bf16, 16 of fp8, 32 of nvfp4.
        max_tokens: most tokens one rank passes to one call; sizes the memory.
        dispatch_dtype: ``"bf16"``, ``"fp8"`` (or their torch dtypes) or ``"nvfp4"``: how rows
            travel to the experts. They always return as bfloat16.
        scale_format: of fp8 rows: ``"float32"``, ``"power_of_two"`` or ``"ue8m0"``.
        config: the settings; resolved from the environment if None.

    Attributes:
        device: where tensors must be: this rank's GPU, or the CPU.
        memory: what the ranks share.

    It cannot be copied or pickled (CopyError).

    Raises:
        ArgumentError: a size out of bounds, or ranks that disagree about one (naming both values);
            on all ranks alike.
        UnavailableError: the ranks cannot share memory, or ``config.backend`` is ``"cuda"`` and
            they cannot run on their GPUs.
    """

    mode: ClassVar[Literal["low_latency"]] = "low_latency"  # type: ignore[misc]

    def __init__(
        self,
        group: GroupLike = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dispatch_dtype: RowDtype = "bf16",
        scale_format: ScaleFormatName = "float32",
        config: Config | None = None,
    ) -> None:
        super().__init__("dispatch", "combine")
        with together(as_group(group)) as self._group:
            self.config = checked_config(config)
            geometry = Geometry(self._group.size, num_experts, top_k, hidden, max_tokens)
            self.geometry, self._formats = (
                geometry,
                check_formats(hidden, dispatch_dtype, scale_format),
            )
            self._agree(self._formats, scale_format=scale_format)
            self._choice = choose(self._group, self.config, "low_latency", may_cross_hosts=True)
            self.memory, self._backend = open_low_latency(
                self._group, self._choice, geometry, self.config
            )
            self._on_host = self._choice.backend == "host"
            # The same in every call, so it is made once.
            begins = torch.arange(geometry.experts_per_rank + 1, dtype=torch.int64, device="cpu")
            self._offsets = (begins * geometry.expert_capacity).to(self.device)
        shapes = Shapes.of(geometry, "low_latency", self._formats, 1)
        self.registration = register(self, shapes, base=LowLatency)

    def __enter__(self) -> LowLatency:
        return self

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        global_scale: torch.Tensor | None = None,
        return_hook: Literal[False] = False,
    ) -> LowLatencyResult: ...

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        global_scale: torch.Tensor | None = None,
        return_hook: Literal[True],
    ) -> tuple[LowLatencyResult, Hook]: ...

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        global_scale: torch.Tensor | None = None,
        return_hook: bool,
    ) -> LowLatencyResult | tuple[LowLatencyResult, Hook]: ...

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        global_scale: torch.Tensor | None = None,
        return_hook: bool = False,
    ) -> LowLatencyResult | tuple[LowLatencyResult, Hook]:
        """Sends each token to the ranks that hold its experts. Collective.

        Args:
            x: ``[T, hidden]`` bfloat16, contiguous, 0 <= T <= max_tokens; T may differ between
                ranks. Quantised here if rows travel as fp8 or nvfp4.
            topk_idx: ``[T, top_k]`` int64, -1 for none. A token goes to an expert once, however
                often its row names the expert, with the sum of those weights.
            topk_weights: ``[T, top_k]`` float32. They travel along for a weighted combine.
            global_scale: float32, of one element, on :attr:`device`: what nvfp4 rows are multiplied
                by before their blocks are scaled, for example ``448 * 6 / amax(|x|)``; None with
                other rows. Each rank quantises its own tokens with its own, and the experts' ranks
                do not receive it, so all ranks need the same. No kernel waits for it: a value that
                is not positive gives NaN scales.
            return_hook: return before anything has arrived, with a function that receives it; at
                most two such dispatches may be in flight.

        Returns:
            The received rows, or the rows that will have arrived when the hook has run, and the
            hook.

        Raises:
            ArgumentError: bad input: nothing was sent, the call is aborted on all ranks (the others
                raise PeerRefused), and this object stays usable. Or ranks that disagree about the
                call, for example weights on some only: the call is aborted on all likewise.
            PeerRefused: another rank refused its input; this object stays usable.
            PeerTimeout: a peer did not arrive in time; close this object.
            UsageError: closed, failed earlier, or more than two dispatches in flight.

        On a GPU a later call raises what the kernels find: PeerTimeout by any call, a bad index or
        PeerRefused by a combine or :meth:`check`.
        """
        if is_dynamo_compiling():
            from fanfold.operators import native

            return native.dispatch(  # type: ignore[no-any-return]
                self, x, topk_idx, topk_weights, global_scale=global_scale, return_hook=return_hook
            )
        self._check_open()
        self._calls["dispatch"] += 1
        kept_idx = None
        if self._on_host:
            with Refusing(self._backend.refuse_dispatch):
                self._choice.check_devices(
                    x=x, topk_idx=topk_idx, topk_weights=topk_weights, global_scale=global_scale
                )
                # Combine needs the routing as it was sent, whatever the caller does to the tensor.
                # On a GPU the kernels keep it.
                if isinstance(topk_idx, torch.Tensor):
                    kept_idx = topk_idx.clone()
        dispatched, receive = self._backend.dispatch(
            self.geometry,
            x,
            topk_idx,
            topk_weights,
            formats=self._formats,
            global_scale=global_scale,
            return_hook=return_hook,
        )
        received = LowLatencyResult.of(dispatched, kept_idx, self._offsets, self, receive is None)
        if receive is None:
            return received

        def hook() -> None:
            receive()
            received.complete = True

        return received, hook

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: LowLatencyResult,
        *,
        weighted: bool = True,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: LowLatencyResult,
        *,
        weighted: bool = True,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: Literal[True],
    ) -> tuple[torch.Tensor, Hook]: ...

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: LowLatencyResult,
        *,
        weighted: bool = True,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, Hook]: ...

    def combine(
        self,
        y: torch.Tensor,
        received: LowLatencyResult,
        *,
        weighted: bool = True,
        logfmt: bool = False,
        out: torch.Tensor | None = None,
        return_hook: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Hook]:
        """Returns the experts' outputs to the tokens' ranks and sums them per token. Collective.

        The sum is taken in fp32: per rank over its experts in top-k order, rounded to bfloat16,
        then over ranks in order, rounded again. Products are rounded before they are added.

        Args:
            y: bfloat16, shaped like ``received.tokens``: the output of each row in its place.
            received: what dispatch returned; may be combined more than once.
            weighted: multiply each row by its routing weight, if dispatch had weights.
            logfmt: send rows as LogFMT-10; on GPUs all ranks do or none.
            out: ``[num_tokens, hidden]`` bfloat16 to write to, in other memory than ``y`` if on a
                GPU; made if None.
            return_hook: return before anything has arrived, with a function that completes the
                result.

        Returns:
            ``[num_tokens, hidden]`` bfloat16, zeros for a token without experts; and the hook if
            asked for.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout, UsageError: as :meth:`dispatch`.
        """
        if is_dynamo_compiling():
            from fanfold.operators import native

            return native.combine(  # type: ignore[no-any-return]
                self, y, received, weighted=weighted, bias=None, out=out, logfmt=logfmt,
                return_hook=return_hook,
            )  # fmt: skip
        self._check_open()
        self._calls["combine"] += 1
        if self._on_host or not self._is_own(received):
            with Refusing(partial(self._refuse_combine_of, received)):
                self._check_own("received", received, LowLatencyResult)
                if not received.complete:
                    raise UsageError(
                        "received is not complete: call the hook of its dispatch first"
                    )
                self._choice.check_devices(y=y, out=out)
        source = received.source
        assert isinstance(source, LowLatencySource)
        routing = source.dispatched.routing
        result, hook = self._backend.combine(
            self.geometry,
            y,
            routing if weighted else routing.unweighted(),
            source.topk_idx,
            logfmt=logfmt,
            out=out,
            return_hook=return_hook,
        )
        return result if hook is None else (result, hook)

    def reset(self) -> None:
        """Gives up the calls whose hooks have not been called, because they are lost for example.
        Collective: every rank calls it, whatever it has in flight.

        Their hooks raise UsageError from then on, and what they were to receive is undefined. The
        next calls work. On a GPU the CPU waits until the buffers are initialised, and rows that
        were dispatched before cannot be combined any more.

        Raises:
            PeerTimeout: a rank did not call it in time; close this object.
            UsageError: closed, or failed earlier.
        """
        self._check_open()
        self._backend.reset()

    def check(self) -> None:
        """See :meth:`BaseDispatcher.check`."""
        self._check_open()
        self._backend.check()

    def refuse_dispatch(self, error: BaseException) -> None:
        """See :meth:`BaseDispatcher.refuse_dispatch`."""
        if not self._closed:
            self._backend.refuse_dispatch(error)

    def refuse_combine(self, error: BaseException) -> None:
        """See :meth:`BaseDispatcher.refuse_combine`."""
        if not self._closed:
            self._backend.refuse_combine(error)

    def _masked(self) -> torch.Tensor:
        return super()._masked() if self._on_host else self._backend.masked()

    def _is_own(self, received: object) -> bool:
        """Whether there is nothing to say against combining ``received``."""
        return (
            isinstance(received, LowLatencyResult) and received.owner is self and received.complete
        )

    def _refuse_combine_of(self, received: object, error: BaseException) -> None:
        """Refuses a combine of ``received``, whose rows the peers send, if it is known."""
        if isinstance(received, LowLatencyResult) and self._is_own(received):
            source = received.source
            assert isinstance(source, LowLatencySource)
            self._backend.refuse_combine(error, routing=source.dispatched.routing)
        else:
            self._backend.refuse_combine(error)
