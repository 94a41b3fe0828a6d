"""Both faces where low latency runs on a device, played by PyTorch's meta device and a mode that
writes down how it is called."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

import fanfold
from fanfold import low_latency as face
from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.backends.low_latency import (
    CudaRouting,
    Dispatched,
    LateRouting,
    RoutingLayout,
    cuda_required_bytes,
)
from fanfold.deep_ep import Buffer, runtime
from fanfold.deep_ep.sizes import cuda_memory_bytes
from fanfold.errors import ArgumentError, UsageError
from fanfold.formats import BF16_ROWS, Formats, RowFormat
from fanfold.geometry import Geometry

META = torch.device("meta")
PLACED = BackendChoice("cuda", META, "each rank has a GPU of its own")
SIZES: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hidden": 32, "max_tokens": 8}


class Memory:
    """A region of the device."""

    def __init__(self, group: Any, bytes_per_rank: int) -> None:
        self.group, self.bytes_per_rank, self.closed = group, bytes_per_rank, False
        self.tensor = torch.empty(bytes_per_rank, dtype=torch.uint8, device=META)

    def close(self) -> None:
        self.closed = True


class Mode:
    """A mode on the device."""

    device = META

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.error: Exception | None = None
        self.late = False
        self.formats: Formats = BF16_ROWS
        self.check_devices: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **rest: self.calls.append((name, *args, *rest.values()))

    def dispatch(
        self, geometry: Geometry, x: Any, topk_idx: Any, topk_weights: Any = None, **rest: Any
    ) -> Any:
        self._check("dispatch", x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        self.calls.append(("dispatch", (x, topk_idx, topk_weights)))
        self.formats = rest.get("formats", BF16_ROWS)
        local, capacity = geometry.experts_per_rank, geometry.expert_capacity

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        dispatched = Dispatched(
            tokens=empty(local, capacity, geometry.hidden, dtype=torch.bfloat16),
            scales=None,
            counts=empty(local),
            routing=self._routing(geometry, x.shape[0]),
        )
        return dispatched, self._hook("dispatch", rest)

    def _routing(self, geometry: Geometry, tokens: int) -> CudaRouting | LateRouting:
        layout = RoutingLayout.of(geometry, 36)
        routing = CudaRouting(
            torch.empty(layout.words, dtype=torch.int32, device=META), layout, tokens, True, 0
        )
        return LateRouting(routing.ranges, routing.source_tokens) if self.late else routing

    def combine(self, geometry: Geometry, y: Any, routing: Any, topk_idx: Any, **rest: Any) -> Any:
        self._check("combine", y=y, out=rest.get("out"))
        self.calls.append(("combine", (routing, topk_idx, rest.get("late_weights"))))
        tokens = topk_idx.shape[0] if topk_idx is not None else routing.tokens
        result = torch.empty((tokens, geometry.hidden), dtype=torch.bfloat16, device=META)
        return result, self._hook("combine", rest)

    def _check(self, call: str, **tensors: Any) -> None:
        try:
            self.check_devices(**tensors)
        except ArgumentError:
            self.calls.append((f"refuse_{call}", None))
            raise

    def _hook(self, call: str, rest: dict[str, Any]) -> Any:
        return (lambda: self.calls.append((f"{call} hook", None))) if rest["return_hook"] else None

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def masked(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=META)


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Mode:
    """What every face opens instead of a GPU's mode."""
    made = Mode()
    for module in (face, runtime):
        monkeypatch.setattr(module, "choose", lambda *which, **how: PLACED)
    monkeypatch.setattr(opening, "CudaSymmetricMemory", Memory)

    def opened(memory: Any, config: Any, *, late_weights: bool = False, check_devices: Any) -> Mode:
        made.late, made.check_devices = late_weights, check_devices
        return made

    monkeypatch.setattr(opening.low_latency, "open_low_latency", opened)
    monkeypatch.setattr(runtime, "open_low_latency", opened)
    monkeypatch.setattr(runtime, "Streams", lambda device: runtime.HostStreams())
    return made


def tokens(device: torch.device = META) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.zeros((5, 32), dtype=torch.bfloat16, device=device)
    return x, torch.zeros((5, 2), dtype=torch.int64, device=device), torch.zeros((5, 2)).to(device)


def test_native_round_trip(mode: Mode) -> None:
    with fanfold.LowLatency(None, **SIZES) as ep:
        geometry = Geometry(1, **SIZES)
        assert ep.memory.bytes_per_rank == cuda_required_bytes(geometry, late_weights=False)
        assert ep.device == META
        x, idx, weights = tokens()
        received = ep.dispatch(x, idx, weights)
        assert mode.calls == [("dispatch", (x, idx, weights))]
        assert received.complete
        assert received.num_tokens == 5
        assert received.offsets is received.offsets
        other = ep.dispatch(x, idx, weights).offsets  # a caller may write to each
        assert other.untyped_storage()._cdata != received.offsets.untyped_storage()._cdata
        assert received.offsets.device == META
        assert received.weights is received.weights
        assert received.weights is not None
        assert (received.weights.shape, received.weights.dtype) == ((4, 8), torch.float32)
        assert dataclasses.replace(received, num_tokens=4).weights is received.weights
        assert dataclasses.replace(received, weights=None).weights is None
        assert not hasattr(received, "wait")
        assert received.source_rank.device == META
        out = ep.combine(received.tokens, received)
        assert out.shape == x.shape
        name, (routing, topk_idx, late) = mode.calls[-1]
        assert (name, routing.weighted, topk_idx, late) == ("combine", True, None, None)
        ep.combine(received.tokens, received, weighted=False)
        assert mode.calls[-1][1][0].weighted is False
        ep.synchronize()
    assert ep.memory.closed  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="closed"):
        ep.check()


def test_native_hooks(mode: Mode) -> None:
    with fanfold.LowLatency(None, **SIZES) as ep:
        received, hook = ep.dispatch(*tokens(), return_hook=True)
        assert not received.complete
        with pytest.raises(UsageError, match="not complete"):
            ep.combine(received.tokens, received)
        hook()
        assert received.complete
        _, hook = ep.combine(received.tokens, received, return_hook=True)
        hook()
        sent, refused, *rest = [name for name, *_ in mode.calls]
        assert (sent, refused) == ("dispatch", "refuse_combine")
        assert rest == ["dispatch hook", "combine", "combine hook"]


def test_tensors_elsewhere_are_told_why(mode: Mode) -> None:
    with fanfold.LowLatency(None, **SIZES) as ep:
        x, idx, weights = tokens()
        near = tokens(torch.device("cpu"))
        for wrong, name in (
            ((near[0], idx, weights), "x"),
            ((x, near[1], weights), "topk_idx"),
            ((x, idx, near[2]), "topk_weights"),
        ):
            with pytest.raises(ArgumentError, match=rf"{name}.device is cpu, .* a GPU of its own"):
                ep.dispatch(*wrong)
            assert mode.calls[-1][0] == "refuse_dispatch"
        received = ep.dispatch(x, idx, weights)
        with pytest.raises(ArgumentError, match=r"out.device is cpu"):
            ep.combine(received.tokens, received, out=near[0])
        assert mode.calls[-1][0] == "refuse_combine"


def test_what_kernels_found_is_raised(mode: Mode) -> None:
    with fanfold.LowLatency(None, **SIZES) as ep:
        ep.check()
        mode.error = ArgumentError("topk_idx[0, 1]", 4, "from -1 (none) to 3")
        for call in (ep.check, ep.synchronize):
            with pytest.raises(ArgumentError, match="topk_idx"):
                call()


def test_deep_ep_round_trip(mode: Mode) -> None:
    size = Buffer.get_low_latency_rdma_size_hint(8, 32, 1, 4)
    comm = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, allgather=lambda v: [v])
    buffer = Buffer(
        None, 1 << 16, size, low_latency_mode=True, enable_shrink=True, comm=comm,
        explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.device == META
    x, idx, weights = tokens()
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    assert (rows.shape, counts.shape, event.event, hook) == ((4, 8, 32), (4,), None, None)
    out, event, hook = buffer.low_latency_combine(rows, idx, weights, handle, async_finish=True)
    assert out.shape == x.shape
    assert event.event is not None
    name, (routing, topk_idx, late) = mode.calls[-1]
    assert (name, topk_idx is idx, late is weights) == ("combine", True, True)
    assert routing.ranges is handle[1]
    zero_copy = buffer.get_next_low_latency_combine_buffer(handle)
    assert (zero_copy.device, zero_copy.shape) == (META, rows.shape)
    with pytest.raises(ArgumentError, match=r"x.device is cpu, .* a GPU of its own"):
        buffer.low_latency_dispatch(x.new_zeros(x.shape, device="cpu"), idx, 8, 4)

    buffer.low_latency_update_mask_buffer(0, True)
    assert mode.calls[-1] == ("set_masked", 0, True)
    buffer.low_latency_clean_mask_buffer()
    assert mode.calls[-1] == ("set_masked", 0, False)
    buffer.low_latency_query_mask_buffer(torch.zeros(1, dtype=torch.int32, device=META))
    buffer.clean_low_latency_buffer(8, 32, 4)
    assert mode.calls[-1] == ("reset",)

    local = buffer.get_local_buffer_tensor(torch.bfloat16, use_rdma_buffer=True)
    assert (local.device, local.numel()) == (META, size // 2)
    assert buffer.get_local_buffer_tensor(torch.uint8).device.type == "cpu"
    assert buffer.runtime is not None
    memory = buffer.runtime._gpu_memory
    assert memory is not None
    assert memory.bytes_per_rank == cuda_memory_bytes(size)
    buffer.destroy()
    assert memory.closed  # type: ignore[attr-defined]


def test_deep_ep_knows_a_geometry_again_and_what_is_wrong_with_a_call(mode: Mode) -> None:
    size = Buffer.get_low_latency_rdma_size_hint(8, 32, 1, 4)
    comm = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, allgather=lambda v: [v])
    buffer = Buffer(None, 0, size, low_latency_mode=True, comm=comm)
    x, idx, weights = tokens()
    bf16 = {"use_fp8": False}
    for _ in range(2):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, 4, **bf16)  # type: ignore[arg-type]
        assert isinstance(rows, torch.Tensor)
        for call, options, message in (
            ((x, idx, 8.0, 4), bf16, "num_max_dispatch_tokens_per_rank is 8.0"),
            ((x, idx, 8, 4.0), bf16, "num_experts"),
            ((x, idx, 8, True), {}, "num_experts"),
            ((x[0], idx, 8, 4), bf16, r"x.shape is \(32,\)"),
            ((x.float(), idx[:, :1].contiguous(), 8, 4), bf16, "x.dtype"),
            ((None, idx, 8, 4), bf16, "x is None"),
            ((x, idx.flatten(), 8, 4), bf16, "topk_idx.shape"),
            ((x, idx, 1 << 20, 4), bf16, "num_rdma_bytes"),
            ((x, idx, 8, 4096), bf16, "num_experts is 4096, .* at most 2048"),
            ((x, idx, 8, 4, idx), bf16, "cumulative_local_expert_recv_stats"),
            ((x, idx, 8, 4), {**bf16, "use_ue8m0": True}, "use_ue8m0"),
            ((x, idx, 8, 4), {**bf16, "round_scale": True}, "round_scale"),
            (
                (x, idx, 8, 4),
                {**bf16, "async_finish": True, "return_recv_hook": True},
                "async_finish",
            ),
        ):
            with pytest.raises(ArgumentError, match=message):
                buffer.low_latency_dispatch(*call, **options)  # type: ignore[arg-type]
            assert mode.calls[-1][0] == "refuse_dispatch"
        info, ranges, *sizes = handle
        for args, message in (
            ((rows, idx, weights, handle[:4]), "handle"),
            ((rows, idx, weights, (info, ranges.int(), *sizes)), r"handle\[1\]"),
            ((rows, idx, weights, (info[:1], ranges, *sizes)), r"handle\[0\]"),
            ((rows, idx, weights, (info, ranges, 8.0, 32, 4)), r"handle\[2\]"),
            ((rows[:, :4], idx, weights, handle), "x.shape"),
            ((rows.float(), idx, weights, handle), "x.dtype"),
        ):
            with pytest.raises(ArgumentError, match=message):
                buffer.low_latency_combine(*args)  # type: ignore[arg-type]
            assert mode.calls[-1][0] == "refuse_combine"
        for equal in (handle, list(handle), (info, ranges, *map(int, map(str, sizes)))):
            out, _, _ = buffer.low_latency_combine(rows, idx, weights, equal)  # type: ignore[arg-type]
            assert out.shape == x.shape
            assert mode.calls[-1][1][0].ranges is ranges
    wider = torch.zeros((5, 3), dtype=torch.int64, device=META)
    for top_k in (wider, idx, wider):  # another geometry each time
        buffer.low_latency_dispatch(x, top_k, 8, 4, **bf16)  # type: ignore[arg-type]
        assert mode.calls[-1][1][1] is top_k


def test_a_deep_ep_refusal_tells_the_geometry_of_the_call(mode: Mode) -> None:
    """So that the mode knows whether the peers are about to agree about another."""
    size = Buffer.get_low_latency_rdma_size_hint(8, 32, 1, 4)
    comm = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, allgather=lambda v: [v])
    buffer = Buffer(None, 0, size, low_latency_mode=True, comm=comm)
    x, idx, weights = tokens()
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    same, narrow = Geometry(1, **SIZES), torch.zeros((5, 1), dtype=torch.int64, device=META)
    dispatches: list[tuple[Any, Geometry | None]] = [
        ((x, idx, 8, 4, idx), same),
        ((x, idx.int(), 6, 4), dataclasses.replace(same, max_tokens=6)),
        ((x.float(), narrow, 8, 4), dataclasses.replace(same, top_k=1)),
        # These tell none, or one of which no rank can make a call.
        ((x[0], idx, 8, 4), None),
        ((x[None], idx, 8, 4), None),
        ((x, idx[None], 8, 4), None),
        ((x, idx[:4], 8, 4, idx), None),
        ((None, idx, 8, 4), None),
        ((x, idx.flatten(), 8, 4), None),
        ((x, idx, 8, "4"), None),
        ((x, idx, 1 << 20, 4), None),
    ]
    for call, geometry in dispatches:
        with pytest.raises(ArgumentError):
            buffer.low_latency_dispatch(*call)
        assert (mode.calls[-1][0], mode.calls[-1][2]) == ("refuse_dispatch", geometry)
    info, ranges, *sizes = handle
    combines: list[tuple[Any, Geometry | None]] = [
        # A combine of the last geometry has its top-k, whatever its tensors say.
        ((rows.float(), idx, weights, handle), None),
        ((rows, narrow, weights, handle), None),
        ((rows, idx[None], weights, handle), None),
        (
            (rows, idx, weights, (info, ranges, 6, *sizes[1:])),
            dataclasses.replace(same, max_tokens=6),
        ),
        ((rows, idx, weights, handle[:4]), None),
        ((rows, None, weights, handle), None),
        ((rows, idx[None], weights, (info, ranges, 6, *sizes[1:])), None),
    ]
    for call, geometry in combines:
        with pytest.raises(ArgumentError):
            buffer.low_latency_combine(*call)
        # The ranges say whether the dispatch was aborted, in which case no rank counts the combine.
        name, _, routing, told = mode.calls[-1]  # type: ignore[misc]
        assert (name, told) == ("refuse_combine", geometry)
        assert (routing is None) == (len(call[3]) != 5)
        assert routing is None or routing.ranges is ranges


def test_what_is_no_bool_is_taken_for_one(mode: Mode) -> None:
    size = Buffer.get_low_latency_rdma_size_hint(8, 32, 1, 4)
    comm = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, allgather=lambda v: [v])
    buffer = Buffer(None, 0, size, low_latency_mode=True, comm=comm)
    x, idx, _ = tokens()
    for use_fp8, row_format in ((1, RowFormat.FP8), ([0], RowFormat.FP8), ([], RowFormat.BF16)):
        buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=use_fp8)  # type: ignore[arg-type]
        assert mode.formats[0] is row_format
    wrong: Any = torch.zeros(2)
    with pytest.raises(RuntimeError, match="ambiguous"):
        buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=wrong)
    assert mode.calls[-1][0] == "refuse_dispatch"


def test_padding_is_zero_on_the_host() -> None:
    host = fanfold.Config.resolve(backend="host")
    x, idx, weights = tokens(torch.device("cpu"))
    with fanfold.HighThroughput(None, **SIZES, expert_alignment=8, config=host) as ep:
        ep.use_zero_padding(False)
        ep.dispatch(x + 1, idx, weights).tokens.fill_(7)  # memory that the next one gets
        got = ep.dispatch(x + 1, idx, weights)
        padding = got.source_rank < 0
        assert padding.any()
        assert got.tokens[~padding].all()
        assert not got.tokens[padding].any()


def test_in_place_without_a_gpu() -> None:
    """On the host rows come into tensors of their own; what cannot be is refused all the same."""
    host = fanfold.Config.resolve(backend="host")
    x, idx, weights = tokens(torch.device("cpu"))
    with fanfold.HighThroughput(None, **SIZES, in_place_rows=64, config=host) as ep:
        got = ep.dispatch(x, idx, weights, in_place=True)
        ep.dispatch(x + 1, previous=got, in_place=True)
        assert not got.tokens.any()
    with fanfold.HighThroughput(None, **SIZES, config=host) as ep:
        with pytest.raises(ArgumentError, match="in_place_rows"):
            ep.dispatch(x, idx, weights, in_place=True)
        ep.dispatch(x, idx, weights)
    for wrong in (-1, 1.5):
        with pytest.raises(ArgumentError, match="in_place_rows"):
            fanfold.HighThroughput(None, **SIZES, in_place_rows=wrong, config=host)
