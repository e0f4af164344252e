"""Rules of `hash`: the dtypes whose elements are whole bytes, all of which are the element's."""

from __future__ import annotations

from diptych.common.errors import DTypeError
from diptych.common.ops.operand import Operand
from diptych.common.ops.shapes import Shape

_INTEGERS = (f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_FP8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_COMPLEX = ("complex32", "complex64", "complex128")
_DTYPES = {"bool", *_INTEGERS, *_FLOATS, *(f"float8_{name}" for name in _FP8), *_COMPLEX, "float4_e2m1fn_x2"}


def hash(x: Operand) -> Shape:
    """Returns the shape of the hash of x. **Raises** DTypeError unless x has integers, floats or bools of whole bytes.

    Elements of fewer bits lie in memory in another way in each framework, and bits without a meaning, as a `longdouble`
    has them, are not copied with it.
    """
    if x.dtype not in _DTYPES:
        raise DTypeError(f"hash: x must hold integers, floats or bools of whole bytes (longdouble is none), got {x}")
    return (4,)
