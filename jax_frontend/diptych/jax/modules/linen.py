"""Modules for flax's linen over `dense` and general products.

    layer = dl.Dense(128, recipe=recipe)                      # instead of nn.Dense(128)
    layer = nn.Dense(128, dot_general_cls=functools.partial(dl.DotGeneral, recipe=recipe))

Parameters have linen's names and layout: kernels are [in, out]. Each module's path in the model, joined by dots, is the
name by which a recipe chooses quantizers. What a recipe keeps between calls:

- States of delayed scaling are in flax's collection `_overwrite_with_gradient`, whose gradient is the next value. A
  step differentiates with respect to all variables, and `update_states` returns them with the states for the next step:

      grads = jax.grad(lambda variables: loss(model.apply(variables, x)))(variables)
      variables = dl.update_states(variables, grads)         # states alone; the optimizer updates "params"

- Random bits of stochastic rounding are drawn from the stream `stochastic_rounding`: pass another key in each step, as
  `model.apply(variables, x, rngs={"stochastic_rounding": key})`.

For inference, `hold_kernels` quantizes kernels once. They are then in the collection `held_kernels`, in the layout of
products, [out, in], and no longer among the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.layers.checks import Names
from diptych.common.recipes import Recipe
from diptych.jax.functional.quantize import quantize
from diptych.jax.layers.general import Contraction, dense_general
from diptych.jax.layers.held import kernel_quantizer
from diptych.jax.layers.layernorm_mlp import PARTS, part_name
from diptych.jax.layers.linear import dense
from diptych.jax.layers.quantize import verb_of
from diptych.jax.modules.serialize import register_with_flax
from diptych.jax.modules.shared import kept, next_states, random_bits, refuse_quantized, without_random_bits
from diptych.jax.tensors.quantized import QuantizedArray

register_with_flax()

Array = jax.Array
Axes = tuple[str | None, ...]

STATES = OVERWRITE_WITH_GRADIENT
"""The collection of the states of delayed scaling."""

RNG = "stochastic_rounding"
"""The stream of random bits of stochastic rounding."""

HELD = "held_kernels"
"""The collection of kernels that are held quantized, as `hold_kernels` makes it."""

_PARTS = dict(zip(("wi_kernel", "wo_kernel"), PARTS, strict=True))
_REMEDY = (
    f"pass rngs={{{RNG!r}: key}} to apply, another key in each step; nn.scan and nn.vmap hand the stream on if "
    "split_rngs names it"
)
KERNEL_INIT = nn.initializers.lecun_normal()
BIAS_INIT = nn.initializers.zeros_init()


def update_states(variables: Mapping[str, Any], grads: Mapping[str, Any], axis_name: Any = None) -> dict[str, Any]:
    """Returns a model's variables with the states for the next step; see `diptych.jax.update_state`.

    With flax's `TrainState`, whose `params` are then all variables, pass on the states as gradients:

        news = dl.update_states(state.params, grads)
        state = state.apply_gradients(grads={**grads, dl.STATES: news[dl.STATES]})

    **Arguments:** `variables`: as `init` made them; without delayed scaling they are returned as they are. `grads`: the
    gradients of a step with respect to them. `axis_name`: mesh axes over which amaxes are reduced first, inside
    shard_map. States may be stacked, as by `nn.scan` or `nn.vmap`.

    **Raises:** TypeError if the gradients lack states of the model; ValueError for states that were summed, as those of
    a module that is called twice are, or averaged. Under jit their scales become NaN.
    """
    out = dict(variables)
    if STATES in out:
        remedy = f"differentiate with respect to all variables, the collection {STATES!r} too"
        out[STATES] = next_states("update_states", out[STATES], grads.get(STATES), axis_name, remedy)
    return out


def hold_kernels(model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns a model's variables with the kernels of its diptych modules quantized once, by their recipes.

    They are in the collection `HELD`, and no longer in "params". The modules then compute the same bits, except under
    delayed scaling, where a held kernel has a scale computed from itself, and each kernel of a stack its own. Held
    kernels have no gradient. Under `nn.scan` and `nn.vmap` over layers, pass `variable_axes={..., dl.HELD: 0}`, or the
    kernels there stay as they are.

    **Arguments:** `variables`: as `init` made them. Others: of one call, `model.apply(variables, *args, **kwargs)`.

    **Raises:** ValueError if no module that is called has a kernel that its recipe quantizes, or for a recipe that
    quantizes the kernel in two ways, or stochastically; NotImplementedError for a kernel with batch axes.
    """
    _, found = model.apply(variables, *args, mutable=[HELD], **kwargs)
    held = traverse_util.flatten_dict(found.get(HELD, {}))
    if not held:
        raise ValueError("hold_kernels: the model has no diptych module whose recipe quantizes its kernel")
    rest = {k: v for k, v in traverse_util.flatten_dict(dict(variables["params"])).items() if k not in held}
    return {**variables, "params": traverse_util.unflatten_dict(rest), HELD: traverse_util.unflatten_dict(held)}


class Layer(nn.Module, kw_only=True):
    """Base of the linen modules: holds the recipe, and as variables what the recipe keeps between calls."""

    recipe: Recipe | None
    kind = "linear"  # of the roles

    @nn.nowrap
    def _run(self, f: Any, *args: Any, batch: tuple[int, ...] = (), **options: Any) -> Any:
        """Calls a layer's function with the recipe, roles, states and random bits. `batch`: axes in front of states."""
        op, module, name = type(self).__name__, self.kind, ".".join(self._role())
        make, needs_rng = kept(op, self.recipe, module, name, batch)
        given: dict[str, Any] = {}
        if make is not None:
            given["state"] = self._states(op, make)
        if needs_rng and (self.has_rng(RNG) or self.has_rng("params")):  # `init` has the latter alone
            given["rng"] = random_bits(self.make_rng(RNG))
        out = f(*args, recipe=self.recipe, module=module, name=name, **given, **options)
        return without_random_bits(_REMEDY, out) if needs_rng and "rng" not in given else out

    @nn.nowrap
    def _role(self) -> tuple[str, ...]:
        """Returns the names that, joined by dots, are the name of the roles."""
        return self.path

    @nn.nowrap
    def _product(self, contraction: Any, x: Any, kernel: Any, bias: Any = None, **options: Any) -> Array:
        """Returns `dense_general` of these operands."""
        c = Contraction.of(Names(type(self).__name__, "the input", "the kernel"), contraction, x, kernel)
        batch = tuple(x.shape[a] for a in c.batch_left)
        options["contraction"] = contraction
        return self._run(dense_general, x, kernel, bias, batch=batch, **options)

    @nn.nowrap
    def _states(self, op: str, make: Any) -> Any:
        if not self.has_variable(STATES, "states") and not self.is_mutable_collection(STATES):
            raise ArgumentError(
                f"{op} at {'/'.join(self.path) or 'the root'}: {type(self.recipe).__name__} scales by earlier steps' "
                f"amaxes, and the variables lack their states: pass the collection {STATES!r} that init made to apply; "
                "nn.scan and nn.vmap hand it on if variable_axes names it"
            )
        return self.variable(STATES, "states", make).value


class Weighted(Layer, kw_only=True):
    """Base of the linen modules that have parameters."""

    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = KERNEL_INIT
    bias_init: Any = BIAS_INIT

    @nn.nowrap
    def _param(self, name: str, init: Any, shape: tuple[int, ...], axes: Axes) -> Any:
        """Returns a parameter. `axes`: logical names of its dimensions, or () for none."""
        refuse_quantized(type(self).__name__, self.get_variable("params", name))
        return self.param(name, named(init, axes), shape, self.param_dtype)

    @nn.nowrap
    def _bias(self, shape: tuple[int, ...], axes: Axes, name: str = "bias") -> Any:
        return self._param(name, self.bias_init, shape, axes) if self.use_bias else None

    @nn.nowrap
    def _kernel(self, shape: tuple[int, ...], axes: Axes, name: str = "kernel") -> Any:
        """Returns a kernel [in, ...out] as a matrix [out, in]. It is initialized as the matrix [in, out]."""
        flat = shape[0], math.prod(shape[1:])
        return self._weight(name, reshaped(self.kernel_init, flat), shape, axes, lambda kernel: kernel.reshape(flat).T)

    @nn.nowrap
    def _weight(
        self, name: str, init: Any, shape: tuple[int, ...], axes: Axes, move: Callable[[Array], Array], hold: Any = None
    ) -> Any:
        """Returns a kernel in the layout of products: as it is held quantized, or as `move` brings it there. `hold`:
        quantizes a kernel to be held; None for the verb of its dimensions."""
        if self.has_variable(HELD, name):
            return self.get_variable(HELD, name)
        kernel = move(self._param(name, init, shape, axes))
        if self.recipe is not None and self.is_mutable_collection(HELD) and not self.is_initializing():
            role = ".".join(self._role())
            role = part_name(role, _PARTS[name]) if name in _PARTS else role
            quantizer = kernel_quantizer(self.recipe, self.kind, role)
            if quantizer is not None:
                self.put_variable(HELD, name, (hold or verb_of(kernel))(kernel, quantizer, as_bytes=True))
        return kernel

    @nn.nowrap
    def _input(self, x: Any) -> Array:
        return jnp.asarray(x, self.dtype)


def named(init: Any, axes: Axes) -> Any:
    """Returns an initializer whose arrays carry logical names of their dimensions, if there are any."""
    return nn.with_logical_partitioning(init, axes) if axes else init


def reshaped(init: Any, flat: tuple[int, ...]) -> Any:
    """Returns an initializer that draws values of another shape, by which initializers scale them."""

    def wrapped(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        value = init(key, flat, dtype)
        if isinstance(value, nn.meta.AxisMetadata):
            return nn.meta.replace_boxed(value, nn.meta.unbox(value).reshape(shape))
        return value.reshape(shape)

    return wrapped


class General(Weighted, kw_only=True):
    """Base of linear layers over any axes, whose kernels are in the layout of products [*batch, *kept, *contracted]."""

    @nn.nowrap
    def _contraction(self, contraction: Any, x: Any, shape: tuple[int, ...]) -> Contraction:
        names = Names(type(self).__name__, "the input", "the kernel")
        return Contraction.of(names, contraction, x, jax.ShapeDtypeStruct(shape, self.param_dtype))

    @nn.nowrap
    def _general_kernel(self, c: Contraction, init: Any, shape: tuple[int, ...], axes: Axes) -> Any:
        first = (*c.batch_right, *(a for a in range(len(shape)) if a not in (*c.batch_right, *c.right)))

        def hold(kernel: Array, quantizer: Any, **options: Any) -> Any:
            if c.batch_right:
                raise UnsupportedError(f"{type(self).__name__}: a kernel with batch axes cannot be held quantized")
            return quantize(kernel.reshape(*kernel.shape[: len(first)], -1), quantizer, **options)

        return self._weight("kernel", init, shape, axes, lambda kernel: kernel.transpose(*first, *c.right), hold)

    @nn.nowrap
    def _contract(self, c: Contraction, x: Any, kernel: Any, bias: Any) -> Array:
        right = (-1,) if isinstance(kernel, QuantizedArray) else tuple(range(-len(c.right), 0))
        numbers = (c.left, right), (c.batch_left, tuple(range(len(c.batch_left))))
        y = self._product(numbers, x, kernel, bias)
        return y if c.order is None else y.transpose(c.order)


class Dense(Weighted):
    """A linear layer whose three products run in the low precision of `recipe`; otherwise as `nn.Dense`.

    **Arguments:** `features`, `use_bias`, `param_dtype`, `kernel_init`, `bias_init`: as in `nn.Dense`. `dtype`: the
    input is cast to it; None keeps the input's dtype, which is the result's. The kernel is quantized from its own
    dtype. `kernel_axes`, `bias_axes`: logical names of the dimensions, for `nn.get_partition_spec`; () for none.
    `recipe`: None gives the plain product.

    Parameters: `kernel` [in, features], `bias` [features].

    **Raises:** TypeError if `recipe` is no recipe, or if its states or random bits are missing; a call raises as
    `diptych.jax.dense`.
    """

    features: int
    kernel_axes: Axes = ()
    bias_axes: Axes = ()

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """[..., in] to [..., features]."""
        x = self._input(inputs)
        kernel = self._kernel((x.shape[-1], self.features), self.kernel_axes)
        return self._run(dense, x, kernel, self._bias((self.features,), self.bias_axes))


class DenseGeneral(General):
    """A linear layer over any axes in the low precision of `recipe`; otherwise as `nn.DenseGeneral`.

    **Arguments:** `features`, `axis`, `batch_dims`: as in `nn.DenseGeneral`: ints or several, the widths of the
    result's last axes, the axes of the input that are contracted (in ascending order), and leading axes that the
    kernel has too. Others: as in `Dense`.

    Parameters: `kernel` [*batch, *axes, *features], `bias` [*batch, *features]. Each element of the batch has scales
    and states of its own.

    **Raises:** as `Dense`; ValueError for `batch_dims` that are not the leading axes.
    """

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    batch_dims: Sequence[int] = ()
    kernel_axes: Axes = ()
    bias_axes: Axes = ()

    @nn.compact
    def __call__(self, inputs: Any) -> Array:
        """[*batch, ..., *axes] to [*batch, ..., *features]."""
        x, features = self._input(inputs), as_tuple(self.features)
        axis, batch_dims = (tuple(sorted(a % x.ndim for a in as_tuple(axes))) for axes in (self.axis, self.batch_dims))
        b, n = len(batch_dims), len(axis)
        if set(batch_dims) != set(range(b)):
            raise ValueError(f"DenseGeneral: batch_dims must be the leading axes, got {self.batch_dims}")
        batch, contracted = (tuple(x.shape[a] for a in axes) for axes in (batch_dims, axis))
        flat = math.prod(batch) * math.prod(contracted), math.prod(features)
        init = reshaped(self.kernel_init, flat)
        shape = (*batch, *contracted, *features)
        numbers = (axis, tuple(range(b, b + n))), (batch_dims, tuple(range(b)))
        c = self._contraction(numbers, x, shape)
        kernel = self._general_kernel(c, init, shape, self.kernel_axes)
        return self._contract(c, x, kernel, self._bias((*batch, *features), self.bias_axes))


class Einsum(General):
    """An einsum of the input and a kernel in the low precision of `recipe`; otherwise as `nn.Einsum`.

    **Arguments:** `shape`: of the kernel. `einsum_str`: an equation of two operands with "->", as "btd,dhk->bthk"; it
    may be given to the call instead. The kernel's term is letters alone. Others: as in `Dense`.

    Parameters: `kernel`, of `shape`; `bias`, with the axes of the kernel that the result has, in the result's order.

    **Raises:** as `Dense`; ValueError for no equation or one that does not fit; a call raises as `dense_general`.
    """

    shape: Sequence[int]
    einsum_str: str | None = None
    kernel_axes: Axes = ()
    bias_axes: Axes = ()

    @nn.compact
    def __call__(self, inputs: Any, einsum_str: str | None = None) -> Array:
        """Any shape to the equation's."""
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        x, shape = self._input(inputs), tuple(self.shape)
        c = self._contraction(equation, x, shape)
        kernel = self._general_kernel(c, self.kernel_init, shape, self.kernel_axes)
        operands, _, result = equation.partition("->")
        left, _, right = operands.partition(",")
        bias = None
        if self.use_bias:
            if len(right) != len(shape) or not right.isalpha():
                raise ValueError(f"Einsum: the kernel's term in {equation!r} must be {len(shape)} letters")
            own = [label for label in result if label in right]  # the order of `dense_general`: batch, then kept
            wanted = sorted(own, key=lambda label: (label not in left, right.index(label)))
            bias = self._bias(tuple(shape[right.index(label)] for label in own), self.bias_axes)
            bias = None if bias is None else bias.transpose([own.index(label) for label in wanted])
        return self._contract(c, x, kernel, bias)


class DotGeneral(Layer):
    """`jax.lax.dot_general` in the low precision of `recipe`, with states and random bits, for layers of flax:

        nn.Dense(128, dot_general_cls=functools.partial(dl.DotGeneral, recipe=recipe))

    The name of the roles is the layer's path. One module serves one product. See `dense_general`, which it calls.
    """

    @nn.nowrap
    def _role(self) -> tuple[str, ...]:
        return self.path[:-1]

    @nn.compact
    def __call__(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        """The input, and the kernel, to their product, in the axes' order of `jax.lax.dot_general`."""
        options = {"precision": precision, "preferred_element_type": preferred_element_type}
        return self._product(dimension_numbers, lhs, rhs, **options)


class EinsumOp(DotGeneral):
    """`jnp.einsum` of an input and a kernel in the low precision of `recipe`, with states and random bits, for layers
    that take a function or module for it, as they take flax's `Fp8Einsum`. See `DotGeneral`."""

    @nn.compact
    def __call__(
        self, equation: str, lhs: Any, rhs: Any, precision: Any = None, preferred_element_type: Any = None
    ) -> Array:
        """An equation, the input, and the kernel to their product."""
        return super().__call__(lhs, rhs, equation, precision, preferred_element_type)


def as_tuple(x: int | Sequence[int]) -> tuple[int, ...]:
    return (x,) if isinstance(x, int) else tuple(x)
