"""Products of groups: each group's operands are cut out and multiplied by the oracle of plain products.

A group's blocks of scales lie where they do in the whole tensor. What is cut out are the blocks that its rows touch;
elements of other rows in them are zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import oracle

ONE = {"float32": 1.0, "e8m0": 127, "e4m3": 0x38}  # as arrays of scales hold it


def rows_of(copy: oracle.Copy, begin: int, end: int) -> tuple[oracle.Copy, slice]:
    """A rowwise copy of the rows around begin..end that whole blocks hold, and where those rows are in it."""
    size = copy.fmt.block_rows or 1
    first, last = begin // size * size, min(-(-end // size) * size, len(copy.data))
    scale = copy.scale_inv if copy.fmt.one_scale else copy.scale_inv[first // size : -(-last // size)]
    amax = copy.amax if copy.amax is None or np.size(copy.amax) == 1 else copy.amax[first:last]
    part = dataclasses.replace(copy, data=copy.data[first:last], scale_inv=scale, amax=amax)
    return part, slice(begin - first, end - first)


def depth_of(copy: oracle.Copy, begin: int, end: int, unit: int) -> oracle.Copy:
    """A columnwise copy of the rows around begin..end that blocks of `unit` hold, zeros but for those; a scale that
    serves none of them is one."""
    fmt, size = copy.fmt, copy.fmt.block_cols
    codes = oracle.unpack(copy.data) if fmt.pack == 2 else copy.data
    codes, scale = (codes, copy.scale_inv) if copy.transposed else (codes.T, copy.scale_inv.T)  # [outer, rows]
    first, last = begin // unit * unit, min(-(-end // unit) * unit, codes.shape[1])
    inside = np.zeros_like(codes)
    inside[:, begin:end] = codes[:, begin:end]
    codes = inside[:, first:last]
    if size:
        scale = scale[:, first // size : -(-last // size)].copy()
        at = np.arange(first, last, size)
        scale[:, (at + size <= begin) | (at >= end)] = ONE[fmt.scale]
    data = oracle.pack(codes) if fmt.pack == 2 else codes
    turn = (lambda x: x) if copy.transposed else np.transpose
    return dataclasses.replace(copy, data=turn(data), scale_inv=turn(scale))


@dataclasses.dataclass(frozen=True)
class Problem:
    """`b`: one copy for each group, or (depth) one for all; `like`: a copy of that form, where there is no group."""

    a: oracle.Copy
    b: list[oracle.Copy] | oracle.Copy
    like: oracle.Copy
    offsets: tuple[int, ...]
    alpha: float = 1.0
    beta: float = 0.0
    bias: np.ndarray | None = None
    c: np.ndarray | None = None
    out_dtype: Any = np.float32

    @property
    def depth(self) -> bool:
        return not isinstance(self.b, list)

    @property
    def groups(self) -> int:
        return len(self.offsets) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        rows, inner = self.a.shape
        n = self.like.shape[self.like.columnwise]
        return (self.groups, inner, n) if self.depth else (rows, n)

    def parts(self) -> Iterator[tuple[Any, oracle.Copy, oracle.Copy, Any, dict[str, Any]]]:
        """Yields for each non-empty group: its place in D, both operands, the rows of theirs to keep, the epilogue."""
        for g, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            if begin == end:
                continue
            where = g if self.depth else slice(begin, end)
            # Over no elements the sum is +0, whatever alpha is.
            alpha = self.alpha if self.depth or self.a.shape[1] else 1.0
            more = {"alpha": alpha, "beta": self.beta, "c": None if self.c is None else self.c[where]}
            if isinstance(self.b, list):
                a, keep = rows_of(self.a, begin, end)
                if self.c is not None:
                    spread = np.zeros((len(a.data), self.c.shape[1]), self.c.dtype)
                    spread[keep] = self.c[where]
                    more["c"] = spread
                yield where, a, self.b[g], keep, more | {"bias": None if self.bias is None else self.bias[g]}
            else:
                unit = max(self.a.fmt.block_cols, self.b.fmt.block_cols, 1)
                a, b = (depth_of(copy, begin, end, unit) for copy in (self.a, self.b))
                yield where, a, b, slice(None), more

    def result(self, product: Callable[..., np.ndarray], nothing: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns D: `product` of each part, and elsewhere `nothing` of beta * c in float32."""
        c = np.zeros(self.shape, np.float32)
        if self.beta != 0:
            with np.errstate(all="ignore"):
                c = c + np.float32(self.beta) * np.asarray(self.c).astype(np.float32)
        out = nothing(c)
        for where, a, b, keep, more in self.parts():
            out[where] = product(a, b, **more)[keep]
        return out

    def summed(self) -> np.ndarray:
        """Which elements of D are sums of something."""
        out = np.zeros(self.shape, bool)
        for where, *_ in self.parts():
            out[where] = True
        return out

    def cpu(self) -> np.ndarray:
        """The CPU's bits (NUMERICS 7)."""
        return self.result(
            lambda a, b, **more: oracle.gemm_cpu(a, b, out_dtype=self.out_dtype, **more),
            lambda c: oracle.cast(c, self.out_dtype),
        )

    def float64(self) -> np.ndarray:
        return self.result(oracle.gemm_float64, lambda c: c.astype(np.float64))

    def tolerance(self, **accumulate: Any) -> np.ndarray:
        """How far a device may be from `float64`; what sums nothing is exact but for the cast."""
        zero = np.finfo(np.float64).tiny

        def cast_alone(c: np.ndarray) -> np.ndarray:
            with np.errstate(all="ignore"):
                return np.abs(oracle.cast(c, self.out_dtype).astype(np.float64) - c) + zero

        return self.result(
            lambda a, b, **more: oracle.gemm_tolerance(
                a, b, out_dtype=self.out_dtype, worst_case=False, **accumulate, **more
            ),
            cast_alone,
        )
