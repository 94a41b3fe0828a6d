"""Settings: resolved once into an immutable value that remembers where each part came from.

An argument beats the environment, the environment beats the default. An absent variable means the
default; a malformed one is an error that names it. This module is the only one that reads
``FANFOLD_*`` from the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fanfold.errors import ConfigError
from fanfold.representation import show_fields

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "NCCL_GIN",
    "Backend",
    "Config",
    "LatePeers",
    "Overrides",
    "Setting",
    "act_as_host_of_nccl",
    "cuda_toolkit",
    "default_environment",
    "in_environment",
    "libfabric_interface",
    "settings",
    "symmetric_memory_environment",
    "unknown_variables",
]

NCCL_GIN = "nccl:gin"
"""Of the setting ``network``: kernels of GPUs put by NCCL's GIN."""


Backend = Literal["auto", "host", "cuda"]
LatePeers = Literal["raise", "mask"]
Source = Literal["argument", "environment", "default"]


class Overrides(TypedDict, total=False):
    """What :meth:`Config.resolve` takes; :class:`Config` says what each means."""

    timeout_s: float
    spin_us: float | None
    late_peers: LatePeers
    staging_bytes: int
    ring_bytes: int
    backend: Backend
    share_gpus: bool
    hosts: int | None
    network: str
    network_memory: str
    gpu_memory: str
    proxy_threads: int | None
    ctas: int | None
    senders: int | None
    dispatch_transfer: str
    few_tokens: int
    cache_dir: str | None
    ranges: bool
    fast_accumulation: bool
    swap_ab_rows: int | None
    group_rows: int | None


@dataclass(frozen=True)
class Setting:
    """One setting: its name, environment variable, help text and how text is read."""

    name: str
    variable: str
    help: str
    parse: Callable[[str], object]
    check: Callable[[Any], bool]
    bound: str

    @property
    def default(self) -> object:
        """What :class:`Config` has where nothing is given."""
        return getattr(Config, self.name)

    def value_of(self, value: object, source: str) -> object:
        """``value`` if it is within the bound; else a ConfigError that names ``source``."""
        try:
            accepted = self.check(value)
        except TypeError:
            accepted = False
        if not accepted:
            raise ConfigError(f"{self.name} is {value!r} (from {source}), but must be {self.bound}")
        return value

    def parse_text(self, text: str) -> object:
        """Parses ``text`` of the environment."""
        source = f"environment variable {self.variable}"
        try:
            return self.value_of(self.parse(text), source)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{source} is {text!r}, but must be {self.bound}") from error


def _parse_spin(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _parse_count(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _parse_folder(text: str) -> str | None:
    return None if text == "auto" else text


def _parse_flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return value is None or (_is_integer(value) and 0 <= value < 2**31)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SETTINGS = (
    Setting(
        name="timeout_s",
        variable="FANFOLD_TIMEOUT_S",
        help="Seconds that any wait for a peer may last before PeerTimeout.",
        parse=float,
        check=lambda v: _is_real(v) and 0.0 < v < 1e6,
        bound="a number of seconds above 0 and below 1e6",
    ),
    Setting(
        name="spin_us",
        variable="FANFOLD_SPIN_US",
        help="Microseconds to spin before a waiting rank yields its core; 'auto' spins 20 us "
        "where every rank of the host, and every proxy thread, has a core of its own, and not at "
        "all elsewhere.",
        parse=_parse_spin,
        check=lambda v: v is None or (_is_real(v) and 0.0 <= v <= 1e6),
        bound="'auto' or a number of microseconds from 0 to 1e6",
    ),
    Setting(
        name="late_peers",
        variable="FANFOLD_LATE_PEERS",
        help="What a wait does when its time is over: 'raise' PeerTimeout, or 'mask' the peer, "
        "warn and go on without its tokens and results; high throughput on GPUs always raises.",
        parse=str,
        check=lambda v: v in ("raise", "mask"),
        bound="'raise' or 'mask'",
    ),
    Setting(
        name="staging_bytes",
        variable="FANFOLD_STAGING_BYTES",
        help="Bytes of shared memory per rank through which the high-throughput mode streams "
        "rows; a tensor of any size passes through it.",
        parse=int,
        check=lambda v: _is_integer(v) and (1 << 16) <= v <= (1 << 40),
        bound="an integer from 65536 to 2**40",
    ),
    Setting(
        name="ring_bytes",
        variable="FANFOLD_RING_BYTES",
        help="Bytes of GPU memory per rank and peer through which the high-throughput mode streams "
        "rows on GPUs. The default holds 128 batches of 8 rows of 7168 bfloat16 and what travels "
        "beside them, which is as many as are of use; longer rows take fewer.",
        parse=int,
        check=lambda v: _is_integer(v) and (1 << 12) <= v <= (1 << 36),
        bound="an integer from 4096 to 2**36",
    ),
    Setting(
        name="backend",
        variable="FANFOLD_BACKEND",
        help="Where calls run: 'cuda' on the ranks' GPUs, 'host' on the CPU, 'auto' on the GPUs "
        "where every rank has one of its own and all reach each other, else on the CPU. High "
        "throughput needs GPUs of compute capability 9.0 or later; on the CPU it takes tensors of "
        "any device, through host memory.",
        parse=str,
        check=lambda v: v in ("auto", "host", "cuda"),
        bound="'auto', 'host' or 'cuda'",
    ),
    Setting(
        name="share_gpus",
        variable="FANFOLD_SHARE_GPUS",
        help="Whether several ranks may have one GPU, which their kernels then time-slice by "
        "milliseconds: for programs that are developed or tested with fewer GPUs than ranks. "
        "Not over groups of NCCL, which wants a GPU for each rank, and not under MPS, where ranks "
        "that wait keep SMs from those that they wait for.",
        parse=_parse_flag,
        check=lambda v: isinstance(v, bool),
        bound="True or False, in the environment 1 or 0",
    ),
    Setting(
        name="hosts",
        variable="FANFOLD_HOSTS",
        help="Number of hosts that the ranks are on, as many on each as possible and consecutive "
        "ones together; 'auto' finds out who shares memory. With a number one machine acts as "
        "several hosts, for tests.",
        parse=_parse_count,
        check=lambda v: v is None or (_is_integer(v) and 1 <= v <= 4096),
        bound="'auto' or an integer from 1 to 4096",
    ),
    Setting(
        name="network",
        variable="FANFOLD_NETWORK",
        help="What carries between hosts: 'libfabric' takes the best network that it finds, "
        "'libfabric:PROVIDER' or 'libfabric:PROVIDER:NIC,NIC' a provider and NICs (efa, verbs, "
        "cxi, tcp, net, shm), with 'nccl:gin' kernels of GPUs put by NCCL's GIN themselves (and "
        "CPUs have libfabric), and 'loopback' or 'loopback:SEED' reaches ranks that are threads of "
        "one process, for tests; a seed makes it delay, reorder and repeat.",
        parse=str,
        check=lambda v: (
            isinstance(v, str)
            and (v == NCCL_GIN or v.partition(":")[0] in ("libfabric", "loopback"))
        ),
        bound="'libfabric', 'libfabric:PROVIDER[:NICS]', 'nccl:gin', 'loopback' or 'loopback:SEED'",
    ),
    Setting(
        name="network_memory",
        variable="FANFOLD_NETWORK_MEMORY",
        help="Where rows lie that kernels of GPUs exchange with other hosts: 'auto' in memory of "
        "the GPU where NICs reach it without the CPU, else in pinned memory of the CPU; 'cpu' "
        "always there.",
        parse=str,
        check=lambda v: v in ("auto", "cpu"),
        bound="'auto' or 'cpu'",
    ),
    Setting(
        name="gpu_memory",
        variable="FANFOLD_GPU_MEMORY",
        help="Whose memory the GPUs of a host share: PyTorch's symmetric memory ('torch'), or "
        "windows of the NCCL that PyTorch has loaded ('nccl', 2.28.9 or later). The same on all "
        "ranks.",
        parse=str,
        check=lambda v: v in ("torch", "nccl"),
        bound="'torch' or 'nccl'",
    ),
    Setting(
        name="proxy_threads",
        variable="FANFOLD_PROXY_THREADS",
        help="Threads of each rank that carry between hosts; 'auto' is 4, fewer where there are "
        "fewer cores for them or fewer peers.",
        parse=_parse_count,
        check=lambda v: v is None or (_is_integer(v) and 1 <= v <= 64),
        bound="'auto' or an integer from 1 to 64",
    ),
    Setting(
        name="ctas",
        variable="FANFOLD_CTAS",
        help="CTAs of each kernel; 'auto' is one for each SM of the GPU in low latency, and as "
        "many as keep the link busy, 24 at most, in high throughput, which can have 64. Fewer "
        "leave SMs to kernels beside it. All must fit on the GPU at once.",
        parse=_parse_count,
        check=lambda v: v is None or (_is_integer(v) and 2 <= v <= 512),
        bound="'auto' or an integer from 2 to 512",
    ),
    Setting(
        name="senders",
        variable="FANFOLD_SENDERS",
        help="Of those CTAs, how many send rows in a dispatch while the others receive; 'auto' is "
        "what fills the links: about one in seven in low latency, 8 to 12 of 24 in high "
        "throughput.",
        parse=_parse_count,
        check=lambda v: v is None or (_is_integer(v) and 1 <= v <= 511),
        bound="'auto' or an integer from 1 to 511, below the number of CTAs",
    ),
    Setting(
        name="dispatch_transfer",
        variable="FANFOLD_DISPATCH_TRANSFER",
        help="How high-throughput dispatches on GPUs move rows within a host, where they are not "
        "in place: 'push', sources store each row for every rank that gets it; 'pull', they store "
        "it once, and those ranks load it; 'auto' by a model. The same on all ranks.",
        parse=str,
        check=lambda v: v in ("auto", "push", "pull"),
        bound="'auto', 'push' or 'pull'",
    ),
    Setting(
        name="few_tokens",
        variable="FANFOLD_FEW_TOKENS",
        help="Plain dispatches of deep_ep.ElasticBuffer on GPUs of one host whose "
        "num_max_tokens_per_rank is at most this take the low-latency protocol; 0 for none. The "
        "same on all ranks.",
        parse=int,
        check=lambda v: _is_integer(v) and 0 <= v <= 4096,
        bound="an integer from 0 to 4096",
    ),
    Setting(
        name="cache_dir",
        variable="FANFOLD_CACHE_DIR",
        help="Folder that keeps compiled kernels between processes; 'auto' is fanfold in "
        "$XDG_CACHE_HOME, or in ~/.cache.",
        parse=_parse_folder,
        check=lambda v: v is None or (isinstance(v, str) and v.strip() != "" and v.isprintable()),
        bound="'auto' or the path of a folder in printable characters",
    ),
    Setting(
        name="ranges",
        variable="FANFOLD_RANGES",
        help="Whether each dispatch, combine, hook and call of a FusedMoE is a range in profiles: "
        "of NVTX, for Nsight Systems, where PyTorch has it, and of torch.profiler.",
        parse=_parse_flag,
        check=lambda v: isinstance(v, bool),
        bound="True or False, in the environment 1 or 0",
    ),
    Setting(
        name="fast_accumulation",
        variable="FANFOLD_FAST_ACCUMULATION",
        help="Whether the GEMMs of FusedMoE keep their sums in the GPU's tensor cores, 3 to 8% "
        "faster with thousands of tokens. They keep about 14 bits: a sum of thousands of terms of "
        "one sign comes out several percent too small. Otherwise each 128 terms are added in FP32.",
        parse=_parse_flag,
        check=lambda v: isinstance(v, bool),
        bound="True or False, in the environment 1 or 0",
    ),
    Setting(
        name="swap_ab_rows",
        variable="FANFOLD_SWAP_AB_ROWS",
        help="Up to how many rows of an expert, a mean, FusedMoE on GPUs swaps weights and tokens; "
        "0 never. 'auto' goes by what `fanfold tune fused-moe` measured.",
        parse=_parse_count,
        check=_is_count,
        bound="'auto' or an integer from 0 to 2147483647",
    ),
    Setting(
        name="group_rows",
        variable="FANFOLD_GROUP_ROWS",
        help="From how many rows of a rank on FusedMoE on GPUs computes columns in two groups, and "
        "sums tokens over the first meanwhile. 'auto' goes by what `fanfold tune fused-moe` "
        "measured.",
        parse=_parse_count,
        check=_is_count,
        bound="'auto' or an integer from 0 to 2147483647",
    ),
)


def settings() -> tuple[Setting, ...]:
    """Every setting there is, in the order of ``fanfold env``."""
    return _SETTINGS


def cuda_toolkit() -> Path | None:
    """The CUDA toolkit that ``CUDA_HOME`` or ``CUDA_PATH`` names, as CUDA's own tools read them."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(named) if named else None


def libfabric_interface() -> str:
    """The interface that libfabric's own variables name for sockets; empty if they name none."""
    return os.environ.get("FI_TCP_IFACE") or os.environ.get("FI_NET_IFACE") or ""


def unknown_variables() -> dict[str, str | None]:
    """The variables ``FANFOLD_*`` of the environment that set nothing, most likely misspelt, each
    with the variable that is probably meant, if one is near."""
    known = [setting.variable for setting in _SETTINGS]
    given = sorted(name for name in os.environ if name.startswith("FANFOLD_"))
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in given}
    return {name: next(iter(near[name]), None) for name in given if name not in known}


@contextlib.contextmanager
def default_environment() -> Iterator[None]:
    """Within it no variable ``FANFOLD_*`` is set, in this process and in those that it starts."""
    taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("FANFOLD_")}
    try:
        yield
    finally:
        os.environ.update(taken)


def _text(value: object) -> str:
    """What a setting's variable has for ``value``."""
    return str(int(value)) if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def in_environment(values: Overrides) -> Iterator[None]:
    """Within it the environment has these settings, for what takes no :class:`Config`.

    None of them may be None. A variable that has its value already is left alone: so ranks that are
    threads may be within it at the same time, if the thread that starts them is.
    """
    variables = {setting.name: setting.variable for setting in _SETTINGS}
    wanted = {variables[name]: _text(value) for name, value in values.items()}
    changed = {name: text for name, text in wanted.items() if os.environ.get(name) != text}
    before = {name: os.environ[name] for name in changed if name in os.environ}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(before)


def act_as_host_of_nccl(number: int) -> None:
    """Has NCCL take the processes with this number for one host, unless the environment says which
    host this is: only between hosts does it put by GIN, and let ranks share a GPU."""
    os.environ.setdefault("NCCL_HOSTID", f"fanfold {number}")


@contextlib.contextmanager
def symmetric_memory_environment(same_index: bool) -> Iterator[None]:
    """Within it the environment has what PyTorch's symmetric memory reads there when ranks meet.

    Its NVLink multicast mapping is left out: Fanfold's kernels write to one peer at a time, and
    where the fabric manager is not set up for it that mapping fails and takes the rest with it. A
    value that is in the environment already stays, and what the program maps later is its own.

    Args:
        same_index: two ranks call different GPUs by the same index, as each sees others; PyTorch
            would take them for one GPU.
    """
    names = ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]
    if same_index:
        names.append("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    added = [name for name in names if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@dataclass(frozen=True)
class Config:
    """The settings of an object. ``Config(timeout_s=3)`` takes what is not given from the defaults
    alone; :meth:`resolve` takes it from the environment first, as objects do that are given none.

        >>> config = fanfold.Config(timeout_s=3, backend="host")
        >>> ep = fanfold.LowLatency(num_experts=8, top_k=2, hidden=64, max_tokens=4, config=config)
        >>> ep.backend, ep.config.timeout_s
        ('host', 3)
        >>> ep.close()

    Attributes:
        timeout_s: seconds that any wait for a peer may last before ``PeerTimeout``.
        spin_us: microseconds to spin before yielding; None for a choice by the machine.
        late_peers: ``"raise"`` or ``"mask"``, which warns (LatePeerWarning) and goes on without the
            peer; high throughput on GPUs always raises.
        staging_bytes: shared memory per rank for high-throughput streams, in bytes.
        ring_bytes: memory per rank and peer for high-throughput streams on GPUs, in bytes.
        backend: ``"auto"``, ``"host"`` or ``"cuda"``: where calls run.
        share_gpus: whether several ranks may time-slice one GPU.
        hosts: number of hosts, consecutive ranks together; None for those that share memory.
        network: what carries between hosts, as ``"libfabric"`` or ``"libfabric:tcp"``.
        network_memory: where rows of GPUs lie for the network: ``"auto"`` or ``"cpu"``.
        gpu_memory: whose memory the GPUs of a host share: ``"torch"`` or ``"nccl"``; the same on
            all ranks.
        proxy_threads: of each rank, that carry between hosts; None for a choice by the machine.
        ctas: of each kernel; None for a choice by the mode.
        senders: CTAs of them that send rows in a dispatch; None for a choice by the machine.
        dispatch_transfer: how rows of high-throughput dispatches on GPUs move within a host:
            ``"push"``, ``"pull"`` or ``"auto"``; the same on all ranks.
        few_tokens: up to which ``num_max_tokens_per_rank`` plain dispatches of
            ``deep_ep.ElasticBuffer`` take the low-latency protocol, on GPUs of one host; the same
            on all ranks.
        cache_dir: folder of compiled kernels; None for the user's own (:meth:`cache_folder`).
        ranges: whether calls are ranges of NVTX and of ``torch.profiler``.
        fast_accumulation: whether FusedMoE may lose bits of sums on GPUs, for a few percent.
        swap_ab_rows, group_rows: when the kernel of FusedMoE changes its form
            (:class:`fanfold.fused_moe.FusedMoeTuning`); None for what was measured.
        sources: for each name above ``"argument"``, ``"environment"`` or ``"default"``.
    """

    timeout_s: float = 100.0
    spin_us: float | None = None
    late_peers: LatePeers = "raise"
    staging_bytes: int = 8 << 20
    ring_bytes: int = 16 << 20
    backend: Backend = "auto"
    share_gpus: bool = False
    hosts: int | None = None
    network: str = "libfabric"
    network_memory: str = "auto"
    gpu_memory: str = "torch"
    proxy_threads: int | None = None
    ctas: int | None = None
    senders: int | None = None
    dispatch_transfer: str = "auto"
    few_tokens: int = 256
    cache_dir: str | None = None
    ranges: bool = False
    fast_accumulation: bool = False
    swap_ab_rows: int | None = None
    group_rows: int | None = None
    sources: Mapping[str, Source] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({}), repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            ConfigError: for the first that is outside its bound.
        """
        for setting in _SETTINGS:
            source = self.sources.get(setting.name, "argument")
            setting.value_of(getattr(self, setting.name), source)

    __repr__ = show_fields

    @classmethod
    def resolve(cls, **overrides: Unpack[Overrides]) -> Config:
        """Settings from ``overrides``, then the environment, then the defaults.

        Raises:
            ConfigError: for an unknown name, or a value outside its bound.
        """
        known = {setting.name for setting in _SETTINGS}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; there are {', '.join(known)}")
        given: dict[str, object] = {**overrides}
        values: dict[str, Any] = {}
        sources: dict[str, Source] = {}
        for setting in _SETTINGS:
            text = os.environ.get(setting.variable)
            source: Source
            if setting.name in given:
                value, source = setting.value_of(given[setting.name], "argument"), "argument"
            elif text is not None:
                value, source = setting.parse_text(text), "environment"
            else:
                value, source = setting.default, "default"
            values[setting.name], sources[setting.name] = value, source
        return cls(sources=sources, **values)

    def source_of(self, name: str) -> Source:
        """Where the value of a setting came from."""
        return self.sources.get(name, "argument")

    def cache_folder(self) -> Path | None:
        """The folder of compiled kernels: ``cache_dir``, else the user's own cache; None if this
        user has no home. It need not exist."""
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not Path(base).is_absolute():  # the specification has such values ignored
            base = "~/.cache"
        chosen = Path(base, "fanfold") if self.cache_dir is None else Path(self.cache_dir)
        try:
            return chosen.expanduser().absolute()
        except RuntimeError:
            return None

    def spin_seconds(self, threads_on_host: int) -> float:
        """Seconds to spin before yielding, where ``threads_on_host`` threads (a rank's own, and its
        proxies) share the cores."""
        if self.spin_us is not None:
            return self.spin_us * 1e-6
        return 20e-6 if threads_on_host <= len(os.sched_getaffinity(0)) else 0.0
