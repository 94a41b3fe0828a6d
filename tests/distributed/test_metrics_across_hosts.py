"""What ranks on two hosts count agrees with what their calls must send, and what they log."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold.group import as_group
from fanfold.launch import RankPool
from fanfold.metrics import METRICS
from fanfold.thread_ranks import ThreadRanks
from tests.distributed.test_across_hosts import need
from tests.environment import environment
from tests.unit.test_logs import fields
from tests.unit.test_metrics import samples

HIDDEN, TOP_K, TOKENS = 64, 2, 5
NETWORKS = ["libfabric:tcp", "loopback", "loopback:7"]
CHANNELS = [metric.name for metric in METRICS if metric.labels == ("peer",)]
THREADS = [metric.name for metric in METRICS if metric.labels == ("thread",)]

Measured = dict[str, Any]

pytestmark = pytest.mark.one_host  # the tests say themselves on how many hosts they run


def low_latency(group: dist.ProcessGroup, **settings: Any) -> fanfold.LowLatency:
    config = fanfold.Config.resolve(**{"timeout_s": 20.0, "proxy_threads": 1, **settings})
    sizes = {"num_experts": 4, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 8}
    return fanfold.LowLatency(**sizes, config=config, group=group)


def tokens_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of rank 0 three rows go to rank 1, of rank 1 five to rank 0."""
    x = torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16, device="cpu")
    rows = [[0, 1], [0, 1], [0, 2], [2, 3], [3, -1]] if rank == 0 else [[1, 2]] * 5
    idx = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return x, idx, torch.ones((TOKENS, TOP_K), dtype=torch.float32, device="cpu")


def after_rounds(group: dist.ProcessGroup, rounds: int, combines: bool) -> Measured:
    """The last values of a layer that is closed."""
    ep = low_latency(group)
    for _ in range(rounds):
        received = ep.dispatch(*tokens_of(ep.rank))
        if combines:
            ep.combine(received.tokens, received)
    ep.close()
    return ep.metrics()


def grown(ranks: ThreadRanks | RankPool, combines: bool) -> list[Measured]:
    """What the third round adds to the counters of each rank."""
    before = ranks.run(after_rounds, 2, combines)
    after = ranks.run(after_rounds, 3, combines)
    return [
        {name: late[name][key] - early[name][key] for name in (*CHANNELS, *THREADS)
         for key in late[name]}
        for early, late in zip(before, after, strict=True)
    ]  # fmt: skip


@pytest.fixture(params=NETWORKS)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ThreadRanks:
    """Two ranks on two hosts."""
    need(request.param)
    monkeypatch.setenv("FANFOLD_NETWORK", request.param)
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    return ThreadRanks(2, timeout_s=100.0)


def up(nbytes: int) -> int:
    """To the alignment of rows."""
    return -(-nbytes // 16) * 16


SIGNATURE, STORE, ROW = 32, 16, 2 * HIDDEN
ROWS = (3, 5)  # that rank 0 sends, and rank 1


def test_a_dispatch_sends_signature_routing_rows_and_three_signals(threads: ThreadRanks) -> None:
    routing = up(2 * TOKENS * TOP_K) + up(4 * TOKENS * TOP_K)
    for rank, added in enumerate(grown(threads, combines=False)):
        rows = ROWS[rank]
        assert added["channel_sent_bytes_total"] == SIGNATURE + routing + rows * ROW + 3 * STORE
        # The tokens that go to the other rank follow each other, so their rows are one command.
        assert added["proxy_commands_total"] == 1 + 2 + 1 + 3
        commands = added["channel_sent_messages_total"] + added["channel_coalesced_commands_total"]
        assert commands == added["proxy_commands_total"]
        assert added["channel_sent_parts_total"] == 1 + 2 + 1
        assert added["channel_dropped_commands_total"] == 0


def test_a_combine_sends_signature_rows_encodings_and_three_signals(threads: ThreadRanks) -> None:
    dispatches, both = grown(threads, combines=False), grown(threads, combines=True)
    for rank in range(2):
        name = "channel_sent_bytes_total"
        back = ROWS[1 - rank] * ROW
        added = both[rank][name] - dispatches[rank][name]
        assert added == SIGNATURE + back + up(TOKENS) + 3 * STORE


def sent_by_streams(group: dist.ProcessGroup) -> list[float]:
    """The bytes that dispatches and combines of five tokens send, one call after the other."""
    sizes = {"num_experts": 4, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 1024}
    with fanfold.HighThroughput(group, **sizes) as ep:

        def sent() -> float:
            as_group(group).all_gather(None)  # what is on its way is acknowledged, or sent
            return sum(ep.metrics()["channel_sent_bytes_total"].values())

        bytes_before = [sent()]
        for _ in range(2):
            received = ep.dispatch(*tokens_of(ep.rank))
            bytes_before.append(sent())
            ep.combine(received.tokens, received)
            bytes_before.append(sent())
        return [late - early for early, late in itertools.pairwise(bytes_before)]


def test_few_rows_do_not_travel_as_a_whole_chunk(threads: ThreadRanks) -> None:
    for sent in threads.run(sent_by_streams):
        # Beside rows: what stands before the rows of a chunk, a header, counts and signals.
        assert all(0 < added < 4 << 10 for added in sent)


def test_a_peer_receives_what_a_rank_sends(threads: ThreadRanks) -> None:
    measured = threads.run(after_rounds, 3, True)
    for rank in range(2):
        here, there = measured[rank], measured[1 - rank]
        assert list(here["channel_sent_bytes_total"]) == [1 - rank]
        sent = {name: here[name][1 - rank] for name in CHANNELS}
        got = {name: there[name][rank] for name in CHANNELS}
        assert sent["channel_sent_messages_total"] > 0
        assert sent["channel_sent_messages_total"] == (
            got["channel_received_messages_total"] - got["channel_duplicate_messages_total"]
        )
        assert sent["channel_sent_parts_total"] == got["channel_received_parts_total"]
        assert here["calls_total"] == {"dispatch": 3, "combine": 3}
        # A rank may end at its barrier's end, before the other one knows that it has come there.
        assert here["proxy_barriers_total"] in ({0: 0}, {0: 1})
        assert all(list(here[name]) == [0] for name in THREADS)


def read_while_calls_run(group: dist.ProcessGroup) -> int:
    """How often another thread reads the metrics while this one calls and closes."""
    ep = low_latency(group)
    reads: list[int] = []
    ended = threading.Event()

    def read() -> None:
        last = 0
        while not ended.is_set():
            sent = ep.metrics()["channel_sent_bytes_total"][1 - ep.rank]
            assert sent >= last
            last = sent
            reads.append(sent)
            ended.wait(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(30):
            received = ep.dispatch(*tokens_of(ep.rank))
            ep.combine(received.tokens, received)
        ep.close()
    finally:
        ended.set()
        reader.join()
    assert ep.metrics()["channel_sent_bytes_total"][1 - ep.rank] >= reads[-1] > 0
    return len(reads)


def test_another_thread_reads_while_calls_run_and_close(threads: ThreadRanks) -> None:
    assert all(count > 0 for count in threads.run(read_while_calls_run))


def round_of_processes(group: dist.ProcessGroup) -> dict[str, dict[str, float]]:
    with environment(FANFOLD_HOSTS="2", FANFOLD_NETWORK="libfabric:tcp"), low_latency(group) as ep:
        registry = prometheus_client.CollectorRegistry()
        registry.register(fanfold.metrics.collector(decode=ep))
        received = ep.dispatch(*tokens_of(ep.rank))
        ep.combine(received.tokens, received)
        return samples(registry)


def test_processes_report_their_channels(process_pools: Callable[[int], RankPool]) -> None:
    need("libfabric:tcp")
    for rank, read in enumerate(process_pools(2).run(round_of_processes)):
        labels = f"layer=decode peer={1 - rank} rank={rank}"
        assert read["fanfold_channel_sent_bytes_total"][labels] > 0
        assert set(read["fanfold_proxy_commands_total"]) == {f"layer=decode rank={rank} thread=0"}
    assert read["fanfold_calls_total"]["call=dispatch layer=decode rank=1"] == 1.0


# ---- logs ---------------------------------------------------------------------------------------


def test_the_network_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FANFOLD_NETWORK", "loopback")
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    with caplog.at_level(logging.INFO, "fanfold"):
        ThreadRanks(2, timeout_s=100.0).run(after_rounds, 1, True)
    opened = [record for record in caplog.records if record.name == "fanfold.memory.host"]
    assert sorted(fields(record)["rank"] for record in opened) == [0, 1]
    for record in opened:
        assert record.levelno == logging.INFO
        found = fields(record)
        assert (found["hosts"], found["network"]) == (2, "loopback")
        assert found["proxy_threads"] == 1


def goes_on_alone(group: dist.ProcessGroup) -> Measured | None:
    """Rank 0 masks rank 1, which has closed, and makes one more call once its proxy knows."""
    ep = low_latency(group, timeout_s=1.0, late_peers="mask")
    received = ep.dispatch(*tokens_of(ep.rank))
    ep.combine(received.tokens, received)
    ranks = as_group(group)
    if ranks.rank == 1:
        ep.close()
        ranks.all_gather(None)
        return None
    # A row that came before the peer closed would be no failure, and the next one is sent late.
    ranks.all_gather(None)
    with pytest.warns(fanfold.LatePeerWarning):
        ep.dispatch(*tokens_of(ep.rank))
    polls = 0
    while ep.metrics()["channel_lost"] != {1: 1}:
        polls += 1
        assert polls < 3000
        time.sleep(0.01)
    ep.dispatch(*tokens_of(ep.rank))
    ep.close()
    return ep.metrics()


def test_a_peer_that_is_given_up_is_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FANFOLD_NETWORK", "loopback")
    monkeypatch.setenv("FANFOLD_HOSTS", "2")
    with caplog.at_level(logging.WARNING, "fanfold"):
        measured, _ = ThreadRanks(2, timeout_s=100.0).run(goes_on_alone)
    assert measured["masked_ranks"] == 1
    assert measured["channel_lost"] == {1: 1}
    masked, given_up = [record for record in caplog.records if fields(record)["rank"] == 0]
    assert (masked.name, given_up.name) == ("fanfold.late_peers", "fanfold.memory.host")
    found = fields(given_up)
    assert (found["rank"], found["peer"], found["network"]) == (0, 1, "loopback")
    assert found["reason"] != ""
    assert "rank 0 sends rank 1 nothing any more: " in given_up.getMessage()
