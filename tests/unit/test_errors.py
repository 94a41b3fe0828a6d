"""Exceptions travel between processes with their fields, and say what to do."""

from __future__ import annotations

import math
import pickle

import pytest

from fanfold.errors import (
    ArgumentError,
    CompileError,
    DriverFailure,
    FanfoldError,
    PeerRefused,
    PeerTimeout,
    RingFull,
    SignalTimeout,
    TransportError,
)

ERRORS = [
    ArgumentError("hidden", 17, "a multiple of 8"),
    PeerRefused(0, 2, "low_latency dispatch", "hidden is 17"),
    PeerTimeout(1, 3, "low_latency combine", 8, 7, 0.5, False),
    PeerTimeout(1, 3, "low_latency combine", 8, 7, 0.5, True),
    DriverFailure("cuLaunchKernelEx", "kernel k on 1 CTAs", "CUDA_ERROR_NO_BINARY_FOR_GPU", "none"),
    RingFull(1024, 5024, 4000, 30.0),
    CompileError("a/k.cu", "sm_90a", "a/k.cu(3): error: no", "Kernel: k", "the log"),
    TransportError(1, 3, "libfabric:tcp", "the connection is gone", 5, 8192, 0.25),
    TransportError(1, -1, "libfabric:tcp", "no device", 0, 0, 0.0),
    PeerTimeout(1, 3, "low_latency combine", 8, 7, 0.5, False, "eth0, from 10.0.0.1 to 10.0.0.2"),
    TransportError(1, 3, "libfabric:tcp", "gone", 5, 8, 0.25, "eth0, from 10.0.0.1 to 10.0.0.2"),
    SignalTimeout(1, "low_latency combine", 4, 2, 6, 7, 0.5),
]


@pytest.mark.parametrize("error", ERRORS)
def test_pickle(error: FanfoldError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_kinds() -> None:
    assert isinstance(ERRORS[0], ValueError)
    assert isinstance(ERRORS[2], TimeoutError)
    assert isinstance(ERRORS[7], ConnectionError)


def test_words() -> None:
    assert "hidden is 17, but must be a multiple of 8" in str(ERRORS[0])
    late, gone = str(ERRORS[2]), str(ERRORS[3])
    for text in (late, gone):
        assert "rank 1 waited 0.5 s for rank 3 in low_latency combine: expected 8, have 7" in text
    assert "FANFOLD_TIMEOUT_S" in late
    assert "has ended" in gone
    early = str(PeerTimeout(1, 3, "low_latency combine", 8, 7, math.nan, False))
    assert early.startswith("rank 1 waited for rank 3 in low_latency combine: expected 8, have 7")


def test_errors_between_hosts_name_the_interface_apart_from_the_phase() -> None:
    for error in ERRORS[9:11]:
        assert " over eth0, from 10.0.0.1 to 10.0.0.2 (FANFOLD_NETWORK=" in str(error)
    assert isinstance(ERRORS[9], PeerTimeout)
    assert ERRORS[9].phase == "low_latency combine"
    assert " over " not in str(ERRORS[2])


def test_transport_errors_say_where_and_how_much() -> None:
    lost, whole = str(ERRORS[7]), str(ERRORS[8])
    assert lost.startswith(
        "transport libfabric:tcp between rank 1 and rank 3: the connection is gone; "
        "5 messages (8192 bytes) were outstanding, and nothing had moved for 0.25 s; "
    )
    assert "rank 3 has ended or cannot be reached" in lost
    assert whole.startswith("transport libfabric:tcp of rank 1: no device; ")
    assert "fanfold doctor" in whole
