"""The model that serve_moe.py serves, as one of its ranks has it: weights, KV cache, passes.

The model is that of ``fanfold demo``. New prompts pass it through ``fanfold.HighThroughput``; then
its sequences grow by one byte a pass through ``fanfold.LowLatency``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch.distributed.tensor import DTensor

import fanfold
from fanfold.cli.demo_model import ByteModel, DemoSettings, train_parallel
from fanfold.errors import ArgumentError
from fanfold.nn import MoE, MoEOptions


@dataclass(frozen=True)
class Options:
    """What every rank must know.

    Attributes:
        model: sizes of the model.
        weights: ``"train"``, ``"random"``, or a checkpoint's path.
        save: where rank 0 writes a checkpoint before it serves; "" for nowhere.
        slots: sequences that one rank decodes at a time.
        prefill_tokens: bytes of prompts that one rank takes in one step.
        queue: requests that may wait for a slot; further ones get 503.
        host, port: where rank 0 listens; port 0 takes a free one.
        metrics_port: where rank 0 serves its metrics; rank r does so at ``metrics_port + r``, or if
            it is 0 at a free one. None: no rank does.
        drain_s: seconds that requests have to end after SIGTERM.
        slow_rank, slow_ms: a rank that sleeps before every step, and how long; for load tests.
    """

    model: DemoSettings
    weights: str
    save: str
    slots: int
    prefill_tokens: int
    queue: int
    host: str
    port: int
    metrics_port: int | None
    drain_s: float
    slow_rank: int
    slow_ms: float


# ---- the model on one rank ----------------------------------------------------------------------


class Engine:
    """One rank's model, and the KV cache of its slots. Passes are collective.

    On GPUs a decode pass is one CUDA graph over all slots; on CPUs it is plain calls over the
    slots in use.

    Attributes:
        groups: whether a prefill multiplies the rows of all experts by grouped GEMMs, for which
            the CPU waits for nothing: on GPUs for which PyTorch has a kernel of them.
    """

    def __init__(self, group: dist.ProcessGroup | None, options: Options) -> None:
        model = options.model
        sizes = sizes_of(model)
        self.prefill_ep = fanfold.HighThroughput(group, max_tokens=options.prefill_tokens, **sizes)
        self.decode_ep = fanfold.LowLatency(group, max_tokens=options.slots, **sizes)
        self.device = self.decode_ep.device
        self.model = ByteModel(model, self._make_moe(model)).to(self.device)
        columns = model.hidden // model.heads
        shape = (model.layers, options.slots, model.heads, model.context, columns)
        self.keys = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self.values = torch.zeros_like(self.keys)
        # Of each slot: the byte that the next decode pass reads, and its position.
        self.last = torch.zeros(options.slots, dtype=torch.int64, device=self.device)
        self.position = torch.zeros_like(self.last)
        self.active = torch.zeros_like(self.last, dtype=torch.bool)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._experts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.groups = self._has_grouped_gemms(model)
        ranks = 1 if group is None else group.size()
        choices = min(model.top_k, self.prefill_ep.experts_per_rank)
        self._most_rows = ranks * options.prefill_tokens * choices

    def _make_moe(self, model: DemoSettings) -> Callable[[int], MoE]:
        sizes = (model.hidden, model.intermediate, model.num_experts, model.top_k)
        return lambda seed: MoE(
            *sizes,
            dispatcher=self.prefill_ep,
            options=MoEOptions(balance=model.balance, seed=seed),
            device=self.device,
        )

    def _has_grouped_gemms(self, model: DemoSettings) -> bool:
        if self.device.type != "cuda" or not hasattr(F, "grouped_mm"):  # before PyTorch 2.10
            return False
        # Before Hopper PyTorch multiplies group by group. Rows must be multiples of 16 bytes.
        is_new = torch.cuda.get_device_capability(self.device) >= (9, 0)
        return is_new and model.hidden % 8 == 0 and model.intermediate % 8 == 0

    @property
    def layers(self) -> list[MoE]:
        """The MoE layers of the model."""
        return [layer for layer in self.model.layers if isinstance(layer, MoE)]

    def close(self) -> None:
        """Frees what the ranks share. Collective."""
        self.prefill_ep.close()
        self.decode_ep.close()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[tuple[int, bytes]]) -> None:
        """Fills the cache of new slots and computes the first byte of each.

        Args:
            prompts: a slot and its prompt each; together up to ``prefill_tokens`` bytes.
        """
        if self.groups and not self._experts:
            self.copy_experts()
        for layer in self.layers:
            layer.dispatcher = self.prefill_ep
        ends = list(itertools.accumulate(len(p) for _, p in prompts))
        spans = [(slot, end - len(p), end) for (slot, p), end in zip(prompts, ends, strict=True)]
        text = torch.tensor(list(b"".join(p for _, p in prompts)), dtype=torch.int64, device="cpu")
        places = [torch.arange(len(p), dtype=torch.int64, device="cpu") for _, p in prompts]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            for slot, begin, end in spans:
                query, key, value = (each[begin:end].transpose(0, 1) for each in (q, k, v))
                self.keys[layer, slot, :, : end - begin] = key
                self.values[layer, slot, :, : end - begin] = value
                y = F.scaled_dot_product_attention(
                    query[None], key[None], value[None], is_causal=True
                )
                out[begin:end] = y[0].transpose(0, 1)
            return out

        x = self._pass(
            text.to(self.device),
            torch.cat([text[:0], *places]).to(self.device),
            attend,
            self._grouped_moe if self.groups else lambda layer, x: self.layers[layer](x),
        )
        slots = torch.tensor([s for s, _ in prompts], dtype=torch.int64, device=self.device)
        self.last[slots] = self._next(x[[end - 1 for end in ends]])
        lengths = torch.tensor([len(p) for _, p in prompts], dtype=torch.int64, device=self.device)
        self.position[slots] = lengths

    @torch.no_grad()
    def decode(self, slots: Sequence[int]) -> None:
        """Appends a byte to each of ``slots``; :attr:`last` has it."""
        if self.device.type == "cuda":
            active = torch.zeros(self.active.shape, dtype=torch.bool, device="cpu")
            active[list(slots)] = True
            self.active.copy_(active)
            self._replay()
            return
        for layer in self.layers:
            layer.dispatcher = self.decode_ep
        rows = torch.tensor(slots, dtype=torch.int64, device=self.device)
        out = self._decode_pass(rows, lambda layer, x: self.layers[layer](x))
        self.last[rows] = out
        self.position[rows] += 1

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """The last byte of each of ``slots``, on the CPU.

        Raises:
            FanfoldError: a call that computed them went wrong; on GPUs nothing has raised it yet.
        """
        found = self.last[list(slots)].cpu()  # waits for the calls
        self.prefill_ep.check()
        self.decode_ep.check()
        return found

    def _replay(self) -> None:
        if self._graph is None:
            if not self._experts:
                self.copy_experts()
            # The first call of a kind compiles and initialises, so it cannot be captured.
            now = self.active.clone()
            self.active.zero_()
            self.decode_all()
            self.active.copy_(now)
            torch.cuda.synchronize(self.device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self.decode_all()
        self._graph.replay()  # of which read() raises what went wrong

    @torch.no_grad()
    def copy_experts(self) -> None:
        """Makes the copies of the experts' weights that :meth:`decode_all` and grouped GEMMs
        multiply with: again after the weights have changed."""
        weights = [layer.local_weights() for layer in self.layers]
        self._experts = [
            (w_in.bfloat16().transpose(1, 2), w_out.bfloat16().transpose(1, 2))
            for w_in, w_out in weights
        ]

    @torch.no_grad()
    def decode_all(self) -> None:
        """A decode pass of fixed shapes, for a CUDA graph: all slots take part, and those that are
        not :attr:`active` choose no expert and stay as they are."""
        rows = torch.arange(self.last.shape[0], dtype=torch.int64, device=self.device)
        out = self._decode_pass(rows, self._padded_moe)
        self.last.copy_(torch.where(self.active, out, self.last))
        self.position.add_(self.active)

    def _decode_pass(
        self, rows: torch.Tensor, moe: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        # A slot that is not in use may stand behind the last position.
        at = self.position[rows].clamp(max=self.keys.shape[3] - 1)
        seen = (
            torch.arange(self.keys.shape[3], dtype=torch.int64, device=self.device) <= at[:, None]
        )

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[layer, rows, :, at] = k
            self.values[layer, rows, :, at] = v
            mask = seen[:, None, None]
            past = self.keys[layer, rows], self.values[layer, rows]
            return F.scaled_dot_product_attention(q[:, :, None], *past, attn_mask=mask)[:, :, 0]

        return self._next(self._pass(self.last[rows], at, attend, moe))

    def _padded_moe(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """An MoE layer whose CPU waits for nothing: one GEMM per weight over all packed slots, of
        which combine reads the valid ones."""
        moe, (w_in, w_out) = self.layers[layer], self._experts[layer]
        topk_idx, topk_weights, _ = moe.router(x)
        topk_idx = topk_idx.masked_fill(~self.active[:, None], -1)
        received = self.decode_ep.dispatch(x.bfloat16(), topk_idx, topk_weights)
        gate, up = torch.bmm(received.tokens, w_in).chunk(2, dim=-1)
        y = torch.bmm(F.silu(gate) * up, w_out)
        return self.decode_ep.combine(y, received).to(x.dtype)

    def _grouped_moe(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """An MoE layer of any number of tokens: one grouped GEMM per weight over the received rows
        of all experts. :meth:`read` raises what its calls find wrong."""
        moe, (w_in, w_out) = self.layers[layer], self._experts[layer]
        topk_idx, topk_weights, _ = moe.router(x)
        received = self.prefill_ep.dispatch(
            x.bfloat16(), topk_idx, topk_weights, capacity=self._most_rows
        )
        ends = received.offsets[1:].to(torch.int32)
        gate, up = F.grouped_mm(received.tokens, w_in, offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, w_out, offs=ends)
        return self.prefill_ep.combine(y, received).to(x.dtype)

    def _pass(
        self,
        text: torch.Tensor,
        places: torch.Tensor,
        attend: Callable[..., torch.Tensor],
        moe: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """``[n, hidden]`` before the head, for n bytes at their positions."""
        model, n = self.model, text.shape[0]
        x = model.embedding[text] + model.positions[places]
        parts: Any = zip(model.attention, model.norms, strict=True)
        for layer, (attention, norm) in enumerate(parts):
            mixed = F.linear(attention.norm(x), attention.w_in)
            query, key, value = mixed.view(n, 3, self.keys.shape[2], self.keys.shape[4]).unbind(1)
            out = attend(layer, query, key, value).reshape(x.shape)
            x = x + F.linear(out, attention.w_out)
            x = x + moe(layer, norm(x))
        return model.norm(x)  # type: ignore[no-any-return]

    def _next(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.model.head).argmax(-1)


def sizes_of(model: DemoSettings) -> dict[str, Any]:
    """What every dispatcher of the model must know."""
    return {"num_experts": model.num_experts, "top_k": model.top_k, "hidden": model.hidden}


# ---- weights ------------------------------------------------------------------------------------


def train(engine: Engine, group: dist.ProcessGroup, model: DemoSettings) -> None:
    """Trains the model as ``fanfold demo`` does. Collective."""
    if model.sequences % model.ranks:
        raise ArgumentError("--ranks", model.ranks, f"a divisor of the {model.sequences} sequences")
    tokens = model.tokens_per_step // model.ranks
    with fanfold.HighThroughput(group, max_tokens=tokens, **sizes_of(model)) as ep:
        for layer in engine.layers:
            layer.dispatcher = ep
        run = train_parallel(engine.model, model, ep, group, lambda step, loss: None)
        if ep.rank == 0:
            losses = run.training.losses
            said = f"{len(losses)} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}"
            print(f"trained: {said}", flush=True)
        for layer in engine.layers:
            layer.dispatcher = engine.prefill_ep


def save(engine: Engine, model: DemoSettings, path: Path) -> None:
    """Writes all experts and the sizes to one file. Collective; rank 0 writes."""
    state = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
        for name, value in engine.model.state_dict().items()
    }
    if engine.decode_ep.rank == 0:
        torch.save({"settings": dataclasses.asdict(model), "state": state}, path)


def read_checkpoint(path: Path) -> tuple[DemoSettings, dict[str, torch.Tensor]]:
    """What :func:`save` wrote.

    Raises:
        ArgumentError: the file cannot be read, or has something else.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return DemoSettings(**content["settings"]), content["state"]
    except Exception as error:  # torch.load raises whatever its readers raise
        raise ArgumentError(
            "--weights", f"{path} ({error})", "'train', 'random', or a file that --save wrote"
        ) from error
