"""What ``fanfold demo`` trains: a small byte-level language model with MoE layers, twice.

Once over several ranks, with its experts spread by ``fanfold.nn.MoE``; once on one process, with
:class:`PlainMoE`, which shares nothing with Fanfold but the initial weights.

Where every rank has a GPU of its own the model is there. It trains in high throughput, and then the
ranks generate text in low latency, whose kernels run on the GPUs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch.nn.attention import SDPBackend, sdpa_kernel

from fanfold.backends.choose import BackendChoice, choose
from fanfold.bench.dispatchers import AnyDispatcher, open_dispatcher
from fanfold.config import Config
from fanfold.errors import UnavailableError
from fanfold.geometry import Mode
from fanfold.group import as_group
from fanfold.nn import MoE, MoEOptions, average_gradients, parameter_groups, seeded_normal
from fanfold.nn.sharding import local_part

__all__ = [
    "ByteModel",
    "Decoding",
    "DemoSettings",
    "PlainMoE",
    "RankRun",
    "Training",
    "corpus",
    "decode",
    "train_parallel",
    "train_plain",
    "train_rank",
]

BYTES = 256
Progress = Callable[[int, float], None]
"""Called after each step with the steps done and the loss."""


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the model and of its training; ``sequences`` are those of all ranks in a step."""

    ranks: int = 4
    steps: int = 150
    seed: int = 0
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    intermediate: int = 128
    num_experts: int = 16
    top_k: int = 2
    balance: float = 0.01
    context: int = 64
    sequences: int = 32
    learning_rate: float = 2e-3
    warmup: int = 20
    prompt: int = 16

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.sequences * self.context


def corpus() -> torch.Tensor:
    """The bytes of Python's own language reference, int64, about 460,000.

    Raises:
        UnavailableError: this Python came without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UnavailableError(
            "the demo reads pydoc_data.topics, which this Python lacks; use one that has its whole "
            "standard library (Debian, Ubuntu: apt install libpython3-stdlib)"
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode()), dtype=torch.int64, device="cpu")


def batches(settings: DemoSettings) -> Iterator[torch.Tensor]:
    """For each step the sequences of each rank: ``[ranks, sequences / ranks, context + 1]``."""
    text = corpus()
    generator = torch.Generator().manual_seed(settings.seed)
    places = torch.arange(settings.context + 1, dtype=torch.int64, device="cpu")
    for _ in range(settings.steps):
        shape = (settings.ranks, settings.sequences // settings.ranks, 1)
        begin = torch.randint(
            text.numel() - settings.context,
            shape,
            generator=generator,
            dtype=torch.int64,
            device="cpu",
        )
        yield text[begin + places]


# ---- the model ----------------------------------------------------------------------------------


class _Attention(torch.nn.Module):
    """Causal attention with its norm."""

    def __init__(self, settings: DemoSettings, seed: int) -> None:
        super().__init__()
        hidden, std = settings.hidden, settings.hidden**-0.5
        self.heads = settings.heads
        self.norm = torch.nn.RMSNorm(hidden)
        self.w_in = torch.nn.Parameter(seeded_normal((3 * hidden, hidden), std, seed, "qkv"))
        self.w_out = torch.nn.Parameter(seeded_normal((hidden, hidden), std / 2, seed, "attention"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        mixed = F.linear(self.norm(x), self.w_in)
        query, key, value = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.linear(out.transpose(1, 2).reshape(batch, length, hidden), self.w_out)


class ByteModel(torch.nn.Module):
    """A transformer over bytes with an MoE layer in each block.

    Args:
        settings: its sizes.
        make_moe: makes the MoE layer of a block, given the seed of its weights.
    """

    def __init__(self, settings: DemoSettings, make_moe: Callable[[int], MoE | PlainMoE]) -> None:
        super().__init__()
        hidden, seed = settings.hidden, settings.seed
        seeds = [seed * 1000 + layer for layer in range(settings.layers)]
        self.embedding = torch.nn.Parameter(seeded_normal((BYTES, hidden), 0.5, seed, "bytes"))
        positions = seeded_normal((settings.context, hidden), 0.1, seed, "positions")
        self.positions = torch.nn.Parameter(positions)
        self.attention = torch.nn.ModuleList(_Attention(settings, s) for s in seeds)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in seeds)
        self.layers = [make_moe(s) for s in seeds]
        self.moe = torch.nn.ModuleList(self.layers)
        self.norm = torch.nn.RMSNorm(hidden)
        self.head = torch.nn.Parameter(seeded_normal((BYTES, hidden), 0.02, seed, "head"))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Logits ``[sequences, length, 256]`` of the byte after each of ``text``."""
        x = self.embedding[text] + self.positions[: text.shape[1]]
        for attention, norm, moe in zip(self.attention, self.norms, self.layers, strict=True):
            x = x + attention(x)
            x = x + moe(norm(x))
        return F.linear(self.norm(x), self.head)

    def losses(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross-entropy in nats per byte, and the balance losses of all layers."""
        logits = self(batch[:, :-1])
        entropy = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return entropy, torch.stack([moe.balance_loss for moe in self.layers]).sum()


class PlainMoE(torch.nn.Module):
    """The layer of ``fanfold.nn.MoE`` as one would write it without expert parallelism.

    Everything is float32 and all experts are here. The balance loss is over each rank's tokens, as
    in the parallel run, and averaged.
    """

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        experts, hidden = settings.num_experts, settings.hidden
        self.top_k, self.ranks, self.balance = settings.top_k, settings.ranks, settings.balance
        self.router = torch.nn.Linear(hidden, experts, bias=False)
        self.w_in = torch.nn.Parameter(
            torch.empty(
                experts, 2 * settings.intermediate, hidden, dtype=torch.float32, device="cpu"
            )
        )
        self.w_out = torch.nn.Parameter(
            torch.empty(experts, hidden, settings.intermediate, dtype=torch.float32, device="cpu")
        )
        self.balance_loss = torch.zeros((), dtype=torch.float32, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` to the same shape."""
        tokens = x.flatten(0, -2)
        experts = self.w_in.shape[0]
        scores = torch.softmax(self.router(tokens), dim=-1)
        weights, chosen = torch.topk(scores, self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(experts):
            token, place = torch.nonzero(chosen == expert, as_tuple=True)
            gate, up = F.linear(tokens[token], self.w_in[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.w_out[expert])
            out = out.index_add(0, token, y * weights[token, place].unsqueeze(-1))
        share = F.one_hot(chosen, experts).float().unflatten(0, (self.ranks, -1)).mean((1, 2))
        score = scores.unflatten(0, (self.ranks, -1)).mean(1)
        self.balance_loss = self.balance * experts * (share * score).sum(-1).mean()
        return out.view_as(x)


def _open(
    settings: DemoSettings, group: dist.ProcessGroup | None, mode: Mode = "high_throughput"
) -> AnyDispatcher:
    dispatcher: AnyDispatcher = open_dispatcher(
        mode,
        group,
        num_experts=settings.num_experts,
        top_k=settings.top_k,
        hidden=settings.hidden,
        max_tokens=settings.tokens_per_step // settings.ranks,
    )
    return dispatcher


def _parallel_model(settings: DemoSettings, ep: AnyDispatcher) -> ByteModel:
    sizes = (settings.hidden, settings.intermediate, settings.num_experts, settings.top_k)

    def make_moe(seed: int) -> MoE:
        options = MoEOptions(balance=settings.balance, seed=seed)
        return MoE(*sizes, dispatcher=ep, options=options)

    return ByteModel(settings, make_moe)


def _plain_model(settings: DemoSettings) -> ByteModel:
    """All experts on this process, starting from the weights that a single rank starts from."""
    model = ByteModel(settings, lambda seed: PlainMoE(settings))
    with _open(settings, None) as ep:
        model.load_state_dict(_parallel_model(settings, ep).state_dict())
    return model


# ---- training -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What a training was like.

    Attributes:
        losses: cross-entropy in nats per byte of each step, on a rank that of its own sequences.
        gradients: of the first step, by parameter, on the CPU; on a rank averaged over the ranks.
        seconds: of all steps together.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    seconds: float


@dataclass(frozen=True)
class Decoding:
    """One rank's part in what the trained model did through low latency.

    Attributes:
        backend: where low latency ran: ``"cuda"`` or ``"host"``.
        loss: of one batch, in nats per byte.
        training_loss: of the same batch in the mode of the training.
        text: a prompt and what the model went on with.
        seconds_per_byte: of what it wrote, one pass of the model each.
    """

    backend: str
    loss: float
    training_loss: float
    text: str
    seconds_per_byte: float


@dataclass(frozen=True)
class RankRun:
    """One rank's training and what Fanfold did in it.

    Attributes:
        training: losses, gradients (of the routed experts those that live here), time.
        dispatch_seconds, combine_seconds: of that time, in dispatches and combines, backward
            passes included; what that holds, :class:`fanfold.nn.MoEStatistics` says.
        bytes_sent, bytes_returned: of rows, to other ranks and back.
        expert_rows: ``[steps, layers, E_l]`` int64: rows that each local expert computed.
        device: where the model was, such as ``"cuda:0"``.
        reason: why there.
        backend: where high throughput ran: ``"cuda"`` or ``"host"``.
        decoding: what followed the training, on GPUs.
    """

    training: Training
    dispatch_seconds: float
    combine_seconds: float
    bytes_sent: int
    bytes_returned: int
    expert_rows: torch.Tensor
    device: str = "cpu"
    reason: str = ""
    backend: str = "host"
    decoding: Decoding | None = None


def train_rank(group: dist.ProcessGroup, settings: DemoSettings, progress: Progress) -> RankRun:
    """Trains the model on this rank's part of each batch; on GPUs it then decodes. Collective."""
    choice = choose(as_group(group), Config.resolve())
    with _open(settings, group) as ep:
        model = _parallel_model(settings, ep).to(choice.device)
        run = train_parallel(model, settings, ep, group, progress)
        backend = "cuda" if ep.device.type == "cuda" else "host"
        run = replace(run, device=str(choice.device), reason=choice.reason, backend=backend)
        if choice.backend == "host":
            return run
        return replace(run, decoding=decode(model, settings, group, choice))


def train_parallel(
    model: ByteModel,
    settings: DemoSettings,
    ep: AnyDispatcher,
    group: dist.ProcessGroup,
    progress: Progress,
) -> RankRun:
    """Trains ``model``, whose layers are MoE layers over ``ep``, on this rank's part of each batch.
    Collective.

    Args:
        model: on the device where it is to be trained.
        settings: its sizes; ``ranks`` are those of ``group``.
        ep: takes ``settings.tokens_per_step / ranks`` tokens.
        group: the ranks.
        progress: called after each step.
    """
    layers = [moe.statistics for moe in model.layers if isinstance(moe, MoE)]
    rows = [torch.zeros((len(layers), ep.experts_per_rank), dtype=torch.int64, device="cpu")]

    def after_backward() -> None:
        average_gradients(model, group)
        rows.append(torch.stack([layer.expert_rows for layer in layers]).cpu())

    training = _train(model, settings, slice(ep.rank, ep.rank + 1), after_backward, progress)
    return RankRun(
        training=training,
        dispatch_seconds=sum(layer.dispatch_seconds for layer in layers),
        combine_seconds=sum(layer.combine_seconds for layer in layers),
        bytes_sent=sum(layer.bytes_sent for layer in layers),
        bytes_returned=sum(layer.bytes_returned for layer in layers),
        expert_rows=torch.stack(rows).diff(dim=0),
    )


def train_plain(
    settings: DemoSettings, progress: Progress, device: torch.device | str = "cpu"
) -> Training:
    """The same training on this process alone, each step on the whole batch."""
    model = _plain_model(settings).to(device)
    return _train(model, settings, slice(None), lambda: None, progress)


def _train(
    model: ByteModel,
    settings: DemoSettings,
    ranks: slice,
    after_backward: Callable[[], None],
    progress: Progress,
) -> Training:
    """Trains on the part of each batch that belongs to ``ranks``."""
    optimizer = torch.optim.Adam(parameter_groups(model), betas=(0.9, 0.95))
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    device = model.head.device
    begin = _seconds(device)
    for step, batch in enumerate(batches(settings)):
        with _reproducible(device):
            entropy, balance = model.losses(batch[ranks].flatten(0, 1).to(device))
            optimizer.zero_grad()
            (entropy + balance).backward()
        after_backward()
        if step == 0:
            named = model.named_parameters()
            grads = {name: p.grad for name, p in named if p.grad is not None}
            first = {name: local_part(grad).clone().cpu() for name, grad in grads.items()}
        for parameters in optimizer.param_groups:
            parameters["lr"] = _learning_rate(settings, step)
        optimizer.step()
        losses.append(float(entropy.detach()))
        progress(step + 1, losses[-1])
    return Training(losses, first, _seconds(device) - begin)


def _seconds(device: torch.device) -> float:
    """The time at which ``device`` has done what was asked of it so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reproducible(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """On a GPU, attention whose gradients are sums in a fixed order."""
    if device.type == "cuda":
        return sdpa_kernel(SDPBackend.MATH)
    return contextlib.nullcontext()


def _learning_rate(settings: DemoSettings, step: int) -> float:
    """A linear warm-up, then a linear decay to a tenth."""
    after = max(step - settings.warmup, 0) / max(settings.steps - settings.warmup, 1)
    return settings.learning_rate * min((step + 1) / settings.warmup, 1.0 - 0.9 * after)


# ---- decoding -----------------------------------------------------------------------------------


@torch.no_grad()
def decode(
    model: ByteModel, settings: DemoSettings, group: dist.ProcessGroup, choice: BackendChoice
) -> Decoding:
    """Evaluates and generates through low latency, where ``choice`` has it. Collective.

    Args:
        model: trained, on ``choice.device``; its layers use high throughput, and do again
            afterwards.
        settings: its sizes. No more than ``context`` bytes are looked at, and as many are written
            as fit in it after the prompt.
        group: the ranks that trained it.
        choice: of these ranks.
    """
    layers = [moe for moe in model.layers if isinstance(moe, MoE)]
    trained_through = [moe.dispatcher for moe in layers]
    device, rank = choice.device, dist.get_rank(group)
    other = replace(settings, seed=settings.seed + 1, steps=1)
    batch = next(batches(other))[rank].to(device)
    training_loss = float(model.losses(batch)[0])
    text = corpus()[rank * 1000 :][: settings.prompt].to(device)
    with _open(settings, group, "low_latency") as ep:
        for moe in layers:
            moe.dispatcher = ep
        try:
            loss = float(model.losses(batch)[0])
            begin = _seconds(device)
            while text.numel() < settings.context:
                text = torch.cat([text, model(text.unsqueeze(0))[0, -1].argmax().reshape(1)])
            seconds = _seconds(device) - begin
            # Kernels report what they find at the next call, and this was the last.
            ep.synchronize()
        finally:
            for moe, before in zip(layers, trained_through, strict=True):
                moe.dispatcher = before
    return Decoding(
        backend=choice.backend,
        loss=loss,
        training_loss=training_loss,
        text=bytes(text.tolist()).decode(errors="replace"),
        seconds_per_byte=seconds / (settings.context - settings.prompt),
    )
