"""The MoE layer through FusedMoE, against the exact reference and against HighThroughput."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fanfold
from fanfold.errors import ArgumentError, FanfoldError, PeerRefused, UsageError
from fanfold.fused_moe import ExpertWeights, FusedMoE, difference, reference
from fanfold.nn import MoE, MoEOptions, MoEStatistics, fused, prepare_data_parallel
from fanfold.nn.sharding import local_part

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, MOST = 8, 3, 256, 128, 40
# Bits differ where a value is at a tie of a rounding and sums in FP64 differ by 1e-16.
CLOSE = 1e-8


@dataclasses.dataclass(frozen=True)
class Problem:
    """A layer and each rank's tokens."""

    options: MoEOptions
    tokens: tuple[int, ...]

    def inputs(self) -> list[torch.Tensor]:
        """Each rank's x."""
        generator = torch.Generator().manual_seed(7)
        return [torch.randn((tokens, HIDDEN), generator=generator) for tokens in self.tokens]


PROBLEMS = {
    "softmax": Problem(MoEOptions(seed=3), (40, 33)),
    "raw sigmoid": Problem(MoEOptions(score="sigmoid", renormalize=False, balance=1.0), (21, 40)),
    "shared": Problem(MoEOptions(shared_intermediate=24), (11, 0, 30, 7)),
    "latent": Problem(MoEOptions(latent=128, shared_intermediate=16), (25, 25)),
    "bfloat16": Problem(MoEOptions(dtype=torch.bfloat16, latent=128), (40, 12)),
    "float16": Problem(MoEOptions(dtype=torch.float16), (9,)),
}


def sizes(options: MoEOptions, **changes: Any) -> dict[str, Any]:
    made = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": options.latent or HIDDEN}
    return {**made, "max_tokens": MOST, **changes}


def open_fused(group: object, options: MoEOptions, **changes: Any) -> FusedMoE:
    return FusedMoE(group, **sizes(options, intermediate=INTERMEDIATE, **changes))  # type: ignore[arg-type]


@contextlib.contextmanager
def opened(group: object, options: MoEOptions) -> Iterator[tuple[MoE, FusedMoE]]:
    """A layer over a HighThroughput, and a FusedMoE that fits it."""
    with (
        fanfold.HighThroughput(group, **sizes(options)) as ep,  # type: ignore[arg-type]
        open_fused(group, options) as moe,
    ):
        yield MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=ep, options=options), moe


def weights_of(layer: MoE) -> ExpertWeights:
    """Of the local experts, as they are now."""
    w_in, w_out = (local_part(parameter) for parameter in layer.expert_parameters())
    kept = (torch.bfloat16, torch.float32)
    return ExpertWeights.quantize(
        *(tensor if tensor.dtype in kept else tensor.float() for tensor in (w_in, w_out))
    )


def direct(layer: MoE, moe: FusedMoE, x: torch.Tensor) -> torch.Tensor:
    """The plain layer's output, without the layer's own FP8 copies. Collective."""
    indices, weights, _ = layer.router(x)
    return moe.forward(x.bfloat16(), indices, weights, weights_of(layer)).to(x.dtype)


# ---- results ------------------------------------------------------------------------------------


@torch.no_grad()
def infer(group: object, problem: Problem) -> dict[str, Any]:
    """One pass in both ways."""
    with opened(group, problem.options) as (layer, moe):
        x = problem.inputs()[moe.rank]
        unfused = layer(x)
        balance = float(layer.balance_loss)
        layer.statistics.reset()
        layer.dispatcher = moe
        before = {name: local_part(value).clone() for name, value in layer.state_dict().items()}
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        out = layer(x.view(1, -1, HIDDEN))[0]
        after = {name: local_part(value) for name, value in layer.state_dict().items()}
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert float(layer.balance_loss) == balance
        return {
            "out": out,
            "unfused": unfused,
            "chosen": layer.router(x)[:2],
            "parameters": after,
            "experts": {n for n, p in layer.named_parameters() if hasattr(p, "expert_parallel")},
            "statistics": dataclasses.asdict(layer.statistics),
        }


def exact(
    problem: Problem, full: dict[str, torch.Tensor], x: torch.Tensor, chosen: tuple[Any, Any]
) -> torch.Tensor:
    """The layer's output for one rank's tokens, with all experts at hand."""
    options = problem.options
    wide = x.to(options.dtype)
    rows = wide @ full["latent_in.weight"].T if options.latent else x
    kept = options.dtype if options.dtype is torch.bfloat16 else torch.float32
    weights = ExpertWeights.quantize(full["w_in"].to(kept), full["w_out"].to(kept))
    out = reference(rows.bfloat16(), *chosen, weights)
    if options.latent:
        out = out.to(options.dtype) @ full["latent_out.weight"].T
    out = out.float()
    if options.shared_intermediate:
        gate, up = (wide @ full["shared.w_in.weight"].T).chunk(2, dim=1)
        out = out + ((F.silu(gate) * up) @ full["shared.w_out.weight"].T).float()
    return out


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_layer_gives_what_the_reference_gives(pools: Any, name: str) -> None:
    problem = PROBLEMS[name]
    results = pools(len(problem.tokens)).run(infer, problem)
    full = {
        name: torch.cat([result["parameters"][name] for result in results])
        if name in results[0]["experts"]
        else value
        for name, value in results[0]["parameters"].items()
    }
    ranks, width = len(results), problem.options.latent or HIDDEN
    chosen = torch.cat([result["chosen"][0] for result in results])
    rows = torch.cat([result["statistics"]["expert_rows"] for result in results])
    assert rows.tolist() == (2 * torch.bincount(chosen.flatten(), minlength=EXPERTS)).tolist()
    for rank, (x, result) in enumerate(zip(problem.inputs(), results, strict=True)):
        out, unfused = result["out"], result["unfused"]
        assert difference(out, exact(problem, full, x, result["chosen"])) < CLOSE
        # FP8 errs by 1 in 45 in the mean, twice in tokens and activations, and in all weights.
        assert (out - unfused).norm() <= 0.1 * unfused.norm()
        remote = int((result["chosen"][0] // (EXPERTS // ranks) != rank).sum())
        counted = result["statistics"]
        assert counted["tokens"] == 2 * len(x)
        assert counted["bytes_sent"] == 2 * remote * (width + width // 128 * 4)
        assert counted["bytes_returned"] == 2 * remote * width * 2
        assert counted["fused_seconds"] > 0
        assert counted["dispatch_seconds"] == counted["combine_seconds"] == 0


@torch.no_grad()
def change_over(group: object) -> bool:
    """Made with a FusedMoE, which is enough for inference; then over a HighThroughput and back."""
    options = MoEOptions()
    with open_fused(group, options) as moe:
        layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=moe, options=options)
        x = Problem(options, (20, 31)).inputs()[moe.rank]
        first = layer(x)
        assert torch.equal(first, direct(layer, moe, x))
        with fanfold.HighThroughput(group, **sizes(options)) as ep:  # type: ignore[arg-type]
            layer.dispatcher = ep
            assert not torch.equal(layer(x), first)
        layer.dispatcher = moe
        forgotten = weakref.ref(ep)
        del ep
        gc.collect()
        assert forgotten() is None
        return torch.equal(layer(x), first)


def test_a_layer_is_made_with_a_fused_layer_and_changes_over(pools: Any) -> None:
    assert pools(2).run(change_over) == [True, True]


def test_a_compiled_layer_makes_the_call_between_graphs() -> None:
    options = MoEOptions(latent=128, shared_intermediate=16)
    with opened(None, options) as (layer, moe), torch.no_grad():
        x = Problem(options, (17,)).inputs()[0]
        layer.dispatcher = moe
        want = layer(x)
        torch._dynamo.reset()
        got = torch.compile(layer, backend="aot_eager")(x)
        assert difference(got, want) < CLOSE
        torch._dynamo.reset()
        with pytest.raises(Exception, match="outside of graphs"):
            torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()


# ---- weights that change ------------------------------------------------------------------------


def step(foreach: bool | None, fused: bool | None) -> Callable[[MoE], None]:
    """A step of an optimizer."""

    def run(layer: MoE) -> None:
        parameters = list(layer.expert_parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach, fused=fused)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return run


def load(assign: bool) -> Callable[[MoE], None]:
    """Loads other weights."""

    def run(layer: MoE) -> None:
        other = {name: value.clone() * 2 for name, value in layer.state_dict().items()}
        layer.load_state_dict(other, assign=assign)

    return run


def write_unseen(layer: MoE) -> None:
    for parameter in layer.expert_parameters():
        local_part(parameter.data).mul_(-1)


def write_in_place(layer: MoE) -> None:
    layer.w_out.mul_(-2)


def write_in_inference_mode(layer: MoE) -> None:
    with torch.inference_mode():
        layer.w_in.mul_(-2)


def reset_with_another_seed(layer: MoE) -> None:
    layer.options = dataclasses.replace(layer.options, seed=9)
    layer.reset_parameters()


def change_dtype_twice(layer: MoE) -> None:
    """Rounds the weights; at the end they may be at the address where they were."""
    layer.to(torch.bfloat16)
    layer.to(torch.float32)


def empty_and_fill(layer: MoE) -> None:
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)


def set_data(layer: MoE) -> None:
    """Twice, as the allocator may give the old memory back."""
    for factor in (2, 3):
        layer.w_in.data = layer.w_in.data * factor


def replace_parameter(layer: MoE) -> None:
    layer.w_out = torch.nn.Parameter(layer.w_out.detach() * 2)


def write_and_quantize(layer: MoE) -> None:
    write_unseen(layer)
    layer.quantize_experts()


def write_and_change_mode(layer: MoE) -> None:
    write_unseen(layer)
    layer.train(not layer.training)


def write_and_assign(layer: MoE) -> None:
    write_unseen(layer)
    layer.dispatcher = layer.dispatcher


CHANGES: dict[str, Callable[[MoE], None]] = {
    "step": step(False, None),
    "foreach-step": step(True, None),
    "fused-step": step(None, True),
    "load": load(False),
    "load-assign": load(True),
    **{
        change.__name__.replace("_", "-"): change
        for change in (
            write_in_place, write_in_inference_mode, reset_with_another_seed, change_dtype_twice,
            empty_and_fill, set_data, replace_parameter, write_and_quantize, write_and_change_mode,
            write_and_assign,
        )
    },
}  # fmt: skip


def change_all(group: object, change: str) -> None:
    """The layer uses weights as they are after a change, with two passes before it."""
    options = MoEOptions(seed=2)
    with opened(group, options) as (layer, moe):
        x = Problem(options, (16, 9)).inputs()[moe.rank]
        layer.dispatcher = moe
        with torch.no_grad():
            layer(x)
            before = layer(x)
            assert torch.equal(before, direct(layer, moe, x))
            CHANGES[change](layer)
            after = layer(x)
            assert torch.equal(after, direct(layer, moe, x))
            assert not torch.equal(after, before)


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "set-data"])
def test_changed_weights_are_used(pools: Any, change: str) -> None:
    """But ``data`` of a DTensor cannot be set: PyTorch ignores it."""
    pools(2).run(change_all, change)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_of_one_rank_are_used(change: str) -> None:
    change_all(None, change)


def test_weights_are_copied_once_and_into_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    quantize_weights = fused.quantize_weights

    def counting(matrix: torch.Tensor) -> Any:
        copied.append(matrix.shape)
        return quantize_weights(matrix)

    monkeypatch.setattr(fused, "quantize_weights", counting)
    options = MoEOptions()
    with opened(None, options) as (layer, moe):
        x = Problem(options, (5,)).inputs()[0]
        layer.dispatcher = moe
        unrelated = torch.nn.Parameter(torch.ones(3))
        unrelated.grad = torch.ones(3)
        with torch.inference_mode():
            layer(x)
        for _ in range(3):
            torch.optim.SGD([unrelated, layer.router.weight], lr=0.1).step()
            layer.train()  # as it is
            with torch.no_grad():
                layer(x)
        assert len(copied) == 2 * EXPERTS
        weights = layer._fused._weights
        write_in_place(layer.requires_grad_(False))
        layer(x)
        assert len(copied) == 4 * EXPERTS
        assert layer._fused._weights is weights


# ---- refusals -----------------------------------------------------------------------------------


def want_gradients(group: object) -> list[str]:
    """What is raised where all ranks want a gradient, and where rank 0 does."""
    options = MoEOptions(latent=128)
    raised = []
    with opened(group, options) as (layer, moe):
        x = Problem(options, (6, 7)).inputs()[moe.rank]
        layer.dispatcher = moe
        layer.eval()
        for case in ("parameters", "rank 0", "input", "experts"):
            layer.requires_grad_(case == "parameters" or (case == "rank 0" and moe.rank == 0))
            layer.w_out.requires_grad_(layer.w_out.requires_grad or case == "experts")
            try:
                layer(x.clone().requires_grad_(case == "input"))
            except FanfoldError as error:
                raised.append(f"{type(error).__name__}: {error}")
            with torch.no_grad():
                want = layer(x)
        layer.requires_grad_(False)
        assert torch.equal(layer(x), want)
    return raised


def test_gradients_are_refused_on_all_ranks_and_the_layer_goes_on(pools: Any) -> None:
    first, second = pools(2).run(want_gradients)
    refused = "UsageError: nn.MoE over a FusedMoE has no backward pass"
    assert [text.startswith(refused) for text in first] == [True] * 4
    assert all("torch.no_grad()" in text for text in first)
    assert [text.startswith(refused) for text in second] == [True, False, True, True]
    assert second[1].startswith("PeerRefused")
    assert "no backward pass" in second[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 128}, "dispatcher.hidden is 128, but must be 256"),
        ({"num_experts": 4}, "dispatcher.num_experts is 4, but must be 8"),
        ({"top_k": 2}, "dispatcher.top_k is 2, but must be 3"),
        ({"intermediate": 256}, "dispatcher.intermediate is 256, but must be 128"),
        ({"activation_clamp": 7.0}, "dispatcher.activation_clamp is 7.0, but must be None"),
    ],
)
def test_another_geometry_is_refused(changes: dict[str, Any], message: str) -> None:
    options = MoEOptions()
    made = sizes(options, intermediate=INTERMEDIATE) | changes
    with opened(None, options) as (layer, _), FusedMoE(**made) as other:
        before = layer.dispatcher
        with pytest.raises(ArgumentError, match=message):
            layer.dispatcher = other
        with pytest.raises(ArgumentError, match=message):
            MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=other, options=options)
        assert layer.dispatcher is before
        with pytest.raises(UsageError, match=r"layer\.dispatcher is a HighThroughput"):
            layer.quantize_experts()
        assert layer(torch.ones((2, HIDDEN))).requires_grad


def spoil_x(layer: MoE, x: torch.Tensor) -> Any:
    return layer(x[:, :128])


def spoil_weights(layer: MoE, x: torch.Tensor) -> Any:
    kept = local_part(layer.w_out).clone()
    local_part(layer.w_out)[1, 2, 3] = float("nan")
    try:
        return layer(x)
    finally:
        local_part(layer.w_out).copy_(kept)


@torch.no_grad()
def refuse(group: object, spoil: Callable[[MoE, torch.Tensor], Any]) -> str:
    """What is raised where the input of rank 1 is bad. The layer goes on."""
    options = MoEOptions()
    with opened(group, options) as (layer, moe):
        x = Problem(options, (6, 7)).inputs()[moe.rank]
        layer.dispatcher = moe
        want = layer(x)
        layer.statistics.reset()
        with pytest.raises(ArgumentError if moe.rank == 1 else PeerRefused) as caught:
            spoil(layer, x) if moe.rank == 1 else layer(x)
        assert layer.statistics.tokens == 0
        assert torch.equal(layer(x), want)
        assert layer.statistics.tokens == len(x)
        return str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_x, "x.shape is (7, 128), but must be (..., 256)"),
        (spoil_weights, "w_out[5] is not finite everywhere, but must be finite"),
    ],
)
def test_what_one_rank_refuses_ends_the_call_on_all(pools: Any, spoil: Any, message: str) -> None:
    assert all(message in text for text in pools(2).run(refuse, spoil))


def test_parameters_whose_changes_are_not_counted_are_refused() -> None:
    options = MoEOptions()
    with open_fused(None, options) as moe, torch.inference_mode():
        layer = MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dispatcher=moe, options=options)
        with pytest.raises(UsageError, match=r"w_in was made under torch\.inference_mode"):
            layer(torch.ones((2, HIDDEN)))


@torch.no_grad()
def shard_by_fsdp(group: object) -> str:
    """FSDP2 leaves experts alone that differ from rank to rank. One rank's it would manage."""
    options = MoEOptions()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with opened(group, options) as (layer, moe):
        x = Problem(options, (6, 7)).inputs()[moe.rank]
        layer.dispatcher = moe
        want = layer(x)
        ignored = prepare_data_parallel(layer)
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
        if moe.ranks == 1:
            with pytest.raises(UsageError) as caught:
                layer(x)
            return str(caught.value)
        assert torch.equal(layer(x), want)
        write_in_place(layer)
        assert not torch.equal(layer(x), want)
        return ""


def test_experts_that_fsdp_manages_are_refused(pools: Any) -> None:
    assert "ignored_params" in pools(1).run(shard_by_fsdp)[0]
    assert pools(2).run(shard_by_fsdp) == ["", ""]


# ---- statistics in CUDA graphs ------------------------------------------------------------------


def test_replays_are_counted_until_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = MoEStatistics(expert_rows=torch.zeros(2, dtype=torch.int64))
    statistics.prepare_replays(torch.device("cpu"))
    statistics.prepare_replays(torch.device("cpu"))

    def count() -> None:
        statistics.count_rows(3, torch.tensor([1, 2], dtype=torch.int32))
        statistics.count_bytes("bytes_sent", torch.tensor(2), 10)

    def counted() -> tuple[int, list[int], int, int]:
        rows = statistics.expert_rows.tolist()
        return statistics.tokens, rows, statistics.bytes_sent, statistics.bytes_returned

    count()
    rows = statistics.expert_rows
    with monkeypatch.context() as patch:
        captured = lambda self, name, _: vars(self)["_replays"][name]  # noqa: E731
        patch.setattr(MoEStatistics, "_captured", captured)
        for _ in range(2):
            count()
    assert counted() == (9, [3, 6], 60, 0)
    assert rows.tolist() == [1, 2]
    count()
    assert counted() == (12, [4, 8], 80, 0)
    statistics.reset()
    assert counted() == (0, [0, 0], 0, 0)
    count()
    assert counted() == (3, [1, 2], 20, 0)
