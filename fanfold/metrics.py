"""Counters of calls, waits, proxies and channels, as a mapping and for Prometheus.

``metrics()`` of a :class:`fanfold.LowLatency`, a :class:`fanfold.HighThroughput` and a
:class:`fanfold.deep_ep.Buffer` returns them. :func:`collector` gives them to ``prometheus_client``
(the extra ``fanfold[prometheus]``).
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fanfold import _core
from fanfold.errors import ArgumentError, FanfoldError, UnavailableError
from fanfold.representation import worded

__all__ = ["METRICS", "Collector", "Measured", "Metric", "collector"]

PREFIX = "fanfold_"
ANY_PEER = "any"
"""The label ``peer`` of waits that any one of several peers ends."""


@dataclass(frozen=True)
class Metric:
    """One entry of ``metrics()``.

        >>> [metric.name for metric in fanfold.metrics.METRICS if metric.labels == ("call",)]
        ['calls_total']

    Attributes:
        name: with its unit; Prometheus has it after ``fanfold_``.
        labels: what the mapping is nested by, from the outside.
        help: what it counts.
        kind: a counter only grows; a gauge is as it is now.
        count: what the core calls it, for those of proxies and channels.
    unit: how many of ``count`` are one of this.
    """

    name: str
    labels: tuple[str, ...]
    help: str
    kind: Literal["counter", "gauge"] = "counter"
    count: str = ""
    unit: int = 1


def _of_thread(name: str, count: str, text: str, unit: int = 1) -> Metric:
    return Metric(f"proxy_{name}", ("thread",), text, count=count, unit=unit)


def _of_peer(name: str, count: str, text: str, unit: int = 1) -> Metric:
    return Metric(f"channel_{name}", ("peer",), text, count=count, unit=unit)


METRICS: tuple[Metric, ...] = (
    Metric(
        "calls_total",
        ("call",),
        "Calls that this rank has begun, refused ones included; replays of a CUDA graph are not "
        "counted",
    ),
    Metric(
        "waits_total",
        ("phase", "peer"),
        "Waits for a peer that did not find at once what they waited for",
    ),
    Metric("wait_seconds_total", ("phase", "peer"), "Time that those waits took"),
    Metric(
        "wait_failures_total",
        ("phase", "peer"),
        "Waits of them that ended without it: the peer was late or gone, the network failed, the "
        "ranks were in different calls, or a signal interrupted the wait",
    ),
    Metric(
        "rows_total",
        ("phase", "peer"),
        "Rows that this rank has sent to each rank, itself included: a token crosses once to each "
        "rank that holds one of its experts",
    ),
    Metric("row_bytes_total", ("phase", "peer"), "Bytes of those rows and of their scales"),
    Metric(
        "expert_rows_total", ("expert",), "Rows that dispatches have brought this rank's experts"
    ),
    Metric("masked_ranks", (), "Ranks that this rank goes on without", "gauge"),
    _of_thread("commands_total", "commands", "Commands taken from the ring"),
    _of_thread(
        "ring_seconds_total",
        "ring_ns",
        "Time that those commands lay in the ring, at most: since the thread last found it empty",
        10**9,
    ),
    _of_thread("fences_total", "fences", "Fences completed"),
    _of_thread("barriers_total", "barriers", "Barriers completed"),
    _of_thread("sleeps_total", "sleeps", "Times that the thread had nothing to wait for and slept"),
    _of_thread("naps_total", "naps", "Times that the thread had waited in vain for 4 ms and slept"),
    _of_peer("sent_messages_total", "messages", "Messages sent: data, signals and stores of words"),
    _of_peer("sent_bytes_total", "bytes", "Bytes of those messages"),
    _of_peer("sent_parts_total", "parts", "Parts of those messages; receivers count in parts"),
    _of_peer(
        "queue_seconds_total",
        "queue_ns",
        "Time that those messages waited in the proxy, which had taken their commands",
        10**9,
    ),
    _of_peer(
        "transit_seconds_total",
        "transit_ns",
        "Time from then until the transport no longer needed their bytes, which may be before or "
        "after they have arrived",
        10**9,
    ),
    _of_peer("coalesced_commands_total", "coalesced", "Writes sent as part of the one before"),
    _of_peer(
        "retries_total", "retries", "Times that the transport had no room for a message (EAGAIN)"
    ),
    _of_peer(
        "credit_stalls_total",
        "stalls",
        "Times that the next message began to wait, for credit or for an earlier message to the "
        "same place",
    ),
    _of_peer("dropped_commands_total", "dropped", "Commands dropped because the peer was given up"),
    _of_peer(
        "received_messages_total", "arrivals", "Messages received from the peer, with repetitions"
    ),
    _of_peer(
        "received_parts_total", "parts_received", "Parts of the data received, without repetitions"
    ),
    _of_peer("duplicate_messages_total", "duplicates", "Messages received that were repetitions"),
    _of_peer(
        "reordered_messages_total",
        "reordered",
        "Messages received before an earlier one: they passed through the reorder window",
    ),
    _of_peer("sent_acknowledgements_total", "acks_sent", "Acknowledgements sent"),
    _of_peer(
        "received_acknowledgements_total",
        "acks_received",
        "Acknowledgements received, with those that brought nothing new",
    ),
    Metric(
        "channel_lost",
        ("peer",),
        "1 if the peer was given up, was lost or has ended",
        "gauge",
        "lost",
    ),
)
"""Every metric there is, in the order of docs/metrics.md."""

_BY_COUNT = {metric.count: metric for metric in METRICS if metric.count}


class Measured(Protocol):
    """What has metrics: a LowLatency, a HighThroughput, a deep_ep.Buffer."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    def metrics(self) -> dict[str, Any]:
        """Names and numbers."""


def collect(
    calls: Mapping[str, int],
    host: _core.SymmetricMemory | None,
    proxies: Iterable[_core.SymmetricMemory],
) -> dict[str, Any]:
    """What ``metrics()`` returns.

    Args:
        calls: how many of each kind have begun.
        host: has counted waits and rows, unless kernels wait for and send them.
        proxies: have counted for proxies, if there may be any; their counts are added.
    """
    collected: dict[str, Any] = {"calls_total": dict(calls)}
    if host is not None:
        _collect_host(collected, host)
    for core in proxies:
        for name, thread, peer, value in core.carrier_counts():
            metric, label = _BY_COUNT[name], thread if peer < 0 else peer
            counted = collected.setdefault(metric.name, {})
            add = max if metric.kind == "gauge" else operator.add
            scaled = value if metric.unit == 1 else value / metric.unit
            counted[label] = add(counted.get(label, 0), scaled)
    return collected


def _collect_host(collected: dict[str, Any], core: _core.SymmetricMemory) -> None:
    waits, seconds, failures = (
        collected.setdefault(name, {})
        for name in ("waits_total", "wait_seconds_total", "wait_failures_total")
    )
    for phase, peer, count, duration, failed in core.waits():
        other = ANY_PEER if peer < 0 else peer
        waits.setdefault(phase, {})[other] = count
        seconds.setdefault(phase, {})[other] = duration
        failures.setdefault(phase, {})[other] = failed
    rows, row_bytes = (collected.setdefault(name, {}) for name in ("rows_total", "row_bytes_total"))
    for phase, peer, count, nbytes in core.rows():
        rows.setdefault(phase, {})[peer] = count
        row_bytes.setdefault(phase, {})[peer] = nbytes
    collected["expert_rows_total"] = dict(core.expert_rows())
    collected["masked_ranks"] = core.masked_ranks


# ---- Prometheus ---------------------------------------------------------------------------------


def collector(*layers: Measured, **named: Measured) -> Collector:
    """A collector of the metrics of ``layers``, for a registry of ``prometheus_client``.

        >>> import prometheus_client
        >>> ep = fanfold.LowLatency(num_experts=8, top_k=2, hidden=64, max_tokens=16)
        >>> registry = prometheus_client.CollectorRegistry()    # or prometheus_client.REGISTRY
        >>> registry.register(fanfold.metrics.collector(decode=ep))
        >>> text = prometheus_client.generate_latest(registry).decode()
        >>> 'fanfold_calls_total{call="dispatch",layer="decode",rank="0"} 0.0' in text
        True
        >>> ep.close()

    It refers to the layers weakly: a layer that is dropped is no longer reported. One that is
    closed is reported as it was at its end, while something keeps it.

    Args:
        layers: objects with ``metrics()``, each labelled with its class and a number.
        named: the same, each labelled with its name.

    Raises:
        ArgumentError: something has no metrics.
        UnavailableError: ``prometheus_client`` is not installed.
    """
    made = Collector()
    for layer in layers:
        made.add(layer)
    for name, layer in named.items():
        made.add(layer, name)
    return made


class Collector:
    """What :func:`collector` returns; ``prometheus_client`` calls :meth:`collect`.

        >>> collector = fanfold.metrics.Collector()
        >>> [family.name for family in collector.describe()][0]
        'fanfold_calls'

    Raises:
        UnavailableError: ``prometheus_client`` is not installed.
    """

    def __init__(self) -> None:
        self._families = _families()
        self._layers: weakref.WeakValueDictionary[str, Measured] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # a server scrapes from a thread of its own

    def add(self, layer: Measured, name: str | None = None) -> None:
        """Reports ``layer``, too, from now on.

        Args:
            layer: an object with ``metrics()``.
            name: its label ``layer``; its class and a number if None.

        Raises:
            ArgumentError: ``layer`` has no metrics, or ``name`` is another layer's.
        """
        if not callable(getattr(layer, "metrics", None)):
            raise ArgumentError(
                "layer", worded(layer), "a LowLatency, a HighThroughput or a deep_ep.Buffer"
            )
        if name is None:
            name = f"{type(layer).__name__}-{next(self._numbers)}"
        with self._lock:
            if name in self._layers:
                raise ArgumentError("name", repr(name), "a name that no other layer has here")
            self._layers[name] = layer

    def describe(self) -> Iterator[Any]:
        """Every metric without samples, so that registering does not collect."""
        for metric in METRICS:
            yield self._family(metric)

    def collect(self) -> Iterator[Any]:
        """The metrics of the layers that are left."""
        families = {metric.name: self._family(metric) for metric in METRICS}
        with self._lock:
            layers = sorted(self._layers.items())
        for name, layer in layers:
            try:
                measured = layer.metrics()
            except FanfoldError:  # in a forked child the layers are the parent's
                continue
            for metric in METRICS:
                if metric.name not in measured:
                    continue
                for labels, value in _samples(measured[metric.name], len(metric.labels)):
                    families[metric.name].add_metric([name, str(layer.rank), *labels], value)
        yield from families.values()

    def _family(self, metric: Metric) -> Any:
        labels = ("layer", "rank", *metric.labels)
        return self._families[metric.kind](PREFIX + metric.name, metric.help, labels=labels)


def _samples(value: Any, depth: int) -> Iterable[tuple[list[str], float]]:
    """The numbers of a mapping that is nested ``depth`` deep, with their labels."""
    if depth == 0:
        return [([], value)]
    return [
        ([str(label), *labels], number)
        for label, inner in value.items()
        for labels, number in _samples(inner, depth - 1)
    ]


def _families() -> dict[str, Any]:
    """The classes of ``prometheus_client`` by kind of metric."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise UnavailableError(
            f"prometheus_client cannot be imported ({error}): pip install 'fanfold[prometheus]'"
        ) from None
    return {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
