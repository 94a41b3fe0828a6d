"""What `metrics()` returns on one host, `fanfold.metrics.collector`, and the table of its page."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

import fanfold
from fanfold.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from fanfold.errors import ArgumentError, UsageError
from fanfold.group import as_group
from fanfold.metrics import METRICS, collect, collector
from fanfold.thread_ranks import ThreadRanks

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SIZES = {"num_experts": 8, "top_k": 2, "hidden": 64, "max_tokens": 8}


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.ones((8, 64), dtype=torch.bfloat16, device="cpu")
    topk_idx = torch.arange(16, dtype=torch.int64, device="cpu").view(8, 2) % 8
    return x, topk_idx, torch.ones((8, 2), dtype=torch.float32, device="cpu")


def samples(registry: prometheus_client.CollectorRegistry) -> dict[str, dict[str, float]]:
    """The text form, read back: for each sample's name its values by labels."""
    read: dict[str, dict[str, float]] = {}
    text = prometheus_client.generate_latest(registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = " ".join(f"{name}={value}" for name, value in sample.labels.items())
            read.setdefault(sample.name, {})[labels] = sample.value
    return read


# ---- the mapping --------------------------------------------------------------------------------


def test_calls_of_low_latency_are_counted_until_after_close() -> None:
    with fanfold.LowLatency(**SIZES) as ep:
        assert ep.metrics()["calls_total"] == {"dispatch": 0, "combine": 0}
        x, topk_idx, topk_weights = tokens()
        for _ in range(3):
            received = ep.dispatch(x, topk_idx, topk_weights)
        ep.combine(received.tokens, received)
        with pytest.raises(ArgumentError):
            ep.dispatch(x, topk_idx + 99, topk_weights)
    with pytest.raises(UsageError):
        ep.dispatch(x, topk_idx, topk_weights)
    assert ep.metrics() == {
        "calls_total": {"dispatch": 4, "combine": 1},
        "waits_total": {},
        "wait_seconds_total": {},
        "wait_failures_total": {},
        # Each token goes once to the only rank, and to two of its experts; one call was refused.
        "rows_total": {"low_latency dispatch": {0: 24}, "low_latency combine": {0: 8}},
        "row_bytes_total": {
            "low_latency dispatch": {0: 24 * 128},
            "low_latency combine": {0: 8 * 128},
        },
        "expert_rows_total": dict.fromkeys(range(8), 6),
        "masked_ranks": 0,
    }


def test_calls_of_high_throughput_are_counted() -> None:
    with fanfold.HighThroughput(**SIZES) as ep:
        x, topk_idx, topk_weights = tokens()
        received = ep.dispatch(x, topk_idx, topk_weights)
        again = ep.dispatch(x, previous=received)
        ep.combine(again.tokens, again)
        ep.combine_weights(torch.ones((16,), dtype=torch.float32, device="cpu"), received)
        calls = {"dispatch": 2, "combine": 1, "combine_weights": 1}
        assert ep.metrics()["calls_total"] == calls


def buffer_calls(group: dist.ProcessGroup) -> dict[str, Any]:
    nbytes = Buffer.get_low_latency_rdma_size_hint(8, 64, 1, 8)
    buffer = Buffer(
        group, 1 << 20, num_rdma_bytes=nbytes, low_latency_mode=True, explicitly_destroy=True
    )
    x, topk_idx, topk_weights = tokens()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 8, use_fp8=False)
    buffer.low_latency_combine(rows, topk_idx, topk_weights, handle)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)
    sizes = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    rows, _, _, _, handle, _ = buffer.dispatch(x, num_tokens_per_rank=per_rank, **sizes)
    buffer.internode_dispatch(x, handle=handle)
    buffer.combine(rows, handle)
    before = buffer.metrics()
    buffer.destroy()
    assert buffer.metrics() == before
    return before


def test_calls_of_a_buffer_are_counted_until_after_destroy() -> None:
    [measured] = ThreadRanks(1, timeout_s=100.0).run(buffer_calls)
    assert measured["calls_total"] == {
        "dispatch": 2,
        "combine": 1,
        "low_latency_dispatch": 1,
        "low_latency_combine": 1,
    }
    assert measured["masked_ranks"] == 0


ROUTING = torch.Generator().manual_seed(5)
RANKS, EXPERTS, HIDDEN = 3, 6, 256
# Of each rank, with entries that go nowhere and experts that are named twice.
TOPK_IDX = [
    torch.randint(-1, EXPERTS, (n, 3), generator=ROUTING, dtype=torch.int64, device="cpu")
    for n in (7, 0, 12)
]


def rows_to(source: int, rank: int) -> int:
    """Tokens of ``source`` that name an expert of ``rank``."""
    local = EXPERTS // RANKS
    return sum(any(e // local == rank for e in ids if e >= 0) for ids in TOPK_IDX[source].tolist())


def rows_of(expert: int) -> int:
    return sum(expert in ids for routing in TOPK_IDX for ids in routing.tolist())


def counted_rows(group: dist.ProcessGroup, mode: str, dtype: Any) -> dict[str, Any]:
    sizes = {"num_experts": EXPERTS, "top_k": 3, "hidden": HIDDEN, "max_tokens": 12}
    made = fanfold.LowLatency if mode == "low_latency" else fanfold.HighThroughput
    with made(**sizes, group=group, dispatch_dtype=dtype) as ep:
        topk_idx = TOPK_IDX[ep.rank]
        x = torch.ones((len(topk_idx), HIDDEN), dtype=torch.bfloat16, device="cpu")
        weights = torch.ones(topk_idx.shape, dtype=torch.float32, device="cpu")
        given = {}
        if dtype == "nvfp4":
            given["global_scale"] = torch.ones(1, dtype=torch.float32, device="cpu")
        received = ep.dispatch(x, topk_idx, weights, **given)
        if mode == "high_throughput":
            ep.dispatch(x, previous=received)
            ep.combine_weights(
                torch.ones(len(received.tokens), dtype=torch.float32, device="cpu"), received
            )
        y = torch.ones((*received.tokens.shape[:-1], HIDDEN), dtype=torch.bfloat16, device="cpu")
        ep.combine(y, received)
        return ep.metrics()


# Of one row, with its scales.
ROW_BYTES = {
    "bf16": 2 * HIDDEN,
    "fp8": HIDDEN + 4 * HIDDEN // 128,
    "nvfp4": HIDDEN // 2 + HIDDEN // 16,
}


@pytest.mark.parametrize(
    ("mode", "dtype", "dispatches"),
    [*(("low_latency", dtype, 1) for dtype in ROW_BYTES),
     ("high_throughput", "bf16", 2), ("high_throughput", "fp8", 2)],
)  # fmt: skip
def test_rows_are_counted_by_peer_and_by_expert(mode: str, dtype: str, dispatches: int) -> None:
    for rank, measured in enumerate(
        ThreadRanks(RANKS, timeout_s=60.0).run(counted_rows, mode, dtype)
    ):
        sent = {peer: dispatches * rows_to(rank, peer) for peer in range(RANKS)}
        returned = {peer: rows_to(peer, rank) for peer in range(RANKS)}
        some = {f"{mode} dispatch": sent, f"{mode} combine": returned}
        rows = {phase: {peer: n for peer, n in of.items() if n} for phase, of in some.items()}
        assert measured["rows_total"] == {phase: of for phase, of in rows.items() if of}
        of_phase = {f"{mode} dispatch": ROW_BYTES[dtype], f"{mode} combine": 2 * HIDDEN}
        assert measured["row_bytes_total"] == {
            phase: {peer: n * of_phase[phase] for peer, n in of.items()}
            for phase, of in measured["rows_total"].items()
        }
        local = range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS)
        assert measured["expert_rows_total"] == {e: dispatches * rows_of(e) for e in local}


def newer_buffers(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    x, topk_idx, topk_weights = tokens()
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=8, explicitly_destroy=True)
    rows, _, _, handle, _ = elastic.dispatch(x, topk_idx, topk_weights, num_experts=8)
    elastic.dispatch(x, handle=handle)
    elastic.combine(rows, handle)
    before = elastic.metrics()
    elastic.destroy()
    assert elastic.metrics() == before
    hybrid = HybridEPBuffer(group, 64, 8, 8)
    rows, _, _, _, permuted = hybrid.dispatch_with_permute(
        hidden=x, topk_idx=topk_idx, topk_weights=topk_weights, num_of_experts=8
    )
    hybrid.combine_with_unpermute(hidden=rows, handle=permuted)
    return [before, hybrid.metrics()]


def test_calls_and_rows_of_newer_buffers_are_counted() -> None:
    [[elastic, hybrid]] = ThreadRanks(1, timeout_s=60.0).run(newer_buffers)
    assert elastic["calls_total"] == {"dispatch": 2, "combine": 1}
    assert elastic["rows_total"]["high_throughput dispatch"] == {0: 16}
    assert hybrid["calls_total"] == {"dispatch_with_permute": 1, "combine_with_unpermute": 1}
    assert hybrid["expert_rows_total"] == dict.fromkeys(range(8), 2)


def one_is_absent(
    group: dist.ProcessGroup, ended: threading.Event, late_peers: Any
) -> dict[str, Any] | None:
    """Rank 0 waits for rank 1, which makes no call; its last values."""
    config = fanfold.Config.resolve(timeout_s=0.2, late_peers=late_peers)
    with fanfold.LowLatency(**SIZES, config=config, group=group) as ep:
        if as_group(group).rank == 1:
            ended.wait(60.0)
            return None
        try:
            if late_peers == "mask":
                with pytest.warns(fanfold.LatePeerWarning):
                    ep.dispatch(*tokens())
            else:
                with pytest.raises(fanfold.PeerTimeout):
                    ep.dispatch(*tokens())
            return ep.metrics()
        finally:
            ended.set()


def test_a_wait_for_a_peer_that_is_masked_has_failed() -> None:
    run = ThreadRanks(2, timeout_s=100.0).run
    measured, _ = run(one_is_absent, threading.Event(), "mask")
    assert measured["calls_total"]["dispatch"] == 1
    assert measured["masked_ranks"] == 1
    # New sizes make the ranks agree first, which is the wait that rank 1 misses.
    assert measured["waits_total"] == {"low_latency dispatch": {1: 1}}
    assert measured["wait_failures_total"] == {"low_latency dispatch": {1: 1}}
    assert measured["wait_seconds_total"]["low_latency dispatch"][1] >= 0.2


def many_rounds(group: dist.ProcessGroup) -> dict[str, Any]:
    config = fanfold.Config.resolve(timeout_s=60.0)
    with fanfold.HighThroughput(**SIZES, config=config, group=group) as ep:
        for _ in range(300):
            received = ep.dispatch(*tokens())
            ep.combine(received.tokens, received)
        return ep.metrics()


def test_waits_of_high_throughput_are_for_any_peer() -> None:
    """In 300 rounds of two threads a rank has to wait for the other one."""
    for measured in ThreadRanks(2, timeout_s=100.0).run(many_rounds):
        waits, failures = measured["waits_total"], measured["wait_failures_total"]
        assert sum(sum(peers.values()) for peers in waits.values()) > 0
        for phase, peers in waits.items():
            assert phase.startswith("high_throughput")
            assert set(peers) == {"any"}
            assert failures[phase] == {"any": 0}
            assert measured["wait_seconds_total"][phase]["any"] > 0.0


class Core:
    """A core that has counted something of everything."""

    masked_ranks = 2

    def waits(self) -> list[tuple[str, int, int, float, int]]:
        return [("low_latency dispatch", 3, 4, 0.5, 1), ("high_throughput combine", -1, 2, 0.25, 0)]

    def rows(self) -> list[tuple[str, int, int, int]]:
        return [("low_latency dispatch", 3, 11, 1100)]

    def expert_rows(self) -> list[tuple[int, int]]:
        return [(8, 21), (9, 0)]

    def carrier_counts(self) -> list[tuple[str, int, int, int]]:
        named = [(metric.count, metric.labels[0]) for metric in METRICS if metric.count]
        return [(name, 1, -1 if label == "thread" else 5, 7) for name, label in named]


def test_what_several_cores_count_for_proxies_is_added() -> None:
    measured = collect({}, None, [Core(), Core()])  # type: ignore[list-item]
    assert measured["proxy_commands_total"] == {1: 14}
    assert measured["channel_sent_bytes_total"] == {5: 14}
    assert measured["channel_transit_seconds_total"] == {5: pytest.approx(14e-9)}
    assert measured["channel_lost"] == {5: 7}  # a gauge
    assert "waits_total" not in measured


def test_what_the_core_counts_is_nested_by_its_labels() -> None:
    measured = collect({"dispatch": 1}, Core(), [Core()])  # type: ignore[arg-type,list-item]
    assert list(measured) == [metric.name for metric in METRICS]
    assert measured["waits_total"] == {
        "low_latency dispatch": {3: 4},
        "high_throughput combine": {"any": 2},
    }
    assert measured["wait_seconds_total"]["low_latency dispatch"] == {3: 0.5}
    assert measured["wait_failures_total"]["low_latency dispatch"] == {3: 1}
    assert measured["rows_total"] == {"low_latency dispatch": {3: 11}}
    assert measured["row_bytes_total"] == {"low_latency dispatch": {3: 1100}}
    assert measured["expert_rows_total"] == {8: 21, 9: 0}
    assert measured["masked_ranks"] == 2
    for metric in METRICS:
        if metric.count:
            label = 1 if metric.labels == ("thread",) else 5
            assert measured[metric.name] == {label: 7 / metric.unit}


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")


def test_the_page_has_every_metric_as_the_code_does() -> None:
    table = PAGE.read_text().partition("| metric | labels | meaning |\n|---|---|---|\n")[2]
    lines = table.partition("\n\n")[0].splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert rows == [
        (f"`{metric.name}`", ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS
    ]


def test_the_page_asks_prometheus_for_metrics_that_exist() -> None:
    asked = re.findall(r"\bfanfold_(\w+)(?=\[|\))", PAGE.read_text())
    assert len(asked) == 5
    assert set(asked) <= {metric.name for metric in METRICS}


# ---- Prometheus ---------------------------------------------------------------------------------


def test_the_text_form_reads_back_as_the_mapping() -> None:
    registry = prometheus_client.CollectorRegistry()

    class Layer:
        rank = 6

        def metrics(self) -> dict[str, Any]:
            return collect({"dispatch": 1, "combine": 2}, Core(), [Core()])  # type: ignore[arg-type,list-item]

    layer = Layer()
    registry.register(fanfold.metrics.collector(decode=layer))
    read = samples(registry)
    assert set(read) == {f"fanfold_{metric.name}" for metric in METRICS}
    assert read["fanfold_calls_total"] == {
        "call=dispatch layer=decode rank=6": 1.0,
        "call=combine layer=decode rank=6": 2.0,
    }
    assert read["fanfold_wait_seconds_total"] == {
        "layer=decode peer=3 phase=low_latency dispatch rank=6": 0.5,
        "layer=decode peer=any phase=high_throughput combine rank=6": 0.25,
    }
    assert read["fanfold_expert_rows_total"]["expert=8 layer=decode rank=6"] == 21.0
    assert read["fanfold_masked_ranks"] == {"layer=decode rank=6": 2.0}
    assert read["fanfold_proxy_commands_total"] == {"layer=decode rank=6 thread=1": 7.0}
    assert read["fanfold_channel_sent_bytes_total"] == {"layer=decode peer=5 rank=6": 7.0}
    assert read["fanfold_channel_lost"] == {"layer=decode peer=5 rank=6": 7.0}


def test_a_layer_that_is_dropped_vanishes_and_a_closed_one_stays() -> None:
    registry = prometheus_client.CollectorRegistry()
    first, second = fanfold.LowLatency(**SIZES), fanfold.HighThroughput(**SIZES)
    collector = fanfold.metrics.collector(first)
    registry.register(collector)
    collector.add(second, "prefill")
    first.dispatch(*tokens())
    first.close()
    read = samples(registry)["fanfold_calls_total"]
    assert read["call=dispatch layer=LowLatency-0 rank=0"] == 1.0
    assert read["call=combine_weights layer=prefill rank=0"] == 0.0
    del first
    gc.collect()
    left = samples(registry)["fanfold_calls_total"]
    assert left
    assert all("layer=prefill" in labels for labels in left)
    second.close()
    del second
    gc.collect()
    assert samples(registry) == {}


def test_what_has_no_metrics_and_a_name_that_is_taken_are_refused() -> None:
    with fanfold.LowLatency(**SIZES) as ep:
        with pytest.raises(ArgumentError, match=r"layer is .*must be a LowLatency"):
            fanfold.metrics.collector(torch.ones(1, dtype=torch.float32, device="cpu"))  # type: ignore[arg-type]
        collector = fanfold.metrics.collector(decode=ep)
        with pytest.raises(ArgumentError, match="name is 'decode'"):
            collector.add(ep, "decode")


def test_a_layer_of_the_parent_is_left_out_in_a_forked_child() -> None:
    registry = prometheus_client.CollectorRegistry()

    class Layer:
        rank = 0

        def metrics(self) -> dict[str, Any]:
            raise UsageError("it was made before this process was forked")

    layer = Layer()
    registry.register(fanfold.metrics.collector(layer))
    assert samples(registry) == {}


WITHOUT = """
import sys
sys.modules["prometheus_client"] = None
import fanfold
with fanfold.LowLatency(num_experts=8, top_k=2, hidden=64, max_tokens=8) as ep:
    assert ep.metrics()["calls_total"] == {"dispatch": 0, "combine": 0}
    try:
        fanfold.metrics.collector(ep)
    except fanfold.UnavailableError as error:
        assert "pip install 'fanfold[prometheus]'" in str(error), error
    else:
        raise SystemExit("there is a collector")
"""


def test_without_prometheus_client_the_rest_works() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, timeout=100)


def test_layers_may_be_added_while_a_server_scrapes() -> None:
    class Layer:
        rank = 0

        def metrics(self) -> dict[str, object]:
            return {"calls_total": {"dispatch": 1}}

    layers = [Layer() for _ in range(2000)]
    found = collector()

    def add() -> None:
        for layer in layers:
            found.add(layer)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    adding = threading.Thread(target=add)
    adding.start()
    try:
        while adding.is_alive():
            list(found.collect())
    finally:
        sys.setswitchinterval(interval)
        adding.join()
