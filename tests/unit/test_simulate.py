"""The model behind ``fanfold simulate``: closed forms, published rows, and the command."""

from __future__ import annotations

import dataclasses
import heapq
import json

import numpy as np
import pytest

from fanfold.bench.workload import Workload
from fanfold.errors import ArgumentError
from fanfold.simulate import (
    HELD_OUT_BOUND,
    NETWORKS,
    SYSTEMS,
    Fixed,
    Network,
    Scenario,
    System,
    routing,
)
from fanfold.simulate.engine import serve
from fanfold.simulate.model import simulate
from fanfold.simulate.published import load, sources

# 10 GB/s: 10,000 bytes in a µs. bfloat16 rows of 5,000 columns take one µs.
PLAIN = Network(
    "plain", rails=1, rail_gb_per_s=10.0, efficiency=1.0, message_us=0.0, latency_us=0.0,
    switch_us=0.0, packet_bytes=4096,
)  # fmt: skip
BARE = System(
    "bare", "entry", Fixed(0.0, 0.0), Fixed(0.0, 0.0), nvlink_gb_per_s=100.0,
    forward_gb_per_s=1e6, sum_gb_per_s=1e6,
)  # fmt: skip


def to_one(network=PLAIN, system=BARE, ranks=2, tokens=1, hidden=5000, **more):
    """Every token of every rank goes to rank 1; each rank has a host to itself."""
    return Scenario(
        network, system, ranks=ranks, ranks_per_host=1, tokens=tokens, hidden=hidden, top_k=1,
        experts=ranks, dtype="bf16", routing="one_expert", seed=1, **more,
    )  # fmt: skip


# ---- servers ------------------------------------------------------------------------------------


def test_messages_queue_at_their_server_in_the_order_of_arrival():
    server = np.array([0, 1, 0, 0])
    served = serve(server, np.array([5.0, 0.0, 0.0, 1.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert served.finish.tolist() == [8.0, 2.0, 3.0, 7.0]
    assert served.start.tolist() == [7.0, 0.0, 0.0, 3.0]


def test_equal_arrivals_are_served_in_the_given_order():
    served = serve(np.zeros(3, int), np.zeros(3), np.array([1.0, 2.0, 4.0]))
    assert served.finish.tolist() == [1.0, 3.0, 7.0]


def test_a_switch_is_paid_after_another_origin_only():
    ones, origin = np.ones(4), np.array([0, 0, 1, 0])
    served = serve(np.zeros(4, int), np.arange(4.0), ones, origin, ones * 10)
    assert served.switched.tolist() == [0.0, 0.0, 10.0, 10.0]
    assert served.finish.tolist() == [1.0, 2.0, 13.0, 24.0]


def test_nothing_to_serve():
    empty = np.zeros(0)
    assert serve(np.zeros(0, int), empty, empty).finish.tolist() == []


def by_events(paths, arrivals, services):
    """The same servers with one queue of events over all of them: the textbook way."""
    free = {}
    events = [(at, 0, message) for message, at in enumerate(arrivals)]
    heapq.heapify(events)
    done = [0.0] * len(paths)
    while events:
        now, stage, message = heapq.heappop(events)
        server = (stage, paths[message][stage])
        finish = max(now, free.get(server, 0.0)) + services[message][stage]
        free[server] = done[message] = finish
        if stage + 1 < len(paths[message]):
            heapq.heappush(events, (finish, stage + 1, message))
    return done


@pytest.mark.parametrize("seed", range(5))
def test_stage_by_stage_gives_the_times_of_a_queue_of_events(seed):
    random = np.random.default_rng(seed)
    count, stages, servers = 400, 4, 7
    paths = random.integers(servers, size=(count, stages))
    arrivals, services = random.random(count) * 50, random.random((count, stages))
    at = arrivals
    for stage in range(stages):
        at = serve(paths[:, stage], at, services[:, stage]).finish
    np.testing.assert_allclose(at, by_events(paths, arrivals, services), rtol=1e-9)


# ---- closed forms -------------------------------------------------------------------------------


def test_one_message_pays_each_stage_once():
    network = dataclasses.replace(PLAIN, message_us=0.25, latency_us=7.0)
    system = dataclasses.replace(
        BARE, proxies=2, command_us=0.5, handover_us=3.0, low_latency=Fixed(20.0, 30.0)
    )
    dispatch = simulate(to_one(network, system), "dispatch")
    # Fixed, hand-over, command, NIC with its message, fabric, NIC.
    assert dispatch.us == pytest.approx(20.0 + 3.0 + 0.5 + 1.25 + 7.0 + 1.0)
    assert dispatch.bytes_network == pytest.approx(10_000 / 2)  # a mean over both ranks
    assert dispatch.messages == 1
    assert simulate(to_one(network, system), "combine").us == pytest.approx(dispatch.us + 10.0)


def test_a_saturated_link_takes_bytes_over_bandwidth():
    phase = simulate(to_one(tokens=1000), "dispatch")
    assert phase.us == pytest.approx(1000 + 1)  # and the last message once more at the receiver
    assert phase.bound == "NIC bandwidth"
    assert phase.parts["NIC bandwidth"] == pytest.approx(1000)


def test_rails_share_the_messages():
    network = dataclasses.replace(PLAIN, rails=2, rail_gb_per_s=5.0)
    phase = simulate(to_one(network, tokens=1000), "dispatch")
    assert phase.us == pytest.approx(1000 + 2)


def test_many_small_messages_are_bound_by_the_message_rate():
    network = dataclasses.replace(PLAIN, message_us=2.0)
    phase = simulate(to_one(network, tokens=1000, hidden=50), "dispatch")
    assert phase.us == pytest.approx(1000 * 2.01 + 0.01)
    assert phase.bound == "message rate"


def test_a_large_message_costs_one_message():
    network = dataclasses.replace(PLAIN, message_us=2.0)
    coalesced = dataclasses.replace(BARE, pattern="peer_rows")
    phase = simulate(to_one(network, coalesced, tokens=1000), "dispatch")
    assert phase.parts["message rate"] == pytest.approx(2.0)
    assert phase.messages == pytest.approx(1)
    assert 1002 < phase.us < 1010  # a segment once more


def test_incast_queues_at_the_receiver():
    phase = simulate(to_one(ranks=9, tokens=100), "dispatch")
    assert phase.us == pytest.approx(8 * 100 + 1)
    assert phase.parts["incast"] == 0
    switching = dataclasses.replace(PLAIN, switch_us=0.5, packet_bytes=10_000)
    worse = simulate(to_one(switching, ranks=9, tokens=100), "dispatch")
    assert worse.parts["incast"] == pytest.approx(0.5 * (8 * 100 - 1))
    assert worse.us == pytest.approx(phase.us + worse.parts["incast"])
    large = dataclasses.replace(BARE, pattern="peer_rows")  # 1 MB each: no switches
    assert simulate(to_one(switching, large, ranks=9, tokens=100), "dispatch").parts["incast"] == 0


def test_peers_beyond_the_cached_ones_cost_misses():
    network = dataclasses.replace(PLAIN, cached_peers=2, miss_us=3.0)
    scenario = Scenario(
        network, BARE, ranks=9, ranks_per_host=1, tokens=500, hidden=5000, top_k=8, experts=9,
        dtype="bf16",
    )  # fmt: skip
    phase = simulate(scenario, "dispatch")
    # Of 8 peers 6 are not at hand.
    assert phase.parts["message rate"] == pytest.approx(phase.messages * 3.0 * 6 / 8)


def test_proxies_share_the_commands_by_peer():
    one = dataclasses.replace(BARE, proxies=1, command_us=5.0)
    uniform = Scenario(
        PLAIN, one, ranks=8, ranks_per_host=1, tokens=512, hidden=64, top_k=4, experts=8
    )
    alone = simulate(uniform, "dispatch")
    assert alone.bound == "proxy"
    assert alone.parts["proxy"] == pytest.approx(5.0 * alone.messages)
    four = dataclasses.replace(uniform, system=dataclasses.replace(one, proxies=4))
    assert simulate(four, "dispatch").parts["proxy"] < 0.4 * alone.parts["proxy"]


def test_nvlink_carries_what_stays_in_the_host():
    scenario = dataclasses.replace(to_one(tokens=1000), ranks_per_host=2)
    phase = simulate(scenario, "dispatch")
    assert phase.us == pytest.approx(100)
    assert phase.bound == "NVLink"
    assert phase.messages == 0
    through_nics = dataclasses.replace(BARE, nvlink=False)
    assert simulate(dataclasses.replace(scenario, system=through_nics), "dispatch").us > 1000


def test_high_throughput_sends_a_row_once_for_each_host():
    scenario = Scenario(
        PLAIN, BARE, "high_throughput", ranks=16, tokens=512, hidden=5000, top_k=8, experts=16,
        dtype="bf16",
    )  # fmt: skip
    for phase in ("dispatch", "combine"):
        result = simulate(scenario, phase)
        # Nearly every token has an expert on the other host, and crosses once.
        assert 0.99 * 512 * 10_000 < result.bytes_network <= 512 * 10_000
        assert result.us == pytest.approx(512, rel=0.05)
        assert result.bound == "NIC bandwidth"


def test_a_window_bounds_what_goes_to_one_host():
    windowed = dataclasses.replace(BARE, stream_gb_per_s={"plain": 5.0})
    scenario = to_one(system=windowed, tokens=1000, mode="high_throughput")
    phase = simulate(scenario, "dispatch")
    assert phase.bound == "window"
    assert phase.us == pytest.approx(2000, rel=0.01)
    assert phase.parts["NVLink"] == 0  # a host of one rank forwards nothing


def test_forwarding_and_sums_bound_high_throughput():
    slow = dataclasses.replace(BARE, forward_gb_per_s=1.0)
    scenario = Scenario(PLAIN, slow, "high_throughput", ranks=16, tokens=512, experts=16)
    assert simulate(scenario, "dispatch").bound == "NVLink"
    sums = dataclasses.replace(BARE, sum_gb_per_s=1.0)
    scenario = dataclasses.replace(scenario, system=sums)
    combine = simulate(scenario, "combine")
    assert combine.bound == "partial sums"
    assert combine.us > combine.parts["partial sums"] > 1000
    assert simulate(scenario, "dispatch").parts["partial sums"] == 0


# ---- sanity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["low_latency", "high_throughput"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_more_work_is_never_faster_and_a_better_network_never_slower(mode, system):
    base = Scenario(NETWORKS["efa-p5en"], SYSTEMS[system], mode, ranks=32, tokens=64)

    def times(**changes):
        scenario = dataclasses.replace(base, **changes)
        return [simulate(scenario, phase).us for phase in ("dispatch", "combine")]

    now = times()
    assert all(a > b for a, b in zip(times(hidden=2 * base.hidden), now, strict=True))
    assert all(a > b for a, b in zip(times(tokens=2 * base.tokens), now, strict=True))
    assert times(dtype="bf16")[0] > now[0]
    for number, value in (
        ("rail_gb_per_s", 50.0), ("efficiency", 1.0), ("message_us", 0.0), ("latency_us", 1.0),
        ("switch_us", 0.0),
    ):  # fmt: skip
        better = dataclasses.replace(base.network, **{number: value})
        after = times(network=better)
        # Messages that come in another order may come with more switches.
        room = 1.05 if system in ("uccl-ep", "deepep", "deepep-rdma") else 1.0001
        assert all(a <= b * room for a, b in zip(after, now, strict=True)), number


def test_a_seed_gives_the_same_times_and_another_one_others():
    scenario = Scenario(NETWORKS["cx7"], SYSTEMS["uccl-ep"], tokens=32)
    first = simulate(scenario, "dispatch")
    assert simulate(scenario, "dispatch") == first
    assert simulate(dataclasses.replace(scenario, seed=1), "dispatch").us != first.us


def test_skewed_routing_is_slower():
    scenario = Scenario(NETWORKS["cx7"], SYSTEMS["fanfold"])
    skewed = dataclasses.replace(scenario, routing="skewed")
    assert simulate(skewed, "dispatch").us > 1.5 * simulate(scenario, "dispatch").us


def test_a_thousand_ranks_reuse_the_routing_of_a_few(monkeypatch):
    monkeypatch.setattr(routing, "_MOST_NOISE", 16 * 8 * 1024)
    scenario = Scenario(NETWORKS["cx7"], SYSTEMS["fanfold"], ranks=1024, tokens=16, experts=1024)
    phase = simulate(scenario, "dispatch")
    assert phase.drawn == 8
    rows = 16 * 8 * (1 - 8 / 1024)
    assert phase.bytes_network == pytest.approx(rows * scenario.row_bytes("dispatch"), rel=0.02)


def test_reused_routing_is_moved_by_whole_hosts(monkeypatch):
    workload = Workload(32, 4, 1, 2, 32, seed=3)
    routing.draw.cache_clear()
    monkeypatch.setattr(routing, "_MOST_NOISE", 1)
    rows = routing.draw(workload, 8)
    routing.draw.cache_clear()
    assert rows.drawn == 8
    assert rows.entries.sum() == 32 * 4 * 2
    for rank in range(8, 32):
        twin, hosts = rank % 8, rank // 8
        assert np.array_equal(rows.entries[rank], np.roll(rows.entries[twin], 8 * hosts))
        assert np.array_equal(rows.pairs[rank], np.roll(rows.pairs[twin], 8 * hosts))
        assert np.array_equal(rows.host_rows[rank], np.roll(rows.host_rows[twin], hosts))
    by_host = rows.pairs.reshape(32, 4, 8).sum(2)
    assert (rows.host_rows <= by_host).all()


def test_no_token_goes_to_more_hosts_than_allowed():
    rows = routing.draw(Workload(64, 100, 1, 8, 256), 8, 2)
    assert (rows.entries.sum(1) == 800).all()
    assert (rows.host_rows.sum(1) <= 200).all()
    assert rows.host_rows.sum() > 0.9 * 64 * 200


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"mode": "fast"}, "mode"),
        ({"dtype": "fp4"}, "dtype"),
        ({"routing": "even"}, "routing"),
        ({"ranks": 5000}, "ranks"),
        ({"ranks": 12}, "ranks"),
        ({"experts": 100}, "experts"),
        ({"tokens": 0}, "tokens"),
        ({"top_k": 257}, "top_k"),
        ({"top_hosts": -1}, "top_hosts"),
    ],
)
def test_a_scenario_refuses(changes, argument):
    with pytest.raises(ArgumentError) as error:
        Scenario(NETWORKS["cx7"], SYSTEMS["fanfold"], **changes)
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        (PLAIN, {"rails": 0}),
        (PLAIN, {"efficiency": 1.1}),
        (PLAIN, {"rail_gb_per_s": float("nan")}),
        (PLAIN, {"message_us": -1.0}),
        (BARE, {"pattern": "row"}),
        (BARE, {"proxies": -1}),
        (BARE, {"forward_gb_per_s": 0.0}),
        (BARE, {"command_us": float("inf")}),
        (BARE, {"chunk_rows": 0}),
    ],
)
def test_a_network_or_system_refuses(preset, changes):
    with pytest.raises(ArgumentError) as error:
        dataclasses.replace(preset, **changes)
    assert error.value.argument == next(iter(changes))


# ---- published rows -----------------------------------------------------------------------------


def test_every_row_names_its_source_and_its_use():
    rows = load()
    named = sources()
    for row in rows:
        assert row.fields["source"] in named
        assert ("us" in row.fields) != ("gb_per_s" in row.fields)
        assert row.use in ("fit", "held_out", "excluded")
        assert ("fits" in row.fields) == (row.use == "fit")
        assert ("why" in row.fields) == (row.use == "excluded")
    assert len({json.dumps({**row.fields}, sort_keys=True) for row in rows}) == len(rows)


@pytest.mark.parametrize("ranks", [24, pytest.param(64, marks=pytest.mark.long)])
def test_held_out_rows_are_within_the_bound(inside, tmp_path, monkeypatch, ranks):
    """Of at most so many ranks; `fanfold simulate --validate` takes all."""
    expected = [row for row in load() if row.scenario.ranks <= ranks]
    monkeypatch.setattr("fanfold.cli.simulate.load", lambda: expected)
    lines = tmp_path / "validation.jsonl"
    code, printed, errors = inside("simulate", "--validate", "--json", str(lines))
    assert (code, errors) == (0, "")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(rows) == len(expected)
    held_out = [row for row in rows if row["use"] == "held_out"]
    assert len(held_out) > sum(row["use"] == "fit" for row in rows)
    off = [row for row in held_out if abs(row["error"]) > HELD_OUT_BOUND]
    assert all("beyond" in row for row in off)
    assert len(off) <= 1
    assert max(abs(row["error"]) for row in held_out) < 0.2
    assert sum(abs(row["error"]) for row in held_out) / len(held_out) < 0.06
    for name in sources():
        assert name in printed


def test_a_row_that_gets_worse_fails_the_validation(inside, monkeypatch):
    slow = dataclasses.replace(NETWORKS["cx7"], efficiency=0.7)
    rows = [row for row in load({**NETWORKS, "cx7": slow}) if row.scenario.ranks == 8]
    assert any(row.use == "held_out" and "beyond" not in row.fields for row in rows)
    monkeypatch.setattr("fanfold.cli.simulate.load", lambda: rows)
    code, printed, _ = inside("simulate", "--validate")
    assert code == 1
    assert "NOT EXPECTED" in printed


# ---- the command --------------------------------------------------------------------------------


def test_the_command_prints_and_appends(inside, tmp_path):
    lines = tmp_path / "r.jsonl"
    code, printed, errors = inside(
        "simulate", "--ranks", "16,24", "--network", "efa-p5en", "--proxies", "2", "--json",
        str(lines),
    )  # fmt: skip
    assert (code, errors) == (0, "")
    assert "A prediction: Fanfold itself has not been measured across hosts." in printed
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(one["ranks"], one["experts"]) for one in results] == [(16, 256), (24, 264)]
    for one in results:
        assert (
            max(one["dispatch"]["parts_us"], key=one["dispatch"]["parts_us"].get)
            == (one["dispatch"]["bound"])
        )
        assert f"{one['combine']['us']:.0f}" in printed


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_command_draws(inside, tmp_path, ending):
    picture = tmp_path / f"p.{ending}"
    code, printed, errors = inside(
        "simulate", "--ranks", "16,32", "--tokens", "8", "--plot", str(picture)
    )
    assert (code, errors) == (0, "")
    assert picture.stat().st_size > 1000
    assert str(picture) in printed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ranks", "0"), "ranks is 0"),
        (("--ranks", "12"), "a multiple of the 8 ranks of a host"),
        (("--ranks", "x"), "no list of numbers"),
        (("--experts", "100"), "experts is 100"),
        (("--tokens", "0"), "tokens is 0"),
        (("--network", "token-ring"), "invalid choice"),
        (("--efficiency", "2"), "efficiency is 2.0"),
        (("--proxies", "65"), "proxies is 65"),
        (("--plot", "p.xyz"), "--plot is p.xyz"),
        (("--json", "no/such/folder.jsonl"), "--json is no/such/folder.jsonl"),
    ],
)
def test_the_command_refuses_in_one_line(inside, options, told):
    code, _, errors = inside("simulate", *options)
    assert code == 2
    assert told in errors
    assert errors.count("\n") == 1
