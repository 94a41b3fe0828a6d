"""Values and exceptions on their way between processes."""

from __future__ import annotations

import io
import traceback
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Raised", "pack", "unpack"]


def pack(value: object) -> bytes:
    """``value`` pickled by torch: plain pickle cannot restore tensors of every dtype, and the one
    of torch.multiprocessing shares memory with a process that may end."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """The value that :func:`pack` was given. Only for bytes of one's own ranks: it runs code."""
    return torch.load(io.BytesIO(packed), weights_only=False)


@dataclass(frozen=True)
class Raised:
    """An exception, which can be rebuilt elsewhere, and its traceback as text."""

    packed: bytes
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """``error`` ready to travel; as a RuntimeError if its own parts cannot be pickled."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        state = {k: v for k, v in vars(error).items() if not k.startswith("__")}
        try:
            packed = pack((type(error), error.args, state))
            unpack(packed)
        except Exception:  # a lock, a generator, a local class: anything may hang on an exception
            packed = pack((RuntimeError, (f"{type(error).__name__}: {error}",), {}))
        return cls(packed, text)

    def error(self) -> BaseException:
        """The exception, made without its ``__init__``, whose parameters nobody knows."""
        kind, args, state = unpack(self.packed)
        error: BaseException = kind.__new__(kind, *args)
        error.args = args
        vars(error).update(state)
        return error
