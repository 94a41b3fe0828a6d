"""A dashboard of Fanfold's metrics as one picture: what Prometheus and Grafana would show.

Watches the ranks of a program that serves its metrics (docs/metrics.md), one URL for each rank:

    python examples/dashboard.py --out dashboard.svg --seconds 60 http://host:9400 http://host:9401

Without a URL it starts four ranks itself, of which one is slow for a third of the time and some
experts are preferred, and shows how that looks. Needs ``fanfold[plot,prometheus]``.
"""

from __future__ import annotations

import argparse
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prometheus_client
import torch
from matplotlib.figure import Figure
from prometheus_client.parser import text_string_to_metric_families

import fanfold
from fanfold.group import as_group
from fanfold.launch import launch

RANKS, EXPERTS, TOP_K, HIDDEN, TOKENS = 4, 16, 4, 512, 32
SLOW_RANK, PAUSE_S = 2, 0.003
PANELS = {
    "calls": ("calls_total", ("rank",), "calls per second of each rank"),
    "waits": ("wait_seconds_total", ("peer",), "seconds per second that others wait for a rank"),
    "bytes": ("row_bytes_total", ("rank",), "MB per second that a rank sends to other ranks"),
    "experts": ("expert_rows_total", ("expert",), "rows per second of each expert"),
}

Labels = dict[str, str]
Key = tuple[str, ...]


@dataclass
class Watched:
    """What one rank has reported: times in seconds, and at each the values of its counters."""

    times: list[float] = field(default_factory=list)
    samples: list[list[tuple[str, Labels, float]]] = field(default_factory=list)

    def add(self, at: float, text: str) -> None:
        """Reads the text form of Prometheus."""
        families = text_string_to_metric_families(text)
        found = [(s.name, dict(s.labels), s.value) for family in families for s in family.samples]
        self.times.append(at)
        self.samples.append([sample for sample in found if sample[0].startswith("fanfold_")])

    def rates(self, metric: str, by: Sequence[str]) -> dict[Key, list[tuple[float, float]]]:
        """For each value of the labels ``by`` the increase per second of the sum over the others,
        at the end of each interval: ``sum by (...) (rate(metric[...]))`` in PromQL."""
        sums: list[dict[Key, float]] = []
        for samples in self.samples:
            total: dict[Key, float] = defaultdict(float)
            for name, labels, value in samples:
                to_itself = labels.get("peer") == labels["rank"]
                if name == f"fanfold_{metric}" and not to_itself:
                    total[tuple(labels[label] for label in by)] += value
            sums.append(total)
        rates: dict[Key, list[tuple[float, float]]] = defaultdict(list)
        for i in range(1, len(sums)):
            passed = self.times[i] - self.times[i - 1]
            for key, value in sums[i].items():
                rates[key].append((self.times[i], (value - sums[i - 1].get(key, 0.0)) / passed))
        return rates


def watch(sources: Sequence[Callable[[], str]], seconds: float, every: float) -> list[Watched]:
    """Reads every source each ``every`` seconds, as Prometheus scrapes its targets."""
    watched = [Watched() for _ in sources]
    begin = time.monotonic()
    while (at := time.monotonic() - begin) < seconds:
        for rank, source in zip(watched, sources, strict=True):
            rank.add(at, source())
        time.sleep(every)
    return watched


def page(url: str) -> Callable[[], str]:
    """The metrics that a program serves."""

    def read() -> str:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            text: str = answer.read().decode()
            return text

    return read


# ---- the ranks that are watched where there is no URL -------------------------------------------


def decode(group: Any, seconds: float, every: float) -> Watched:
    """Decodes without a pause, and watches itself meanwhile."""
    rank = as_group(group).rank
    with fanfold.LowLatency(
        group, num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS
    ) as ep:
        registry = prometheus_client.CollectorRegistry()
        registry.register(fanfold.metrics.collector(decode=ep))
        text = lambda: prometheus_client.generate_latest(registry).decode()  # noqa: E731
        results: list[Watched] = []
        watching = threading.Thread(target=lambda: results.extend(watch([text], seconds, every)))
        watching.start()
        decode_until(ep, seconds, rank)
        watching.join()
    return results[0]


def decode_until(ep: fanfold.LowLatency, seconds: float, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    preferred = torch.linspace(2.0, 0.5, EXPERTS, dtype=torch.float32, device="cpu")
    begin = time.monotonic()
    done = torch.zeros(1, dtype=torch.int64, device="cpu")
    while not done:
        x = torch.randn((TOKENS, HIDDEN), generator=generator, dtype=torch.float32, device="cpu")
        topk_idx = torch.multinomial(preferred.expand(TOKENS, -1), TOP_K, generator=generator)
        received = ep.dispatch(x.to(ep.device, torch.bfloat16), topk_idx.to(ep.device))
        passed = time.monotonic() - begin
        if rank == SLOW_RANK and seconds / 3 < passed < 2 * seconds / 3:
            time.sleep(PAUSE_S)
        ep.combine(received.tokens, received)
        # All ranks end together.
        done[0] = int(rank == 0 and passed > seconds)
        torch.distributed.broadcast(done, 0)


# ---- the picture --------------------------------------------------------------------------------


def drawn(watched: Sequence[Watched]) -> Figure:
    """One panel for each kind of counter."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    for place, (metric, by, title) in enumerate(PANELS.values()):
        axes = figure.add_subplot(2, 2, place + 1)
        series = summed([rank.rates(metric, by) for rank in watched])
        if metric == "expert_rows_total":
            means = {int(key[0]): mean(points) for key, points in series.items()}
            axes.bar(list(means), list(means.values()), color="tab:blue")
            axes.set_xlabel("expert")
        else:
            scale = 1e-6 if metric == "row_bytes_total" else 1.0
            for key in sorted(series):
                times, values = zip(*series[key], strict=True)
                axes.plot(times, [value * scale for value in values], label=f"{by[0]} {key[0]}")
            axes.set_xlabel("seconds")
            axes.legend(fontsize="small", loc="upper right")
        axes.set_title(title, fontsize="medium")
        axes.set_ylim(bottom=0)
    return figure


def mean(points: Sequence[tuple[float, float]]) -> float:
    return sum(value for _, value in points) / len(points)


def summed(
    parts: Sequence[dict[Key, list[tuple[float, float]]]],
) -> dict[Key, list[tuple[float, float]]]:
    """The series of all ranks, those of one key added, interval by interval."""
    all_of: dict[Key, list[list[tuple[float, float]]]] = defaultdict(list)
    for part in parts:
        for key, points in part.items():
            all_of[key].append(points)
    return {
        key: [(at[0][0], sum(value for _, value in at)) for at in zip(*several, strict=False)]
        for key, several in all_of.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("urls", nargs="*", help="where the ranks serve their metrics")
    parser.add_argument("--out", type=Path, required=True, help="the picture: svg, png or pdf")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to watch")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks")
    args = parser.parse_args()
    if args.urls:
        watched = watch([page(url) for url in args.urls], args.seconds, args.every)
    else:
        watched = launch(decode, RANKS, (args.seconds, args.every))
    drawn(watched).savefig(args.out)
    print(f"{args.out}: {len(watched)} ranks, {len(watched[0].times)} samples of each")


if __name__ == "__main__":
    main()
