"""The messages of a phase, before any time is given to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fanfold.simulate.engine import Floats, Ints

__all__ = ["Messages", "chunks", "per_entry", "per_peer"]

# Large messages are cut into segments, so that a later server can begin before the last byte.
_SEGMENT_BYTES = 32768
# Segments of a phase; longer ones where there would be more.
_MOST_SEGMENTS = 1 << 15
_FIELDS = ("source", "target", "bytes", "messages", "commands", "message_bytes")


@dataclass(frozen=True)
class Messages:
    """Segments in the order in which their senders post them.

    Attributes:
        source: ``[n]`` rank that sends.
        target: ``[n]`` rank, or host in high throughput.
        bytes: ``[n]`` of a segment.
        messages: ``[n]`` messages that begin with the segment; below 1 in all but the first segment
            of a message.
        commands: ``[n]`` that a proxy reads for it.
        message_bytes: ``[n]`` of the whole message to which it belongs.
        turn: ``[n]`` number of the segment at its sender; segments go round-robin over rails.
    """

    source: Ints
    target: Ints
    bytes: Floats
    messages: Floats
    commands: Floats
    message_bytes: Floats
    turn: Ints

    def __len__(self) -> int:
        return len(self.source)


def per_entry(rows: Floats, row_bytes: float, seed: int) -> Messages:
    """One message for each row, in an order that is random for each sender.

    Args:
        rows: ``[ranks, ranks]`` from a rank to a rank.
        row_bytes: of one row.
        seed: of the order.
    """
    source, target = np.nonzero(rows)
    count = rows[source, target].astype(np.int64)
    source, target = np.repeat(source, count), np.repeat(target, count)
    order = np.lexsort((np.random.default_rng(seed).random(len(source)), source))
    ones = np.ones(len(source))
    each = ones * row_bytes
    return Messages(source, target[order], each, ones, ones, each, _turn(source))


def per_peer(
    rows: Floats, row_bytes: float, ranks_per_host: int, commands_per_row: bool
) -> Messages:
    """One message for each peer; a NIC serves its connections in turn, a segment of each.

    Every sender begins with the host after its own, and there with its own local index: so no
    rank is everybody's first.

    Args:
        rows: ``[ranks, ranks]`` from a rank to a rank.
        row_bytes: of one row.
        ranks_per_host: ranks of each host.
        commands_per_row: a proxy reads a command for each row; else one for each message.
    """
    source, target = np.nonzero(rows)
    count = rows[source, target]
    commands = count if commands_per_row else np.ones(len(count))
    sent = _segments(source, target, count * row_bytes, np.ones(len(count)), commands)
    local, hosts = ranks_per_host, len(rows) // ranks_per_host
    host_after = (sent.target // local - sent.source // local) % hosts
    return _in_turns(sent, host_after * local + (sent.target - sent.source) % local)


def chunks(rows: Floats, row_bytes: float, chunk_rows: int, ranks_per_host: int) -> Messages:
    """Messages of ``chunk_rows`` rows; every sender goes round the hosts, from the one after its
    own.

    Args:
        rows: ``[ranks, hosts]`` from a rank to a host.
        row_bytes: of one row.
        chunk_rows: of one message.
        ranks_per_host: ranks of each host.
    """
    source, target = np.nonzero(rows)
    count = rows[source, target]
    messages = np.ceil(count / chunk_rows)
    sent = _segments(source, target, count * row_bytes, messages, messages)
    sent = replace(sent, message_bytes=np.minimum(sent.message_bytes, chunk_rows * row_bytes))
    return _in_turns(sent, (sent.target - sent.source // ranks_per_host) % rows.shape[1])


def _in_turns(sent: Messages, place: Ints) -> Messages:
    """First the first segments of all that is sent, then the second ones; among equals in the
    order of ``place``."""
    step = _turn(sent.source * (int(sent.target.max(initial=0)) + 1) + sent.target)
    order = np.lexsort((place, step))
    fields = {name: getattr(sent, name)[order] for name in _FIELDS}
    return Messages(**fields, turn=_turn(fields["source"]))


def _segments(
    source: Ints, target: Ints, size: Floats, messages: Floats, commands: Floats
) -> Messages:
    """Cuts what goes from a source to a target into equal segments."""
    longest = max(_SEGMENT_BYTES, float(size.sum()) / _MOST_SEGMENTS)
    parts = np.maximum(1, np.ceil(size / longest)).astype(np.int64)
    which = np.repeat(np.arange(len(size)), parts)
    share = 1.0 / parts[which]
    return Messages(
        source[which],
        target[which],
        (size[which] * share),
        messages[which] * share,
        commands[which] * share,
        size[which],
        _turn(source[which]),
    )


def _turn(group: Ints) -> Ints:
    """``[n]`` how many entries of the same group come before each."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    first = np.ones(len(group), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    begin = np.flatnonzero(first)[np.cumsum(first) - 1]
    turn = np.empty(len(group), np.int64)
    turn[order] = np.arange(len(group)) - begin
    return turn
