"""Which recipe `convert` gives to one layer, and why it leaves others: the part that knows no framework."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diptych.common.conversion import ConversionReport, ConvertedModule, ConvertWarning, Rules
from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.layers.checks import Names
from diptych.common.layers.plan import LinearPlan, linear_plan
from diptych.common.recipes import Recipe
from diptych.jax.layers.general import Contraction
from diptych.jax.layers.linear import dense
from diptych.jax.state.scales import group_axes, init_state

_TOKENS = 4096  # a multiple of every format's block, so that only the kernel's extents can be refused


@dataclasses.dataclass(frozen=True)
class Choice:
    """The recipe of a layer, or why it is left; `warn`: although a rule gives it a recipe."""

    recipe: Recipe | None
    why: str = ""
    warn: bool = False


def choose(rules: Rules, path: str, contraction: Any, x: Any, kernel: Any, precision: Any) -> Choice:
    """Returns the choice for a layer's product. `contraction`: as in `dense_general`, or made already; of `x` and
    `kernel` only the shapes are read."""
    rule = rules.find(path)
    if rule is None or rule.recipe is None:
        return unconvertible(rules, path, "")
    if not _is_default(precision):
        return unconvertible(rules, path, f"asks for precision {precision}")
    try:
        c = contraction
        if not isinstance(contraction, Contraction):
            c = Contraction.of(Names("convert", "the input", "the kernel"), contraction, x, kernel)
    except UnsupportedError as error:
        return unconvertible(rules, path, str(error).removeprefix("convert: "))
    k, (_, _, kept) = math.prod([kernel.shape[a] for a in c.right]), c.shapes(x.shape, kernel.shape)
    why = misfit(rule.recipe, role_name(path), math.prod(kept), k)
    return unconvertible(rules, path, why) if why else Choice(rule.recipe)


def _is_default(precision: Any) -> bool:
    try:
        return precision is None or jax.lax.Precision(precision) == jax.lax.Precision.DEFAULT
    except ValueError:  # one for each operand, or an algorithm
        return False


def unconvertible(rules: Rules, path: str, why: str) -> Choice:
    """Returns the choice for a layer that is left, for the reason `why` if a rule gives it a recipe."""
    rule = rules.find(path)
    if rule is None:
        return Choice(None, "no rule matches it")
    return Choice(None, why, True) if rule.recipe is not None else Choice(None, f"the rule {rule.pattern!r} left it")


def role_name(path: str) -> str:
    """Returns the name of a layer's roles: its path with dots, as in torch."""
    return path.replace("/", ".")


@dataclasses.dataclass(frozen=True)
class _Planned:
    """A recipe and a role's name, equal for equal plans: layers of many names are then tried once for each shape."""

    recipe: Recipe = dataclasses.field(compare=False)
    name: str = dataclasses.field(compare=False)
    kind: type
    plan: LinearPlan


def misfit(recipe: Recipe, name: str, n: int, k: int) -> str:
    """Returns why a recipe cannot run the products of a kernel [n, k] forward and backward; empty if it can."""
    return _misfit(_Planned(recipe, name, type(recipe), linear_plan(recipe, name=name)), n, k)


@functools.lru_cache(maxsize=1024)
def _misfit(planned: _Planned, n: int, k: int) -> str:
    recipe, name = planned.recipe, planned.name

    def loss(x: Any, kernel: Any, state: Any, rng: Any) -> Any:
        return dense(x, kernel, recipe=recipe, name=name, state=state, record=False, rng=rng).sum()

    x, kernel = (jax.ShapeDtypeStruct((rows, k), jnp.bfloat16) for rows in (_TOKENS, n))
    state = jax.eval_shape(lambda: init_state(recipe, name=name))
    run = in_groups([recipe], lambda *args: (jax.grad(loss, (0, 1))(*args), None)[1])
    try:
        jax.eval_shape(run, x, kernel, state, jax.ShapeDtypeStruct((4,), jnp.int32))
    except (ShapeError, UnsupportedError) as error:
        return f"does not fit {type(recipe).__name__}: {error}"
    return ""


def in_groups(recipes: Iterable[Recipe | None], f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns f with the mesh axes bound over which these recipes reduce amaxes: it is traced outside of shard_map."""
    for axis in sorted({axis for recipe in recipes if recipe is not None for axis in group_axes(recipe)}):
        f = jax.vmap(f, in_axes=None, out_axes=None, axis_name=axis, axis_size=1)
    return f


class Found(NamedTuple):
    """A module with parameters of its own. `choice`: of a layer that rules may convert; None for other modules, which
    are left for a `reason`, or are this library's and have a `recipe` already."""

    path: str
    kind: str
    parameters: int
    choice: Choice | None
    reason: str = ""
    recipe: Recipe | None = None


def make_report(rules: Rules, found: list[Found]) -> ConversionReport:
    """Returns the report. **Raises** ValueError for rules that decide on nothing."""
    layers = [f.path for f in found if f.choice is not None]
    rules.require_used("convert", layers, [f.path for f in found if f.choice is None])
    rows = []
    for f in found:
        choice = f.choice or Choice(f.recipe, f.reason)
        rows.append(ConvertedModule(f.path, f.kind, f.parameters, choice.recipe is not None, choice.why, choice.recipe))
    return ConversionReport(tuple(rows))


def announce(report: ConversionReport, found: list[Found], verbose: bool) -> None:
    """Warns of layers that a rule would convert and that stay as they are, and prints the report if asked to."""
    for f in found:
        if f.choice is not None and f.choice.warn:
            said = f"convert: {f.path or 'the model'} ({f.kind}) {f.choice.why}; it is left as it is"
            warnings.warn(said, ConvertWarning, stacklevel=4)
    if verbose:
        print(report)
