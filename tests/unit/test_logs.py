"""What is logged below the logger `fanfold`: fields of records, and silence without handlers."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

from fanfold.errors import TransportError, logged
from fanfold.thread_ranks import ThreadRanks
from tests.unit.test_metrics import one_is_absent


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a record has besides the attributes of every record."""
    plain = logging.LogRecord("", 0, "", 0, "", (), None)
    known = {*vars(plain), "message", "asctime", "taskName"}
    return {name: value for name, value in vars(record).items() if name not in known}


def test_a_masked_peer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fanfold"):
        ThreadRanks(2, timeout_s=100.0).run(one_is_absent, threading.Event(), "mask")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fanfold.late_peers", logging.WARNING)
    assert record.getMessage().startswith("rank 0 masks rank 1, for which it waited 0.2")
    found = fields(record)
    assert found.pop("seconds") >= 0.2
    assert found == {
        "rank": 0,
        "peer": 1,
        "phase": "low_latency dispatch 1",
        "peer_gone": False,
    }


def test_a_timeout_is_logged_with_its_attributes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fanfold"):
        ThreadRanks(2, timeout_s=100.0).run(one_is_absent, threading.Event(), "raise")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fanfold.errors", logging.ERROR)
    found = fields(record)
    waited = f"rank 0 waited {found['seconds']:.3g} s for rank 1 in low_latency dispatch"
    assert record.getMessage().startswith(waited)
    numbers = {"expected", "actual", "seconds"}
    assert {"rank", "peer", "phase", "peer_gone", "path", *numbers} == set(found)
    assert (found["rank"], found["peer"], found["phase"]) == (0, 1, "low_latency dispatch")


def test_a_copy_of_an_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = TransportError(0, 1, "libfabric:tcp", "it is down", 3, 4096, 1.5)
    with caplog.at_level(logging.DEBUG, "fanfold"):
        assert logged(error) is error
        pickle.loads(pickle.dumps(error))
    [record] = caplog.records
    assert fields(record) == {
        "rank": 0,
        "peer": 1,
        "transport": "libfabric:tcp",
        "what": "it is down",
        "outstanding_messages": 3,
        "outstanding_bytes": 4096,
        "seconds": 1.5,
        "path": "",
    }


def test_a_filter_that_fails_does_not_hide_the_error() -> None:
    def broken(_: logging.LogRecord) -> bool:
        raise KeyError("a field that other records have")

    logger = logging.getLogger("fanfold.errors")
    logger.addFilter(broken)
    try:
        ThreadRanks(2, timeout_s=100.0).run(one_is_absent, threading.Event(), "raise")
    finally:
        logger.removeFilter(broken)


QUIET = """
import logging
import fanfold
from fanfold.errors import TransportError, logged
logged(TransportError(0, 1, "libfabric:tcp", "it is down", 3, 4096, 1.5))
assert logging.getLogger().handlers == []
assert logging.getLogger("fanfold").level == logging.NOTSET
"""


def test_a_program_that_configures_no_logging_sees_nothing() -> None:
    command = [sys.executable, "-c", QUIET]
    done = subprocess.run(command, check=False, timeout=100, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
