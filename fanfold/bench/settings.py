"""What one bench is asked to do, checked before a rank is started."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fanfold import _core
from fanfold.bench.workload import ROUTINGS, Workload
from fanfold.config import NCCL_GIN, Backend, Config, Overrides
from fanfold.errors import ArgumentError, UnavailableError
from fanfold.formats import RowFormat, RowFormatName
from fanfold.geometry import Geometry, Mode, check_hidden
from fanfold.launch import MAX_RANKS

__all__ = [
    "BACKENDS",
    "DTYPES",
    "FACES",
    "FACES_OF_BOTH_MODES",
    "LAYOUTS",
    "LEAVE_SMS",
    "MODES",
    "ONE_HOST",
    "REUSES",
    "THROUGH",
    "BenchSettings",
    "check_bounds",
    "check_choices",
    "check_transport",
]

MODES = ("low_latency", "high_throughput")
DTYPES = ("bf16", "fp8")
BACKENDS = ("auto", "host", "cuda")
FACES = ("native", "deep_ep", "elastic", "hybridep")
FACES_OF_BOTH_MODES = FACES[:2]
LAYOUTS = ("expert_major", "token_major")
REUSES = ("new", "cached")
LEAVE_SMS = "_set_sm_carveout_experimental"
"""Of ``torch._C``, since PyTorch 2.7: how many SMs matrix products leave to others."""

# Of high throughput only.
_OWN_OPTIONS = ("layout", "routing", "sms", "alignment", "zero_padding", "in_place")
_OF_GPUS = ("sms", "in_place")  # of these, what the host backend does not have
THROUGH = {
    "deep_ep": "deep_ep",
    "elastic": "deep_ep.ElasticBuffer",
    "hybridep": "deep_ep.HybridEPBuffer",
}
"""What reports and pictures call the faces but the native one."""

_LAYOUTS_OF = {
    "native": LAYOUTS,
    "deep_ep": ("token_major",),
    "elastic": ("token_major", "expert_major"),
    "hybridep": ("expert_major",),
}
"""The orders of rows of each face, the usual one first."""

_GPU_ALIGNMENT = 128  # what grouped matrix products on GPUs want

# The library's argument names, as the command line calls them.
_OPTIONS = {"num_experts": "experts", "max_tokens": "tokens"}

# What of GPUs a bench does across hosts.
_ACROSS = (
    "on GPUs of several hosts --face native times high throughput expert-major only, and not in "
    "place"
)
ONE_HOST = "left out on one host, where nothing goes over a network (--hosts 2 acts as two hosts)"
"""The bound of ``transport`` where the ranks are on one host."""

ACROSS_HOSTS = "one between hosts; FANFOLD_GPU_MEMORY=nccl has each host take NCCL's memory"
"""The bound of ``transport`` where the ranks are on several hosts."""

NCCL_LSA = "nccl:lsa"
"""The ``transport`` within a host that is memory of NCCL's, the setting ``gpu_memory``."""

_TRANSPORTS_OF_GPUS = (NCCL_GIN, NCCL_LSA)
_MOST_SEED = (1 << 64) - 1  # of loopback


def check_transport(name: str) -> None:
    """Raises ArgumentError unless ``name`` could name a network; whether there is one is open."""
    kind, colon, seed = name.partition(":")
    if name in _TRANSPORTS_OF_GPUS:
        return
    if kind == "loopback":
        if colon and not (seed.isdecimal() and seed.isascii() and int(seed) <= _MOST_SEED):
            bound = "loopback or loopback:SEED, with an integer below 2**64 as seed"
            raise ArgumentError("transport", repr(name), bound)
        return
    with contextlib.suppress(UnavailableError):  # nothing is offered, so that it cannot choose
        _core.choose_network([], name, True)


def check_choices(settings: object, choices: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raises ArgumentError for the first attribute that is none of those known."""
    for name, known in choices:
        value = getattr(settings, name)
        if value not in known:
            raise ArgumentError(name, repr(value), f"one of {', '.join(known)}")


def check_bounds(settings: object, bounds: Iterable[tuple[str, int, int]]) -> None:
    """Raises ArgumentError for the first attribute that is not within its bounds."""
    for name, low, high in bounds:
        value = getattr(settings, name)
        if not low <= value <= high:
            raise ArgumentError(name, value, f"from {low} to {high}")


@dataclass(frozen=True)
class BenchSettings:
    """Every argument of ``fanfold bench``.

    Attributes:
        mode: one of :data:`MODES`.
        ranks: size of the group.
        tokens: of each rank.
        hidden: columns of a row.
        top_k: experts per token.
        experts: of all ranks.
        dtype: how rows travel to the experts, one of :data:`DTYPES`.
        backend: one of :data:`BACKENDS`.
        distribution: which experts tokens choose, one of ``workload.ROUTINGS``.
        seed: of tokens and routing.
        iterations: timed rounds.
        warmup: rounds before them.
        check: compare with the oracle first.
        baseline: time the rival too.
        calls: calls that one CUDA graph holds.
        overlap: time a matrix product beside a waiting hook, or beside dispatches; on GPUs only.
        layout: high throughput: one of :data:`LAYOUTS`; None for the first.
        routing: high throughput: one of :data:`REUSES`: whether each dispatch brings a routing of
            its own, or all follow an earlier one's; None for the first.
        sms: high throughput on GPUs: how many each kernel takes; None for the library's choice.
        alignment: high throughput, expert-major: rows of an expert are padded to a multiple of
            this; None for 128 on GPUs and 1 on the host.
        zero_padding: high throughput on GPUs, expert-major: whether these rows are zeros, or hold
            anything; None for what callers of the face get, which are zeros but of ElasticBuffer's.
        in_place: high throughput on GPUs: rows stay where peers write them; None for False there.
        face: whose calls are timed, one of :data:`FACES`. Those of DeepEP's ``Buffer`` bring the
            weights with combine in low latency, and rows token-major in high throughput, which is
            the only mode of the last two.
        hosts: that the ranks are on, as many on each, of which one machine acts as several; None
            for the setting ``hosts``.
        transport: what carries between hosts, as the setting ``network``, or within a host
            :data:`NCCL_LSA`; None for the settings.
            With ``"loopback"`` the bench starts ranks that are threads.
    """

    mode: Mode
    ranks: int = 4
    tokens: int = 128
    hidden: int = 1024
    top_k: int = 8
    experts: int = 64
    dtype: RowFormatName = "bf16"
    backend: Backend = "auto"
    distribution: str = "uniform"
    seed: int = 0
    iterations: int = 100
    warmup: int = 10
    check: bool = True
    baseline: bool = False
    calls: int = 20
    overlap: bool = False
    layout: str | None = None
    routing: str | None = None
    sms: int | None = None
    alignment: int | None = None
    zero_padding: bool | None = None
    in_place: bool | None = None
    face: str = "native"
    hosts: int | None = None
    transport: str | None = None

    def __post_init__(self) -> None:
        """Checks everything that can be checked without a group.

        Raises:
            ArgumentError: the first argument that is out of its bound.
            UnavailableError: something that the backend asked for does not have.
        """
        check_choices(
            self,
            (
                ("mode", MODES), ("dtype", DTYPES), ("backend", BACKENDS), ("face", FACES),
                ("distribution", ROUTINGS),
            ),
        )  # fmt: skip
        self._check_own_options()
        if self.overlap and self.backend == "host":
            raise UnavailableError("overlap is timed on GPUs: use --backend cuda, or leave it out")
        if self.overlap and self.mode == "high_throughput" and not hasattr(torch._C, LEAVE_SMS):
            raise UnavailableError(
                "overlap needs PyTorch 2.7 or newer, which can tell a product to leave SMs to "
                f"others; this is {torch.__version__}: install a newer one, or leave out --overlap"
            )
        check_bounds(
            self,
            (
                ("ranks", 1, MAX_RANKS),
                ("iterations", 1, 10_000_000),
                ("warmup", 0, 10_000_000),
                ("seed", 0, 2**40),
                ("calls", 1, 1000),
            ),
        )
        try:
            Geometry(self.ranks, self.experts, self.top_k, self.hidden, self.tokens)
            check_hidden(self.hidden, RowFormat.of(self.dtype).dtype.itemsize)
        except ArgumentError as error:
            name = _OPTIONS.get(error.argument, error.argument)
            raise ArgumentError(name, error.value, error.bound) from None
        self._check_hosts()
        self.workload()

    def _check_hosts(self) -> None:
        """Raises ArgumentError for hosts that do not divide the ranks or a malformed transport, and
        UnavailableError for GPUs on several hosts."""
        if self.transport is not None:
            check_transport(self.transport)
        if self.backend == "host" and self.transport in _TRANSPORTS_OF_GPUS:
            bound = "left out with --backend host: NCCL's are of GPUs"
            raise ArgumentError("transport", repr(self.transport), bound)
        if self.hosts is None:
            return
        if self.hosts < 1 or self.ranks % self.hosts:
            divisors = [str(n) for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            bound = f"{' or '.join(divisors)}, as many ranks on each (--hosts, FANFOLD_HOSTS)"
            raise ArgumentError("hosts", f"{self.hosts} with {self.ranks} ranks", bound)
        if self.hosts == 1 and self.transport not in (None, NCCL_LSA):
            raise ArgumentError("transport", repr(self.transport), ONE_HOST)
        if self.hosts > 1 and self.backend == "cuda" and not self._crosses_hosts:
            raise UnavailableError(
                f"backend is cuda, but hosts is {self.hosts}, and {_ACROSS}: use --backend host, "
                "or leave out --hosts (FANFOLD_HOSTS)"
            )

    @property
    def through_gateways(self) -> bool:
        """Whether a row crosses once to each other host, which returns one sum: of a bench on a
        backend that has been chosen. Else each rank there gets it, and returns its own."""
        return self.mode == "high_throughput" and self.backend != "cuda"

    @property
    def _crosses_hosts(self) -> bool:
        """Whether kernels reach ranks on other hosts, and are taken for that."""
        if self.backend == "auto" and self.config().network.startswith("loopback"):
            return False  # ranks are threads, which auto leaves on the host
        native = self.mode == "high_throughput" and self.face == "native"
        return not (native and (self.layout == "token_major" or self.in_place))

    def _check_own_options(self) -> None:
        """Raises ArgumentError for an option of one mode that is wrong or out of place."""
        if self.mode != "high_throughput":
            if self.face not in FACES_OF_BOTH_MODES:
                bound = f"{' or '.join(FACES_OF_BOTH_MODES)} in low latency, which it does not have"
                raise ArgumentError("face", self.face, bound)
            for name in _OWN_OPTIONS:
                if getattr(self, name) is not None:
                    bound = "left out in low latency; it is an option of high throughput"
                    if name == "routing":
                        bound += " (which experts tokens choose is --distribution)"
                    raise ArgumentError(name, getattr(self, name), bound)
            return
        if self.face != "native":
            self._check_as_deep_ep()
        for name, known in (("layout", LAYOUTS), ("routing", REUSES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ArgumentError(name, repr(value), f"one of {', '.join(known)}")
        most = _core.CUDA_HIGH_THROUGHPUT_MOST_CTAS
        for name, low, high in (("sms", 2, most), ("alignment", 1, 1 << 20)):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ArgumentError(name, value, f"from {low} to {high}")
        for name in _OF_GPUS:
            if self.backend == "host" and getattr(self, name):
                bound = "left out with --backend host; layout, routing and alignment work there"
                raise ArgumentError(name, getattr(self, name), bound)
        if self.backend == "host" and self.zero_padding is False:
            raise ArgumentError("zero_padding", False, "left out with --backend host: always zeros")
        for name in ("alignment", "zero_padding"):
            if self.layout == "token_major" and getattr(self, name) is not None:
                bound = "left out with --layout token-major, which has no padding"
                raise ArgumentError(name, getattr(self, name), bound)

    def _check_as_deep_ep(self) -> None:
        """Raises ArgumentError for what DeepEP's calls of high throughput do not have."""
        known = _LAYOUTS_OF[self.face]
        if self.layout is not None and self.layout in LAYOUTS and self.layout not in known:
            bound = f"{' or '.join(known)}, or left out, with --face {self.face}"
            raise ArgumentError("layout", self.layout, bound)
        if self.face in ("deep_ep", "hybridep") and self.zero_padding is False:
            raise ArgumentError("zero_padding", False, f"left out with --face {self.face}")
        for name in ("in_place", *(("alignment",) if self.face == "deep_ep" else ())):
            if getattr(self, name):
                bound = f"left out with --face {self.face}"
                raise ArgumentError(name, getattr(self, name), bound)
        if self.face == "deep_ep" and self.sms is not None and self.sms % 2:
            raise ArgumentError("sms", self.sms, "even with --face deep_ep, as Buffer.set_num_sms")

    def on(self, backend: Backend) -> BenchSettings:
        """The settings with ``backend`` instead of ``auto``, and the choices that go with it."""
        chosen = dataclasses.replace(self, backend=backend)
        if self.mode != "high_throughput":
            return chosen
        layout, alignment = self.layout or _LAYOUTS_OF[self.face][0], self.alignment
        if alignment is None and layout == "expert_major":
            alignment = _GPU_ALIGNMENT if backend == "cuda" else 1
        zeros = self.zero_padding
        if backend != "cuda" or layout != "expert_major":
            zeros = None
        elif zeros is None:
            zeros = self.face != "elastic"
        return dataclasses.replace(
            chosen,
            layout=layout,
            routing=self.routing or REUSES[0],
            alignment=alignment,
            zero_padding=zeros,
            in_place=bool(self.in_place) if backend == "cuda" else None,
        )

    def overrides(self) -> Overrides:
        """What is asked for of the library's settings, for :meth:`Config.resolve`."""
        asked: Overrides = {"backend": self.backend}
        if self.hosts is not None:
            asked["hosts"] = self.hosts
        if self.transport == NCCL_LSA:
            asked["gpu_memory"] = "nccl"
        elif self.transport is not None:
            asked["network"] = self.transport
        return asked

    def config(self) -> Config:
        """The settings of the library, those of the environment where nothing is asked for."""
        asked = self.overrides()
        if self.sms is not None:
            asked["ctas"] = self.sms
        return Config.resolve(**asked)

    def backend_here(self, several_hosts: bool = False, ranks_here: int | None = None) -> Backend:
        """The backend that ``auto`` means on this machine, or the one asked for.

        Args:
            several_hosts: whether the ranks are on several hosts, where only some kernels reach
                others, and then ranks may share a GPU (``share_gpus``).
            ranks_here: ranks on this machine; all of them if None.

        Raises:
            UnavailableError: ``cuda``, ``overlap``, ``sms``, ``in_place`` or padding that is not
                written, with fewer GPUs than ranks, or on several hosts.
        """
        if self.backend == "host":
            return "host"
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        ranks = self.ranks if ranks_here is None else ranks_here
        enough = gpus >= ranks
        if several_hosts:
            shared = gpus > 0 and self.config().share_gpus
            enough = self._crosses_hosts and (enough or shared)
        if enough:
            return "cuda"
        asked = "backend is cuda"
        if self.backend == "auto":
            of_gpus = [name for name in ("overlap", *_OF_GPUS) if getattr(self, name)]
            if self.zero_padding is False and self.face == "native":
                of_gpus.append("no zero_padding")
            if self.transport in _TRANSPORTS_OF_GPUS:
                of_gpus.append(f"transport {self.transport}")
            if not of_gpus:
                return "host"
            asked = f"{of_gpus[0]} is asked for"
        if several_hosts and not self._crosses_hosts:
            raise UnavailableError(
                f"{asked}, but the ranks are on several hosts, and {_ACROSS}: start the ranks on "
                "one host (--hosts 1, FANFOLD_HOSTS), or use --backend host without options of GPUs"
            )
        raise UnavailableError(
            f"{asked} with {ranks} ranks, each on a GPU of its own, but PyTorch sees {gpus} "
            "here: lower --ranks, check CUDA_VISIBLE_DEVICES, or use --backend host"
        )

    def workload(self) -> Workload:
        """The input it runs on."""
        return Workload(
            ranks=self.ranks,
            tokens=self.tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            experts=self.experts,
            routing=self.distribution,
            seed=self.seed,
        )
