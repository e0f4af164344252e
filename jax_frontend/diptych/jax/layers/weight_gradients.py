"""`dense_vjp`: gradients of kernels that are computed later, or added to buffers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from diptych.common.arguments import require_recipe
from diptych.common.errors import ShapeError
from diptych.common.recipes import Recipe
from diptych.jax.layers.checks import check_operands
from diptych.jax.layers.linear import prepare
from diptych.jax.layers.options import Options
from diptych.jax.layers.products import Needs, backward, forward
from diptych.jax.primitives import checks
from diptych.jax.state.carry import has_ref
from diptych.jax.state.scales import ScaleState, check_states, group_axes
from diptych.jax.tensors.copies import Copies
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("saved",), meta_fields=("op", "run", "shape", "dtype")
)
@dataclasses.dataclass(frozen=True, eq=False)
class Pullback:
    """A backward pass: a pytree of the residuals, called with dy of y's `shape` and `dtype`."""

    op: str
    run: Callable[[Any, Array], Any]
    saved: Any
    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(op: str, run: Callable[[Any, Array], Any], saved: Any, y: Array) -> Pullback:
        return Pullback(op, run, saved, y.shape, y.dtype.name)

    def __call__(self, dy: Array) -> Any:
        dy = checks.to_array(self.op, "dy", dy)
        if dy.shape != self.shape or dy.dtype.name != self.dtype:
            raise ShapeError(
                f"{self.op}: dy must be {self.dtype}{list(self.shape)}, as y, got {dy.dtype.name}{list(dy.shape)}"
            )
        return self.run(self.saved, dy)


def refuse_references(op: str, states: Mapping[str, ScaleState]) -> None:
    """**Raises** ValueError for states in references, which a pullback cannot return."""
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
    """Runs `dense` and returns its pullback, for schedules that compute the kernel's gradient later.

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
