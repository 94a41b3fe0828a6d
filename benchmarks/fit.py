"""How the cost of dispatch plus combine grows with tokens and with ranks, and the promised factors.

Use: python benchmarks/fit.py [folder of the results that run_host.sh wrote]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

# What Fanfold promises on two cores with four ranks: mode, tokens, top-k, experts, factor.
TARGETS = (
    ("low_latency", 128, 8, 64, 3.0),
    ("low_latency", 128, 22, 512, 5.0),
    ("high_throughput", 4096, 8, 64, 2.0),
)


def load(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line_through(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, float]:
    """a, b and the largest relative deviation of y = a + b x, fitted to relative errors: else the
    largest x would decide alone."""
    matrix = torch.stack([1 / y, x / y], dim=1)
    a, b = torch.linalg.lstsq(matrix, torch.ones_like(y).unsqueeze(1)).solution.flatten().tolist()
    return a, b, float(((a + b * x) / y - 1).abs().max())


def exponent(x: torch.Tensor, y: torch.Tensor) -> float:
    """p of y = c x**p, by least squares of the logarithms."""
    u, v = x.log() - x.log().mean(), y.log() - y.log().mean()
    return float((u * v).sum() / (u * u).sum())


def columns(lines: list[dict], mode: str, axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = sorted((r for r in lines if r["mode"] == mode), key=lambda r: r[axis])
    x = torch.tensor([float(r[axis]) for r in chosen], dtype=torch.float64)
    return x, torch.tensor([float(r["total_us"]) for r in chosen], dtype=torch.float64)


def report_targets(lines: list[dict]) -> None:
    print("factor over the torch.distributed baseline, dispatch plus combine")
    for mode, tokens, top_k, experts, factor in TARGETS:
        for r in lines:
            if (r["mode"], r["tokens"], r["top_k"], r["experts"]) == (mode, tokens, top_k, experts):
                verdict = "reached" if r["ratio"] >= factor else "NOT reached"
                print(
                    f"  {mode}, {tokens} tokens, top-{top_k} of {experts}: {r['total_us']:.0f} us "
                    f"against {r['baseline_total_us']:.0f} us, {r['ratio']:.2f} times "
                    f"(promised {factor:g}: {verdict})"
                )


def report_tokens(lines: list[dict], mode: str) -> None:
    x, y = columns(lines, mode, "tokens")
    a, b, deviation = line_through(x, y)
    print(
        f"  {mode}: {a:.0f} us + {b:.2f} us per token, off by at most {deviation:.0%}; "
        f"time ~ tokens**{exponent(x, y):.2f}"
    )


def report_ranks(lines: list[dict], mode: str) -> None:
    x, y = columns(lines, mode, "ranks")
    cores = lines[0]["machine"]["cores"]
    # More ranks than cores take turns: a rank has its core for cores / ranks of the time.
    own = y * torch.minimum(torch.tensor(float(cores)), x) / x
    rows = torch.tensor(
        [r["bytes_total"] for r in sorted(lines, key=lambda r: r["ranks"]) if r["mode"] == mode],
        dtype=torch.float64,
    )
    verdict = "no faster than linear" if exponent(x, own) <= 1.0 else "FASTER than linear"
    print(
        f"  {mode}: processor time of a rank ~ ranks**{exponent(x, own):.2f} ({verdict}); "
        f"bytes of a rank ~ ranks**{exponent(x, rows):.2f}; "
        f"elapsed time on {cores} cores ~ ranks**{exponent(x, y):.2f}"
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results")
    report_targets(load(folder / "host_targets.jsonl"))
    for axis, report in (("tokens", report_tokens), ("ranks", report_ranks)):
        print(f"growth with {axis}")
        lines = load(folder / f"host_{axis}.jsonl")
        for mode in ("low_latency", "high_throughput"):
            report(lines, mode)


if __name__ == "__main__":
    main()
