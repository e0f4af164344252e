"""What all nnx modules share: their variables, the update of states, and kernels that are held quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diptych.common.errors import UnsupportedError
from diptych.common.recipes import Recipe
from diptych.jax.layers.held import kernel_quantizer
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at, verb_of
from diptych.jax.modules.shared import kept, next_states, random_bits
from diptych.jax.tensors.quantized import QuantizedCopies

Array = jax.Array
KERNEL_INIT = nnx.initializers.lecun_normal()
BIAS_INIT = nnx.initializers.zeros_init()


class ScaleStates(nnx.Variable[Any]):
    """The states of delayed scaling of one module, as `init_state` makes them."""


class RandomState(nnx.Variable[Any]):
    """The random bits of stochastic rounding of one module, int32 [4] as `rng_state` makes them."""


class HeldKernel(nnx.Variable[Any]):
    """A kernel that is held quantized, as `hold_kernels` makes it: a `QuantizedArray` in the layout of products, [out,
    in], or a `QuantizedStack` [groups, out, in]. It is no `nnx.Param`, so optimizers leave it as it is."""


DIFFERENTIATED = nnx.Any(nnx.Param, ScaleStates)
"""Filter of what a training step differentiates with respect to: parameters, and states of delayed scaling."""


def update_states(model: nnx.Module, grads: Any, axis_name: Any = None) -> None:
    """Writes the states for the next step into a model's `ScaleStates`; see `diptych.jax.update_state`.

    **Arguments:** `grads`: the gradients of a step, with respect to `DIFFERENTIATED`. `axis_name`: mesh axes over which
    amaxes are reduced first, inside shard_map. Modules may be stacks, as `nnx.vmap` makes them for `nnx.scan`.

    **Raises:** TypeError if the gradients lack states of the model; ValueError for states that were summed, as those of
    a module that is called twice are, or averaged. Under jit their scales become NaN.
    """
    old, new = nnx.state(model, ScaleStates), nnx.state(grads, ScaleStates)
    remedy = "differentiate with respect to nnx.DiffState(0, diptych.jax.nnx.DIFFERENTIATED)"
    nnx.update(model, next_states("update_states", old, new, axis_name, remedy))


def hold_kernels(model: nnx.Module) -> None:
    """Quantizes the kernels of a model's diptych modules once, by their recipes, and keeps them in no other precision.

    Each kernel's `nnx.Param` is replaced by a `HeldKernel`. The modules then compute the same bits, except under
    delayed scaling, where a held kernel has a scale computed from itself, and each kernel of a stack its own. Held
    kernels have no gradient; other parameters and inputs do.

    **Raises:** ValueError if no module has a kernel that its recipe quantizes, or for a recipe that quantizes the
    kernel in two ways, or stochastically; NotImplementedError for a kernel with batch axes.
    """
    modules = [m for _, m in nnx.iter_modules(model) if isinstance(m, Layer)]
    if not sum(m._hold() for m in modules):
        raise ValueError("hold_kernels: the model has no diptych module whose recipe quantizes its kernel")


def scoped(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `__call__` so that the ops of a module have its name, or its class's, in profiles and compiled code."""

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(self.name or type(self).__name__):
            return call(self, *args, **kwargs)

    return run


class Layer(nnx.Module):
    """Base of the nnx modules: holds the recipe, and as variables what the recipe keeps between calls."""

    recipe: Recipe | None
    module: str
    name: str
    dtype: Any

    def _keep(
        self, recipe: Recipe | None, module: str, name: str, dtype: Any, rngs: Any, batch: tuple[int, ...] = ()
    ) -> None:
        """Sets the recipe, the roles and the variables. `batch`: axes in front of states."""
        found = kept(type(self).__name__, recipe, module, name, batch)
        self.recipe, self.module, self.name, self.dtype, self.batch = recipe, module, name, dtype, batch
        self.states = nnx.data(None if found.states is None else ScaleStates(found.states))
        self.random = nnx.data(RandomState(random_bits(rngs.params())) if found.rng else None)

    def _roles(self, offsets: int = OFFSETS) -> dict[str, Any]:
        """Returns recipe, roles, states and random bits of one call, which uses this number of offsets."""
        out: dict[str, Any] = {"recipe": self.recipe, "module": self.module, "name": self.name}
        if self.states is not None:
            out["state"] = self.states.get_value()
        if self.random is not None:
            out["rng"] = self.random.get_value()
            self.random.set_value(rng_at(out["rng"], offsets))
        return out

    def _input(self, x: Any) -> Any:
        return x if self.dtype is None else jnp.asarray(x, self.dtype)

    # --- kernels ---

    def _kernels(self) -> tuple[tuple[str, str], ...]:
        """Returns the attributes of the kernels, and the names of their roles."""
        return (("kernel", self.name),)

    def _move(self, kernel: Array) -> Array:
        """Returns a kernel [..., in, out] as [..., out, in]."""
        return jnp.swapaxes(kernel, -2, -1)

    def _kernel(self, attribute: str = "kernel") -> Any:
        """Returns a kernel in the layout of products."""
        variable = getattr(self, attribute)
        value = variable.get_value()
        if isinstance(variable, HeldKernel):
            return value
        if isinstance(value, QuantizedCopies):
            raise UnsupportedError(
                f"{type(self).__name__}: a kernel that is held quantized must be a HeldKernel in the layout of "
                "products, [out, in], as diptych.jax.nnx.hold_kernels makes it; an nnx.Param is in high precision"
            )
        return self._move(value)

    def _hold(self) -> int:
        """Replaces kernels by `HeldKernel`s, and returns their number."""
        held = 0
        for attribute, name in () if self.recipe is None else self._kernels():
            quantizer = kernel_quantizer(self.recipe, self.module, name)  # type: ignore[arg-type]
            if quantizer is not None and not isinstance(getattr(self, attribute), HeldKernel):
                kernel = self._kernel(attribute)
                setattr(self, attribute, HeldKernel(self._verb(kernel)(kernel, quantizer, as_bytes=True)))
                held += 1
        return held

    def _verb(self, kernel: Array) -> Callable[..., Any]:
        return verb_of(kernel)


def param(init: Any, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: Any, metadata: Any = None) -> nnx.Param[Any]:
    """Returns a parameter. `metadata`: of the variable, as in flax's layers."""
    return nnx.Param(init(rngs.params(), shape, dtype), **(metadata or {}))


def optional(wanted: bool, *args: Any) -> Any:
    """`param`, or None if it is not wanted."""
    return nnx.data(param(*args) if wanted else None)


def value(variable: Any) -> Any:
    """Returns a parameter's array; None for None."""
    return None if variable is None else variable.get_value()
