"""torch's products of groups: `grouped_mm` of bfloat16 tensors, and `_scaled_grouped_mm` of FP8 ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.peers import Absent


class GroupedMM:
    """Products of rows and a stack of weights; for wgrad of two tensors of rows. `ends`: the groups' last rows."""

    @staticmethod
    def plain(product: str, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if product == "wgrad":
            return F.grouped_mm(a.t(), b, offs=ends)
        return F.grouped_mm(a, b.transpose(1, 2) if product == "fprop" else b, offs=ends)

    @staticmethod
    def by_row(product: str, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Returns the product with a scale for each row of a and each column of b; None for wgrad, which sums rows."""
        if product == "wgrad":
            return None
        b = b if product == "fprop" else b.transpose(1, 2)  # [G, out, reduced]
        sa, sb = (t.abs().amax(-1).float() / 448 for t in (a, b))
        fa, fb = ((t / s[..., None]).to(torch.float8_e4m3fn).contiguous() for t, s in ((a, sa), (b, sb)))
        return lambda: torch.ops.aten._scaled_grouped_mm(
            fa, fb.transpose(1, 2), sa, sb, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )


def load(_: Any) -> type[GroupedMM]:
    if not hasattr(F, "grouped_mm"):
        raise Absent(f"torch {torch.__version__} has no grouped_mm")
    return GroupedMM
