"""The verb `hash` on NumPy arrays."""

from __future__ import annotations

import numpy as np

from diptych.common.ops import hash as rules
from diptych.common.ops.operand import Operand
from diptych.core import _core
from diptych.core._arrays import Array, _array, _operand


def hash(x: Array) -> Array:
    """Returns the hash of the bits of `x`, int32 [4] (NUMERICS 10), which `diptych.torch` and `diptych.jax` give too.

    **Arguments:** `x`: any shape; integers, floats, complex numbers or bools of whole bytes. Its elements count in
    row-major order; shape and dtype do not count.

    **Raises:** TypeError for another dtype or the other byte order.
    """
    x = _array("hash", "x", x)
    out = np.empty(rules.hash(Operand("x", x.dtype.name, x.shape)), np.int32)
    _core.hash(_operand(x.reshape(-1).view(np.uint8), "uint8"), _operand(out, "int32"))
    return out
