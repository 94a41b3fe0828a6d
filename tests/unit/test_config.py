"""Settings: precedence, provenance, and errors that name the variable."""

from __future__ import annotations

import dataclasses
import os
from unittest import mock

import pytest

from fanfold.config import Config, in_environment, settings
from fanfold.errors import ConfigError
from fanfold.launch import RankPool


def test_defaults_are_valid_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings():  # the tests themselves set the backend, whoever runs them others
        monkeypatch.delenv(setting.variable, raising=False)
    config = Config.resolve()
    assert set(config.sources) == {setting.name for setting in settings()}
    assert set(config.sources.values()) == {"default"}
    for setting in settings():
        assert getattr(config, setting.name) == setting.default
        assert setting.variable == f"FANFOLD_{setting.name.upper()}"
        assert setting.help


def test_environment_beats_default_and_argument_beats_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "7.5")
    monkeypatch.setenv("FANFOLD_LATE_PEERS", "mask")
    config = Config.resolve(timeout_s=3)
    assert (config.timeout_s, config.late_peers) == (3, "mask")
    assert config.sources["timeout_s"] == "argument"
    assert config.sources["late_peers"] == "environment"
    assert config.sources["spin_us"] == "default"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FANFOLD_TIMEOUT_S", "soon"),
        ("FANFOLD_TIMEOUT_S", ""),
        ("FANFOLD_TIMEOUT_S", "0"),
        ("FANFOLD_TIMEOUT_S", "-1"),
        ("FANFOLD_TIMEOUT_S", "nan"),
        ("FANFOLD_TIMEOUT_S", "inf"),
        ("FANFOLD_SPIN_US", "-1"),
        ("FANFOLD_SPIN_US", "none"),
        ("FANFOLD_LATE_PEERS", "wait"),
        ("FANFOLD_STAGING_BYTES", "8MB"),
        ("FANFOLD_STAGING_BYTES", "1"),
        ("FANFOLD_BACKEND", "gpu"),
        ("FANFOLD_SHARE_GPUS", "yes"),
        ("FANFOLD_CACHE_DIR", ""),
    ],
)
def test_malformed_variable(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match=variable) as caught:
        Config.resolve()
    assert repr(text) in str(caught.value) or text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", "1"),
        ("timeout_s", True),
        ("spin_us", -0.5),
        ("late_peers", None),
        ("staging_bytes", 1.5e6),
        ("ring_bytes", 4095),
        ("backend", None),
        ("share_gpus", 1),
    ],
)
def test_bad_argument(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.resolve(**{name: value})


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="timeout_ms"):
        Config.resolve(timeout_ms=5)


def test_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config.resolve().timeout_s = 1.0  # type: ignore[misc]


def test_spin_only_where_every_rank_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert Config.resolve().spin_seconds(cores) > 0.0
    assert Config.resolve().spin_seconds(cores + 1) == 0.0
    assert Config.resolve(spin_us=3).spin_seconds(cores + 1) == pytest.approx(3e-6)


def test_what_is_not_given_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings():
        monkeypatch.delenv(setting.variable, raising=False)
    assert Config(timeout_s=3) == Config.resolve(timeout_s=3)
    assert Config() == Config.resolve()
    monkeypatch.setenv("FANFOLD_TIMEOUT_S", "7")
    assert Config().timeout_s == 100.0  # the environment counts in resolve() alone
    for wrong in ({"timeout_s": 0}, {"backend": "gpu"}, {"ctas": "many"}, {"late_peers": None}):
        with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} is .* \(from argument\)"):
            Config(**wrong)  # type: ignore[arg-type]


def test_ranks_do_not_start_with_a_malformed_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_SPIN_US", "long")
    with pytest.raises(ConfigError, match="FANFOLD_SPIN_US is 'long'"):
        RankPool(2)


def test_settings_in_the_environment_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_BACKEND", "auto")
    monkeypatch.setenv("FANFOLD_NETWORK", "loopback")
    for name in ("FANFOLD_HOSTS", "FANFOLD_SHARE_GPUS"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with in_environment({"backend": "host", "hosts": 2, "share_gpus": True, "network": "loopback"}):
        config = Config.resolve()
        assert (config.backend, config.hosts, config.share_gpus) == ("host", 2, True)
        with pytest.MonkeyPatch.context() as patch:
            # What other threads may read meanwhile does not change, not even for a moment.
            for name in ("putenv", "unsetenv"):
                patch.setattr(os, name, mock.Mock(side_effect=AssertionError(name)))
            with in_environment({"hosts": 2, "backend": "host"}):
                assert Config.resolve().hosts == 2
        assert Config.resolve().hosts == 2
        with pytest.raises(KeyError), in_environment({"hosts": 3}):
            raise KeyError
        assert Config.resolve().hosts == 2
    assert dict(os.environ) == before
