"""The picture of ``fanfold simulate --plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fanfold.cli.plot import save
from fanfold.cli.simulate_report import Result
from fanfold.simulate import PARTS
from fanfold.simulate.model import PHASES

__all__ = ["draw"]


def draw(results: Sequence[Result], out: Path) -> None:
    """Draws, for each phase, the time against the ranks, and the parts below it.

    Raises:
        ArgumentError: the file cannot be written.
    """
    ordered = sorted(results, key=lambda result: result[0].ranks)
    figure = Figure(figsize=(10.0, 4.5), layout="constrained")
    panels = figure.subplots(1, len(PHASES), sharey=True)
    ranks = [scenario.ranks for scenario, _ in ordered]
    for axes, phase in zip(panels, PHASES, strict=True):
        series = [phases[phase] for _, phases in ordered]
        axes.plot(ranks, [one.us for one in series], marker="o", color="black", label="phase")
        for part in PARTS:
            times = [one.parts[part] for one in series]
            if max(times) >= 1.0:
                axes.plot(ranks, times, marker=".", ls="--", label=part)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        axes.set_xlabel("ranks")
        axes.set_title(phase)
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylim(bottom=1.0)  # of both, once both have all their lines
    panels[0].set_ylabel("µs, model (dashed: the busiest server of a kind)")
    panels[0].legend(fontsize="small")
    first = ordered[0][0]
    figure.suptitle(
        f"Predicted, not measured: {first.system.name} over {first.network.name}, "
        f"{first.mode.replace('_', ' ')}, {first.tokens} tokens of {first.hidden}, "
        f"top-{first.top_k}, {first.dtype}"
    )
    save(figure, out, "--plot")
