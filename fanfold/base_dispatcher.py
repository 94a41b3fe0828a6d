"""What :class:`fanfold.LowLatency` and :class:`fanfold.HighThroughput` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from fanfold.backends.choose import BackendChoice
from fanfold.config import Config
from fanfold.errors import ArgumentError, UsageError
from fanfold.forks import Owner
from fanfold.formats import Formats, RowFormat, RowFormatName, ScaleFormat, ScaleFormatName
from fanfold.geometry import Geometry, Mode, check_tensor
from fanfold.group import Group, agree
from fanfold.memory import PeerMemory
from fanfold.memory.cuda_hosts import counting_cores
from fanfold.memory.host import SymmetricMemory
from fanfold.metrics import collect
from fanfold.operators import Registration
from fanfold.representation import described, worded
from fanfold.results import DispatchResult

__all__ = ["BaseDispatcher", "GroupLike", "RowDtype", "check_formats", "checked_config"]

GroupLike = dist.ProcessGroup | Group | None
RowDtype = RowFormatName | torch.dtype | RowFormat

_Result = TypeVar("_Result", bound=DispatchResult)


def checked_config(config: object) -> Config:
    """``config``, or the settings of the environment if it is None.

    Raises:
        ArgumentError: it is something else.
        ConfigError: a malformed variable of the environment.
    """
    if config is None:
        return Config.resolve()
    if not isinstance(config, Config):
        raise ArgumentError("config", worded(config), "a fanfold.Config or None")
    return config


def check_formats(hidden: int, dispatch_dtype: RowDtype, scale_format: ScaleFormatName) -> Formats:
    """How rows of ``hidden`` columns travel.

    Raises:
        ArgumentError: an unknown format, a scale format of other rows, or a row that is no
            multiple of 16 bytes.
    """
    row_format = RowFormat.of(dispatch_dtype)
    if scale_format not in [member.value for member in ScaleFormat]:
        allowed = " or ".join(repr(member.value) for member in ScaleFormat)
        raise ArgumentError("scale_format", repr(scale_format), allowed)
    row_format.check_hidden(hidden)
    if row_format is RowFormat.NVFP4 and scale_format != "float32":
        raise ArgumentError(
            "scale_format", repr(scale_format), "left out with nvfp4 rows, whose scales are e4m3"
        )
    return row_format, ScaleFormat(scale_format)


class HasGeometry:
    """The sizes of an object, by their names.

    Attributes:
        geometry: all of them.
    """

    geometry: Geometry

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.geometry.ranks

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.geometry.num_experts

    @property
    def experts_per_rank(self) -> int:
        """Local experts of each rank."""
        return self.geometry.experts_per_rank

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.geometry.top_k

    @property
    def hidden(self) -> int:
        """Columns of a row."""
        return self.geometry.hidden

    @property
    def max_tokens(self) -> int:
        """Most tokens one rank passes to one call."""
        return self.geometry.max_tokens


class BaseDispatcher(HasGeometry, ABC):
    """The base class of :class:`fanfold.LowLatency` and :class:`fanfold.HighThroughput`: sizes,
    errors of earlier calls, masked ranks, and the end of the object.

    Attributes:
        mode: ``"low_latency"`` or ``"high_throughput"``.
        config: the settings.
        geometry: the sizes.
        device: where the calls work: this rank's GPU, or the CPU.
        memory: what the ranks share.
        registration: names the object in compiled code.
    """

    mode: Mode
    config: Config
    memory: PeerMemory
    registration: Registration
    _group: Group
    _choice: BackendChoice

    def __init__(self, *calls: str) -> None:
        self._closed = False
        self._calls = dict.fromkeys(calls, 0)
        self._owner = Owner(f"this {type(self).__name__}")

    def _agree(self, formats: Formats, **options: object) -> None:
        """Checks that all ranks ask for the same. Collective.

        Raises:
            ArgumentError: for the first value that differs, naming both; on all ranks.
        """
        geometry, config = self.geometry, self.config
        signature: dict[str, object] = {
            "mode": self.mode,
            "num_experts": geometry.num_experts,
            "top_k": geometry.top_k,
            "hidden": geometry.hidden,
            "max_tokens": geometry.max_tokens,
            "dispatch_dtype": formats[0].value,
            **options,
            "staging_bytes": config.staging_bytes,
            "ring_bytes": config.ring_bytes,
        }
        agree(self._group, signature)

    # ---- sizes ----------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the calls work: this rank's GPU, or the CPU."""
        return self._choice.device

    @property
    def backend(self) -> Literal["host", "cuda"]:
        """``"cuda"`` if the calls run on the ranks' GPUs, ``"host"`` if they run on the CPU."""
        return self._choice.backend

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._group.rank

    # ---- calls ----------------------------------------------------------------------------------

    @abstractmethod
    def dispatch(self, *args: Any, **options: Any) -> Any:
        """Sends tokens to their experts; see the classes."""

    @abstractmethod
    def combine(self, *args: Any, **options: Any) -> Any:
        """Returns the experts' outputs to the tokens; see the classes."""

    # ---- refusals and errors of earlier calls ---------------------------------------------------

    @abstractmethod
    def refuse_dispatch(self, error: BaseException) -> None:
        """Takes part in the other ranks' dispatch when ``error`` keeps this rank from making it.
        For a layer that checks its own input before it dispatches.

        The call is aborted on all ranks: the others raise PeerRefused with the text of ``error``,
        and the next call works. Raise ``error`` afterwards. Does nothing if this object is closed.
        """

    @abstractmethod
    def refuse_combine(self, error: BaseException) -> None:
        """Like :meth:`refuse_dispatch`, for a combine."""

    @abstractmethod
    def check(self) -> None:
        """Raises what earlier calls have found wrong since they returned. Does not wait for them.

        On a GPU a call returns before its kernels have run. If they find that a peer is late, any
        later call raises that. If they find an expert index out of range, a capacity too small or a
        peer that refused, this method or a later combine raises it.

        Raises:
            ArgumentError, PeerRefused, PeerTimeout: of an earlier call.
            UsageError: closed, or failed earlier.
        """

    def synchronize(self) -> None:
        """Waits until the current stream has done its work, then calls :meth:`check`. On the host
        every call has done its work when it returns."""
        self._check_open()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def metrics(self) -> dict[str, Any]:
        """What this rank has done so far: calls, waits for peers, and between hosts what its proxy
        threads have sent and received. Local; any thread may ask while calls run.

            >>> ep.metrics()["calls_total"]
            {'dispatch': 1, 'combine': 1}

        The names are those of ``docs/metrics.md``; units are part of them. What does not exist here
        is left out: on GPUs all but calls, proxies and channels, on one host the last two. After
        :meth:`close` the last values are returned.

        Raises:
            UsageError: in a forked child.
        """
        self._owner.check()
        return collect(self._calls, *counting_cores(self.memory))

    # ---- masked ranks ---------------------------------------------------------------------------

    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are not masked. All ranks, unless ``late_peers`` is ``"mask"`` and a rank
        was late. On a GPU this waits for the current stream, and a CUDA graph cannot hold it.

        Each rank masks for itself. High throughput on GPUs masks no rank.

        Raises:
            UsageError: closed.
        """
        self._check_open()
        masked = self._masked().tolist()
        return tuple(rank for rank in range(self.ranks) if not masked[rank])

    def missing(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Which top-k entries get no contribution, because their expert is on a masked rank, or in
        high throughput on a host where the rank that receives for it from this one is masked.

        To renormalise a token's output, divide it by the share of its weights that is left::

            left = (topk_weights * ~ep.missing(topk_idx)).sum(1) / topk_weights.sum(1)

        The masks are those after the calls so far: ask after a combine for what that combine left
        out. In the call during which a rank is masked, some of its rows may have arrived: the
        result is undefined for tokens with an entry on that rank. On a GPU this waits for nothing:
        it is enqueued on the current stream, and in a CUDA graph each replay reads the masks anew.

        Args:
            topk_idx: ``[T, top_k]`` int64, as dispatched.

        Returns:
            ``[T, top_k]`` bool, on the device of ``topk_idx``; False for -1.

        Raises:
            ArgumentError: ``topk_idx`` is no such tensor.
            UsageError: closed.
        """
        self._check_open()
        return missing_entries(self.geometry, self._unreached(), topk_idx)

    def _masked(self) -> torch.Tensor:
        """``[R]``: not zero for each masked rank."""
        if isinstance(self.memory, SymmetricMemory):
            return torch.tensor(self.memory.masked(), dtype=torch.bool, device="cpu")
        return torch.zeros(self.ranks, dtype=torch.bool, device=self.device)

    def _unreached(self) -> torch.Tensor:
        """``[R]``: not zero for each rank that gets no tokens of this one."""
        return self._masked()

    # ---- the end of the object ------------------------------------------------------------------

    def close(self) -> None:
        """Releases the memory, on a GPU once it is idle. Not collective; harmless when repeated."""
        self._closed = True
        self.memory.close()

    def __repr__(self) -> str:
        names = ("rank", "ranks", "num_experts", "top_k", "hidden", "max_tokens")
        state = "closed" if getattr(self, "_closed", False) else ""
        paths = {name: name for name in (*names, "backend", "device")}
        return described(self, state, **paths)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this {type(self).__name__} is closed; make a new one")
        self._owner.check()

    def _check_own(self, name: str, given: object, kind: type[_Result]) -> _Result:
        """``given`` if a dispatch of this object returned it.

        Raises:
            ArgumentError: it is no result of this mode.
            UsageError: another object dispatched it.
        """
        if not isinstance(given, kind):
            bound = f"the {kind.__name__} that dispatch returned"
            raise ArgumentError(name, worded(given), bound)
        if given.owner is not self:
            raise UsageError(
                f"{name} comes from another {type(self).__name__}; combine where you dispatched"
            )
        return given


def missing_entries(
    geometry: Geometry, masked: torch.Tensor, topk_idx: torch.Tensor
) -> torch.Tensor:
    """See :meth:`BaseDispatcher.missing`.

    Args:
        geometry: of the call.
        masked: ``[R]``, not zero for each masked rank.
        topk_idx: of the call.
    """
    shape = ("tokens", geometry.top_k)
    check_tensor("topk_idx", topk_idx, shape, (torch.int64,), contiguous=False)
    last = geometry.num_experts - 1
    ranks = topk_idx.clamp(0, last) // geometry.experts_per_rank
    absent = masked.to(topk_idx.device, torch.bool)[ranks]
    return absent & (topk_idx >= 0) & (topk_idx <= last)
