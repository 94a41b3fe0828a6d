"""Options of ``fanfold bench``: what they mean, what is refused, and in which words."""

from __future__ import annotations

import argparse

import pytest
import torch

from fanfold.bench import oracle
from fanfold.bench.settings import BenchSettings
from fanfold.bench.workload import Workload
from fanfold.cli import bench
from fanfold.errors import ArgumentError


def points(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench._points(parser.parse_args(arguments), None)


def test_each_of_several_is_a_point():
    found = points(
        "high-throughput", "--layout", "token-major,expert_major", "--routing", "cached",
        "--sms", "12,24", "--distribution", "skewed",
    )  # fmt: skip
    assert [(each.layout, each.routing, each.sms) for each in found] == [
        ("token_major", "cached", 12),
        ("token_major", "cached", 24),
        ("expert_major", "cached", 12),
        ("expert_major", "cached", 24),
    ]
    assert {each.distribution for each in found} == {"skewed"}
    assert {each.workload().routing for each in found} == {"skewed"}


def test_what_is_left_out_the_backend_decides():
    (asked,) = points("high-throughput")
    assert (asked.layout, asked.routing, asked.sms, asked.alignment) == (None,) * 4
    here, there = asked.on("host"), asked.on("cuda")
    assert (here.backend, here.layout, here.routing, here.alignment) == (
        "host", "expert_major", "new", 1,
    )  # fmt: skip
    assert (there.backend, there.alignment, there.sms) == ("cuda", 128, None)
    (token_major,) = points("high-throughput", "--layout", "token-major")
    assert token_major.on("cuda").alignment is None
    (low_latency,) = points("low-latency")
    assert low_latency.on("cuda").layout is None
    (aligned,) = points("high-throughput", "--alignment", "16")
    assert aligned.on("host").alignment == aligned.on("cuda").alignment == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("low-latency --layout token-major", "layout is token_major, .*left out in low latency"),
        ("low-latency --routing uniform", "experts tokens choose is --distribution"),
        ("low-latency --sms 12", "sms is 12, .*high throughput"),
        ("low-latency --alignment 8", "alignment is 8, .*high throughput"),
        ("high-throughput --routing uniform", "routing is 'uniform', .*new, cached"),
        ("high-throughput --layout flat", "layout is 'flat', .*expert_major, token_major"),
        ("high-throughput --backend host --sms 12", "layout, routing and alignment work there"),
        ("high-throughput --sms 1", "sms is 1, .*from 2 to"),
        ("high-throughput --sms 12,1000", "sms is 1000"),
        ("high-throughput --alignment 0", "alignment is 0"),
        ("high-throughput --layout token-major --alignment 8", "has no padding"),
    ],
)
def test_what_does_not_apply_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        points(*arguments.split())


def test_a_list_of_something_else_is_refused(capsys):
    with pytest.raises(SystemExit):
        points("high-throughput", "--sms", "12,many")
    assert "'12,many' is no list of numbers" in capsys.readouterr().err


def test_distribution_is_one_of_those_there_are():
    with pytest.raises(ArgumentError, match="distribution is 'even'"):
        BenchSettings("low_latency", distribution="even")


@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_arriving_are_those_of_the_layouts(alignment):
    workload = Workload(
        ranks=3, tokens=20, hidden=16, top_k=4, experts=12, seed=5, none_share=0.3,
        duplicate_share=0.3, uneven=True,
    )  # fmt: skip
    batches = [workload.batch(rank) for rank in range(3)]
    arrived = [oracle.arrivals(batches, rank, 12) for rank in range(3)]
    token_major = oracle.rows_arriving(batches, 12, token_major=True)
    assert token_major == [len(each.row) for each in arrived]
    rows = oracle.rows_arriving(batches, 12, token_major=False, alignment=alignment)
    assert rows == [int(oracle.expert_major(each, alignment).offsets[-1]) for each in arrived]
    assert torch.tensor(rows).sum() > 0
