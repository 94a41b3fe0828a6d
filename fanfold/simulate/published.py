"""The published measurements, and how far the model is from each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fanfold.simulate.machines import NETWORKS, SYSTEMS, Network, System
from fanfold.simulate.model import Phase, Scenario, simulate

__all__ = ["DRAWS", "HELD_OUT_BOUND", "Comparison", "Row", "beyond", "compare", "load", "sources"]

# The most by which a held-out row may be off, unless its field "beyond" says why it is.
HELD_OUT_BOUND = 0.15
# One draw of 128 tokens moves the slowest rank by some percent; one of thousands does not.
DRAWS = 3
_FEW_TOKENS = 1024

_FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Row:
    """One published number.

    Attributes:
        fields: of the file: where it was published, what ran, and what it took.
        scenario: the same in the model.
    """

    fields: Mapping[str, Any]
    scenario: Scenario

    @property
    def use(self) -> str:
        """``"fit"``: parameters were fitted to it; ``"held_out"``; ``"excluded"``: see ``why``."""
        return str(self.fields["use"])


@dataclass(frozen=True)
class Comparison:
    """A row beside what the model makes of it.

    Attributes:
        row: the published one.
        published_us: its time; where a rate was published, the bytes by DeepEP's count over it.
        model_us: the model's, the mean over ``DRAWS`` routings if a rank has few tokens.
        bound: what bounds it in the first of them.
    """

    row: Row
    published_us: float
    model_us: float
    bound: str

    @property
    def error(self) -> float:
        """0.1: the model takes a tenth longer than was published."""
        return self.model_us / self.published_us - 1.0


def sources() -> dict[str, dict[str, str]]:
    """Title and link of each source."""
    found: dict[str, dict[str, str]] = _content()["sources"]
    return found


def load(
    networks: Mapping[str, Network] = NETWORKS, systems: Mapping[str, System] = SYSTEMS
) -> list[Row]:
    """All rows, in the order of the file, on these networks and systems."""
    content = _content()
    shared = {name: content[name] for name in ("hidden", "top_k", "ranks_per_host")}
    return [
        Row(
            fields,
            Scenario(
                networks[fields["network"]], systems[fields["system"]], fields["mode"],
                ranks=fields["ranks"], tokens=fields["tokens"], experts=fields["experts"],
                dtype=fields["dtype"] if fields["phase"] == "dispatch" else "fp8",
                top_hosts=fields.get("top_hosts", 0), **shared,
            ),
        )
        for fields in content["rows"]
    ]  # fmt: skip


def compare(rows: Iterable[Row]) -> list[Comparison]:
    """Runs the model once for each scenario and phase."""
    done: dict[str, list[Phase]] = {}
    compared = []
    for row in rows:
        name = row.fields["phase"]
        key = f"{name} {row.scenario}"
        if key not in done:
            draws = DRAWS if row.scenario.tokens < _FEW_TOKENS else 1
            done[key] = [simulate(replace(row.scenario, seed=n), name) for n in range(draws)]
        phases = done[key]
        published = row.fields.get("us")
        if published is None:
            published = phases[0].bytes_total / row.fields["gb_per_s"] / 1e3
        mean = sum(phase.us for phase in phases) / len(phases)
        compared.append(Comparison(row, float(published), mean, phases[0].bound))
    return compared


def beyond(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Held-out rows that are farther off than the bound."""
    return [
        one for one in comparisons if one.row.use == "held_out" and abs(one.error) > HELD_OUT_BOUND
    ]


def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content
