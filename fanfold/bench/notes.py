"""What a bench says below its tables."""

from __future__ import annotations

from fanfold.bench.report import Result
from fanfold.bench.settings import BenchSettings

__all__ = ["notes"]

# How much slower one rank's core may be than another's before the notes speak of it.
_UNEQUAL_CORES = 1.3


def notes(result: Result) -> list[str]:
    """Lines to print below the table."""
    if result.device is not None:
        if result.settings.mode == "high_throughput":
            return _high_throughput_notes(result)
        return _gpu_notes(result)
    lines = [
        "Percentiles over ranks and iterations; slowest rank: median of the slowest of each round.",
        "MB and GB/s are per rank; remote leaves out what a rank sends to itself.",
        "Checked against the oracle." if result.checked else "NOT checked.",
        *_weights_notes(result.settings),
        *_hosts_notes(result),
    ]
    if result.ratio is not None:
        rival = "The baseline, torch.distributed's all-to-all,"
        lines.append(f"{rival} takes {result.ratio:.2f} times as long.")
    return lines


def _gpu_notes(result: Result) -> list[str]:
    timing = result.timing or {}
    lines = [
        "Less what an empty kernel costs between the events; in brackets with it (docs/bench.md).",
        "Checked against the oracle." if result.checked else "NOT checked.",
        *_weights_notes(result.settings),
        *_hosts_notes(result),
    ]
    if "overlap" in timing:
        alone, beside = (timing["overlap"][f"gemm_{name}_us"] for name in ("alone", "beside_hook"))
        lines.append(
            f"A matrix product takes {alone:,.0f} µs alone and {beside:,.0f} µs beside a waiting "
            f"hook: {100 * (beside / alone - 1) if alone else 0:+.1f}%."
        )
    lines += _host_notes(timing)
    if result.ratio is not None:
        lines.append(f"The baseline, NCCL's all-to-all, takes {result.ratio:.2f} times as long.")
    return lines


def _weights_notes(settings: BenchSettings) -> list[str]:
    if settings.face != "deep_ep" or settings.mode != "low_latency":
        return []
    return ["Weights come with combine, in which every rank first sends its routing once more."]


def _high_throughput_notes(result: Result) -> list[str]:
    timing = result.timing or {}
    empty = timing.get("overhead", {}).get("end_to_end_us", 0.0)
    lines = [
        f"Nothing is taken off; an empty kernel takes {empty:.1f} µs end to end (docs/bench.md).",
        "Checked against the oracle." if result.checked else "NOT checked.",
        *_hosts_notes(result),
    ]
    if late := timing.get("overhead", {}).get("late_share", 0.0):
        lines.append(
            f"The host was late for {100 * late:.1f}% of the calls timed end to end: where that is "
            "many, the times hold the host's, too."
        )
    if result.settings.in_place:
        lines.append(
            "Rows came in place: into symmetric memory, where they stay until the next dispatch."
        )
    if result.capacity is not None:
        room = f"has room for {result.capacity} rows and waits for nothing."
        lines.append(f"Each dispatch with a new routing {room}")
        missing = "cannot be in a CUDA graph: its kernels are not timed apart."
        lines.append(f"One whose counts the CPU reads {missing}")
    if "overlap" in timing:
        lines += _overlap_notes(result, timing["overlap"])
    lines += _host_notes(timing)
    if result.ratio is not None:
        way = "" if result.settings.routing == "cached" else " by the CPU's clock, counts and all,"
        lines.append(
            f"The baseline, NCCL's all-to-all of a row for each (token, expert),{way} takes "
            f"{result.ratio:.2f} times as long."
        )
    return lines


def _host_notes(timing: dict[str, dict[str, float]]) -> list[str]:
    overhead = timing.get("overhead", {})
    slow, fast = (overhead.get(name, 0.0) for name in ("python_us", "python_least_us"))
    if slow <= _UNEQUAL_CORES * fast:
        return []
    same = f"the same Python takes {fast:.1f} to {slow:.1f} µs"
    return [f"The ranks' cores are not equally fast: {same}, and the host's times differ with it."]


def _overlap_notes(result: Result, times: dict[str, float]) -> list[str]:
    product = (
        f"A matrix product asked to leave {result.settings.sms} SMs takes "
        f"{times['gemm_alone_us']:,.0f} µs alone and {times['gemm_beside_us']:,.0f} µs beside "
        f"dispatches on those: it keeps {100 * times['kept']:.1f}% of its speed. On all SMs it "
        f"takes {times['gemm_on_all_us']:,.0f} µs."
    )
    dispatch = (
        f"A dispatch takes {times['dispatch_alone_us']:,.0f} µs alone and "
        f"{times['dispatch_beside_us']:,.0f} µs beside it."
    )
    lines = [product, dispatch]
    if times["covered"] < 1:
        lines.append(
            f"Only {100 * times['covered']:.0f}% of the products had dispatches beside them from "
            "beginning to end: do not use this figure."
        )
    return lines


def _hosts_notes(result: Result) -> list[str]:
    placement = result.placement
    if placement.hosts == 1:
        return []
    mode = result.settings.mode.replace("_", " ").capitalize()
    crosses = f"{mode} sends a row to each rank that needs it, on whichever host."
    if result.device is None and result.settings.mode == "high_throughput":
        crosses = (
            "High throughput sends a row once to each other host, whose ranks read it there, and "
            "each other host returns one sum for a token."
        )
    lines = [f"{crosses} The bytes are worked out from the routing, not measured."]
    if placement.emulated:
        threads = f"{placement.proxy_threads} proxy thread" + "s" * (placement.proxy_threads != 1)
        lines.append(
            f"One machine acts as several hosts: {result.ranks} ranks with {threads} each share "
            "its cores and its memory, and the times say nothing of a network between machines."
        )
    return lines + _message_notes(result)


def _message_notes(result: Result) -> list[str]:
    messages = result.messages
    if messages is None:
        return []
    way = (
        f"A command lay in its ring for {messages.ring_us:,.1f} µs at most, its message waited "
        f"{messages.queue_us:,.1f} µs in the proxy, and the transport had it for "
        f"{messages.transit_us:,.1f} µs, on average."
    )
    lines = [way]
    for phase in ("dispatch", "combine"):
        times = (result.timing or {}).get(phase, {})
        if "send_us" not in times:
            continue
        whole = times["alone_us"]
        parts = {
            "kernels": times["send_us"] + times["receive_us"],
            "ring": messages.ring_us,
            "proxy": messages.queue_us,
            "provider": messages.transit_us,
        }
        parts["what was not timed"] = max(0.0, whole - sum(parts.values()))
        shares = ", ".join(f"{name} {100 * us / whole:.0f}%" for name, us in parts.items())
        lines.append(f"Of a {phase} alone, {whole:,.0f} µs: {shares}.")
    return lines
