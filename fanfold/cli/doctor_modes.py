"""What ``fanfold doctor`` says of each mode: on which backend it will run, and why.

Ranks decide that together, by what each sees of its GPU and by the settings. So ranks are started,
one for each GPU, and asked what :mod:`fanfold.backends.choose` decides in them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fanfold.cli.doctor_host import Outcome
from fanfold.errors import FanfoldError, UnavailableError

if TYPE_CHECKING:
    import torch.distributed as dist

    from fanfold.backends.choose import BackendChoice
    from fanfold.config import Config
    from fanfold.geometry import Mode

__all__ = ["CANNOT_RUN", "START_S", "choices", "decide", "high_throughput", "low_latency"]

START_S = 60.0
"""Seconds for the start of the ranks, and again for what they look at."""

CANNOT_RUN = "cannot run"
"""What the detail of a mode begins with where no backend is left to it."""

_MOST_RANKS = 32  # that are started; more would say the same
_CHOOSE = "correct or unset it (`fanfold env` explains the settings), or solve what it names"


def low_latency() -> Outcome:
    """The backend of low latency."""
    return _outcome("low_latency")


def high_throughput() -> Outcome:
    """The backend of high throughput."""
    return _outcome("high_throughput")


def _outcome(mode: str) -> Outcome:
    try:
        detail = _asked()[mode]
    except FanfoldError as error:
        detail = f"{CANNOT_RUN}: {error}".splitlines()[0]
    return ("problem", detail, _CHOOSE) if detail.startswith(CANNOT_RUN) else ("ok", detail)


@functools.cache
def _asked() -> dict[str, str]:
    """What ranks of this machine answer; asked once for both modes."""
    import torch

    from fanfold.config import Config
    from fanfold.launch import launch

    config = Config.resolve()
    gpus = 0 if config.backend == "host" else torch.cuda.device_count()
    ranks = max(1, min(gpus, _MOST_RANKS))
    if gpus > 0 and config.share_gpus:
        ranks = max(2, ranks)
    answers: dict[str, str] = launch(decide, ranks, timeout_s=START_S)[0]
    return answers


def decide(group: dist.ProcessGroup) -> dict[str, str]:
    """What each rank runs: :func:`choices` by the settings of the environment."""
    from fanfold.config import Config

    return choices(group, Config.resolve())


def choices(group: Any, config: Config) -> dict[str, str]:
    """For each mode the backend that the ranks of ``group`` take, with the reason. Collective."""
    from fanfold.backends.choose import choose
    from fanfold.group import as_group

    ranks = as_group(group)

    def choice(mode: Mode) -> str:
        try:
            chosen = choose(ranks, config, mode, may_cross_hosts=True)
            return _worded(chosen, ranks.size, config)
        except UnavailableError as error:
            return f"{CANNOT_RUN}: {error}"

    return {"low_latency": choice("low_latency"), "high_throughput": choice("high_throughput")}


def _worded(choice: BackendChoice, ranks: int, config: Config) -> str:
    if choice.backend == "host":
        return f"host, because {choice.reason}"
    from fanfold.jit import kernel

    kernel.check_architecture(kernel.architecture_of(choice.capability))
    why = choice.reason.partition(";")[0]
    if config.backend == "cuda":
        why = f"the setting backend is 'cuda' (from {config.source_of('backend')}), and {why}"
    capability = ".".join(map(str, choice.capability))
    detail = f"cuda, for {ranks} rank{'s' if ranks > 1 else ''}: {why}, compute capability "
    detail += capability
    if config.share_gpus:
        return detail
    more = "ends in an error" if config.backend == "cuda" else "is on the host"
    return f"{detail}; a group of more ranks than GPUs {more}"
