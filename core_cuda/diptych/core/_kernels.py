"""Look-ups in the kernel table: which kernel runs a product or an op, and at which level, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.common import Quantizer
from diptych.common.formats import FormatRow
from diptych.common.gemm_options import GemmOptions
from diptych.common.ops import shapes
from diptych.core import _core

PRODUCTS = ("fprop", "dgrad", "wgrad")
HIGH_PRECISION = {"level": "high precision", "kernel": "", "note": "the framework's own product"}


def arch_of(backend: str, index: int) -> int:
    """Returns the architecture of a GPU, 90 for sm_90; 0 for the CPU."""
    return 0 if backend == "cpu" else _core.cuda_info()["archs"][index]


def product(
    gemm: str,
    operands: tuple[Quantizer | None, Quantizer | None],
    mnk: tuple[int, int, int],
    dtype: str,
    backend: str,
    index: int,
    options: GemmOptions,
) -> dict[str, Any]:
    """Returns level, kernel and note of the row that dispatch takes for one product of a linear layer. `dtype`: of the
    result; `mnk`: extents of the product, not of the layer. Operands lie at aligned addresses."""
    a, b = operands
    if a is None or b is None:
        return HIGH_PRECISION
    a_columnwise, b_columnwise = shapes.gemm_copies(gemm == "wgrad", gemm == "fprop")
    of_a, of_b = ((q.copy_format(side), side) for q, side in ((a, a_columnwise), (b, b_columnwise)))
    return of_copies(of_a, of_b, mnk, dtype, backend, index, options)


def of_copies(
    a: tuple[FormatRow, bool],
    b: tuple[FormatRow, bool],
    mnk: tuple[int, int, int],
    dtype: str,
    backend: str,
    index: int,
    options: GemmOptions,
) -> dict[str, Any]:
    """Does what `product` does, for two copies: each a format, and whether it is the columnwise one."""
    row = _core.gemm_row(a[0].id, a[1], b[0].id, b[1], *mnk, dtype, backend, index, *options)
    if row < 0:
        return {"level": "missing", "kernel": "", "note": f"no kernel for {a[0].name} x {b[0].name}"}
    return {k: _core.kernel_table()[row][k] for k in ("level", "kernel", "note")}


def any_shape(op: str, formats: Sequence[str], backend: str, arch: int) -> dict[str, Any]:
    """Returns level, kernel and note of an op's first row that takes all operands of some formats. The note names the
    rows before it, which take special operands alone."""
    special: list[str] = []
    for row in _core.kernel_table():
        serves = (row["op"], row["backend"]) == (op, backend) and row["min_arch"] <= arch <= row["max_arch"]
        if not serves or (row["formats"] and not set(formats) <= set(row["formats"])):
            continue
        if row["conditional"]:
            special.append(row["kernel"])
        else:
            notes = [row["note"], f"where it fits: {', '.join(special)}" if special else ""]
            return {"level": row["level"], "kernel": row["kernel"], "note": "; ".join(n for n in notes if n)}
    return {"level": "missing", "kernel": "", "note": f"no {op} kernel for {' x '.join(formats)}"}
