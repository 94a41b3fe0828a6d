"""DeepEP's high-throughput handle: six tensors that say all there is to say about one routing.

R ranks, T own tokens, N received rows, C channels. Tokens are dealt to channels in runs of
ceil(T / C); on the CPU channels are a manner of counting only.

0. rank_prefix_matrix          [R, R] int32: rows that ranks 0 to i send to rank j
1. channel_prefix_matrix       [R, C] int32: own tokens of channels 0 to c that go to rank r
2. recv_channel_prefix_matrix  [R, C] int32: rows from rank r of the channels before c
3. recv_src_idx                [N] int32: each row's token index at its source
4. is_token_in_rank            [T, R] bool
5. send_head                   [T, R] int32: place among its channel's tokens for the rank, or -1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.errors import ArgumentError
from fanfold.geometry import check_tensor

__all__ = ["Handle", "Received", "make_handle", "read_handle"]

Handle = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_CPU = torch.device("cpu")
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
        tokens_per_rank: ``[R, R]`` int32: tokens that rank i sends to rank j.
        num_tokens: ``[R]`` int32: tokens of each rank.
        is_token_in_rank: ``[T, R]`` bool: where this rank's own tokens go.
        source_token: ``[N]`` int32: each row's token index at its source, by source rank.
    """

    rank: int
    tokens_per_rank: torch.Tensor
    num_tokens: torch.Tensor
    is_token_in_rank: torch.Tensor
    source_token: torch.Tensor


def _channel_ends(num_tokens: int, channels: int) -> torch.Tensor:
    """``[C + 1]`` int64: the token with which each channel begins, and the number of tokens."""
    run = -(-num_tokens // channels)
    return (torch.arange(channels + 1) * run).clamp(max=num_tokens)


def make_handle(received: Received, channels: int, rows: int) -> Handle:
    """The handle of a routing.

    Args:
        received: what is known of it.
        channels: C.
        rows: length of recv_src_idx: N, or more where the caller asked for a fixed number.
    """
    is_in = received.is_token_in_rank
    tokens, ranks = is_in.shape
    rank_prefix = received.tokens_per_rank.cumsum(0, dtype=torch.int32)
    before = torch.zeros((tokens + 1, ranks), dtype=torch.int32)
    torch.cumsum(is_in, 0, dtype=torch.int32, out=before[1:])
    ends = _channel_ends(tokens, channels)
    channel_prefix = before[ends[1:]].T.contiguous()
    run = max(-(-tokens // channels), 1)
    starts = torch.arange(tokens) // run * run
    send_head = torch.where(is_in, before[:-1] - before[starts], -1)
    recv_channel_prefix = torch.empty((ranks, channels), dtype=torch.int32)
    begin = 0
    for source, end in enumerate(rank_prefix[:, received.rank].tolist()):
        source_ends = _channel_ends(int(received.num_tokens[source]), channels)[:-1]
        recv_channel_prefix[source] = torch.searchsorted(
            received.source_token[begin:end], source_ends.to(torch.int32)
        )
        begin = end
    recv_src_idx = torch.full((rows,), -1, dtype=torch.int32)
    recv_src_idx[: received.source_token.shape[0]] = received.source_token
    return (
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        recv_src_idx,
        is_in,
        send_head.to(torch.int32),
    )


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
    """

    received: int
    rows: int
    source_prefix: torch.Tensor
    source_token: torch.Tensor
    is_token_in_rank: torch.Tensor
    channels: int


def read_handle(handle: object, rank: int, ranks: int) -> Routing:
    """What a handle tuple says.

    Raises:
        ArgumentError: it is no handle, or one of another group.
    """
    if not isinstance(handle, tuple | list) or len(handle) != len(_NAMES):
        size = f" of {len(handle)}" if isinstance(handle, tuple | list) else ""
        raise ArgumentError(
            "handle",
            f"a {type(handle).__name__}{size}",
            f"the tuple ({', '.join(_NAMES)}) that dispatch returned",
        )
    names = [f"handle[{place}] ({name})" for place, name in enumerate(_NAMES)]
    shapes = ((ranks, ranks), (ranks, None), (ranks, None), (None,), (None, ranks), (None, ranks))
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
    rising = torch.diff(source_prefix, prepend=torch.zeros(1, dtype=torch.int32))
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
