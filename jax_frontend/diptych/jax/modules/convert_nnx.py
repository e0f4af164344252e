"""`convert` for flax's nnx: gives layers a product with state in the place of `jax.lax.dot_general` or `jnp.einsum`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from diptych.common.conversion import ConversionReport, Rules, reason
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.layers.checks import Names
from diptych.jax.layers.general import Contraction, of_equation
from diptych.jax.modules.choose import Choice, Found, announce, choose, make_report, role_name, unconvertible
from diptych.jax.modules.nnx import DotGeneral
from diptych.jax.modules.nnx_base import Layer

_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


class EinsumOp(DotGeneral):
    """A product with state for nnx.Einsum, as its `einsum_op`; see `DotGeneral`."""

    def __call__(self, equation: str, lhs: Any, rhs: Any, **options: Any) -> Any:  # type: ignore[override]
        """The arguments and result of `jnp.einsum` for an input and a kernel."""
        return super().__call__(lhs, rhs, equation, **options)


class _Product(NamedTuple):
    """The product of a layer: its contraction, operands of the right shapes, and the lengths of axes in front of the
    kernel's, which layers have that were stacked by nnx.vmap."""

    contraction: Contraction
    x: Any
    kernel: Any
    stack: tuple[int, ...]


def convert_nnx(model: Any, rules: Rules, rngs: Any, verbose: bool) -> ConversionReport:
    """Converts layers of a model in place, and returns the report; see `convert`."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ArgumentError(f"convert: rngs must be an nnx.Rngs, got {type(rngs).__name__}")
    rngs = nnx.Rngs(0) if rngs is None else rngs
    modules = [("/".join(map(str, path)), module) for path, module in nnx.iter_modules(model)]
    layers = {path: module for path, module in modules if isinstance(module, _LAYERS)}
    choices = {path: _choice(rules, path, layer) for path, layer in layers.items()}
    found = _found(modules, choices)
    report = make_report(rules, found)
    wanted = {
        path: layer for path, layer in layers.items() if choices[path].recipe is not None and _held(layer) is None
    }
    made = {path: _made(path, layer, choices[path], rngs) for path, layer in wanted.items()}
    for path, product in made.items():  # after all are made, which may raise
        setattr(layers[path], _attribute(layers[path]), nnx.data(product))
    announce(report, found, verbose)
    return report


def _choice(rules: Rules, path: str, layer: Any) -> Choice:
    """Returns the choice for a layer. **Raises** ValueError if a rule gives a converted one a recipe."""
    rule, held = rules.find(path), _held(layer)
    if held is not None:
        if rule is not None and rule.recipe is not None:
            raise ValueError(
                f"convert: {path!r} is converted already, by {type(held.recipe).__name__}; give all rules at once, or "
                "make the model anew"
            )
        return Choice(held.recipe)
    if departs := _departs(layer):
        return unconvertible(rules, path, departs)
    try:
        product = _product(layer)
    except (UnsupportedError, ValueError) as error:
        return unconvertible(rules, path, str(error).removeprefix("convert: "))
    return choose(rules, path, product.contraction, product.x, product.kernel, layer.precision)


def _held(layer: Any) -> DotGeneral | None:
    """Returns the product with state that a layer has already."""
    held = getattr(layer, _attribute(layer))
    return held if isinstance(held, DotGeneral) else None


def _attribute(layer: Any) -> str:
    return "einsum_op" if isinstance(layer, nnx.Einsum) else "dot_general"


def _departs(layer: Any) -> str:
    """Returns how a layer departs from flax's; empty if it does not."""
    base = next(cls for cls in _LAYERS if isinstance(layer, cls))
    call = type(layer).__call__
    if call is not base.__call__ and not call.__module__.startswith("flax."):
        return "overrides __call__"
    if getattr(layer, "dot_general_cls", None) is not None:
        return "has a dot_general_cls of its own"
    held = getattr(layer, _attribute(layer))
    if held is None or held is jax.lax.dot_general or held is jnp.einsum:
        return ""
    return f"has a product of its own as {_attribute(layer)}"


def _product(layer: Any) -> _Product:
    """Returns a layer's product. **Raises** NotImplementedError or ValueError unless it is of an input and a matrix."""
    shape = layer.kernel.get_value().shape
    if isinstance(layer, nnx.Einsum):
        rank, equation = len(layer.kernel_shape), layer.einsum_str
        left, _, right = equation.partition("->")[0].partition(",")
        dots = rank - len(right.replace("...", ""))
        rank_x = len(left.replace("...", "")) + dots * ("..." in left)
        c, own = of_equation(Names("convert", "the input", "the kernel"), equation, rank_x, rank), layer.kernel_shape
    elif isinstance(layer, nnx.LinearGeneral):
        batch, k = len(layer.batch_axis), len(layer.in_features)
        first, inner = tuple(range(batch)), tuple(range(batch, batch + k))
        c, rank_x = Contraction(inner, inner, first, first), batch + k
        own = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
    else:
        c, rank_x, own = Contraction((0,), (0,), (), ()), 1, (layer.in_features, layer.out_features)
    stack = shape[: len(shape) - len(own)]
    if shape != (*stack, *own):
        raise ValueError(f"convert: holds a kernel {list(shape)}, which is neither {list(own)} nor a stack of such")
    of_x = [1] * rank_x
    for a, b in zip((*c.left, *c.batch_left), (*c.right, *c.batch_right), strict=True):
        of_x[a] = own[b]
    x, kernel = (jax.ShapeDtypeStruct(tuple(s), jnp.float32) for s in (of_x, own))
    return _Product(c, x, kernel, stack)


def _made(path: str, layer: Any, choice: Choice, rngs: nnx.Rngs) -> Any:
    """Returns the product with state for a layer; for a stack of layers, a stack of them."""
    product, kind = _product(layer), EinsumOp if isinstance(layer, nnx.Einsum) else DotGeneral
    batch = tuple(product.kernel.shape[a] for a in product.contraction.batch_right)

    def make(rngs: nnx.Rngs) -> Any:
        return kind(choice.recipe, batch=batch, name=role_name(path), rngs=rngs)

    for size in reversed(product.stack):
        make = nnx.split_rngs(splits=size)(nnx.vmap(make))
    return make(rngs)


# --- the report ---


def _found(modules: list[tuple[str, Any]], choices: dict[str, Choice]) -> list[Found]:
    """Returns the modules with parameters of their own. Tied ones count at a module that quantizes, if there is one."""
    owners: dict[int, str] = {}

    def quantizes(path: str, module: Any) -> bool:
        return choices[path].recipe is not None if path in choices else isinstance(module, Layer)

    for wanted in (True, False):
        for path, module in modules:
            if quantizes(path, module) == wanted:
                for p in _own(module):
                    owners.setdefault(id(p), path)
    found = []
    for path, module in modules:
        if own := _own(module):
            count = sum([math.prod(p.get_value().shape) for p in own if owners[id(p)] == path])
            choice, recipe = choices.get(path), module.recipe if isinstance(module, Layer) else None
            ranks = [p.get_value().ndim for p in own]
            why = "" if choice or recipe else reason(isinstance(module, nnx.Embed), ranks, attends=True)
            found.append(Found(path, type(module).__name__, count, choice, why, recipe))
    return found


def _own(module: Any) -> list[Any]:
    """Returns the parameters among a module's attributes, also in lists, tuples and mappings."""
    return list(_params(vars(module)))


def _params(value: Any) -> Iterator[Any]:
    if isinstance(value, nnx.Param):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _params(inner)
