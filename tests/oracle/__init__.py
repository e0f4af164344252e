"""The bit-level reference: NumPy for the arithmetic, ml_dtypes for narrow casts, and nothing of diptych.

Every formula is written from the numerics contract (NUMERICS, cited by section), never from the C++. What holds here:

- All scale arithmetic is float32, each operation rounded, subnormals kept (`check_ieee` proves it before each use).
- An input of any rank is a matrix `[M, K]`: leading dimensions fold into rows.
- Scales are logical row-major, in the orientation of the data that they belong to.
"""

from oracle.copies import dequantize, quantize
from oracle.formats import (
    BF16,
    E2M1,
    ELEMENT,
    F16,
    F32,
    FLT_MAX,
    FORMATS,
    FP8_MAX,
    NAN_BYTE,
    Copy,
    Fmt,
    Quantized,
    cast,
    check_ieee,
    decode,
    encode,
    encode_stochastic,
    fold,
    pack,
    unpack,
)
from oracle.products import bias_grad, bias_grad_tolerance, full_alpha, gemm_cpu, gemm_float64, gemm_tolerance
from oracle.scales import (
    amax,
    columnwise_amax,
    e8m0_code,
    e8m0_decode,
    e8m0_from_amax,
    e8m0_inverse,
    scale_from_amax,
    scale_update,
    two_level,
)
from oracle.transform import SIGNS, hadamard, noise, noise_of, philox, rng_words

__all__ = [
    "BF16",
    "E2M1",
    "ELEMENT",
    "F16",
    "F32",
    "FLT_MAX",
    "FORMATS",
    "FP8_MAX",
    "NAN_BYTE",
    "SIGNS",
    "Copy",
    "Fmt",
    "Quantized",
    "amax",
    "bias_grad",
    "bias_grad_tolerance",
    "cast",
    "check_ieee",
    "columnwise_amax",
    "decode",
    "dequantize",
    "e8m0_code",
    "e8m0_decode",
    "e8m0_from_amax",
    "e8m0_inverse",
    "encode",
    "encode_stochastic",
    "fold",
    "full_alpha",
    "gemm_cpu",
    "gemm_float64",
    "gemm_tolerance",
    "hadamard",
    "noise",
    "noise_of",
    "pack",
    "philox",
    "quantize",
    "rng_words",
    "scale_from_amax",
    "scale_update",
    "two_level",
    "unpack",
]
