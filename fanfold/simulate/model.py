"""Dispatch and combine of both modes over hosts, NICs, proxies and NVLink."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fanfold.bench.workload import ROUTINGS, Workload
from fanfold.errors import ArgumentError
from fanfold.simulate.engine import Floats, Ints, Served, busy, serve
from fanfold.simulate.machines import Network, System
from fanfold.simulate.routing import Rows, draw
from fanfold.simulate.traffic import Messages, chunks, per_entry, per_peer

__all__ = ["DTYPES", "MODES", "PARTS", "PHASES", "Phase", "Scenario", "simulate"]

MODES = ("low_latency", "high_throughput")
DTYPES = ("fp8", "bf16")
PHASES = ("dispatch", "combine")
PARTS = (
    "NIC bandwidth", "message rate", "incast", "proxy", "window", "NVLink", "partial sums",
    "fixed costs",
)  # fmt: skip

_SCALE_COLUMNS = 128
_MOST_RANKS = 4096  # what a command of the proxies can name


@dataclass(frozen=True)
class Scenario:
    """One call of each phase, on all ranks at once.

    Attributes:
        network: between the hosts.
        system: the library.
        mode: one of ``MODES``.
        ranks: of all hosts.
        ranks_per_host: divides ``ranks``.
        tokens: of each rank.
        hidden: columns of a row.
        top_k: experts per token.
        experts: of all ranks; a multiple of ``ranks``.
        dtype: of the rows of dispatch, one of ``DTYPES``; combine's are bfloat16.
        routing: as in :class:`fanfold.bench.workload.Workload`.
        top_hosts: most hosts of a token; 0 for no limit.
        seed: of the routing.
    """

    network: Network
    system: System
    mode: str = "low_latency"
    ranks: int = 16
    ranks_per_host: int = 8
    tokens: int = 128
    hidden: int = 7168
    top_k: int = 8
    experts: int = 256
    dtype: str = "fp8"
    routing: str = "uniform"
    top_hosts: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            ArgumentError: one is outside its bound.
        """
        allowed = (("mode", MODES), ("dtype", DTYPES), ("routing", ROUTINGS))
        for name, choices in allowed:
            if getattr(self, name) not in choices:
                raise ArgumentError(name, repr(getattr(self, name)), f"one of {', '.join(choices)}")
        for name, most in (
            ("ranks", _MOST_RANKS), ("ranks_per_host", self.ranks), ("tokens", 1 << 16),
            ("hidden", 1 << 16), ("experts", 1 << 14), ("top_k", self.experts),
        ):  # fmt: skip
            if not 1 <= getattr(self, name) <= most:
                raise ArgumentError(name, getattr(self, name), f"from 1 to {most}")
        if self.ranks % self.ranks_per_host:
            bound = f"a multiple of the {self.ranks_per_host} ranks of a host"
            raise ArgumentError("ranks", self.ranks, bound)
        if self.experts % self.ranks:
            raise ArgumentError("experts", self.experts, f"a multiple of the {self.ranks} ranks")
        if self.top_hosts < 0:
            raise ArgumentError("top_hosts", self.top_hosts, "at least 0")

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.ranks_per_host

    def row_bytes(self, phase: str) -> float:
        """Of one row of ``"dispatch"`` or ``"combine"``; FP8 with a float32 per 128 columns."""
        if phase == "dispatch" and self.dtype == "fp8":
            return self.hidden + 4.0 * -(-self.hidden // _SCALE_COLUMNS)
        return 2.0 * self.hidden


@dataclass(frozen=True)
class Phase:
    """What the model says of one phase.

    Attributes:
        us: until the slowest rank has everything.
        mean_us: the mean over ranks.
        parts: for each of ``PARTS``, how long the busiest server of its kind works, µs.
        bytes_network: that a rank sends through its NICs, mean over ranks.
        bytes_total: of rows that a rank sends, as DeepEP counts them: one for each (token, expert)
            in low latency, for each (token, host) in high throughput, with those for itself.
        messages: of the busiest rank, through its NICs.
        drawn: ranks whose routing was drawn; the others reuse it.
    """

    us: float
    mean_us: float
    parts: dict[str, float]
    bytes_network: float
    bytes_total: float
    messages: float
    drawn: int

    @property
    def bound(self) -> str:
        """The one of ``PARTS`` that takes longest."""
        return max(PARTS, key=lambda part: self.parts[part])

    @property
    def network_gb_per_s(self) -> float:
        """What a rank's NICs send on average."""
        return self.bytes_network / self.us / 1e3

    @property
    def total_gb_per_s(self) -> float:
        """The rate as DeepEP's tests print it."""
        return self.bytes_total / self.us / 1e3


def simulate(scenario: Scenario, phase: str) -> Phase:
    """Draws the routing and follows every message of ``"dispatch"`` or ``"combine"``."""
    if phase not in PHASES:
        raise ArgumentError("phase", repr(phase), f"one of {', '.join(PHASES)}")
    workload = Workload(
        scenario.ranks, scenario.tokens, 1, scenario.top_k, scenario.experts,
        scenario.routing, scenario.seed,
    )  # fmt: skip
    rows = draw(workload, scenario.ranks_per_host, scenario.top_hosts)
    run = _low_latency if scenario.mode == "low_latency" else _high_throughput
    return run(scenario, rows, phase)


class _Machine:
    """The servers of all ranks, and how busy the busiest of each kind gets."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.network, self.system = scenario.network, scenario.system
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.messages = 0.0

    def note(self, part: str, server: Ints, service: Floats, servers: int) -> None:
        worked = float(busy(server, service, servers).max(initial=0.0))
        self.parts[part] = max(self.parts[part], worked)

    def cross(self, sent: Messages, ready: Floats, target: Ints) -> Floats:
        """Proxy, sending NIC, fabric, receiving NIC: when each segment is in the memory of rank
        ``target``."""
        network, ranks = self.network, self.scenario.ranks
        if len(sent) == 0:
            return np.zeros(0)
        posted = self._proxy(sent, ready)
        rail = sent.turn % network.rails
        wire = sent.bytes / network.rail_bytes_per_us
        peers = len(np.unique(sent.target[sent.source == sent.source[0]]))
        missed = max(0.0, 1.0 - network.cached_peers / peers) * network.miss_us
        post = sent.messages * (network.message_us + missed) * network.rails
        sender = sent.source * network.rails + rail
        self.note("NIC bandwidth", sender, wire, ranks * network.rails)
        self.note("message rate", sender, post, ranks * network.rails)
        self.messages = float(busy(sent.source, sent.messages, ranks).max())
        left = serve(sender, posted, wire + post).finish
        packets = np.ceil(sent.message_bytes / network.packet_bytes) * sent.messages
        small = sent.message_bytes < network.bulk_bytes
        switch = np.where(small, packets * network.switch_us * network.rails, 0.0)
        receiver = target * network.rails + rail
        host = sent.source // self.scenario.ranks_per_host
        self.note("NIC bandwidth", receiver, wire, ranks * network.rails)
        come = serve(receiver, left + network.latency_us, wire, host, switch)
        self.note("incast", receiver, come.switched, ranks * network.rails)
        return come.finish

    def _proxy(self, sent: Messages, ready: Floats) -> Floats:
        threads = self.system.proxies
        if threads == 0:
            return ready
        server = sent.source * threads + sent.target % threads
        service = sent.commands * self.system.command_us
        self.note("proxy", server, service, self.scenario.ranks * threads)
        return serve(server, ready + self.system.handover_us, service).finish

    def inside(
        self, source: Ints, target: Ints, size: Floats, ready: Floats, gb_per_s: float
    ) -> Floats:
        """NVLink out of ``source`` and into ``target``: when the bytes are there."""
        service = size / (gb_per_s * 1e3)
        self.note("NVLink", source, service, self.scenario.ranks)
        self.note("NVLink", target, service, self.scenario.ranks)
        left = serve(source, ready, service)
        # Both ends work on the same bytes at the same time.
        return np.maximum(left.finish, serve(target, left.start, service).finish)

    def phase(self, done: Floats, fixed: float, sent: Messages, total: float, drawn: int) -> Phase:
        """The results, from when each rank has everything."""
        scenario = self.scenario
        network_bytes = float(sent.bytes.sum()) / scenario.ranks
        self.parts["fixed costs"] += fixed
        return Phase(
            fixed + float(done.max()), fixed + float(done.mean()), self.parts,
            network_bytes, total, self.messages, drawn,
        )  # fmt: skip


def _latest(ranks: int, target: Ints, finish: Floats) -> Floats:
    """``[ranks]`` when the last of what is for each rank is there."""
    done = np.zeros(ranks)
    np.maximum.at(done, target, finish)
    return done


def _low_latency(scenario: Scenario, rows: Rows, phase: str) -> Phase:
    """Straight to each rank, and straight back: combine's traffic is dispatch's, reversed."""
    system, ranks = scenario.system, scenario.ranks
    counts = rows.pairs if system.pattern == "peer_rows" else rows.entries
    counts = counts if phase == "dispatch" else counts.T
    size = scenario.row_bytes(phase)
    machine = _Machine(scenario)
    rank = np.arange(ranks)
    host = rank // scenario.ranks_per_host
    local = host[:, None] == host[None, :] if system.nvlink else np.eye(ranks, dtype=bool)
    remote = np.where(local, 0.0, counts)
    if system.pattern == "entry":
        sent = per_entry(remote, size, scenario.seed)
    else:
        sent = per_peer(remote, size, scenario.ranks_per_host, system.pattern == "peer_rows")
    there = machine.cross(sent, np.zeros(len(sent)), sent.target)
    done = _latest(ranks, sent.target, there)
    beside = np.where(local & ~np.eye(ranks, dtype=bool), counts, 0.0)
    near = per_peer(beside, size, scenario.ranks_per_host, commands_per_row=False)
    there = machine.inside(
        near.source, near.target, near.bytes, np.zeros(len(near)), system.nvlink_gb_per_s
    )
    done = np.maximum(done, _latest(ranks, near.target, there))
    fixed = getattr(system.low_latency, phase)
    if len(sent):
        waits = system.exchanges[0 if phase == "dispatch" else 1]
        fixed += (waits - 1) * scenario.network.latency_us
        machine.parts["fixed costs"] = scenario.network.latency_us
    return machine.phase(done, fixed, sent, float(rows.entries.sum()) / ranks * size, rows.drawn)


def _high_throughput(scenario: Scenario, rows: Rows, phase: str) -> Phase:
    """By rails: a row crosses once for each host, to the rank with the sender's local index, which
    hands it on by NVLink; combine sums in the host first, then crosses."""
    system, ranks, local = scenario.system, scenario.ranks, scenario.ranks_per_host
    size = scenario.row_bytes(phase)
    machine = _Machine(scenario)
    own_host = np.arange(scenario.hosts)[None, :] == (np.arange(ranks) // local)[:, None]
    sent = chunks(np.where(own_host, 0.0, rows.host_rows), size, system.chunk_rows, local)
    near = chunks(np.where(own_host, rows.host_rows, 0.0), size, system.chunk_rows, local)
    walk = _dispatch_walk if phase == "dispatch" else _combine_walk
    done = walk(machine, rows, sent, near)
    fixed = getattr(system.high_throughput, phase)
    if len(sent):
        machine.parts["fixed costs"] = scenario.network.latency_us
    return machine.phase(done, fixed, sent, float(rows.host_rows.sum()) / ranks * size, rows.drawn)


def _fan(machine: _Machine, rows: Rows, sent: Messages) -> tuple[Ints, Ints, Floats]:
    """For each segment and each rank of the host where it is handed on: index of the segment, that
    rank, and the bytes for it."""
    local = machine.scenario.ranks_per_host
    which = np.repeat(np.arange(len(sent)), local)
    rank = (sent.target[:, None] * local + np.arange(local)).ravel()
    source, host = sent.source[which], sent.target[which]
    share = rows.pairs[source, rank] / rows.host_rows[source, host]
    return which, rank, sent.bytes[which] * share


def _paced(machine: _Machine, sent: Messages, ready: Floats) -> Floats:
    """Holds segments back where a window bounds what is in flight to one host."""
    rate = machine.system.stream_gb_per_s.get(machine.network.name)
    if rate is None or len(sent) == 0:
        return ready
    scenario = machine.scenario
    stream = sent.source * scenario.hosts + sent.target
    service = sent.bytes / (rate * 1e3)
    machine.note("window", stream, service, scenario.ranks * scenario.hosts)
    served: Served = serve(stream, ready, service)
    return served.start


def _dispatch_walk(machine: _Machine, rows: Rows, sent: Messages, near: Messages) -> Floats:
    scenario = machine.scenario
    local = scenario.ranks_per_host
    forwarder = sent.target * local + sent.source % local
    there = machine.cross(sent, _paced(machine, sent, np.zeros(len(sent))), forwarder)
    done = _latest(scenario.ranks, forwarder, there)
    which, rank, size = _fan(machine, rows, sent)
    which_near, rank_near, size_near = _fan(machine, rows, near)
    giver = np.concatenate([near.source[which_near], forwarder[which]])
    taker = np.concatenate([rank_near, rank])
    ready = np.concatenate([np.zeros(len(which_near)), there[which]])
    size = np.concatenate([size_near, size])
    over = giver != taker
    finish = machine.inside(
        giver[over], taker[over], size[over], ready[over], machine.system.forward_gb_per_s
    )
    return np.maximum(done, _latest(scenario.ranks, taker[over], finish))


def _combine_walk(machine: _Machine, rows: Rows, sent: Messages, near: Messages) -> Floats:
    """The same segments, backwards: ``sent.source`` is the rank that gets the sums."""
    scenario = machine.scenario
    local, count = scenario.ranks_per_host, len(sent)
    forwarder = sent.target * local + sent.source % local
    which, rank, size = _fan(machine, rows, sent)
    which_near, rank_near, size_near = _fan(machine, rows, near)
    giver = np.concatenate([rank, rank_near])
    taker = np.concatenate([forwarder[which], near.source[which_near]])
    size = np.concatenate([size, size_near])
    finish = np.zeros(len(giver))
    over = giver != taker
    finish[over] = machine.inside(
        giver[over], taker[over], size[over], np.zeros(int(over.sum())),
        machine.system.forward_gb_per_s,
    )  # fmt: skip
    summed = np.zeros(count)
    np.maximum.at(summed, which, finish[: len(which)])
    service = busy(which, size[: len(which)], count) / (machine.system.sum_gb_per_s * 1e3)
    machine.note("partial sums", forwarder, service, scenario.ranks)
    summed = serve(forwarder, summed, service).finish
    done = _latest(scenario.ranks, taker[len(which) :], finish[len(which) :])
    back = Messages(
        forwarder, sent.source // local, sent.bytes, sent.messages, sent.commands,
        sent.message_bytes, sent.turn,
    )  # fmt: skip
    there = machine.cross(back, _paced(machine, back, summed), sent.source)
    return np.maximum(done, _latest(scenario.ranks, sent.source, there))
