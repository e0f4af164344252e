"""An operation with its operands and results as bits, which either framework can compute."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple, TypeVar

import numpy as np

from diptych.common.errors import ExplainedError
from diptych.lab.traces import DTYPES, Tensor

T = TypeVar("T")
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class ReplayError(ExplainedError, ValueError):
    """The error for a recorded operation that cannot be computed again. Its message says why.

    **Cause:** A trace without the operation's operands (captured with `ops=None`, or values that were sampled), or an
    operation that the other framework lacks.

    **Remedy:** Capture with `values="full"` and the operations, or choose another operation.
    """


REFUSED = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)
"""Exceptions that a framework raises if it cannot compute an operation with given dtypes, shapes or options."""


class Bits(NamedTuple):
    """A tensor's bits. `dtype`: its name, as traces spell it. `data`: an unsigned integer array of the same width."""

    dtype: str
    data: np.ndarray

    @staticmethod
    def of(x: np.ndarray, dtype: str | None = None) -> Bits:
        """Returns the bits of `x`. `dtype`: the name of the tensor's dtype, if NumPy does not have it."""
        x = np.ascontiguousarray(x).reshape(x.shape)
        return Bits(dtype or x.dtype.name, x.view(_UINT[x.dtype.itemsize]))

    @property
    def tensor(self) -> Tensor:
        """The tensor as a trace's file holds it."""
        return Tensor(DTYPES[self.dtype], self.data)

    @property
    def floats(self) -> np.ndarray | None:
        """The values of float32 or bfloat16 bits; None for other dtypes."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.view(np.float32) if self.dtype == "float32" else None

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.data.tobytes(), digest_size=16, key=self.dtype.encode()).digest()


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One recorded operation. `kind`: a row of `diptych.lab.replay.table`, which names the operands (`inputs`), the
    `options` and the results (`outputs`)."""

    kind: str
    inputs: dict[str, Bits]
    options: dict[str, Any]
    outputs: dict[str, Bits]


class Operands(dict[str, T]):
    """The operands of an operation in a framework, by name. A missing name **raises** ReplayError."""

    def __missing__(self, name: str) -> T:
        raise ReplayError(f"operand {name} is missing in the trace")


def require_results(op: Op, found: dict[str, T]) -> dict[str, T]:
    """Returns the results `found`. **Raises** ReplayError if a recorded result of `op` is not among them."""
    if missing := [name for name in op.outputs if name not in found]:
        raise ReplayError(f"{op.kind} has no result {missing[0][:80]!r} in this framework, but {', '.join(found)}")
    return found
