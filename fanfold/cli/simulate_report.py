"""How ``fanfold simulate`` prints predictions and the comparison with published rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fanfold.simulate import HELD_OUT_BOUND, PARTS, Comparison, Phase, Scenario, beyond, sources

__all__ = [
    "Result",
    "fields",
    "show",
    "show_validation",
    "unexpected",
    "validation_fields",
]

Result = tuple[Scenario, dict[str, Phase]]

_LINE = "{:>5} {:>7}  {:9} {:>6} {:>9} {:>9}  {}"
_HEAD = ("ranks", "experts", "phase", "µs", "NIC GB/s", "messages", "bound by, µs")
_ROW = "{:19} {:9} {:12} {:30} {:>3} {:>6} {:>8} {:>8} {:>7}  {}"
_ROW_HEAD = (
    "source", "network", "system", "what", "EP", "tokens", "publ. µs", "model µs", "error", "use",
)  # fmt: skip
_FAMILY = "{:9} {:12} {:16} {:20} {:20} {}"
_FAMILY_HEAD = (
    "network", "system", "mode", "fit: mean, largest", "held out", "excluded",
)  # fmt: skip
_WHAT_IT_IS = {
    "fanfold": "A prediction: Fanfold itself has not been measured across hosts.",
}


def show(results: Sequence[Result]) -> None:
    """Prints one line for each phase of each prediction."""
    first = results[0][0]
    print(
        f"{first.system.name} over {first.network.name}, {first.mode.replace('_', ' ')}: "
        f"{first.tokens} tokens per rank, hidden {first.hidden}, top-{first.top_k}, {first.dtype}, "
        f"{first.ranks_per_host} ranks per host"
    )
    print(_LINE.format(*_HEAD))
    for scenario, phases in results:
        for name, phase in phases.items():
            parts = ", ".join(f"{part} {phase.parts[part]:.0f}" for part in _by_size(phase))
            sizes = (scenario.ranks, scenario.experts, name, f"{phase.us:.0f}")
            rates = (f"{phase.network_gb_per_s:.1f}", f"{phase.messages:.0f}")
            print(_LINE.format(*sizes, *rates, parts))
    print(
        "µs: until the slowest rank has everything. GB/s, messages: through one rank's NICs.\n"
        "Bound by: how long the busiest server of each kind works, the longest first; they work at "
        "the same time."
    )
    print(_WHAT_IT_IS.get(first.system.name, "A model of that system, fitted to published rows."))
    for scenario, phases in results:
        drawn = phases["dispatch"].drawn
        if drawn < scenario.ranks:
            print(
                f"{scenario.ranks} ranks: the routing of {drawn} was drawn, and the others reuse "
                "it, moved by whole hosts. All messages of all ranks are simulated."
            )


def _by_size(phase: Phase) -> list[str]:
    shown = [part for part in PARTS if phase.parts[part] >= 0.5]
    return sorted(shown, key=lambda part: -phase.parts[part])


def fields(scenario: Scenario, phases: dict[str, Phase]) -> dict[str, Any]:
    """One JSON line of a prediction."""
    line: dict[str, Any] = {
        "network": scenario.network.name,
        "system": scenario.system.name,
        **{
            name: getattr(scenario, name)
            for name in (
                "mode", "ranks", "ranks_per_host", "tokens", "hidden", "top_k", "experts", "dtype",
                "routing", "top_hosts", "seed",
            )
        },
    }  # fmt: skip
    for name, phase in phases.items():
        line[name] = {
            "us": phase.us,
            "mean_us": phase.mean_us,
            "bound": phase.bound,
            "parts_us": phase.parts,
            "network_gb_per_s": phase.network_gb_per_s,
            "total_gb_per_s": phase.total_gb_per_s,
            "messages": phase.messages,
            "drawn": phase.drawn,
        }
    return line


def show_validation(comparisons: Sequence[Comparison]) -> None:
    """Prints every published row beside the model, then the errors by use of the rows."""
    print(_ROW.format(*_ROW_HEAD))
    for one in comparisons:
        row = one.row.fields
        print(
            _ROW.format(
                " ".join(filter(None, (row["source"], row.get("variant")))),
                row["network"],
                row["system"],
                f"{row['mode'].replace('_', ' ')}, {row['phase']} {row['dtype']}",
                row["ranks"],
                row["tokens"],
                f"{one.published_us:.0f}",
                f"{one.model_us:.0f}",
                f"{one.error:+.1%}",
                row["use"].replace("_", " "),
            )
        )
    _show_families(comparisons)
    for name, source in sources().items():
        print(f"{name}: {source['title']}, {source['link']}")
    _show_excluded(comparisons)
    for use in ("fit", "held_out", "excluded"):
        errors = [abs(one.error) for one in comparisons if one.row.use == use]
        print(
            f"{use.replace('_', ' ')}: {len(errors)} rows, mean error "
            f"{sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
        )
    for one in beyond(comparisons):
        why = one.row.fields.get("beyond", "NOT EXPECTED: the model has got worse")
        print(f"beyond {HELD_OUT_BOUND:.0%}: {_where(one)}: {why}")


def _show_families(comparisons: Sequence[Comparison]) -> None:
    """The errors of the rows of each network, system and mode: how many, mean, largest."""
    families: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in comparisons:
        row = one.row.fields
        names = (row["network"], row["system"], row["mode"].replace("_", " "))
        families[names][one.row.use].append(abs(one.error))
    print(_FAMILY.format(*_FAMILY_HEAD))
    for family, uses in sorted(families.items()):
        cells = [_errors(uses[use]) for use in ("fit", "held_out")]
        print(_FAMILY.format(*family, *cells, len(uses["excluded"])))


def _errors(errors: list[float]) -> str:
    if not errors:
        return "none"
    return f"{len(errors)}: {sum(errors) / len(errors):.1%}, {max(errors):.1%}"


def _show_excluded(comparisons: Sequence[Comparison]) -> None:
    reasons: dict[str, list[str]] = defaultdict(list)
    for one in comparisons:
        if one.row.use == "excluded":
            reasons[one.row.fields["why"]].append(_where(one))
    for why, rows in reasons.items():
        print(f"excluded: {'; '.join(rows)}: {why}")


def _where(one: Comparison) -> str:
    row = one.row.fields
    what = f"EP{row['ranks']} {row['phase']} {row['dtype']}, {row['tokens']} tokens"
    return f"{row['system']} on {row['network']}, {what}"


def unexpected(comparisons: Sequence[Comparison]) -> int:
    """How many held-out rows are farther off than the bound, and not known to be."""
    return sum("beyond" not in one.row.fields for one in beyond(comparisons))


def validation_fields(comparison: Comparison) -> dict[str, Any]:
    """One JSON line of a published row."""
    return {
        **comparison.row.fields,
        "published_us": comparison.published_us,
        "model_us": comparison.model_us,
        "error": comparison.error,
        "bound": comparison.bound,
    }
