"""The verb `statistics` on NumPy arrays."""

from __future__ import annotations

import numpy as np

from diptych.common.ops import statistics as rules
from diptych.common.ops.operand import Operand
from diptych.core import _core
from diptych.core._arrays import Array, _array, _operand


def statistics(x: Array) -> Array:
    """Returns amax, mean and rms of the finite elements of `x`, and the numbers of elements that are zero, NaN,
    infinite and subnormal; float64 [7] (NUMERICS 11).

    **Arguments:** `x`: any shape; integers, bools or floats that traces of the lab hold.

    **Raises:** TypeError for another dtype or the other byte order.
    """
    x = _array("statistics", "x", x)
    shape, number = rules.statistics(Operand("x", x.dtype.name, x.shape))
    out = np.empty(shape, np.float64)
    given, made = _operand(x.reshape(-1).view(np.uint8), "uint8"), _operand(out.view(np.int32), "int32")
    _core.statistics(given, None, None, made, None, number, 1.0)
    return out
