"""`convert` for flax's linen: the same model, of a class that replaces products while any of its methods runs.

linen makes its layers anew in each call, so there is nothing to replace in the model. The class of a converted model
derives from the model's own, and runs every method under `nn.intercept_methods`; the interceptor gives layers a
`dot_general_cls`. It sees layers wherever flax makes them: in setup, in compact methods, and inside of nn.scan,
nn.remat, nn.vmap and nn.jit.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from diptych.common.conversion import ConversionReport, Rules, reason
from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.common.recipes import Recipe
from diptych.jax.modules.choose import Choice, Found, announce, choose, in_groups, make_report, unconvertible
from diptych.jax.modules.linen import DotGeneral, EinsumOp, Layer

_FLAG, _TRACED = "diptych.convert", "diptych.convert.trace"
_EINSUM = inspect.unwrap(nn.Einsum.__call__)
_LAYERS = (nn.Dense, nn.DenseGeneral, nn.Einsum)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How a model is converted, as an attribute of its class."""

    rules: Rules


@dataclasses.dataclass
class _Trace:
    """Collects the modules of a converted model while `init` is traced, by their paths.

    `number`: of this trace; it is a flag of scopes, so that nn.jit compiles anew and does not run code of an earlier
    trace. `kinds`: the modules' classes. `layers`: what was chosen for each layer, None as long as its product has not
    run. `own`: the recipes of diptych's own modules.
    """

    number: int

    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    layers: dict[str, Choice | None] = dataclasses.field(default_factory=dict)
    own: dict[str, Recipe | None] = dataclasses.field(default_factory=dict)


_trace: contextvars.ContextVar[_Trace | None] = contextvars.ContextVar("diptych_convert_trace", default=None)
_numbers = itertools.count()
_running: contextvars.ContextVar[Any] = contextvars.ContextVar("diptych_convert_running", default=None)


class _Converted:
    """Base of the classes of converted models, before flax's.

    The conversion is no field: flax's transformations of a class make its base anew from all fields.
    """

    conversion: ClassVar[Conversion]
    scope: Any

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.scope is not None:
            _mark(self, self.conversion)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.scope is not None:
            return super().__reduce_ex__(protocol)
        return _converted, (type(self).__mro__[2], self.conversion, _fields(self))

    def _call_wrapped_method(self, fun: Any, args: Any, kwargs: Any) -> Any:
        return self._intercepted(functools.partial(super()._call_wrapped_method, fun, args, kwargs))  # type: ignore[misc]

    @nn.nowrap
    def _intercepted(self, run: Any) -> Any:
        """Runs one of the model's methods under the interceptor."""
        here = self.conversion, None if self.scope is None else self.scope.path
        if self.scope is None or _running.get() == here:
            return run()
        token = _running.set(here)
        try:
            with nn.intercept_methods(functools.partial(_intercept, self.conversion, len(self.scope.path))):
                return run()
        finally:
            _running.reset(token)


def _mark(module: Any, conversion: Conversion) -> None:
    """Writes the conversion into the scopes of a model, and of submodules that it got as fields, which have theirs.

    Scopes hand flags down to modules made later, also inside of flax's transformations. For other flags nn.jit compiles
    anew: it must not run what an unconverted model has compiled.
    """
    trace = _trace.get()
    module.scope.flags = {**module.scope.flags, _FLAG: conversion, **({} if trace is None else {_TRACED: trace.number})}
    for child in module._state.children.values():
        if isinstance(child, nn.Module) and not isinstance(child, _Converted):
            _mark(child, conversion)


@functools.cache
def _converted_class(cls: type, conversion: Conversion) -> type:
    """Returns a model's class with conversion. It keeps its name, from which flax makes the names of submodules."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    methods = {name: _run_intercepted(fn) for name, fn in vars(cls).items() if _transformed(cls, name, fn)}
    return type(cls.__name__, (_Converted, cls), body | methods | {"conversion": conversion})


def _transformed(cls: type, name: str, fn: Any) -> bool:
    """Returns whether a method is that of a transformed class, as nn.remat and nn.jit make them: flax does not run it
    through `_call_wrapped_method`."""
    wrapped = getattr(fn, "__wrapped__", None)
    return wrapped is not None and wrapped is getattr(cls.__base__, name, None)


def _run_intercepted(fn: Any) -> Any:
    @functools.wraps(fn)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._intercepted(functools.partial(fn, self, *args, **kwargs))

    return run


def _converted(cls: type, conversion: Conversion, fields: dict[str, Any]) -> Any:
    """Makes a converted model of a class."""
    return _converted_class(cls, conversion)(**fields)


def _fields(model: Any) -> dict[str, Any]:
    return {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}


def convert_linen(model: Any, rules: Rules, inputs: Any, keywords: Any, verbose: bool) -> tuple[Any, ConversionReport]:
    """Returns the converted model and the report. `inputs`, `keywords`: of `model.init`; see `convert`."""
    if isinstance(model, _Converted):
        raise ValueError("convert: the model is converted already; convert the original, with all rules at once")
    if model.scope is not None:
        raise ArgumentError("convert: the model is bound to variables; convert it first, and bind what is returned")
    if not inputs and not keywords:
        raise ArgumentError(
            "convert: a linen model makes its layers when it is called; pass the arguments of model.init after the "
            "rules, such as jax.ShapeDtypeStruct((8, 128), jnp.int32)"
        )
    made = _converted(type(model), Conversion(rules), _fields(model))
    found = _found(made, inputs, keywords)
    report = make_report(rules, found)
    announce(report, found, verbose)
    return made, report


# --- while the model runs ---


def _intercept(conversion: Conversion, root: int, run: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Runs one method of any module while a converted model runs. `root`: the number of parts of the model's path."""
    layer, trace = context.module, _trace.get()
    if layer.scope is None or layer.scope.flags.get(_FLAG) != conversion:  # of another model that this one applies
        return run(*args, **kwargs)
    path = "/".join(layer.path[root:])
    if trace is not None:
        trace.kinds[path] = type(layer).__name__
        trace.own[path] = layer.recipe if isinstance(layer, Layer) else None
    if not isinstance(layer, _LAYERS):
        return run(*args, **kwargs)
    product = _Product(conversion, path)
    if trace is not None:
        trace.layers.setdefault(path, None)
    if isinstance(layer, nn.Einsum):
        own = inspect.unwrap(context.orig_method.func) is _EINSUM  # not that of a subclass or a transformation
        return _einsum(layer, product, *args, **kwargs) if own else run(*args, **kwargs)
    if layer.dot_general_cls is not None or layer.dot_general is not None:  # the user's, or a product in a clone
        return run(*args, **kwargs)
    object.__setattr__(layer, "dot_general_cls", product)  # flax freezes its modules
    try:
        return run(*args, **kwargs)
    finally:
        object.__setattr__(layer, "dot_general_cls", None)


@dataclasses.dataclass(frozen=True)
class _Product:
    """Makes the product of the layer at `path`; flax calls it as the layer's `dot_general_cls`.

    Equal ones compare and hash alike, because nn.jit hashes a layer's fields to find compiled code.
    """

    conversion: Conversion
    path: str

    def __call__(self) -> Any:
        return self.dot_general

    def dot_general(self, lhs: Any, rhs: Any, numbers: Any, precision: Any = None, **options: Any) -> Any:
        if (recipe := self._recipe(numbers, lhs, rhs, precision)) is None:
            return jax.lax.dot_general(lhs, rhs, numbers, precision, **options)
        return DotGeneral(recipe=recipe)(lhs, rhs, numbers, **options)

    def einsum(self, equation: str, lhs: Any, rhs: Any, precision: Any, dtype: Any) -> Any:
        if (recipe := self._recipe(equation, lhs, rhs, precision)) is None:
            return jnp.einsum(equation, lhs, rhs, precision=precision, preferred_element_type=dtype)
        return EinsumOp(recipe=recipe)(equation, lhs, rhs, preferred_element_type=dtype)

    def _recipe(self, contraction: Any, lhs: Any, rhs: Any, precision: Any) -> Recipe | None:
        choice = choose(self.conversion.rules, self.path, contraction, lhs, rhs, precision)
        if (trace := _trace.get()) is not None:
            trace.layers[self.path] = choice
        return choice.recipe


def _einsum(layer: Any, product: _Product, inputs: Any, einsum_str: str | None = None) -> Any:
    """nn.Einsum's call, which has no argument for the product."""
    equation = nn.merge_param("einsum_str", layer.einsum_str, einsum_str).replace(" ", "")
    kernel, bias, shape = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype), None, ()
    if layer.use_bias:
        of_bias, shape = layer._get_bias_shape(equation, inputs, kernel)
        bias = layer.param("bias", layer.bias_init, of_bias, layer.param_dtype)
    inputs, kernel, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y = product.einsum(equation, inputs, kernel, layer.precision, layer.preferred_element_type)
    return y if bias is None else y + bias.reshape(shape)


# --- the report ---


def _found(made: Any, inputs: Any, keywords: Any) -> list[Found]:
    """Traces `init` of a converted model. Returns its modules with parameters."""
    leaves, tree = jax.tree.flatten((inputs, keywords))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def params(arrays: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return made.init(jax.random.key(0), *args, **kwargs).get("params", {})

    trace = _Trace(next(_numbers))
    token = _trace.set(trace)
    try:
        init = in_groups([rule.recipe for rule in made.conversion.rules], params)
        held_params = nn.meta.unbox(jax.eval_shape(init, arrays))
    except Exception as error:
        error.add_note("convert: raised while model.init was traced; its arguments are passed without its rngs")
        raise
    finally:
        _trace.reset(token)
    found, held_by = [], dict(_held(held_params, ""))
    _take_over(trace, made.conversion.rules, held_by)
    for path, held in held_by.items():
        kind, choice = trace.kinds.get(path, "a scope"), trace.layers.get(path)
        if choice is None and path in trace.layers:
            choice = unconvertible(made.conversion.rules, path, "has a product of its own")
        recipe = trace.own.get(path)
        why = "" if choice or recipe else reason(kind == "Embed", [leaf.ndim for leaf in held], attends=True)
        found.append(Found(path, kind, sum([leaf.size for leaf in held]), choice, why, recipe))
    return found


def _take_over(trace: _Trace, rules: Rules, held_by: dict[str, list[Any]]) -> None:
    """Adds layers to a trace that were not met, since nn.jit runs the code that it compiled for a module at another
    path with the same shapes. **Raises** NotImplementedError unless rules decide alike on all of them."""
    shapes = {path: [(leaf.shape, leaf.dtype) for leaf in held] for path, held in held_by.items()}
    for path in [path for path in held_by if path not in trace.kinds]:
        alike = [other for other in trace.layers if shapes.get(other) == shapes[path]]
        for other in alike:
            if len({rule and rule.recipe for rule in (rules.find(path), rules.find(other))}) > 1:
                raise UnsupportedError(
                    f"convert: nn.jit runs one compiled code for modules at several paths, and the rules give {path!r} "
                    f"and {other!r} different recipes; give them one, or leave nn.jit out of the model and call jax.jit"
                )
            trace.kinds[path], trace.layers[path] = trace.kinds[other], trace.layers[other]


def _held(params: Any, path: str) -> Iterator[tuple[str, list[Any]]]:
    """Yields each module that has parameters of its own: its path and these."""
    if held := [leaf for leaf in params.values() if not isinstance(leaf, Mapping)]:
        yield path, held
    for name, inner in params.items():
        if isinstance(inner, Mapping):
            yield from _held(inner, f"{path}/{name}" if path else name)
