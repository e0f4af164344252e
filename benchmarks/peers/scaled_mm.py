"""torch's dense FP8 product, `torch._scaled_mm`: with a scale for each tensor, and with block scales."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers import Absent


class ScaledMM:
    """Products of a [M, K] and b [N, K] in bfloat16."""

    @staticmethod
    def tensorwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """With fast accumulation, and scales of one."""
        one = torch.ones(1, device=a.device)
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def blocks(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
        """1 x 128 by 128 x 128. `a_scale`: [M, K / 128], stored by columns."""
        return torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16)


def load(_: Any) -> type[ScaledMM]:
    if not hasattr(torch, "_scaled_mm"):
        raise Absent(f"torch {torch.__version__} has no _scaled_mm")
    return ScaledMM
