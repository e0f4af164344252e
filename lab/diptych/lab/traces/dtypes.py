"""The dtypes of traced tensors: their names in files, their values as float64, and their order.

Tensors are arrays of unsigned integers of the dtype's width, their *bits*, beside the dtype's name, since NumPy alone
has no bfloat16 and no FP8.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class DType:
    """One dtype.

    `name`: its name in torch, JAX and ml_dtypes. `code`: its name in safetensors files, or "" if they do not have it.
    `kind`: "float", "int" (signed) or "uint". The remaining fields describe floats alone: bits of the mantissa, the
    exponent's bias, the bits of the largest finite magnitude, and whether there are infinities.
    """

    name: str
    code: str
    nbytes: int
    kind: str = "uint"
    mantissa: int = 0
    bias: int = 0
    largest: int = 0
    infinite: bool = False

    @property
    def bits(self) -> np.dtype:
        return np.dtype(f"u{self.nbytes}")

    @property
    def signed(self) -> bool:
        return self.kind != "uint" and self.name != "float8_e8m0fnu"

    @property
    def half_ulp(self) -> float:
        """Half of the distance between 1 and the next larger value; 0 for integers."""
        return 0.5**self.mantissa / 2 if self.kind == "float" else 0.0

    @property
    def smallest_normal(self) -> float:
        """The smallest normal magnitude; smaller nonzero values are subnormal. 0 for dtypes without subnormal
        values."""
        return 2.0 ** (1 - self.bias) if self.kind == "float" and self.signed else 0.0

    def decode(self, bits: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Returns the values as float64, in `out` if it is given; 64-bit integers are rounded."""
        out = np.empty(bits.shape) if out is None else out
        if self.kind == "float" and self.nbytes <= 2:
            return _values(self).take(bits, out=out, mode="clip")  # with other modes `take` makes a copy first
        with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
            np.copyto(out, bits.view(np.dtype(f"{self.kind[0]}{self.nbytes}")))
        return out

    def ulps(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns the distances between a and b in units in the last place, unsigned: the number of steps from one
        representable value to the next, and 0 from -0 to +0."""
        a, b = self._ordered(a), self._ordered(b)
        larger = np.maximum(a, b).view(self.bits)
        larger -= np.minimum(a, b).view(self.bits)
        return larger

    def _ordered(self, bits: np.ndarray) -> np.ndarray:
        if not self.signed:
            return bits
        signed = bits.view(np.dtype(f"i{self.nbytes}"))
        if self.kind == "int":
            return signed
        sign = signed >> (8 * self.nbytes - 1)  # 0 for positive numbers, -1 for negative ones
        ordered = sign & np.iinfo(signed.dtype).max
        ordered ^= signed
        ordered -= sign  # this makes two's complement of sign and magnitude
        return ordered


# fmt: off
DTYPES: dict[str, DType] = {d.name: d for d in (
    #     name              code       bytes  kind     mantissa  bias  largest             infinite
    DType("float64",         "F64",     8, "float", 52,      1023, 0x7FEF_FFFF_FFFF_FFFF, True),
    DType("float32",         "F32",     4, "float", 23,       127, 0x7F7F_FFFF,           True),
    DType("float16",         "F16",     2, "float", 10,        15, 0x7BFF,                True),
    DType("bfloat16",        "BF16",    2, "float",  7,       127, 0x7F7F,                True),
    DType("float8_e4m3fn",   "F8_E4M3", 1, "float",  3,         7, 0x7E,                  False),
    DType("float8_e5m2",     "F8_E5M2", 1, "float",  2,        15, 0x7B,                  True),
    DType("float8_e8m0fnu",  "F8_E8M0", 1, "float",  0,       127, 0xFE,                  False),
    DType("float4_e2m1fn",   "",        1, "float",  1,         1, 0x7,                   False),
    DType("int64", "I64", 8, "int"),    DType("int32", "I32", 4, "int"),
    DType("int16", "I16", 2, "int"),    DType("int8",  "I8",  1, "int"),
    DType("uint64", "U64", 8),          DType("uint32", "U32", 4),
    DType("uint16", "U16", 2),          DType("uint8", "U8", 1),      DType("bool", "BOOL", 1),
)}
# fmt: on
"""The dtypes by name. An array of float4_e2m1fn has one value in the low bits of each byte; files do not hold it."""

STORED = {d.code: d for d in DTYPES.values() if d.code}
"""The dtypes that files hold, by code."""


@functools.cache
def _values(dtype: DType) -> np.ndarray:
    """Returns the float64 values of all bit patterns of a float of at most two bytes."""
    codes = np.arange(1 << 8 * dtype.nbytes, dtype=np.int64)
    if not dtype.signed:
        return np.where(codes <= dtype.largest, np.ldexp(1.0, codes - dtype.bias), np.nan)
    sign_bit = 1 << 3 if dtype.name == "float4_e2m1fn" else 1 << (8 * dtype.nbytes - 1)
    magnitude = codes & (sign_bit - 1)
    exponent, fraction = magnitude >> dtype.mantissa, magnitude & ((1 << dtype.mantissa) - 1)
    significand = fraction + np.where(exponent > 0, 1 << dtype.mantissa, 0)
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - dtype.bias - dtype.mantissa)
    value[magnitude > dtype.largest] = np.nan
    if dtype.infinite:
        value[magnitude == dtype.largest + 1] = np.inf
    return np.where(codes & sign_bit, -value, value)


def is_recorded(dtype: str) -> bool:
    """Returns whether traces hold tensors of a dtype, by its name in torch and JAX."""
    return dtype in DTYPES and bool(DTYPES[dtype].code)


def bits_of(x: np.ndarray, dtype: str | None = None) -> tuple[DType, np.ndarray]:
    """Returns an array's dtype and its bits, C-contiguous and of the same shape.

    **Arguments:** `x`: an array of any dtype in `DTYPES`, including those of ml_dtypes. `dtype`: the tensor's dtype, if
    `x` holds its bits as unsigned integers.

    **Raises** TypeError if the dtype is not in `DTYPES`, has another width than `x`, or `x` has the other byte order.
    """
    held = x.dtype.name
    found = DTYPES.get(dtype or held)
    if found is None:
        raise TypeError(f"traces have no dtype {dtype or held}; they have {', '.join(DTYPES)}")
    if held not in (found.name, found.bits.name) or not x.dtype.isnative:
        raise TypeError(f"an array of {x.dtype.str if held == found.name else held} does not have {found.name}'s bits")
    return found, np.ascontiguousarray(x).reshape(x.shape).view(found.bits)
