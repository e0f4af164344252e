"""`Rule`: how the dimensions of a primitive's operands and results relate, which decides how a mesh may cut them.

A factor is a loop of the primitive, such as the rows of a tensor; dimensions that run over it have its name. Cutting a
factor over mesh axes cuts all of these dimensions. A dimension without a name is never cut. Leading dimensions are
folded into rows, and of those only the first that is longer than 1 can be cut: cutting another leaves no device a
contiguous part of the folded rows, which is how scales and transposed copies lie.

Invariants: no block of a format is ever cut; an axis cuts one factor; operands have precedence over results, and
earlier operands over later ones, whose other cuts are gathered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.formats import FormatRow
from diptych.jax.functional.amax_group import max_over
from diptych.jax.primitives.checks import axes_of

Array = jax.Array
Factors = tuple[str | None, ...]  # of the dimensions of one operand or result
Cuts = Mapping[str, tuple[Any, ...]]  # mesh axes by factor
Run = Callable[..., list[Array]]  # the primitive on one shard's operands


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of one call.

    `blocks`: (extent, block) of factors that are only cut between blocks. `reduce`: for each result how its parts are
    joined over cut factors that it does not have: "max", "sum" or "". `local`: computes one shard's results and joins
    them, from (run, cuts, operands), instead of `run` and `reduce`. `whole`: factors that are refused where a mesh cuts
    them, and why.

    `summed`: a factor whose axes, or some of them, may also cut one of the factors `shares` of results, and of the
    operands from number `before` on, which enter after the sum: each device then gets its share of the sum (a
    reduce-scatter).
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    blocks: Mapping[str, tuple[int, int]]
    reduce: tuple[str, ...] = ()
    local: Callable[[Run, Cuts, Sequence[Array]], list[Array]] | None = None
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    summed: str = ""
    shares: tuple[str, ...] = ()
    before: int | None = None

    def with_batch(self, operands: Sequence[Factors], front: Factors) -> Rule:
        """Returns this rule with the factors of vmapped axes in front of the operands' and of the results'."""
        return dataclasses.replace(
            self,
            operands=tuple(b + own for b, own in zip(operands, self.operands, strict=True)),
            results=tuple(front + own for own in self.results),
        )

    def compute(self, run: Run, cuts: Cuts, operands: Sequence[Array]) -> list[Array]:
        """Computes one shard's results, where the names of mesh axes are bound."""
        if self.local is not None:
            return self.local(run, cuts, operands)
        joined = zip(run(*operands), self.results, self.reduce or [""] * len(self.results), strict=True)
        return [join(x, how, missing(cuts, own)) for x, own, how in joined]


def missing(cuts: Cuts, own: Factors) -> tuple[Any, ...]:
    """Returns the mesh axes of factors that an array does not have."""
    return tuple(axis for factor, axes in cuts.items() if factor not in own for axis in axes)


def join(x: Array, how: str, axes: tuple[Any, ...]) -> Array:
    """Joins the parts of a result over mesh axes. Parts of a sum have the result's dtype and are added in float32."""
    if not how or not axes:
        return x
    return max_over(x, axes) if how == "max" else jax.lax.psum(x.astype("float32"), axes).astype(x.dtype)


# --- factors of tensors and of their copies ---


def row_factors(shape: Sequence[int], factor: str) -> Factors:
    """Returns the factors of leading dimensions, which fold into the rows `factor`."""
    first = next((i for i, n in enumerate(shape) if n != 1), 0)
    return tuple(factor if i == first else None for i in range(len(shape)))


def block_of(fmt: FormatRow) -> tuple[int, int]:
    """Returns the rows and columns of a block, which no cut parts; 1 for a whole extent: its scale serves all parts."""
    return max(fmt.block_rows, 1), max(fmt.block_cols, 1)


def copy_factors(fmt: FormatRow, columnwise: bool, data: Sequence[int], kept: str, reduced: str) -> list[Factors]:
    """Returns the factors of a copy's data and scales. `reduced`: the factor that a product sums over.

    `data`: the shape of the copy's data.
    """
    rows, last = (reduced, kept) if columnwise and fmt.columnwise == "row_major" else (kept, reduced)
    scale = (rows if fmt.block_rows else None, last if fmt.block_cols else None)
    if columnwise and fmt.columnwise == "row_major":
        scale = (rows if fmt.block_cols else None, last if fmt.block_rows else None)
    return [(*row_factors(data[:-1], rows), last), (None,) if fmt.one_scale else scale]


# --- from shardings to cuts ---


def cuts_of(rule: Rule, operands: Sequence[Any], results: Sequence[Any] = ()) -> dict[str, tuple[Any, ...]]:
    """Returns how factors are cut, given the PartitionSpecs of operands and, as far as they are known, of results."""
    cuts: dict[str, tuple[Any, ...]] = {}
    used: set[Any] = set()
    for factors, spec in zip(rule.operands + rule.results[: len(results)], [*operands, *results], strict=True):
        for factor, entry in zip(factors, spec, strict=False):
            axes = axes_of(entry)
            if factor is not None and axes and factor not in cuts and not used & set(axes):
                cuts[factor] = axes
                used |= set(axes)
    summed = cuts.get(rule.summed)
    if summed is not None:
        after = [*rule.operands[rule.before :], *rule.results]
        for factors, spec in zip(after, [*operands[rule.before :], *results], strict=False):
            for factor, entry in zip(factors, spec, strict=False):
                axes = axes_of(entry)
                if factor is None or factor not in rule.shares or factor in cuts or len(factors) == 1:
                    continue
                if axes and set(axes) <= set(summed):
                    return cuts | {factor: axes}
    return cuts


def cuts_before(rule: Rule, cuts: Cuts) -> Cuts:
    """Returns the cuts of operands that enter before the sum over `rule.summed`."""
    summed = set(cuts.get(rule.summed, ()))
    return {factor: axes for factor, axes in cuts.items() if factor == rule.summed or not summed & set(axes)}


def operand_specs(rule: Rule, cuts: Cuts) -> list[list[Any]]:
    """Returns the entries of the operands' PartitionSpecs."""
    before, first = cuts_before(rule, cuts), len(rule.operands) if rule.before is None else rule.before
    return [spec_of(own, before if i < first else cuts) for i, own in enumerate(rule.operands)]


def spec_of(factors: Factors, cuts: Cuts) -> list[Any]:
    """Returns the entries of an array's PartitionSpec."""
    entries = [cuts.get(f, ()) if f is not None else () for f in factors]
    return [None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries]


def check_cuts(op: str, rule: Rule, cuts: Cuts, sizes: Mapping[Any, int], operands: Sequence[Sequence[int]]) -> None:
    """**Raises** ShapeError if shards would not be equal or not have whole blocks.

    `sizes`: of mesh axes. `operands`: the whole operands' shapes.
    """
    split = cuts_before(rule, cuts)
    for factor, axes in cuts.items():
        parts = math.prod(sizes[axis] for axis in axes)
        if factor in rule.whole and parts > 1:
            raise UnsupportedError(f"{op}: mesh axes {axes} cut the {factor}, but {rule.whole[factor]}")
        extent, block = rule.blocks.get(factor, (0, 1)) if factor in split else (0, 1)
        lengths = [n for own, shape in zip(rule.operands, operands, strict=True) for n in _lengths(factor, own, shape)]
        for length, unit in [(extent, parts * block), *((n, parts) for n in lengths)]:
            if length % unit:
                blocks = f" with whole blocks of {block}" if unit > parts else ""
                raise ShapeError(
                    f"{op}: mesh axes {axes} cut {length} {factor} into {parts} shards, which must be equal{blocks}: "
                    f"{length} must be a multiple of {unit}. Reshard the operand, or call inside of jax.shard_map, "
                    "where a shard is a tensor with blocks of its own"
                )


def _lengths(factor: str, own: Factors, shape: Sequence[int]) -> list[int]:
    return [n for f, n in zip(own, shape, strict=True) if f == factor]


def check_whole(
    op: str, rule: Rule, operands: Sequence[Any], batch_ranks: Sequence[int], sizes: Mapping[Any, int]
) -> None:
    """**Raises** UnsupportedError where a mesh cuts a matrix along a dimension that the primitive needs whole.

    Vectors, such as the parameters of a norm, are gathered. `operands`: their PartitionSpecs. `batch_ranks`: how many
    of each operand's dimensions are batch axes. `sizes`: of mesh axes.
    """
    for number, (factors, spec, rank) in enumerate(zip(rule.operands, operands, batch_ranks, strict=True)):
        for i, (factor, entry) in enumerate(zip(factors, spec, strict=False)):
            parts = math.prod(sizes[axis] for axis in axes_of(entry))
            if factor is None and parts > 1 and len(factors) - rank > 1:
                raise UnsupportedError(
                    f"{op}: dimension {i} of operand {number} is cut over mesh axes {axes_of(entry)}, and the op needs "
                    "it whole: of the dimensions that fold into rows only the first longer than 1 can be cut. Reshard "
                    "it (jax.sharding.reshard), or move the cut dimension to the front"
                )
