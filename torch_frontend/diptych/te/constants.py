"""`DType`: the dtypes by which TransformerEngine's quantizers name their elements."""

from __future__ import annotations

import enum

from diptych.te import absent


class DType(enum.Enum):
    """A dtype. Its value is torch's name; TransformerEngine's members are numbers, which are not kept here."""

    kByte = "uint8"
    kInt32 = "int32"
    kFloat32 = "float32"
    kFloat16 = "float16"
    kBFloat16 = "bfloat16"
    kFloat8E4M3 = "float8_e4m3fn"
    kFloat8E5M2 = "float8_e5m2"
    kFloat4E2M1 = "float4_e2m1fn"


__getattr__ = absent.attributes_of(__name__)
