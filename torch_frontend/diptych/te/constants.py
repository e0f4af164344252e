"""`DType`: the dtypes by which TransformerEngine's quantizers name their elements."""

from __future__ import annotations

import enum

import torch

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


TE_DType_To_Torch = {each: getattr(torch, each.value) for each in DType if each is not DType.kFloat4E2M1}
TE_DType = {theirs: ours for ours, theirs in TE_DType_To_Torch.items()}
"""Each `DType` by torch's dtype; torch's has no quantized elements of four bits."""

__getattr__ = absent.attributes_of(__name__)
