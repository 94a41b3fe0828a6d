"""Every public call with every argument wrong: the message names the argument that the caller
passed, what it is, and what it must be. On the host and on GPUs that are none, with one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fanfold
from fanfold import functional
from fanfold import low_latency as face
from fanfold.backends import opening
from fanfold.backends.choose import BackendChoice
from fanfold.bench.dispatchers import open_dispatcher
from fanfold.deep_ep import Buffer, runtime
from fanfold.deep_ep.streams import HostStreams
from fanfold.errors import ArgumentError
from fanfold.nn import MoE, MoEOptions
from tests.emulation.deep_ep import Memory, emulated_buffers
from tests.emulation.high_throughput import CTAS
from tests.emulation.launches import stand_in
from tests.emulation.layers import emulated_layers
from tests.emulation.world import Builder

TOKENS, HIDDEN, EXPERTS, TOP_K, MOST = 5, 64, 4, 2, 8
Arguments = dict[str, Any]
Call = Callable[..., object]


class Wrong(NamedTuple):
    """A mistake, and what the message must say: the argument, its value, what it must be."""

    value: object
    argument: str
    found: str
    wanted: str


class Alone:
    """A group of one rank that is no group of torch.distributed."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int16


def wrongs(name: str, good: torch.Tensor, shape: str) -> Iterator[Wrong]:
    """A tensor spoilt in every way.

    Args:
        name: how the caller calls it.
        good: as it must be.
        shape: as messages must write it.
    """
    yield Wrong([1.0], name, "a list of 1", f"a torch.Tensor of shape {shape} and dtype")
    yield Wrong(7, name, "7 (type int)", "a torch.Tensor")
    dtype = other_dtype(good.dtype)
    yield Wrong(good.to(dtype), f"{name}.dtype", str(dtype), str(good.dtype))
    longer = torch.cat([good, good[..., :1]], dim=-1)
    yield Wrong(longer, f"{name}.shape", str(tuple(longer.shape)), shape)
    deeper = good.unsqueeze(0).contiguous()
    yield Wrong(deeper, f"{name}.shape", str(tuple(deeper.shape)), shape)
    yield Wrong(good.to("meta"), f"{name}.device", "meta", "cpu")
    yield Wrong(good.to_sparse(), f"{name}.layout", "torch.sparse_coo", "torch.strided")
    apart = good.new_zeros((*good.shape[:-1], 2 * good.shape[-1]))[..., ::2]
    yield Wrong(apart, f"{name}.stride()", str(apart.stride()), "contiguous")


def check(call: Call, good: Arguments, name: str, wrong: Wrong) -> None:
    with pytest.raises(ArgumentError) as raised:
        call(**{**good, name: wrong.value})
    error = raised.value
    assert error.argument == wrong.argument, error
    assert wrong.found in error.value, error
    assert wrong.wanted in error.bound, error
    assert str(error).startswith(f"{error.argument} is {error.value}, but must be ")
    assert "any" not in error.bound.replace("any strides", ""), error


def check_tensors(call: Call, good: Arguments, shapes: dict[str, str]) -> None:
    """Spoils each of some tensors in every way; the call works before and after."""
    for name, shape in shapes.items():
        call(**good)
        for wrong in wrongs(name, good[name], shape):
            check(call, good, name, wrong)
    call(**good)


def tokens() -> Arguments:
    return {
        "x": torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16),
        "topk_idx": torch.arange(TOKENS * TOP_K).reshape(TOKENS, TOP_K) % EXPERTS,
        "topk_weights": torch.ones((TOKENS, TOP_K)),
    }


# ---- the native face ----------------------------------------------------------------------------


SIZES: Arguments = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": MOST}


@contextmanager
def opened(
    mode: Any, backend: str, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    with ExitStack() as stack:
        if backend == "cuda" and mode == "high_throughput":
            stack.enter_context(emulated_layers(builder, CTAS))
        elif backend == "cuda":
            pretend_low_latency(monkeypatch, face)
        options: Arguments = {"in_place_rows": 64} if mode == "high_throughput" else {}
        made = open_dispatcher(mode, Alone(), **SIZES, **options)
        yield stack.enter_context(made)


def pretend_low_latency(monkeypatch: pytest.MonkeyPatch, placing: Any) -> None:
    """Low latency of GPUs, whose kernels do nothing.

    Args:
        placing: the module that chooses a backend.
    """
    stand_in(monkeypatch)
    placed = BackendChoice("cuda", torch.device("cpu"), "each rank has a GPU of its own")
    monkeypatch.setattr(placing, "choose", lambda *which, **how: placed)
    monkeypatch.setattr(opening, "CudaSymmetricMemory", Memory)


PLACES = [("low_latency", "host"), ("low_latency", "cuda"), ("high_throughput", "host"),
          ("high_throughput", "cuda")]  # fmt: skip


@pytest.fixture(params=PLACES, ids="-".join)
def ep(
    request: pytest.FixtureRequest, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    mode, backend = request.param
    with opened(mode, backend, builder, monkeypatch) as made:
        yield made


def test_native_dispatch(ep: Any) -> None:
    shapes = {"x": f"(tokens, {HIDDEN})", "topk_idx": f"({TOKENS}, {TOP_K})"}
    check_tensors(ep.dispatch, tokens(), {**shapes, "topk_weights": f"({TOKENS}, {TOP_K})"})
    good = tokens()
    check(ep.dispatch, good, "x", Wrong(None, "x", "None", f"of shape (tokens, {HIDDEN})"))
    check(ep.dispatch, good, "topk_idx", Wrong(None, "topk_idx", "None", ""))
    many = good["x"].repeat(2, 1)
    limit = f"at most max_tokens = {MOST}"
    check(ep.dispatch, good, "x", Wrong(many, "x.shape[0]", str(2 * TOKENS), limit))
    if ep.mode == "high_throughput":
        for previous in (3, "it"):
            with pytest.raises(ArgumentError, match=r"^previous is "):
                ep.dispatch(good["x"], previous=previous)


def test_native_combine(ep: Any) -> None:
    received = ep.dispatch(**tokens())
    rows = tuple(received.tokens.shape)
    good = {"y": torch.ones(rows, dtype=torch.bfloat16), "received": received,
            "out": torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16)}  # fmt: skip
    check_tensors(ep.combine, good, {"y": str(rows), "out": f"({TOKENS}, {HIDDEN})"})
    kind = "LowLatencyResult" if ep.mode == "low_latency" else "HighThroughputResult"
    wrong = Wrong(3, "received", "3 (type int)", f"the {kind} that dispatch returned")
    check(ep.combine, good, "received", wrong)
    check(ep.combine, good, "y", Wrong(None, "y", "None", str(rows)))


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_native_high_throughput(
    backend: str, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("high_throughput", backend, builder, monkeypatch) as ep:
        received = ep.dispatch(**tokens())
        rows = received.tokens.shape[0]
        y = torch.ones((rows, HIDDEN), dtype=torch.bfloat16)
        bias = torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16)
        good: Arguments = {"y": y, "received": received, "bias": bias}
        check_tensors(ep.combine, good, {"bias": f"({TOKENS}, {HIDDEN})"})
        good = {"row_values": torch.ones(rows), "received": received}
        check_tensors(ep.combine_weights, good, {"row_values": f"({rows},)"})
        none = Wrong(None, "row_values", "None", "a torch.Tensor")
        check(ep.combine_weights, good, "row_values", none)
        again: Arguments = {"x": tokens()["x"], "previous": received}
        check_tensors(ep.dispatch, again, {"x": f"(tokens, {HIDDEN})"})
        fewer = Wrong(again["x"][:3], "x.shape[0]", "3", f"{TOKENS}, the tokens of the earlier")
        check(ep.dispatch, again, "x", fewer)
        for name, value in (("capacity", -1), ("capacity", "9"), ("previous", 3)):
            with pytest.raises(ArgumentError, match=rf"^{name} is "):
                ep.dispatch(**{**again, name: value} if name == "previous" else
                            {**tokens(), name: value})  # fmt: skip
        with pytest.raises(ArgumentError, match=r"^sms is 'two' \(type str\), but must be an int"):
            ep.use_sms("two")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"^zeros is 0 \(type int\), but must be a bool"):
            ep.use_zero_padding(0)  # type: ignore[arg-type]
        for pair in ((), (1,), (1, 2, 3)):
            with pytest.raises(ArgumentError, match=r"^x is a tuple of"):
                ep.dispatch(**{**tokens(), "x": pair})
        received.weights = torch.ones(3)
        with pytest.raises(ArgumentError, match=r"^received.weights.shape is .* must be \(\d+,\)"):
            ep.combine(y, received)


@pytest.mark.parametrize(
    ("name", "value", "found", "wanted"),
    [
        ("num_experts", "4", "'4' (type str)", "an integer from 1"),
        ("top_k", 0, "0", "from 1 to 32"),
        ("hidden", 65, "65", "a multiple of 8"),
        ("max_tokens", None, "None", "an integer from 0"),
        ("dispatch_dtype", "int8", "'int8'", "'bf16' or 'fp8'"),
        ("scale_format", "e8", "'e8'", "'float32' or 'power_of_two' or 'ue8m0'"),
        ("expert_alignment", 1.5, "1.5 (type float)", "an integer from 1"),
        ("in_place_rows", "many", "'many' (type str)", "an integer from 0"),
        ("config", {"backend": "host"}, "a dict of 1", "a fanfold.Config or None"),
        ("group", 3, "3 (type int)", "a torch.distributed.ProcessGroup"),
    ],
)
def test_construction(name: str, value: object, found: str, wanted: str) -> None:
    wrong = Wrong(value, name, found, wanted)
    check(fanfold.HighThroughput, SIZES, name, wrong)
    if name not in ("expert_alignment", "in_place_rows"):
        check(fanfold.LowLatency, SIZES, name, wrong)


def test_nvfp4_rows() -> None:
    nvfp4 = {**SIZES, "dispatch_dtype": "nvfp4"}
    elsewhere = Wrong("nvfp4", "dispatch_dtype", "'nvfp4'", "nvfp4 rows need LowLatency")
    check(fanfold.HighThroughput, SIZES, "dispatch_dtype", elsewhere)
    wrong = Wrong("ue8m0", "scale_format", "'ue8m0'", "whose scales are e4m3")
    check(fanfold.LowLatency, nvfp4, "scale_format", wrong)
    check(fanfold.LowLatency, nvfp4, "hidden", Wrong(48, "hidden", "48", "a multiple of 32"))
    with fanfold.LowLatency(Alone(), **nvfp4) as ep:
        good = {**tokens(), "global_scale": torch.ones(1)}
        for given in wrongs("global_scale", good["global_scale"], "(1,)"):
            if not given.argument.endswith("stride()"):  # of one element any stride will do
                check(ep.dispatch, good, "global_scale", given)
        absent = Wrong(None, "global_scale", "None", "given with nvfp4 rows")
        check(ep.dispatch, good, "global_scale", absent)
        ep.dispatch(**good)
    with fanfold.LowLatency(Alone(), **SIZES) as ep:
        given = Wrong(torch.ones(1), "global_scale", "a Tensor", "only nvfp4 rows have one")
        check(ep.dispatch, tokens(), "global_scale", given)


# ---- layers and gradients -----------------------------------------------------------------------


@pytest.mark.parametrize("gradient", [False, True])
def test_functional(ep: Any, gradient: bool) -> None:
    if gradient and ep.mode == "low_latency":
        return
    good = {"ep": ep, **tokens()}
    shapes = {"topk_idx": f"({TOKENS}, {TOP_K})"}
    if gradient:
        good["x"].requires_grad_()
    else:
        shapes |= {"x": f"(tokens, {HIDDEN})", "topk_weights": f"({TOKENS}, {TOP_K})"}
    check_tensors(functional.dispatch, good, shapes)
    rows, weights, received = functional.dispatch(**good)
    y = rows.detach().clone()
    good = {"ep": ep, "y": y, "received": received}
    check_tensors(functional.combine, good, {"y": str(tuple(y.shape))})
    if ep.mode == "high_throughput":
        assert weights is not None
        good |= {"weights": weights.detach()}
        check_tensors(functional.combine, good, {"weights": f"({y.shape[0]},)"})


def test_layer(ep: Any) -> None:
    layer = MoE(HIDDEN, 32, EXPERTS, TOP_K, dispatcher=ep).requires_grad_(False)
    good = {"x": torch.ones((2, 3, HIDDEN))}
    shape = f"(..., {HIDDEN})"
    many = torch.ones((3, 3, HIDDEN))
    for wrong in (
        Wrong([1.0], "x", "a list of 1", f"a torch.Tensor of shape {shape} and a floating dtype"),
        Wrong(None, "x", "None", shape),
        Wrong(torch.ones((5, 32)), "x.shape", "(5, 32)", shape),
        Wrong(torch.ones(()), "x.shape", "()", shape),
        Wrong(torch.ones((5, HIDDEN), dtype=torch.int32), "x.dtype", "torch.int32", "floating"),
        Wrong(torch.ones((5, HIDDEN), device="meta"), "x.device", "meta", "cpu"),
        Wrong(many, "x.shape", f"(3, 3, {HIDDEN}), 9 tokens", f"dispatcher, {MOST}"),
    ):
        check(layer.forward, good, "x", wrong)
    if ep.mode == "high_throughput":
        layer(**good)


def test_a_layer_tells_its_peers() -> None:
    with fanfold.LowLatency(Alone(), **SIZES) as ep:
        layer = MoE(HIDDEN, 32, EXPERTS, TOP_K, dispatcher=ep)
        with mock.patch.object(ep, "refuse_dispatch", wraps=ep.refuse_dispatch) as refuse:
            with pytest.raises(ArgumentError, match=r"^x.shape is \(5, 32\)") as raised:
                layer(torch.ones((5, 32)))
            refuse.assert_called_once_with(raised.value)


def test_layer_options() -> None:
    for name, value, found in (
        ("score", "relu", "'relu'"),
        ("dtype", "bf16", "'bf16' (type str)"),
        ("dtype", torch.int32, "torch.int32"),
        ("shared_intermediate", "4", "'4' (type str)"),
    ):
        check(MoEOptions, {}, name, Wrong(value, name, found, ""))
    with fanfold.LowLatency(Alone(), **SIZES) as ep:
        good = {"hidden": HIDDEN, "intermediate": 32, "num_experts": EXPERTS, "top_k": TOP_K,
                "dispatcher": ep}  # fmt: skip
        check(MoE, good, "intermediate", Wrong("32", "intermediate", "'32'", "an integer from 1"))
        check(MoE, good, "hidden", Wrong(0, "hidden", "0", "from 1"))


def test_received() -> None:
    with fanfold.LowLatency(Alone(), **SIZES) as ep:
        received = ep.dispatch(**tokens())
        leading = f"({EXPERTS}, {MOST}, ...)"
        good: Arguments = {"index": 0, "of": None}
        check(received.expert, good, "index", Wrong(4, "index", "4", "from 0 to 3"))
        check(received.expert, good, "of", Wrong([1], "of", "a list of 1", leading))
        check(received.expert, good, "of", Wrong(torch.ones(3), "of.shape", "(3,)", leading))


# ---- the DeepEP face ----------------------------------------------------------------------------


@pytest.fixture(params=["host", "cuda"])
def buffer(
    request: pytest.FixtureRequest, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Buffer]:
    """With high throughput; on GPUs emulated."""
    with ExitStack() as stack:
        if request.param == "cuda":
            stack.enter_context(emulated_buffers(builder, CTAS))
        made = Buffer(Alone(), 1 << 20, explicitly_destroy=True)  # type: ignore[arg-type]
        yield made
        made.destroy()


def layout_of(buffer: Buffer, topk_idx: torch.Tensor) -> Arguments:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert}  # fmt: skip


def test_deep_ep_layout(buffer: Buffer) -> None:
    good = {"topk_idx": tokens()["topk_idx"], "num_experts": EXPERTS}
    idx = good["topk_idx"]
    for wrong in wrongs("topk_idx", idx, "(tokens, top_k)"):
        if wrong.argument not in ("topk_idx.device", "topk_idx.shape"):
            check(buffer.get_dispatch_layout, good, "topk_idx", wrong)
    flat = Wrong(idx.flatten(), "topk_idx.shape", "(10,)", "(tokens, top_k)")
    check(buffer.get_dispatch_layout, good, "topk_idx", flat)
    wide = Wrong(idx.repeat(1, 17), "topk_idx.shape[1]", "34", "from 1 to 32")
    check(buffer.get_dispatch_layout, good, "topk_idx", wide)
    text = Wrong("4", "num_experts", "'4' (type str)", "an integer")
    check(buffer.get_dispatch_layout, good, "num_experts", text)


def test_deep_ep_dispatch(buffer: Buffer) -> None:
    good = tokens()
    good |= layout_of(buffer, good["topk_idx"])
    buffer.dispatch(**good)
    for name, shape, skipped in (
        ("topk_idx", f"({TOKENS}, top_k)", "shape"),
        ("topk_weights", f"({TOKENS}, {TOP_K})", ""),
        ("num_tokens_per_rank", "(1,)", ""),
        ("is_token_in_rank", f"({TOKENS}, 1)", ""),
        ("num_tokens_per_expert", "(experts,)", "shape"),
    ):
        for wrong in wrongs(name, good[name], shape):
            if good[name].shape[-1] == 1 and wrong.argument.endswith("stride()"):
                continue  # strides of one column are of no consequence
            if not (skipped and wrong.argument.endswith(skipped)):
                check(buffer.dispatch, good, name, wrong)
    x, rows = good["x"], "a torch.Tensor of shape (tokens, hidden)"
    for wrong in (
        Wrong([1.0], "x", "a list of 1", rows),
        Wrong(None, "x", "None", rows),
        Wrong(x.flatten(), "x.shape", f"({TOKENS * HIDDEN},)", "(tokens, hidden)"),
        Wrong(x[:, :60].contiguous(), "x.shape[1]", "60", "a multiple of 8"),
        Wrong(x.to("meta"), "x.device", "meta", "cpu"),
        Wrong(x.T.contiguous().T, "x.stride()", f"(1, {TOKENS})", "contiguous"),
        Wrong((x,), "x", "a tuple of 1", "(values, scales)"),
        Wrong((x, x.float()), "x[0].dtype", "torch.bfloat16", "1-byte"),
    ):
        check(buffer.dispatch, good, "x", wrong)
    for name, value, found in (
        ("expert_alignment", 0, "0"),
        ("num_worst_tokens", "9", "'9' (type str)"),
        ("config", 20, "20 (type int)"),
        ("previous_event", 3, "3 (type int)"),
        ("handle", 3, "3 (type int)"),
    ):
        changed = {"x": x} if name == "handle" else good
        check(buffer.dispatch, changed, name, Wrong(value, name, found, ""))
    buffer.dispatch(**good)


def test_deep_ep_combine(buffer: Buffer) -> None:
    sent = tokens()
    handle = buffer.dispatch(**sent, **layout_of(buffer, sent["topk_idx"]))[4]
    rows = buffer.dispatch(sent["x"], handle)[0]
    assert isinstance(rows, torch.Tensor)
    count = rows.shape[0]
    good = {"x": rows, "handle": handle, "topk_weights": torch.ones((count, TOP_K)),
            "bias": torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16)}  # fmt: skip
    buffer.combine(**good)
    lanes = "top_k" if isinstance(handle[0], torch.Tensor) and type(handle) is tuple else TOP_K
    for name, shape in (
        ("x", f"({count}, hidden)"),
        ("topk_weights", f"({count}, {lanes})"),
        ("bias", f"({TOKENS}, {HIDDEN})"),
    ):
        for wrong in wrongs(name, good[name], shape):
            # The rows may be of any width, and on the host the lanes of any number.
            longer = tuple(getattr(wrong.value, "shape", ()))[1:] == (good[name].shape[1] + 1,)
            if not (longer and name in ("x", "topk_weights")):
                check(buffer.combine, good, name, wrong)
    narrow = Wrong(rows[:, :60].contiguous(), "x.shape[1]", "60", "a multiple of 8")
    check(buffer.combine, {**good, "bias": None}, "x", narrow)
    check(buffer.combine, good, "handle", Wrong(None, "handle", "None", "that dispatch returned"))
    check(buffer.combine, good, "config", Wrong(3, "config", "3 (type int)", "deep_ep.Config"))
    buffer.combine(**good)


@pytest.fixture(params=["host", "cuda"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Buffer]:
    """With low latency; on GPUs with kernels that do nothing."""
    if request.param == "cuda":
        pretend_low_latency(monkeypatch, runtime)
        monkeypatch.setattr(runtime, "Streams", lambda device: HostStreams())
        monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    nbytes = Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, 1, EXPERTS)
    made = Buffer(
        Alone(),  # type: ignore[arg-type]
        num_rdma_bytes=nbytes,
        low_latency_mode=True,
        explicitly_destroy=True,
        enable_shrink=True,
    )
    yield made
    made.destroy()


def decoding() -> Arguments:
    sent = tokens()
    del sent["topk_weights"]
    return {**sent, "num_max_dispatch_tokens_per_rank": MOST, "num_experts": EXPERTS}


def test_deep_ep_low_latency_dispatch(decoder: Buffer) -> None:
    call, good = decoder.low_latency_dispatch, decoding()
    good["cumulative_local_expert_recv_stats"] = torch.zeros(EXPERTS, dtype=torch.int32)
    good["dispatch_wait_recv_cost_stats"] = torch.zeros(1, dtype=torch.int64)
    call(**good)
    for name, shape in (
        ("x", "(tokens, hidden)"),
        ("topk_idx", "(tokens, top_k)"),
        ("cumulative_local_expert_recv_stats", f"({EXPERTS},)"),
        ("dispatch_wait_recv_cost_stats", "(1,)"),
    ):
        for wrong in wrongs(name, good[name], shape):
            width = tuple(getattr(wrong.value, "shape", ()))[1:] == (good[name].shape[-1] + 1,)
            one = good[name].numel() == 1 and wrong.argument.endswith("stride()")
            if not (width or one):
                check(call, good, name, wrong)
    most = "num_max_dispatch_tokens_per_rank"
    x, idx = good["x"], good["topk_idx"]
    for name, wrong in (
        ("x", Wrong(x[:, :60].contiguous(), "x.shape[1]", "60", "a multiple of 8")),
        ("x", Wrong(x[:, :8].contiguous(), "x.shape[1]", "8", "from 16")),
        ("topk_idx", Wrong(idx.repeat(1, 17), "topk_idx.shape[1]", "34", "from 1 to 32")),
        ("topk_idx", Wrong(idx[:3], "topk_idx.shape", f"(3, {TOP_K})", f"({TOKENS}, {TOP_K})")),
        (most, Wrong("8", most, "'8' (type str)", "an integer")),
        (most, Wrong(4, "x.shape[0]", str(TOKENS), f"at most {most} = 4")),
        ("num_experts", Wrong(None, "num_experts", "None", "an integer")),
        ("use_ue8m0", Wrong(True, "use_ue8m0", "True", "round_scale=True")),
    ):
        check(call, good, name, wrong)
    call(**good)


def test_deep_ep_low_latency_combine(decoder: Buffer) -> None:
    rows, _, handle, _, _ = decoder.low_latency_dispatch(**decoding(), use_fp8=False)
    assert isinstance(rows, torch.Tensor)
    handle[1].zero_()  # as kernels that do nothing leave it unwritten
    call, sent = decoder.low_latency_combine, tokens()
    good = {"x": torch.ones_like(rows), "topk_idx": sent["topk_idx"], "handle": handle,
            "topk_weights": sent["topk_weights"],
            "out": torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16)}  # fmt: skip
    good["combine_wait_recv_cost_stats"] = torch.zeros(1, dtype=torch.int64)
    call(**good)
    for name, shape in (
        ("x", str(tuple(rows.shape))),
        ("topk_idx", "(tokens, top_k)"),
        ("topk_weights", f"({TOKENS}, {TOP_K})"),
        ("out", f"({TOKENS}, {HIDDEN})"),
        ("combine_wait_recv_cost_stats", "(1,)"),
    ):
        for wrong in wrongs(name, good[name], shape):
            width = tuple(getattr(wrong.value, "shape", ()))[1:] == (TOP_K + 1,)
            one = good[name].numel() == 1 and wrong.argument.endswith("stride()")
            if not ((width and name == "topk_idx") or one):
                check(call, good, name, wrong)
    parts = list(handle)
    for place, value, argument in (
        (0, parts[0].long(), "handle[0] (src_info).dtype"),
        (1, parts[1].int(), "handle[1] (layout_range).dtype"),
        (2, "8", "handle[2] (num_max_dispatch_tokens_per_rank)"),
        (2, 1 << 30, "handle[2] (num_max_dispatch_tokens_per_rank)"),
        (3, 60, "handle[3] (hidden)"),
        (4, 0, "handle[4] (num_experts)"),
    ):
        spoilt = (*parts[:place], value, *parts[place + 1 :])
        check(call, good, "handle", Wrong(spoilt, argument, "", ""))
        if place >= 2:
            wrong = Wrong(spoilt, argument, "", "")
            check(decoder.get_next_low_latency_combine_buffer, {}, "handle", wrong)
    call(**good)


def test_deep_ep_sizes(decoder: Buffer) -> None:
    most = "num_max_dispatch_tokens_per_rank"
    good: Arguments = {most: MOST, "hidden": HIDDEN, "num_experts": EXPERTS}
    hint = {**good, "num_ranks": 1}
    for name, value in ((most, "8"), (most, -1), ("hidden", 60), ("num_experts", None)):
        wrong = Wrong(value, name, str(value), "")
        check(decoder.clean_low_latency_buffer, good, name, wrong)
        check(Buffer.get_low_latency_rdma_size_hint, hint, name, wrong)
    for name, value in (("dtype", "int8"), ("offset", -1), ("offset", "1"), ("size", "all")):
        scratch = {"dtype": torch.int8, "use_rdma_buffer": True}
        wrong = Wrong(value, name, str(value), "")
        check(decoder.get_local_buffer_tensor, scratch, name, wrong)
    status = {"mask_status": torch.zeros(1, dtype=torch.int32)}
    for wrong in wrongs("mask_status", status["mask_status"], "(1,)"):
        if not wrong.argument.endswith("stride()"):
            check(decoder.low_latency_query_mask_buffer, status, "mask_status", wrong)
    masks = {"rank_to_mask": 0}
    wrong = Wrong("0", "rank_to_mask", "'0' (type str)", "an integer")
    check(decoder.low_latency_update_mask_buffer, masks, "rank_to_mask", wrong)
    for config in (Buffer.get_dispatch_config, Buffer.get_combine_config):
        for good, like_it in ((8, 8.0), (1, True)):
            config(good)  # made once, but the next number is checked as well
            wrong = Wrong(like_it, "num_ranks", str(like_it), "an integer from 1")
            check(config, {}, "num_ranks", wrong)
    check(Buffer.set_num_sms, {}, "new_num_sms", Wrong(3, "new_num_sms", "3", "even"))
    nvl = Wrong("1", "num_nvl_bytes", "'1' (type str)", "an integer from 0")
    check(Buffer, {"group": Alone()}, "num_nvl_bytes", nvl)
