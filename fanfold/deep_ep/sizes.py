"""Sizes: DeepEP's ``Config`` and the hints from which its callers size a ``Buffer``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fanfold import _core
from fanfold.backends.high_throughput.cuda import CudaHighThroughput
from fanfold.backends.low_latency import HostLowLatency, cuda_required_bytes
from fanfold.config import Config as Settings
from fanfold.errors import ArgumentError
from fanfold.geometry import MAX_TOP_K, Geometry
from fanfold.representation import show_fields, worded

__all__ = [
    "Config",
    "combine_config",
    "cuda_low_latency_bytes",
    "cuda_memory_between_hosts_bytes",
    "cuda_memory_bytes",
    "cuda_stream_bytes",
    "dispatch_config",
    "hint_bytes",
    "low_latency_bytes",
    "promised_top_k",
    "signal_bytes",
]

DEEP_EP_TOP_K = 11
"""The largest top-k of DeepEP's own low-latency kernels."""

# What a GPU's memory has beyond num_rdma_bytes: one part in so many of it, and so many bytes.
_TABLE_SHARE = 16
_TABLE_BYTES = 1 << 16
_BETWEEN_HOSTS_BYTES = 1 << 10

_MOST_GPUS = _core.CUDA_HIGH_THROUGHPUT_MOST_RANKS
_LEAST_RING_BYTES = 1 << 12


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning of a high-throughput call.

    High throughput streams through one ring per peer whatever the chunk sizes, so they are checked,
    kept and change nothing. ``num_sms`` is how many SMs the kernels take on GPUs; half of it is the
    number of channels in a handle's matrices.

        >>> fanfold.deep_ep.Config(num_sms=24).num_sms
        24

    Attributes:
        num_sms: even, from 0.
        num_max_nvl_chunked_send_tokens: above 0 and below the following.
        num_max_nvl_chunked_recv_tokens: above 0.
        num_max_rdma_chunked_send_tokens: above 0, at most half of the following.
        num_max_rdma_chunked_recv_tokens: above 0; rounded up to a multiple of the preceding.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    __repr__ = show_fields

    def __post_init__(self) -> None:
        """Checks the relations between the sizes.

        Raises:
            ArgumentError: for the first one that does not hold.
        """
        check_count("num_sms", self.num_sms, 0)
        for end in ("nvl", "rdma"):
            for way in ("send", "recv"):
                name = f"num_max_{end}_chunked_{way}_tokens"
                check_count(name, getattr(self, name), 1)
        send, receive = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if send >= receive:
            bound = f"below num_max_nvl_chunked_recv_tokens = {receive}"
            raise ArgumentError("num_max_nvl_chunked_send_tokens", send, bound)
        send = self.num_max_rdma_chunked_send_tokens
        receive = -(-self.num_max_rdma_chunked_recv_tokens // send) * send
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", receive)
        if send > receive // 2:
            bound = f"at most half of num_max_rdma_chunked_recv_tokens = {receive}"
            raise ArgumentError("num_max_rdma_chunked_send_tokens", send, bound)

    @property
    def num_channels(self) -> int:
        """Columns of the channel matrices in a handle."""
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to pass as ``num_nvl_bytes``: what high throughput streams through.

        Tensors of any length pass through any memory, so this is what runs well, on the host and on
        GPUs, and not what must be; DeepEP's own hint where that is less.

        Args:
            hidden_bytes: bytes of one row.
            num_ranks: size of the group.
        """
        check_count("hidden_bytes", hidden_bytes, 1)
        check_count("num_ranks", num_ranks, 1)
        settings = Settings.resolve()
        host = align(settings.staging_bytes)
        if num_ranks > _MOST_GPUS:
            return host
        gpu = align(CudaHighThroughput.required_bytes(num_ranks, settings))
        return max(host, min(gpu, deep_ep_stream_bytes(self, hidden_bytes, num_ranks)))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes to pass as ``num_rdma_bytes`` for high throughput: 0, as one host needs none."""
        check_count("hidden_bytes", hidden_bytes, 1)
        check_count("num_ranks", num_ranks, 1)
        return 0


# What DeepEP recommends for each number of ranks: the chunk sizes of dispatch, then of combine.
_RECOMMENDED = {
    2: ((24, 256, 6, 128), (10, 256, 6, 128)),
    4: ((6, 256, 6, 128), (9, 256, 6, 128)),
    8: ((6, 256, 6, 128), (4, 256, 6, 128)),
    16: ((36, 288, 20, 128), (4, 288, 12, 128)),
    24: ((32, 288, 8, 128), (1, 288, 8, 128)),
    32: ((32, 288, 8, 128), (1, 288, 8, 128)),
    48: ((32, 288, 8, 128), (1, 288, 8, 128)),
    64: ((32, 288, 8, 128), (1, 288, 8, 128)),
    96: ((20, 480, 12, 128), (1, 480, 8, 128)),
    128: ((20, 560, 12, 128), (1, 560, 8, 128)),
    144: ((32, 720, 12, 128), (2, 720, 8, 128)),
    160: ((28, 720, 12, 128), (2, 720, 8, 128)),
}


def _recommended(num_sms: int, num_ranks: int) -> tuple[Config, Config]:
    """For dispatch and for combine."""
    check_count("num_sms", num_sms, 0)
    check_count("num_ranks", num_ranks, 1)
    return _configs(num_sms, num_ranks)


@lru_cache  # each call without a config needs one of them
def _configs(num_sms: int, num_ranks: int) -> tuple[Config, Config]:
    known = min((ranks for ranks in _RECOMMENDED if ranks >= num_ranks), default=max(_RECOMMENDED))
    dispatch, combine = _RECOMMENDED[known]
    return Config(num_sms, *dispatch), Config(num_sms, *combine)


def dispatch_config(num_sms: int, num_ranks: int) -> Config:
    """DeepEP's recommendation for dispatch; for other ranks that of the next larger number."""
    return _recommended(num_sms, num_ranks)[0]


def combine_config(num_sms: int, num_ranks: int) -> Config:
    """DeepEP's recommendation for combine; for other ranks that of the next larger number."""
    return _recommended(num_sms, num_ranks)[1]


def check_count(name: str, value: object, low: int) -> None:
    """Raises ArgumentError unless ``value`` is an integer from ``low``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(name, worded(value), f"an integer from {low}")
    if value < low:
        raise ArgumentError(name, value, f"an integer from {low}")


def align(nbytes: int, to: int = 128) -> int:
    """``nbytes`` rounded up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def signal_bytes(num_ranks: int) -> int:
    """Bytes of the low-latency mode's signals, which lie outside of ``num_rdma_bytes``."""
    # A geometry without tokens has nothing but signals.
    return _core.LowLatencyGeometry(num_ranks, num_ranks, 1, 16, 0).bytes


def low_latency_bytes(geometry: Geometry) -> int:
    """Bytes of ``num_rdma_bytes`` that low-latency calls of ``geometry`` use on the host."""
    return HostLowLatency.required_bytes(geometry) - signal_bytes(geometry.ranks)


def deep_ep_stream_bytes(config: Config, hidden_bytes: int, num_ranks: int) -> int:
    """What DeepEP's queues between GPUs of one host hold at least (DeepEP, csrc/config.hpp): for
    each channel and rank so many rows, with 128 top-k entries and weights."""
    rows = config.num_channels * min(num_ranks, 8) * config.num_max_nvl_chunked_recv_tokens
    return rows * (hidden_bytes + 128 * (8 + 4)) // 128 * 128


def cuda_stream_bytes(num_nvl_bytes: int, num_ranks: int, settings: Settings) -> int:
    """Bytes of symmetric memory per rank for high throughput on GPUs: rings of the setting's size,
    or what there is.

    Raises:
        ArgumentError: that is nothing.
    """
    _, least = _core.cuda_high_throughput_bytes(num_ranks, _LEAST_RING_BYTES)
    if num_nvl_bytes < least:
        bound = f"0, or at least {least} for {num_ranks} GPUs"
        raise ArgumentError("num_nvl_bytes", num_nvl_bytes, f"{bound}; get_nvl_buffer_size_hint")
    return min(num_nvl_bytes, CudaHighThroughput.required_bytes(num_ranks, settings))


def cuda_memory_bytes(num_rdma_bytes: int) -> int:
    """Bytes of symmetric memory per rank that a Buffer takes on a GPU: a sixteenth and 64 KiB more
    than it was given, for tables that DeepEP has no equal of."""
    return align(num_rdma_bytes + num_rdma_bytes // _TABLE_SHARE + _TABLE_BYTES)


def cuda_memory_between_hosts_bytes(num_rdma_bytes: int, num_ranks: int) -> int:
    """Bytes of each rank's memory on the CPU beside a GPU's :func:`cuda_memory_bytes` where ranks
    are on several hosts: as many, and 1 KiB for each rank, for words and for places that are
    rounded up there. So what fits the one fits the other."""
    return cuda_memory_bytes(num_rdma_bytes) + _BETWEEN_HOSTS_BYTES * num_ranks


def cuda_low_latency_bytes(geometry: Geometry) -> int:
    """Bytes of ``num_rdma_bytes`` that low-latency calls of ``geometry`` need on a GPU."""
    needed = cuda_required_bytes(geometry, late_weights=True) - _TABLE_BYTES
    return align(max(0, -(-needed * _TABLE_SHARE // (_TABLE_SHARE + 1))))


def hint_bytes(geometry: Geometry) -> int:
    """Bytes of ``num_rdma_bytes`` that are enough for ``geometry`` wherever it runs."""
    return max(low_latency_bytes(geometry), cuda_low_latency_bytes(geometry))


def deep_ep_low_latency_bytes(max_tokens: int, hidden: int, num_experts: int) -> int:
    """What DeepEP needs for the same: two send and two receive buffers, a row for each expert.

    ``2 * align128(4 E) + 4 E M (2 H + 4 H / 128)``: a combine row carries a pair of bfloat16 for
    each 128 columns (DeepEP, csrc/config.hpp).
    """
    row = 2 * hidden + 4 * hidden // 128
    return 2 * align(4 * num_experts) + 4 * num_experts * max_tokens * row


@lru_cache(maxsize=256)
def promised_top_k(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """The largest top-k for which the size hint is enough.

    32, unless that would need more than DeepEP's own buffer, which happens only with one expert per
    rank and a hidden size below 4112 (or few tokens): then the largest that does not, but always
    DeepEP's own limit of 11, or every expert where there are fewer.
    """
    budget = deep_ep_low_latency_bytes(max_tokens, hidden, num_experts)
    floor = min(DEEP_EP_TOP_K, num_experts)
    for top_k in range(MAX_TOP_K, floor, -1):
        geometry = Geometry(num_ranks, num_experts, top_k, hidden, max_tokens)
        if hint_bytes(geometry) <= budget:
            return top_k
    return floor
