"""Checks of a layer's operands that both panels make before the first kernel, with the same messages.

The functions read only shapes, so they take torch's tensors and JAX's arrays; `tests/cases/layer_misuse.py` compares
the messages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from diptych.common.layers.groups import rotates_rows
from diptych.common.layers.plan import LinearPlan
from diptych.common.layers.schedule import Call
from diptych.common.ops.shapes import quantize_constraints
from diptych.common.quantizers import RHT, Quantizer
from diptych.common.recipes import Recipe


class Names(NamedTuple):
    """Names of a panel's layer, its input and its weight in messages."""

    op: str
    x: str
    weight: str


def require_fit(names: Names, rank: int, x: Any, weight: Any, bias: Any) -> None:
    """**Raises** ShapeError unless x is [..., K], the weight [N, K] and the bias [N]; with rank 3 the weight is
    [G, N, K] and the bias [G, N]."""
    of_x, of_weight = x.shape, weight.shape
    if len(of_x) == 0 or len(of_weight) != rank or of_x[-1] != of_weight[-1]:
        form = "[N, K]" if rank == 2 else "[G, N, K]"
        raise ShapeError(
            f"{names.op}: {names.x} [..., K] and {names.weight} {form} do not fit: {list(of_x)} and {list(of_weight)}"
        )
    if bias is not None and bias.shape != of_weight[:-1]:
        raise ShapeError(
            f"{names.op}: bias must be {list(of_weight[:-1])} for {names.weight} {list(of_weight)}, got "
            f"{list(bias.shape)}"
        )


def require_offset_count(names: Names, offsets: Any, groups: Any) -> None:
    """**Raises** ShapeError unless offsets are [groups + 1]."""
    if offsets.shape != (groups + 1,):
        raise ShapeError(
            f"{names.op}: offsets must be [{groups + 1}], one more than {names.weight}s, got {list(offsets.shape)}"
        )


def require_groups_once(op: str, offsets: Any, row_map: Any) -> None:
    """**Raises** ValueError unless exactly one of `offsets` and `row_map` is given."""
    if (offsets is None) == (row_map is None):
        raise ValueError(f"{op}: give the groups once, as offsets or by a row_map")


def require_align(op: str, align: Any) -> None:
    """**Raises** ArgumentError unless `align` is an int."""
    if not isinstance(align, int):
        raise ArgumentError(f"{op}: align must be an int, got {type(align).__name__}")


def other_kind(names: Names, weight: Any, wanted: type) -> ArgumentError:
    """Returns the error for a held weight of a class that the layer does not take."""
    return ArgumentError(
        f"{names.op}: a {names.weight} that is held quantized must be a {wanted.__name__}, got a "
        f"{type(weight).__name__}"
    )


def require_stackable(names: Names, calls: tuple[Call | None, ...]) -> None:
    """**Raises** UnsupportedError for quantize calls that a stack of weights does not support."""
    for call in calls:
        if call is not None and call.quantizer.implementation() is not None:
            raise UnsupportedError(
                f"{names.op}: a quantizer of the user's own for the {names.weight}, {call.quantizer.described()}"
            )
        if call is not None and call.needs_rng:
            raise UnsupportedError(
                f"{names.op}: {names.weight}s rounded stochastically, by {call.quantizer.described()}"
            )


def require_whole_rotations(
    names: Names, recipe: Recipe, plan: LinearPlan, promise: int, align: int, sizes: tuple[Any, ...] | None = None
) -> None:
    """**Raises** ValueError if wgrad's operands are Hadamard-rotated and a group may not begin at a multiple of 16.

    `promise`: a common divisor of the groups' first rows. `align`, `sizes`: the caller's `align`, and the groups' sizes
    if they are on the host; both are for the message.
    """
    if not rotates_rows(plan) or promise % 16 == 0:
        return
    remedy = f"promise it with align=16 (or 32, 128), got align={align}"
    if sizes is not None:
        remedy = f"pad each (moe_permute_and_pad_with_probs), got m_splits {list(sizes)}"
    raise ValueError(
        f"{names.op}: {type(recipe).__name__} rotates 16 rows at a time for the {names.weight}s' gradients, so that "
        f"groups must begin at multiples of 16; {remedy}"
    )


def require_quantizable(op: str, name: str, shape: tuple[Any, ...], dtype: str, quantizer: Quantizer) -> None:
    """**Raises** ShapeError or DTypeError, with a remedy, if a layer's quantizer does not take a tensor of such a shape
    or dtype: packed formats take whole blocks, and the Hadamard transform bfloat16. `name`: the layer's, or empty.
    Extents that are not ints, such as a compiler's symbols, are left to the op's own checks."""
    layer = f"{op} {name!r}" if name else op
    if quantizer.spec.flags & RHT and dtype != "bfloat16":
        raise DTypeError(
            f"{layer}: the Hadamard transform of {type(quantizer).__name__} takes bfloat16 alone, got "
            f"{dtype}{list(shape)}: train in bfloat16 or in bfloat16 autocast, or by a recipe with disable_rht=True"
        )
    if not all([isinstance(n, int) for n in shape]):
        return
    for constraint in quantize_constraints(shape, quantizer):
        if constraint.lhs != constraint.rhs:
            raise ShapeError(
                f"{layer}: {constraint.message}: pad sequences or choose batches so that their product is such a "
                "multiple, leave the layer out (convert's filter), or train it by a recipe of FP8 or MXFP8, which take "
                "any extents"
            )


def missing_rng(op: str, quantizer: Quantizer) -> ArgumentError:
    """Returns the error for a call without the random state that its quantizer needs."""
    return ArgumentError(
        f"{op}: {quantizer.described()} rounds stochastically and needs rng=, int32 [4]; rng_state(seed) makes one"
    )
