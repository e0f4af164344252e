"""Kernels between steps: copies kept across microbatches, kernels held quantized, gradients computed later."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from diptych.common.arguments import require_recipe
from diptych.common.errors import ShapeError
from diptych.common.plan import held_quantizer
from diptych.common.quantizers import Quantizer
from diptych.common.recipes import Recipe
from diptych.jax.layers import quantize
from diptych.jax.layers.checks import check_operands
from diptych.jax.layers.linear import prepare
from diptych.jax.layers.options import Options
from diptych.jax.layers.products import Needs, backward, forward, recorded
from diptych.jax.primitives import arrays
from diptych.jax.state.carry import has_ref, returned, viewed
from diptych.jax.state.scales import ScaleState, check_states, group_axes
from diptych.jax.tensors.copies import Copies, named
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array
Tree = TypeVar("Tree")


# --- copies kept across microbatches ---


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
    """The copies of a kernel that `dense(x, kernel, copies=...)` uses in every microbatch of a step; of a stack
    [G, N, K] with `module="grouped_linear"`, those that `grouped_dense` uses.

    They follow the kernel's value now; quantize again when it changes. No derivative goes through them: the kernel's
    gradient is that of `dense`.

    **Arguments:** as `dense`; `rng` is the one that `dense` would get, so that both round alike.

    **Returns:** (rowwise, columnwise) copies, or (those, state) with `return_state`: the kernel's amax is recorded
    here, and not by `dense`.

    **Raises:** as `dense`; ValueError where the amax would be lost.
    """
    options = Options(recipe, module, name, group=group_axes(recipe))
    kernel = jax.lax.stop_gradient(arrays.to_array("quantize_kernel", "kernel", kernel))
    if kernel.ndim not in (2, 3):
        raise ShapeError(f"quantize_kernel: kernel must be [N, K], or a stack [G, N, K], got {list(kernel.shape)}")
    states = check_states("quantize_kernel", state, options.plan, recipe)
    s = options.schedule(True, False)
    copies, amaxes = quantize.quantize_kernel(kernel, s.w, options, viewed(states, ()), rng)
    if lost := [slot for slot in amaxes if not (return_state or has_ref(states[slot]))]:
        raise ValueError(f"quantize_kernel: the amax of {', '.join(lost)} would be lost: pass return_state=True")
    news = returned(states, recorded(viewed(states, ()), amaxes, options))
    return (named(copies), news) if return_state else named(copies)


# --- kernels held quantized ---


def kernel_quantizer(recipe: Recipe, module: str = "linear", name: str = "") -> Quantizer | None:
    """The quantizer of a kernel that is held quantized; None: it stays in high precision.

    Under delayed scaling its scale comes from the kernel itself. **Raises** ValueError for a recipe that quantizes the
    kernel in two ways, or stochastically.
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
    """A tree of parameters whose kernels are held quantized, and in no other precision.

    `dense` takes such a kernel, and `grouped_dense` such a stack; its gradient comes through `main_grad`, for an
    optimizer that steps a master copy.

    **Arguments:** `where(path, leaf)`: which leaves are kernels [N, K], or with `module="grouped_linear"` stacks
    [G, N, K]; paths are joined by dots. `name`: the roles' name, or a function of the path.

    **Returns:** the tree, with bytes for each kernel that the recipe quantizes: a `QuantizedArray`, or for a stack a
    `QuantizedStack`, whose scales are each kernel's own.

    **Raises:** ValueError where `where` picks nothing, or a leaf that is neither a matrix nor a stack of them;
    TypeError for a stack by a quantizer with a `quantize_impl` of its own.
    """
    picked = 0

    def convert(path: Any, leaf: Any) -> Any:
        nonlocal picked
        where_it_is = ".".join(_part(p) for p in path)
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


# --- gradients computed later ---


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("saved",), meta_fields=("op", "run", "shape", "dtype")
)
@dataclasses.dataclass(frozen=True, eq=False)
class Pullback:
    """A backward pass: a pytree of what the forward saved, to be called with dy of y's `shape` and `dtype`."""

    op: str
    run: Callable[[Any, Array], Any]
    saved: Any
    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(op: str, run: Callable[[Any, Array], Any], saved: Any, y: Array) -> Pullback:
        return Pullback(op, run, saved, y.shape, y.dtype.name)

    def __call__(self, dy: Array) -> Any:
        dy = arrays.to_array(self.op, "dy", dy)
        if dy.shape != self.shape or dy.dtype.name != self.dtype:
            raise ShapeError(
                f"{self.op}: dy must be {self.dtype}{list(self.shape)}, as y, got {dy.dtype.name}{list(dy.shape)}"
            )
        return self.run(self.saved, dy)


def refuse_references(op: str, states: Mapping[str, ScaleState]) -> None:
    """**Raises** ValueError for states that a pullback could not hand back."""
    if any(has_ref(s) for s in states.values()):
        raise ValueError(f"{op}: the state comes back in the gradients; pass arrays, not references")


def dense_vjp(
    x: Array,
    kernel: Array | QuantizedArray,
    bias: Array | None = None,
    *,
    recipe: Recipe,
    module: str = "linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    rng: Array | None = None,
    copies: Copies | None = None,
    save_original_input: bool = False,
) -> tuple[Array, Pullback]:
    """`dense` and its backward pass taken apart, for schedules that compute the kernel's gradient later.

        y, pullback = dense_vjp(x, kernel, bias, recipe=recipe)
        grads = pullback(dy)                                   # grads.x is there
        main_grad = grads.kernel.accumulate(main_grad)         # when the pipeline has a bubble

    **Arguments, raises:** as `dense`. States are arrays.

    **Returns:** (y, pullback); pullback and `grads.kernel` are pytrees, and may cross `jax.jit`. Inside shard_map the
    gradients are each shard's own.
    """
    op = "dense_vjp"
    require_recipe(op, recipe, optional=False)
    x, kernel, bias, rng = check_operands(x, kernel, bias, rng)
    options = Options(recipe, module, name, save_original_input, returns=True, group=group_axes(recipe))
    states = check_states(op, state, options.plan, recipe)
    refuse_references(op, states)
    array, copies, _ = prepare(kernel, options, copies, None)
    (y, _), saved = forward(options, Needs.every(kernel, bias, states), x, array, bias, states, rng, copies)
    return y, Pullback.of(op, backward, saved, y)
