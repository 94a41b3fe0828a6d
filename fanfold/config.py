"""Settings: resolved once into an immutable value that remembers where each part came from.

An argument beats the environment, the environment beats the default. An absent variable means the
default; a malformed one is an error that names it. This module is the only one that reads
``FANFOLD_*`` from the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fanfold.errors import ConfigError

__all__ = ["Config", "Setting", "settings", "unknown_variables"]


@dataclass(frozen=True)
class Setting:
    """One setting: its name, environment variable, default, help text and how text is read."""

    name: str
    variable: str
    default: object
    help: str
    parse: Callable[[str], object]
    check: Callable[[Any], bool]
    bound: str

    def value_of(self, value: object, source: str) -> object:
        """``value`` if it is within the bound; else a ConfigError that names ``source``."""
        try:
            accepted = self.check(value)
        except TypeError:
            accepted = False
        if not accepted:
            raise ConfigError(f"{self.name} is {value!r} (from {source}), but must be {self.bound}")
        return value

    def parse_text(self, text: str) -> object:
        """The value that ``text`` of the environment stands for."""
        source = f"environment variable {self.variable}"
        try:
            return self.value_of(self.parse(text), source)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{source} is {text!r}, but must be {self.bound}") from error


def _parse_spin(text: str) -> float | None:
    return None if text == "auto" else float(text)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_SETTINGS = (
    Setting(
        name="timeout_s",
        variable="FANFOLD_TIMEOUT_S",
        default=100.0,
        help="Seconds that any wait for a peer may last before PeerTimeout.",
        parse=float,
        check=lambda v: _is_real(v) and 0.0 < v < 1e6,
        bound="a number of seconds above 0 and below 1e6",
    ),
    Setting(
        name="spin_us",
        variable="FANFOLD_SPIN_US",
        default=None,
        help="Microseconds to spin before a waiting rank yields its core; 'auto' spins 20 us "
        "where every rank of the host has a core of its own, and not at all elsewhere.",
        parse=_parse_spin,
        check=lambda v: v is None or (_is_real(v) and 0.0 <= v <= 1e6),
        bound="'auto' or a number of microseconds from 0 to 1e6",
    ),
    Setting(
        name="late_peers",
        variable="FANFOLD_LATE_PEERS",
        default="raise",
        help="What a wait does when its time is over: 'raise' PeerTimeout, or 'mask' the peer "
        "and go on without its tokens and results.",
        parse=str,
        check=lambda v: v in ("raise", "mask"),
        bound="'raise' or 'mask'",
    ),
    Setting(
        name="staging_bytes",
        variable="FANFOLD_STAGING_BYTES",
        default=8 << 20,
        help="Bytes of shared memory per rank through which the high-throughput mode streams "
        "rows; a tensor of any size passes through it.",
        parse=int,
        check=lambda v: _is_integer(v) and (1 << 16) <= v <= (1 << 40),
        bound="an integer from 65536 to 2**40",
    ),
)


def settings() -> tuple[Setting, ...]:
    """Every setting there is, in the order of ``fanfold env``."""
    return _SETTINGS


def unknown_variables() -> dict[str, str | None]:
    """The variables ``FANFOLD_*`` of the environment that set nothing, most likely misspelt, each
    with the variable that is probably meant, if one is near."""
    known = [setting.variable for setting in _SETTINGS]
    given = sorted(name for name in os.environ if name.startswith("FANFOLD_"))
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in given}
    return {name: next(iter(near[name]), None) for name in given if name not in known}


@dataclass(frozen=True)
class Config:
    """The resolved settings; make one with :meth:`resolve`.

    Attributes:
        timeout_s: seconds that any wait for a peer may last before ``PeerTimeout``.
        spin_us: microseconds to spin before yielding; None for a choice by the machine.
        late_peers: ``"raise"`` or ``"mask"``.
        staging_bytes: shared memory per rank for high-throughput streams, in bytes.
        sources: for each name above ``"argument"``, ``"environment"`` or ``"default"``.
    """

    timeout_s: float
    spin_us: float | None
    late_peers: str
    staging_bytes: int
    sources: Mapping[str, str] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def resolve(cls, **overrides: object) -> Config:
        """Settings from ``overrides``, then the environment, then the defaults.

        Raises:
            ConfigError: for an unknown name, or a value outside its bound.
        """
        known = {setting.name for setting in _SETTINGS}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; there are {', '.join(known)}")
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for setting in _SETTINGS:
            text = os.environ.get(setting.variable)
            if setting.name in overrides:
                value = setting.value_of(overrides[setting.name], "argument")
                source = "argument"
            elif text is not None:
                value, source = setting.parse_text(text), "environment"
            else:
                value, source = setting.default, "default"
            values[setting.name], sources[setting.name] = value, source
        return cls(sources=sources, **values)

    def spin_seconds(self, ranks_on_host: int) -> float:
        """Seconds to spin before yielding, where ``ranks_on_host`` ranks share the cores."""
        if self.spin_us is not None:
            return self.spin_us * 1e-6
        return 20e-6 if ranks_on_host <= len(os.sched_getaffinity(0)) else 0.0
