"""Kernels that are quantized before a call: held quantized, or kept from an earlier microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from diptych.common.errors import ShapeError
from diptych.common.layers.held import require_same
from diptych.common.layers.plan import held_quantizer
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import Recipe
from diptych.jax.layers import quantize
from diptych.jax.layers.options import CallState, Options
from diptych.jax.layers.products import recorded
from diptych.jax.primitives import checks
from diptych.jax.state.carry import has_ref, returned, viewed
from diptych.jax.state.scales import ScaleState, check_states, group_axes
from diptych.jax.tensors.copies import Q, as_bytes, named, only

Tree = TypeVar("Tree")

Array = jax.Array


def high_precision(kernel: Any, dtype: Any) -> Array:
    """Returns a kernel as an array, in `dtype` if it is held quantized."""
    return kernel if isinstance(kernel, jax.Array) else kernel.dequantize(dtype)


def held_copies(kernel: Q, options: Options, copies: Any) -> tuple[Q | None, Q | None]:
    """Returns the two copies of a quantized kernel, None for one that it lacks. **Raises** ValueError for copies of
    another format, rotation or kind of amax."""
    op, held, plan = options.op, kernel.quantizer, options.plan.weight
    if copies is not None:
        raise ValueError(f"{op}: kernel is quantized already, and copies of one were given too")
    remedy = "run it by the recipe that it was quantized with"
    for quantizer, columnwise in ((plan.rowwise, False), (plan.columnwise, True)):
        if quantizer is not None:
            there = (kernel.columnwise_data if columnwise else kernel.rowwise_data) is not None
            sides = there and not columnwise, there and columnwise
            require_same(f"{op}: the kernel", held, quantizer, *sides, remedy)
    kernel = as_bytes(kernel)
    rowwise = None if kernel.rowwise_data is None else only(kernel, False, op)
    return rowwise, None if kernel.columnwise_data is None else only(kernel, True, op)


def quantize_kernel(
    kernel: Array,
    recipe: Recipe,
    *,
    module: str = "linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    return_state: bool = False,
    rng: Array | None = None,
) -> Any:
    """Quantizes a kernel once for all microbatches of a step: `dense(x, kernel, copies=...)` uses the copies. For a
    stack [G, N, K], pass `module="grouped_linear"`, and the copies to `grouped_dense`.

    Quantize again when the kernel changes. The copies have no derivative: the kernel's gradient is that of `dense`.

    **Arguments:** as `dense`; pass the `rng` that `dense` gets, so that both round alike.

    **Returns:** (rowwise, columnwise) copies, or ((rowwise, columnwise), state) with `return_state`: the kernel's amax
    is recorded here, and not by `dense`.

    **Raises:** as `dense`; ValueError if the amax would be lost.
    """
    options = Options(recipe, module, name, group=group_axes(recipe))
    kernel = jax.lax.stop_gradient(checks.to_array("quantize_kernel", "kernel", kernel))
    if kernel.ndim not in (2, 3):
        raise ShapeError(f"quantize_kernel: kernel must be [N, K], or a stack [G, N, K], got {list(kernel.shape)}")
    states = check_states("quantize_kernel", state, options.plan, recipe)
    s = options.schedule(True, False)
    copies, amaxes = quantize.quantize_weight(kernel, s.w, options, CallState(viewed(states, ()), rng))
    if lost := [slot for slot in amaxes if not (return_state or has_ref(states[slot]))]:
        raise ValueError(f"quantize_kernel: the amax of {', '.join(lost)} would be lost: pass return_state=True")
    news = returned(states, recorded(viewed(states, ()), amaxes, options))
    return (named(copies), news) if return_state else named(copies)


def kernel_quantizer(recipe: Recipe, module: str = "linear", name: str = "") -> Quantizer | None:
    """Returns the quantizer of a kernel that is held quantized; None: it stays in high precision.

    Under delayed scaling the scale is computed from the kernel itself. **Raises** ValueError for a recipe that
    quantizes the kernel in two ways, or stochastically.
    """
    return held_quantizer("quantize_params", recipe, module, name, "kernel")


def quantize_params(
    params: Tree,
    recipe: Recipe,
    where: Callable[[str, Array], bool],
    *,
    module: str = "linear",
    name: str | Callable[[str], str] = "",
) -> Tree:
    """Returns a tree of parameters whose kernels are held quantized, and in no other precision.

    `dense` takes such a kernel, and `grouped_dense` such a stack; its gradient comes through `main_grad`, for an
    optimizer that steps a master copy. The tree may be an `nnx.State`.

    **Arguments:** `where(path, leaf)`: whether a leaf is a kernel [N, K], or with `module="grouped_linear"` a stack
    [G, N, K]; paths are joined by dots, without the attribute `value` that flax's variables and boxes add. `name`: the
    roles' name, or a function of the path.

    **Returns:** the tree, with a `QuantizedArray` of bytes for each kernel that the recipe quantizes, or for a stack a
    `QuantizedStack`, in which each kernel has its own scales.

    **Raises:** ValueError if `where` selects nothing, or a leaf that is neither a matrix nor a stack of them;
    TypeError for a stack if the quantizer has its own `quantize_impl`.
    """
    picked = 0

    def convert(path: Any, leaf: Any) -> Any:
        nonlocal picked
        boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        where_it_is = ".".join(_part(p) for p in (path[:-1] if boxed else path))
        if not where(where_it_is, leaf):
            return leaf
        picked += 1
        if leaf.ndim not in (2, 3):
            raise ShapeError(
                f"quantize_params: {where_it_is} must be [N, K], or a stack [G, N, K], got {list(leaf.shape)}"
            )
        quantizer = kernel_quantizer(recipe, module, name(where_it_is) if callable(name) else name)
        return leaf if quantizer is None else quantize.verb_of(leaf)(leaf, quantizer, as_bytes=True)

    out = jax.tree_util.tree_map_with_path(convert, params)
    if picked == 0:
        raise ValueError("quantize_params: `where` picked no leaf of params")
    return out


def _part(key: Any) -> str:
    return str(next(v for v in (getattr(key, a, None) for a in ("key", "name", "idx")) if v is not None))
