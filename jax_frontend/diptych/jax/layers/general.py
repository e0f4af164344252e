"""`dense_general`: a linear layer with any contracted, kept and batch axes, as `dense` on operands moved into place.

    x       [*batch, *rows, *contracted]   ->   [B, *rows, K]
    kernel  [*batch, *kept, *contracted]   ->   [B, N, K]       without batch axes: [N, K]
    y       [*batch, *rows, *kept]         <-   dense, under `jax.vmap` over B

A `Contraction` says which axes of the operands are which. It is made of the dimension numbers of `jax.lax.dot_general`
or of an einsum equation, which also gives the order of y's axes.

Each element of the batch is a product of its own: scales of whole tensors and states are per element, and one `rng`
serves all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from diptych.common.layers.checks import Names
from diptych.common.recipes import Recipe
from diptych.jax.layers.checks import kernel_operand
from diptych.jax.layers.linear import dense
from diptych.jax.primitives.checks import dtype_name, to_array
from diptych.jax.state.carry import has_ref
from diptych.jax.state.scales import ScaleState, init_state, map_states, require_states
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array
Axes = tuple[int, ...]


def dense_general(
    x: Array,
    kernel: Array | QuantizedArray,
    bias: Array | None = None,
    *,
    contraction: Any,
    recipe: Recipe | None,
    module: str = "linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    return_state: bool = False,
    record: bool = True,
    rng: Array | None = None,
    save_original_input: bool = False,
    calibrate: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Any:
    """The product of an input and a kernel over any axes, in the low precision of `recipe`; see `dense`.

        dense_general(x, kernel, contraction="btd,dhk->bthk", recipe=recipe)
        dense_general(x, kernel, contraction=(((2,), (0,)), ((), ())), recipe=recipe)

    The operands are moved into the layout of `dense`, [..., K] and [N, K], so results and gradients have the bits of
    `dense`. Blocks of scales lie along the contracted axes, in the order in which these are named: in the kernel's
    order for an equation.

    **Arguments:**
    - `x`, `kernel`: of any shapes that fit. A kernel may be a `QuantizedArray` [..., K] whose last axis is contracted,
      without batch axes; its K is then the product of x's contracted axes.
    - `contraction`: ((axes of x, axes of kernel), (batch axes of x, batch axes of kernel)), the dimension numbers of
      `jax.lax.dot_general`; or an einsum equation of two operands with "->", in which "..." may stand for axes. Axes of
      both operands that the result has are batch axes.
    - `bias`: [*batch, *kept], added to the product: batch axes in the order of `contraction` (for an equation, of the
      kernel), and the axes that the kernel keeps, in its order.
    - `state`: as in `dense`; with batch axes each array of a state has them in front, as `init_dense_general_state`
      makes it, and states may not be references.
    - `rng`: as in `dense`. All elements of a batch round by the same random numbers.
    - `precision`: of products in high precision, with `recipe=None`.
    - `preferred_element_type`: the result's dtype. Products accumulate in it or in x's dtype, whichever is wider, and
      cotangents are quantized from the wider dtype.
    - `recipe`, `module`, `name`, `return_state`, `record`, `save_original_input`, `calibrate`: as in `dense`.

    **Returns:** y in the order of `jax.lax.dot_general`, [*batch, *rows, *kept], or of the equation; (y, state) with
    `return_state`.

    **Raises:** as `dense`; ValueError for axes or an equation that do not fit, a precision beside a recipe, or states
    without the batch's axes; NotImplementedError for products that contract nothing, sums or diagonals of one operand,
    and quantized kernels with other contractions.
    """
    return general(
        Names("dense_general", "x", "kernel"), contraction, x, kernel, bias, recipe=recipe, precision=precision,
        preferred_element_type=preferred_element_type, state=state, module=module, name=name, return_state=return_state,
        record=record, rng=rng, save_original_input=save_original_input, calibrate=calibrate,
    )  # fmt: skip


def init_dense_general_state(
    recipe: Recipe, batch: Axes = (), *, module: str = "linear", name: str = ""
) -> dict[str, ScaleState]:
    """Makes the states of `dense_general`: those of `init_state`, whose arrays have the axes `batch` in front.

    For the next step, map `update_state` by `jax.vmap` over each axis of the batch.
    """

    def stacked(state: ScaleState) -> ScaleState:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), state)

    return map_states(stacked, init_state(recipe, module=module, name=name))


def general(
    names: Names, contraction: Any, x: Any, kernel: Any, bias: Any, *, recipe: Recipe | None, precision: Any,
    preferred_element_type: Any, state: Any, **options: Any,
) -> Any:  # fmt: skip
    """`dense_general` under another name. `options`: of `dense`."""
    require_recipe(names.op, recipe)
    x, kernel = to_array(names.op, names.x, x), kernel_operand(names, kernel, QuantizedArray)
    bias = None if bias is None else to_array(names.op, "bias", bias)
    c = Contraction.of(names, contraction, x, kernel)
    batch, rows, kept = c.shapes(x.shape, kernel.shape)
    if bias is not None and bias.shape != (*batch, *kept):
        raise ShapeError(f"{names.op}: bias must be {[*batch, *kept]}, got {list(bias.shape)}")
    dtype = jnp.dtype(dtype_name(names.op, preferred_element_type, x.dtype.name))
    stack = (math.prod(batch),) if batch else ()
    k, n = math.prod(x.shape[a] for a in c.left), math.prod(kept)
    x = _moved(x.astype(jnp.promote_types(x.dtype, dtype)), c.batch_left, c.left).reshape(*stack, *rows, k)
    if isinstance(kernel, QuantizedArray):
        kernel = _matrix(kernel)
    else:
        kernel = _moved(kernel, c.batch_right, c.right).reshape(*stack, n, k)
    bias = None if bias is None else bias.reshape(*stack, n)
    run = functools.partial(dense, recipe=recipe, **options)
    if batch:
        run, state = jax.vmap(run), _folded(names.op, state, batch)
    with _at_precision(names.op, recipe, precision):
        out = run(x, kernel, bias, state=state)
    y, news = out if options.get("return_state") else (out, None)
    y = y.reshape(*batch, *rows, *kept).astype(dtype)
    y = y if c.order is None else y.transpose(c.order)
    if news is None:
        return y
    return y, jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), news) if batch else news


def _moved(x: Array, batch: Axes, last: Axes) -> Array:
    """Returns x with its batch axes first and its contracted axes last."""
    return x.transpose(*batch, *(a for a in range(x.ndim) if a not in (*batch, *last)), *last)


def _matrix(q: QuantizedArray) -> QuantizedArray:
    """Returns a quantized kernel [*kept, K] as [N, K]. Its scales have two axes already."""

    def folded(data: Array | None, transposed: bool) -> Array | None:
        return data if data is None or transposed else data.reshape(-1, data.shape[-1])

    return dataclasses.replace(
        q,
        leading=(math.prod(q.leading),),
        rowwise_data=folded(q.rowwise_data, False),
        columnwise_data=folded(q.columnwise_data, q.format.columnwise == "transposed"),
    )


def _folded(op: str, state: Any, batch: Axes) -> Any:
    """Returns states whose arrays have the axes `batch` in front, with one axis for them. **Raises** ValueError."""
    if state is None:
        return None
    require_states(op, state)
    for name, held in state.items():
        if has_ref(held):
            raise ArgumentError(
                f"{op}: with batch axes states must be arrays; take them from references by read_states"
            )
        if held.scale.shape != (*batch, 1):
            raise ShapeError(
                f"{op}: each element of the batch {list(batch)} has its own scales; the state of {name!r} has scales "
                f"{list(held.scale.shape)}, not {[*batch, 1]}; init_dense_general_state makes it"
            )
    return jax.tree.map(lambda a: a.reshape(math.prod(batch), *a.shape[len(batch) :]), state)


def _at_precision(op: str, recipe: Recipe | None, precision: Any) -> Any:
    """Returns the context in which products in high precision have a precision. **Raises** ValueError."""
    if precision is None:
        return contextlib.nullcontext()
    try:
        wanted = jax.lax.Precision(precision)
    except ValueError:
        raise ValueError(f"{op}: precision must be a jax.lax.Precision for both operands, got {precision!r}") from None
    if recipe is not None and wanted != jax.lax.Precision.DEFAULT:
        raise ValueError(f"{op}: the recipe decides on precision, and precision={precision} was given; pass None")
    return jax.default_matmul_precision(wanted.name.lower())


# --- contractions ---


class Contraction(NamedTuple):
    """Which axes a product contracts, and which it keeps in both operands, none of them negative.

    `order`: the axes of the result by their place in [*batch, *rows, *kept]; None keeps that order.
    """

    left: Axes
    right: Axes
    batch_left: Axes
    batch_right: Axes
    order: Axes | None = None

    @staticmethod
    def of(names: Names, contraction: Any, x: Any, kernel: Any) -> Contraction:
        """Returns the contraction that fits these operands. **Raises** ValueError, NotImplementedError."""
        made = of_equation if isinstance(contraction, str) else _of_numbers
        c, held = made(names, contraction, x.ndim, kernel.ndim), isinstance(kernel, QuantizedArray)
        if not c.left:
            raise UnsupportedError(f"{names.op}: {contraction} contracts nothing")
        if held and (c.batch_left or c.right != (kernel.ndim - 1,)):
            raise UnsupportedError(
                f"{names.op}: a quantized {names.weight} must be a kernel [..., K] whose last axis alone is "
                f"contracted, without batch axes, got {list(kernel.shape)} and {contraction}; quantize the kernel in "
                "this layout"
            )
        pairs = [([x.shape[a] for a in c.batch_left], [kernel.shape[a] for a in c.batch_right])]
        ours, theirs = ([v.shape[a] for a in axes] for v, axes in ((x, c.left), (kernel, c.right)))
        pairs.append(([math.prod(ours)], [math.prod(theirs)]) if held else (ours, theirs))
        if any(a != b for a, b in pairs):
            raise ShapeError(
                f"{names.op}: {names.x} {list(x.shape)} and {names.weight} {list(kernel.shape)} do not fit "
                f"{contraction}"
            )
        return c

    def shapes(self, x: tuple[Any, ...], kernel: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Returns the lengths of the result's axes: batch, rows and kept."""
        used_left, used_right = (*self.batch_left, *self.left), (*self.batch_right, *self.right)
        rows = tuple(n for a, n in enumerate(x) if a not in used_left)
        return tuple(x[a] for a in self.batch_left), rows, tuple(n for a, n in enumerate(kernel) if a not in used_right)


def _of_numbers(names: Names, numbers: Any, left: int, right: int) -> Contraction:
    """Returns the contraction of `jax.lax.dot_general`'s dimension numbers, for operands of these ranks."""
    try:
        pairs = [[tuple(int(a) for a in side) for side in pair] for pair in numbers]
        (contracted, (batch_left, batch_right)) = pairs
        axes = [(*contracted[0], *batch_left), (*contracted[1], *batch_right)]
    except (TypeError, ValueError, IndexError):
        raise ArgumentError(
            f"{names.op}: contraction must be an einsum equation or dimension numbers, ((axes of {names.x}, axes of "
            f"{names.weight}), (batch axes of both)), got {numbers!r}"
        ) from None
    for used, rank in zip(axes, (left, right), strict=True):
        if not all(-rank <= a < rank for a in used) or len({a % rank for a in used}) != len(used):
            raise ShapeError(f"{names.op}: {numbers} does not name different axes of operands with {left} and {right}")
    of_left, of_right = [[tuple(a % r for a in side) for side, r in zip(p, (left, right), strict=True)] for p in pairs]
    return Contraction(*of_left, *of_right)


def of_equation(names: Names, equation: str, left: int, right: int) -> Contraction:
    """Returns the contraction of an einsum equation, for operands of these ranks."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise ValueError(f'{names.op}: {equation!r} must have two operands and name its result after "->"')
    ours, theirs = (_labels(names.op, equation, t, r) for t, r in zip(operands.split(","), (left, right), strict=True))
    dots = max((label for label in (*ours, *theirs) if isinstance(label, int)), default=-1) + 1
    out = _labels(names.op, equation, result, len(result.replace("...", "")) + dots * ("..." in result))
    both = [label for label in theirs if label in ours]
    contracted, batch = ([label for label in both if (label in out) == stays] for stays in (False, True))
    made = [
        *batch,
        *(label for label in ours if label not in theirs),
        *(label for label in theirs if label not in ours),
    ]
    if not set(out) <= set(made):
        raise ValueError(f"{names.op}: the result of {equation!r} has axes that neither operand has")
    if len(out) != len(made):
        raise UnsupportedError(f"{names.op}: {equation!r} sums an axis of one operand; sum it before the product")

    def axes(side: list[Any], labels: list[Any]) -> Axes:
        return tuple(side.index(label) for label in labels)

    order = axes(made, out)
    return Contraction(
        *(axes(ours, contracted), axes(theirs, contracted), axes(ours, batch), axes(theirs, batch)),
        None if order == tuple(range(len(order))) else order,
    )


def kernel_axes(names: Names, equation: str, rank: int) -> tuple[Axes, Axes]:
    """Returns the batch axes and the contracted axes of a kernel of this rank, which do not depend on the input."""
    left, _, right = equation.replace(" ", "").partition("->")[0].partition(",")
    letters, dots = len(left.replace("...", "")), rank - len(right.replace("...", ""))
    c = of_equation(names, equation, letters + dots * ("..." in left), rank)
    return c.batch_right, c.right


def _labels(op: str, equation: str, term: str, rank: int) -> list[Any]:
    """Returns the label of each axis of a term: its letter, or for axes of "..." their number from the right."""
    before, dots, after = term.partition("...")
    more = rank - len(before) - len(after)
    if more < 0 or (more and not dots):
        raise ShapeError(f"{op}: {term!r} of {equation!r} does not fit an operand with {rank} axes")
    labels = [*before, *reversed(range(more)), *after]
    if not (before + after).isalpha() and before + after:
        raise ValueError(f'{op}: {term!r} of {equation!r} must consist of letters and at most one "..."')
    if len(set(labels)) != len(labels):
        raise UnsupportedError(f"{op}: {term!r} of {equation!r} takes a diagonal")
    return labels
