"""How many CTAs a high-throughput kernel has, each on an SM of its own, and which send first.

Where nobody says, there are as many as keep the link busy. An SM pushes rows to peers, stores rows
at home and adds rows up at speeds of its own (docs/decisions/sms-and-grids.md, on H200); the link
takes what all SMs of a GPU push. The model adds up the time that one SM would need for a token, and
compares it with the link's time for the same token.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from fanfold.backends.high_throughput.kernels import (
    DEFAULT_MOST_CTAS,
    CombineKind,
    DispatchKind,
    Sizes,
)
from fanfold.backends.high_throughput.protocol import RowOrder

__all__ = ["Grid", "sms_for", "with_transfer"]

# Of 24 in a dispatch. Expert-major there are more copies for the others to make.
_SENDERS: dict[RowOrder, int] = {"token_major": 9, "expert_major": 8}
_SENDERS_OF = 24
# A source whose rows are pulled stores each once. Few senders were faster on few CTAs, and on 24
# between two ranks for rows of 14336 bytes; for rows of 7168, and 224 of scales, more were.
_PULLED_SENDERS: dict[RowOrder, int] = {"token_major": 6, "expert_major": 4}
_MANY_PULLING, _LONG_PULLED_BYTES, _SENDERS_OF_MANY = 20, 10240, 8
# Rows from here on were pulled faster, between two ranks; short ones cost what each of them costs.
# Between four, top-8 was slower; other numbers were not measured.
_LEAST_PULLED_BYTES, _MOST_PULLING_RANKS = 7168, 3
# Token-major in place there are none: eight senders of twelve fill the links, of more half.
_MOST_IN_PLACE, _FEW_IN_PLACE = 2 / 3, 8

# Bytes per nanosecond (GB/s): of one GPU's link to all peers, and of one SM.
_LINK, _PULLED_LINK = 375.0, 257.0
_PUSHED, _STORED = 35.0, 61.0
_SUMMED, _FOLDED = 200.0, 105.0  # rows of experts into one; rows of ranks into a result
# Nanoseconds of an SM for each row, however short.
_MOVED_ROW, _SUMMED_ROW, _FOLDED_ROW = 20.0, 12.0, 5.0
# Not everything happens at once, in a combine less: its folds wait for peers, too.
_DISPATCH_MARGIN, _COMBINE_MARGIN = 1.2, 1.35


@dataclass(frozen=True)
class Grid:
    """CTAs of high-throughput kernels, and how many of them begin as senders in a dispatch.

    Attributes:
        ranks: R.
        most: CTAs that a kernel may have.
        ctas: of every kernel, if somebody has said.
        senders: of every dispatch, if somebody has said.
    """

    ranks: int
    most: int
    ctas: int | None = None
    senders: int | None = None

    def of_plan(self) -> tuple[int, int]:
        """CTAs and senders of a plan, which has nothing for the latter to do."""
        ctas = self._within(DEFAULT_MOST_CTAS)
        return ctas, self._senders(ctas, "token_major", in_place=False)

    def of_dispatch(self, kind: DispatchKind) -> tuple[int, int]:
        """CTAs and senders of a dispatch."""
        ctas = self._within(sms_for(kind))
        if kind.pulls and self.senders is None and self.ranks > 1:
            many = ctas >= _MANY_PULLING and kind.row_bytes < _LONG_PULLED_BYTES
            return ctas, _share(ctas, _SENDERS_OF_MANY if many else _PULLED_SENDERS[kind.layout])
        return ctas, self._senders(ctas, kind.layout, in_place=kind.in_place)

    def of_combine(self, kind: CombineKind) -> tuple[int, int]:
        """CTAs and senders of a combine, where each warp does both in turn."""
        ctas = self._within(sms_for(kind))
        return ctas, self._senders(ctas, "token_major", in_place=False)

    def _within(self, ctas: int) -> int:
        return min(ctas, self.most) if self.ctas is None else self.ctas

    def _senders(self, ctas: int, order: RowOrder, *, in_place: bool) -> int:
        if self.senders is not None:
            return self.senders
        if self.ranks == 1:
            return ctas
        if in_place and order == "token_major":
            return min(max(int(ctas * _MOST_IN_PLACE), 1), max(_FEW_IN_PLACE, ctas // 2))
        return _share(ctas, _SENDERS[order])


def _share(ctas: int, senders: int) -> int:
    """As many of ``ctas`` as ``senders`` of 24, and no more than leave a receiver."""
    return min(-(-ctas * senders // _SENDERS_OF), max(ctas - 1, 1))


def with_transfer(kind: DispatchKind, asked: str) -> DispatchKind:
    """``kind`` as its rows travel: pulled or pushed, as is asked for, or with ``"auto"`` as the
    model says. Ranks must agree, so it goes by nothing that is one rank's own matter."""
    if kind.in_place or kind.sizes.ranks == 1 or asked == "push":
        return kind
    pulled = dataclasses.replace(kind, pulls=True)
    if asked == "auto" and not _gains(kind, pulled):
        return kind
    return pulled


def _gains(pushed: DispatchKind, pulled: DispatchKind) -> bool:
    """Whether readers that pull take less time, on the SMs that the model gives to pushed rows: as
    much as the SMs need, or the link, whichever is more."""
    few = pushed.sizes.ranks <= _MOST_PULLING_RANKS and not pushed.sizes.across_hosts
    if not few or not pushed.expert_major or pushed.row_bytes < _LEAST_PULLED_BYTES:
        return False
    sms, link_bytes = sms_for(pushed), _rows_pushed(pushed.sizes) * _bytes_moved(pushed)
    push_ns = max(_dispatch_ns(pushed) / sms, link_bytes / _LINK)
    return max(_dispatch_ns(pulled) / sms, link_bytes / _PULLED_LINK) < push_ns


def sms_for(kind: DispatchKind | CombineKind) -> int:
    """SMs that keep the link busy in calls of this kind with evenly chosen experts, at most
    ``DEFAULT_MOST_CTAS``; that many, too, where nothing is sent."""
    pulls = isinstance(kind, DispatchKind) and kind.pulls
    link_ns = _rows_pushed(kind.sizes) * _bytes_moved(kind) / (_PULLED_LINK if pulls else _LINK)
    if link_ns == 0:
        return DEFAULT_MOST_CTAS
    if isinstance(kind, DispatchKind):
        sm_ns = _DISPATCH_MARGIN * _dispatch_ns(kind)
    else:
        sm_ns = _COMBINE_MARGIN * _combine_ns(kind)
    return min(math.ceil(sm_ns / link_ns), DEFAULT_MOST_CTAS)


def _chance_of_a_rank(sizes: Sizes) -> float:
    """That a token has an expert on a given rank, if its ``top_k`` differ."""
    local, chosen = sizes.experts // sizes.ranks, min(sizes.top_k, sizes.experts)
    none = math.comb(sizes.experts - local, chosen)
    return 1 - none / math.comb(sizes.experts, chosen)


def _rows_pushed(sizes: Sizes) -> float:
    """To peers, for each token."""
    return (sizes.ranks - 1) * _chance_of_a_rank(sizes)


def _bytes_moved(kind: DispatchKind | CombineKind) -> int:
    """With each row."""
    return kind.row_bytes + (kind.bytes_beside if isinstance(kind, DispatchKind) else 0)


def _dispatch_ns(kind: DispatchKind) -> float:
    """Of one SM for each token, sent and received."""
    sizes, row = kind.sizes, _bytes_moved(kind)
    pushed, own = _rows_pushed(sizes), _chance_of_a_rank(sizes)
    stored = float(sizes.top_k) if kind.expert_major else pushed + own
    if kind.in_place:
        stored -= pushed
    if kind.pulls:  # stored once for all readers, and loaded while others are stored
        return (1 + stored) * row / _STORED + (pushed + stored) * _MOVED_ROW
    return pushed * row / _PUSHED + stored * row / _STORED + (pushed + stored) * _MOVED_ROW


def _combine_ns(kind: CombineKind) -> float:
    """Of one SM for each token, sent and folded."""
    sizes, row = kind.sizes, kind.row_bytes
    pushed, own = _rows_pushed(sizes), _chance_of_a_rank(sizes)
    total = pushed * row / _PUSHED + (pushed + own) * (row / _FOLDED + _FOLDED_ROW)
    if kind.expert_major:
        total += own * row / _STORED + sizes.top_k * (row / _SUMMED + _SUMMED_ROW)
    return total
