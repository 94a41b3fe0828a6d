"""What ``fanfold demo`` shows: its progress, its figures, its check and its picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fanfold.bench.report import append_json_line
from fanfold.cli.demo_model import DemoSettings, RankRun, Training
from fanfold.cli.plot import save

__all__ = ["DemoReport", "ProgressLine", "compare", "compare_gradients"]

WINDOW = 20
"""Steps over which losses are averaged before they are compared."""

TOLERANCE = 0.02
"""Nats per byte by which two losses, averaged so, may differ.

The two runs round differently: rows travel as bfloat16, and sums are taken in another order. That
is a difference of 0.001 in the first steps, and training lets it grow as it does any perturbation.
docs/nn.md has what was measured: by how much equal trainings differ, and unequal ones.
"""

GRADIENT_TOLERANCE = 0.2
"""Relative difference that the first gradients of a parameter may have, as a norm.

bfloat16 rows err by 1 in 512, which can turn the routing of a token whose second and third choice
are nearly equal. Each such token changes the gradients of two experts by about 1 in 16.
"""


class ProgressLine:
    """A progress bar on a terminal; elsewhere a line now and then. A context manager.

    Args:
        title: what is under way.
        steps: of all.
    """

    def __init__(self, title: str, steps: int) -> None:
        self._title, self._steps = title, steps
        self._begin = time.monotonic()
        console = Console()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=steps, loss=float("nan"))

    def __enter__(self) -> ProgressLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, step: int, loss: float) -> None:
        """Shows that ``step`` steps are done, the latest with this loss."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss)
        elif step == self._steps or step % max(self._steps // 5, 1) == 0:
            seconds = time.monotonic() - self._begin
            print(f"{self._title}: step {step} of {self._steps}, loss {loss:.3f}, {seconds:.0f} s",
                  flush=True)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Two loss curves, averaged over windows of ``WINDOW`` steps.

    Attributes:
        largest: the largest difference of two averages, in nats per byte.
        largest_at: the last step of that window, from 1.
        parted_at: the last step of the first window beyond the tolerance; None if there is none.
    """

    largest: float
    largest_at: int
    parted_at: int | None

    @property
    def passed(self) -> bool:
        """Whether the curves are the same within the tolerance."""
        return self.parted_at is None

    def __str__(self) -> str:
        how = f"{self.largest:.4f} nats (at step {self.largest_at}; tolerance {TOLERANCE})"
        if self.parted_at is None:
            return f"passed: the two loss curves differ by at most {how}"
        return (
            f"FAILED: the two loss curves part at step {self.parted_at}, and differ by up to {how}"
        )


def compare(parallel: Sequence[float], plain: Sequence[float]) -> Comparison:
    """Whether two loss curves are the same within ``TOLERANCE``.

    Single losses are not compared: they tell more of the step's batch than of the model, and a
    routing that flips at a tie moves one of them more than it moves training.

    Args:
        parallel: a loss for each step.
        plain: the other run's.
    """
    window = min(WINDOW, len(parallel))
    both = torch.tensor([list(parallel), list(plain)], dtype=torch.float64, device="cpu")
    means = both.unfold(1, window, 1).mean(-1)
    difference = (means[0] - means[1]).abs()
    # What is not a number differs from everything, itself too.
    difference = difference.nan_to_num(nan=float("inf"))
    beyond = (difference > TOLERANCE).nonzero().flatten()
    worst = int(difference.argmax())
    return Comparison(
        largest=float(difference[worst]),
        largest_at=worst + window,
        parted_at=int(beyond[0]) + window if beyond.numel() else None,
    )


@dataclass(frozen=True)
class GradientComparison:
    """The gradients of the first step, where both runs still have the same weights.

    Attributes:
        largest: the largest relative difference of a parameter's gradient (of norms).
        name: that parameter.
    """

    largest: float
    name: str

    @property
    def passed(self) -> bool:
        """Whether all are the same within the tolerance."""
        return self.largest <= GRADIENT_TOLERANCE

    def __str__(self) -> str:
        return (
            f"{'passed' if self.passed else 'FAILED'}: the first gradients differ by at most "
            f"{self.largest:.2%} ({self.name}; tolerance {GRADIENT_TOLERANCE:.0%})"
        )


def compare_gradients(
    ranks: Sequence[dict[str, torch.Tensor]], plain: dict[str, torch.Tensor]
) -> GradientComparison:
    """Whether the ranks' gradients are those of one process within ``GRADIENT_TOLERANCE``.

    Args:
        ranks: of each rank, by parameter; of routed experts each rank has its own.
        plain: of the single process, with all experts.
    """
    largest, worst = 0.0, ""
    for name, want in plain.items():
        pieces = [gradients[name] for gradients in ranks]
        got = pieces[0] if pieces[0].shape == want.shape else torch.cat(pieces)
        difference = float(((got - want).norm() / want.norm()).nan_to_num(nan=float("inf")))
        if difference > largest:
            largest, worst = difference, name
    return GradientComparison(largest, worst)


@dataclass(frozen=True)
class DemoReport:
    """Both trainings and what came of them."""

    settings: DemoSettings
    runs: list[RankRun]
    plain: Training

    @property
    def losses(self) -> list[float]:
        """Mean over the ranks, for each step."""
        steps = zip(*(run.training.losses for run in self.runs), strict=True)
        return [sum(step) / len(step) for step in steps]

    @property
    def comparison(self) -> Comparison:
        """Of the two loss curves."""
        return compare(self.losses, self.plain.losses)

    @property
    def gradient_comparison(self) -> GradientComparison:
        """Of the gradients of the first step."""
        return compare_gradients([r.training.gradients for r in self.runs], self.plain.gradients)

    @property
    def decoding_difference(self) -> float | None:
        """By how many nats per byte the modes' losses of one batch differ, on any rank; None where
        nothing was decoded."""
        differences = [
            abs(run.decoding.loss - run.decoding.training_loss)
            for run in self.runs
            if run.decoding is not None
        ]
        # What is not a number differs from everything.
        return max((d if d == d else float("inf") for d in differences), default=None)

    @property
    def passed(self) -> bool:
        """The check of the demo."""
        modes_agree = (self.decoding_difference or 0.0) <= TOLERANCE
        return self.comparison.passed and self.gradient_comparison.passed and modes_agree

    @property
    def load(self) -> torch.Tensor:
        """``[layers, E]``: rows of each expert in the last quarter, as multiples of the mean."""
        rows = torch.cat([run.expert_rows for run in self.runs], dim=-1)
        last = rows[-max(len(rows) // 4, 1) :].sum(0).double()
        return last / last.mean(-1, keepdim=True)

    def figures(self) -> dict[str, Any]:
        """Everything as plain numbers, for ``--json``."""
        runs, steps = self.runs, self.settings.steps
        seconds = max(run.training.seconds for run in runs)
        comparison = self.comparison
        return {
            "settings": asdict(self.settings),
            "losses": self.losses,
            "plain_losses": self.plain.losses,
            "seconds": seconds,
            "plain_seconds": self.plain.seconds,
            "tokens_per_second": steps * self.settings.tokens_per_step / seconds,
            "plain_tokens_per_second": steps * self.settings.tokens_per_step / self.plain.seconds,
            "dispatch_ms_per_step": _mean([r.dispatch_seconds for r in runs]) * 1e3 / steps,
            "combine_ms_per_step": _mean([r.combine_seconds for r in runs]) * 1e3 / steps,
            "dispatch_bytes": sum(run.bytes_sent for run in runs),
            "combine_bytes": sum(run.bytes_returned for run in runs),
            "expert_load": self.load.tolist(),
            "largest_difference": comparison.largest,
            "tolerance": TOLERANCE,
            "gradient_difference": self.gradient_comparison.largest,
            "gradient_tolerance": GRADIENT_TOLERANCE,
            "device": runs[0].device,
            "backends": self.backends,
            "decoding": None if runs[0].decoding is None else asdict(runs[0].decoding),
            "decoding_difference": self.decoding_difference,
            "passed": self.passed,
        }

    @property
    def backends(self) -> dict[str, str | None]:
        """Where each mode ran; None for one that was not used."""
        decoding = self.runs[0].decoding
        return {
            "high_throughput": self.runs[0].backend,
            "low_latency": None if decoding is None else decoding.backend,
        }

    def write_json(self, path: Path) -> None:
        """Appends :meth:`figures` to ``path`` as one line."""
        append_json_line(path, self.figures())

    def print(self) -> None:
        """The figures as text."""
        figures, settings = self.figures(), self.settings
        steps = sorted({1, *(max(settings.steps * part // 5, 1) for part in range(1, 6))})
        curve = ", ".join(f"{self.losses[step - 1]:.3f} ({step})" for step in steps)
        milliseconds = figures["seconds"] * 1e3 / settings.steps
        megabytes = [figures[f"{name}_bytes"] / 1e6 for name in ("dispatch", "combine")]
        print(f"loss      {curve}, in nats per byte (after steps)")
        print(
            f"speed     {figures['tokens_per_second']:,.0f} tokens/s over {settings.ranks} ranks, "
            f"{figures['plain_tokens_per_second']:,.0f} on one process without expert parallelism"
        )
        # On GPUs the CPU goes on while they work.
        what = "with waiting" if self.runs[0].backend == "host" else "of the CPU"
        print(
            f"time      of {milliseconds:.0f} ms per step: dispatch "
            f"{figures['dispatch_ms_per_step']:.1f} ms, combine "
            f"{figures['combine_ms_per_step']:.1f} ms (both passes, all layers, {what})"
        )
        print(
            f"moved     {megabytes[0]:,.1f} MB between ranks in dispatches, {megabytes[1]:,.1f} MB "
            f"in combines; {sum(megabytes) / settings.steps:.2f} MB per step"
        )
        self._print_backends()
        print("load      rows per expert in the last quarter, in multiples of the mean:")
        for layer, row in enumerate(self.load.tolist()):
            print(f"  layer {layer} " + " ".join(f"{value:4.2f}" for value in row))
        print(f"check     {self.gradient_comparison}")
        print(f"          {self.comparison}")
        difference = self.decoding_difference
        if difference is not None:
            verdict = "passed" if difference <= TOLERANCE else "FAILED"
            print(
                f"          {verdict}: on one batch the losses of the two modes differ by at most "
                f"{difference:.4f} nats (tolerance {TOLERANCE})"
            )

    def _print_backends(self) -> None:
        first = self.runs[0]
        decoding = first.decoding
        if decoding is None:
            print(f"backend   high throughput: host ({first.reason})")
            return
        staged = ", to and from the ranks' GPUs" if first.backend == "host" else ""
        print(
            f"backend   high throughput (training): {first.backend}{staged}; low latency "
            f"(decoding): {decoding.backend}"
        )
        print(
            f"text      {decoding.text!r}, {decoding.seconds_per_byte * 1e3:.1f} ms per byte that "
            "rank 0 wrote"
        )

    def draw(self, path: Path) -> None:
        """The picture: both loss curves, and the load of each layer's experts.

        Raises:
            ImportError: matplotlib is not installed.
            ArgumentError: ``path`` cannot be written.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4), layout="constrained")
        curves, heat = figure.subplots(1, 2, width_ratios=(3, 2))
        steps = range(1, self.settings.steps + 1)
        curves.plot(steps, self.plain.losses, color="0.7", linewidth=4, label="one process")
        label = f"Fanfold, {self.settings.ranks} ranks"
        curves.plot(steps, self.losses, color="tab:blue", linewidth=1, label=label)
        curves.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss")
        curves.legend()
        load = self.load
        image = heat.imshow(load.numpy(), aspect="auto", cmap="viridis", vmin=0)
        local = load.shape[1] // self.settings.ranks
        for rank in range(1, self.settings.ranks):
            heat.axvline(rank * local - 0.5, color="white", linewidth=1.5)
        heat.set(xlabel="expert (white lines: ranks)", ylabel="layer", title="Expert load")
        heat.set_yticks(range(load.shape[0]))
        figure.colorbar(image, ax=heat, label="rows, in multiples of the mean")
        save(figure, path)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
