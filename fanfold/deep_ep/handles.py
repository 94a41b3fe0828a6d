"""DeepEP's high-throughput handle: six tensors that say all there is to say about one routing.

R ranks, T own tokens, N received rows, C channels. Tokens are dealt to channels in runs of
ceil(T / C); here channels are a manner of counting only.

0. rank_prefix_matrix          [R, R] int32: rows that ranks 0 to i send to rank j
1. channel_prefix_matrix       [R, C] int32: own tokens of channels 0 to c that go to rank r
2. recv_channel_prefix_matrix  [R, C] int32: rows from rank r of the channels before c
3. recv_src_idx                [N] int32: each row's token index at its source
4. is_token_in_rank            [T, R] bool
5. send_head                   [T, R] int32: place among its channel's tokens for the rank, or -1

After a dispatch on GPUs with num_worst_tokens nobody has exchanged numbers: all of (2) is -1 then,
and of (0) all but this rank's own column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fanfold.backends.high_throughput import Plan
from fanfold.backends.high_throughput.plan import CudaPlan
from fanfold.errors import ArgumentError
from fanfold.geometry import check_tensor
from fanfold.representation import described, show_fields, worded

__all__ = [
    "GpuHandle",
    "Handle",
    "Received",
    "Routing",
    "check_channels",
    "make_handle",
    "read_handle",
]

Handle = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_CPU = torch.device("cpu")
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_NAMES = (
    "rank_prefix_matrix",
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "recv_src_idx",
    "is_token_in_rank",
    "send_head",
)


@dataclass(frozen=True)
class Received:
    """What one rank knows of a routing once its rows have arrived.

    Attributes:
        rank: this rank.
        rank_prefix: ``[R, R]`` int32: rows that ranks 0 to i send to rank j.
        num_tokens: ``[R]`` int32: tokens of each rank; None where nobody knows.
        is_token_in_rank: ``[T, R]`` bool: where this rank's own tokens go.
        source_token: ``[N]`` int32: each row's token index at its source, by source rank; then -1
            for rows that no token fills.
    """

    rank: int
    rank_prefix: torch.Tensor
    num_tokens: torch.Tensor | None
    is_token_in_rank: torch.Tensor
    source_token: torch.Tensor

    __repr__ = show_fields


def make_handle(received: Received, channels: int) -> Handle:
    """The handle of a routing with C channels, where its tensors are; the CPU waits for nothing."""
    is_in = received.is_token_in_rank
    (tokens, ranks), device = is_in.shape, is_in.device
    before = torch.zeros((tokens + 1, ranks), dtype=torch.int32, device=device)
    torch.cumsum(is_in, 0, dtype=torch.int32, out=before[1:])
    run = max(-(-tokens // channels), 1)
    ends = (torch.arange(1, channels + 1, device=device, dtype=torch.int64) * run).clamp(max=tokens)
    starts = torch.arange(tokens, device=device, dtype=torch.int64) // run * run
    return (
        received.rank_prefix,
        before[ends].T.contiguous(),
        _rows_before_channels(received, channels),
        received.source_token,
        is_in,
        torch.where(is_in, before[:-1] - before[starts], -1),
    )


def _rows_before_channels(received: Received, channels: int) -> torch.Tensor:
    """``[R, C]`` int32: recv_channel_prefix_matrix."""
    counts, device = received.num_tokens, received.source_token.device
    ranks = received.rank_prefix.shape[0]
    if counts is None:
        return torch.full((ranks, channels), -1, dtype=torch.int32, device=device)
    counts = counts.long().unsqueeze(1)
    ends = received.rank_prefix[:, received.rank].long()
    rows = torch.arange(received.source_token.shape[0], device=device, dtype=torch.int64)
    # Rows are in order of source and token, so one search in numbers made of both finds them.
    source = torch.searchsorted(ends, rows, right=True)
    keys = (source << 32) + received.source_token
    starts = -(-counts // channels) * torch.arange(channels, device=device, dtype=torch.int64)
    first = torch.minimum(starts, counts) + (
        torch.arange(ranks, device=device, dtype=torch.int64) << 32
    ).unsqueeze(1)
    begins = torch.nn.functional.pad(ends[:-1], (1, 0)).unsqueeze(1)
    return (torch.searchsorted(keys, first) - begins).to(torch.int32)


class GpuHandle(tuple[torch.Tensor, ...]):
    """The handle of a dispatch on GPUs: DeepEP's tuple, and the plan by which calls there work.

    Its tensors are made when somebody looks into it, which callers of DeepEP hardly do; in a CUDA
    graph at once, as each replay must write them anew. A copy is a plain tuple without the plan.

    Attributes:
        plan: the routing.
        channels: C.
    """

    plan: CudaPlan
    channels: int
    _make: Callable[[], Handle]
    _made: Handle | None

    @classmethod
    def of(cls, plan: CudaPlan, channels: int, make: Callable[[], Handle]) -> GpuHandle:
        """The handle of ``plan``, whose tensors ``make`` makes, on the current stream."""
        handle = super().__new__(cls, (_NOTHING,) * len(_NAMES))
        handle.plan, handle.channels, handle._make, handle._made = plan, channels, make, None
        return handle

    @property
    def rows(self) -> int:
        """Rows of the received tensors."""
        return self.plan.row_count("token_major")

    @property
    def top_k(self) -> int:
        """K."""
        return self.plan.top_k

    def tensors(self) -> Handle:
        """What the tuple holds."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def __new__(cls, tensors: Iterable[torch.Tensor]) -> Any:
        return tuple(tensors)

    def __repr__(self) -> str:
        paths = {"ranks": "plan.ranks", "tokens": "plan.tokens", "rows": "rows", "top_k": "top_k"}
        return described(self, **paths, channels="channels", device="plan.block.device")

    def __reduce__(self) -> Any:
        return tuple, (self.tensors(),)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors())

    def __getitem__(self, place: Any) -> Any:
        return self.tensors()[place]


def check_channels(of_handle: int, of_call: int) -> None:
    """Raises ArgumentError unless a call's configuration has as many channels as its handle."""
    if of_handle != of_call:
        bound = f"{2 * of_handle}, as for the dispatch that made the handle"
        raise ArgumentError("config.num_sms", 2 * of_call, bound)


@dataclass(frozen=True)
class Routing:
    """What combine and cached dispatch need of a handle.

    Attributes:
        received: N, the rows that arrive.
        rows: rows of the received tensors, N or more.
        source_prefix: ``[R]`` int32: rows from ranks 0 to r.
        source_token: ``[N]`` int32.
        is_token_in_rank: ``[T, R]`` bool.
        channels: C.
        top_k: None, as any number of slots may come back.
    """

    received: int
    rows: int
    source_prefix: torch.Tensor
    source_token: torch.Tensor
    is_token_in_rank: torch.Tensor
    channels: int
    top_k: None = None

    __repr__ = show_fields

    def plan(self, top_k: int) -> Plan:
        """The plan: of what a handle does not say, nothing is needed for whole rows."""
        received, (tokens, ranks) = self.received, self.is_token_in_rank.shape
        return Plan(
            ranks=ranks,
            num_experts=ranks,
            top_k=top_k,
            tokens=tokens,
            is_token_in_rank=self.is_token_in_rank,
            received=received,
            source_prefix=self.source_prefix,
            source_token=self.source_token,
            topk_idx=torch.full((received, top_k), -1, dtype=torch.int64, device="cpu"),
            topk_weights=None,
            tokens_per_expert=torch.zeros(1, dtype=torch.int32, device="cpu"),
            offsets=torch.zeros(2, dtype=torch.int64, device="cpu"),
            rows_of=torch.full((received, top_k), -1, dtype=torch.int32, device="cpu"),
            capacity=self.rows if self.rows > received else None,
        )


def read_handle(handle: object, rank: int, ranks: int) -> Routing:
    """What a handle tuple says.

    Raises:
        ArgumentError: it is no handle, or one of another group.
    """
    if not isinstance(handle, tuple | list) or len(handle) != len(_NAMES):
        raise ArgumentError(
            "handle",
            worded(handle),
            f"the tuple ({', '.join(_NAMES)}) that dispatch returned",
        )
    names = [f"handle[{place}] ({name})" for place, name in enumerate(_NAMES)]
    channels, tokens = (ranks, "channels"), ("tokens", ranks)
    shapes: list[tuple[int | str, ...]]
    shapes = [(ranks, ranks), channels, channels, ("rows",), tokens, tokens]
    for name, tensor, shape in zip(names, handle, shapes, strict=True):
        dtype = torch.bool if tensor is handle[4] else torch.int32
        check_tensor(name, tensor, shape, (dtype,), device=_CPU)
    rank_prefix, channel_prefix, recv_channel_prefix, source_token, is_in, send_head = handle
    if recv_channel_prefix.shape != channel_prefix.shape:
        raise ArgumentError(f"{names[2]}.shape", tuple(recv_channel_prefix.shape),
                            f"{tuple(channel_prefix.shape)}, as handle[1]")  # fmt: skip
    if send_head.shape != is_in.shape:
        raise ArgumentError(f"{names[5]}.shape", tuple(send_head.shape),
                            f"{tuple(is_in.shape)}, as handle[4]")  # fmt: skip
    source_prefix = rank_prefix[:, rank].contiguous()
    received = int(source_prefix[-1])
    rising = torch.diff(source_prefix, prepend=torch.zeros(1, dtype=torch.int32, device="cpu"))
    if received > source_token.shape[0] or bool((rising < 0).any()):
        raise ArgumentError(
            names[0],
            f"{source_prefix.tolist()} in column {rank}",
            f"rising, up to the {source_token.shape[0]} rows of recv_src_idx",
        )
    own = int(rising[rank])
    if int(is_in[:, rank].sum()) != own:
        raise ArgumentError(
            names[4], f"{int(is_in[:, rank].sum())} tokens for rank {rank} itself",
            f"{own}, as in handle[0]",
        )  # fmt: skip
    return Routing(
        received=received,
        rows=source_token.shape[0],
        source_prefix=source_prefix,
        source_token=source_token[:received],
        is_token_in_rank=is_in,
        channels=channel_prefix.shape[1],
    )
