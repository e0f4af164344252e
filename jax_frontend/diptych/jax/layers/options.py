"""Options of a layer's call, and the schedule of products that a recipe gives it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from diptych.common.layer_options import NO_ORIGINALS, Originals
from diptych.common.layers.plan import LinearPlan, linear_plan
from diptych.common.layers.schedule import OFFSETS as OFFSETS
from diptych.common.layers.schedule import Schedule, make_schedule
from diptych.common.recipes import Recipe
from diptych.jax.state.scales import ScaleState

Array = jax.Array


class Options(NamedTuple):
    """Options of one call of `dense`, hashable: the static argument of its custom_vjp.

    `originals`: those that backward keeps. `group`: mesh axes over which amaxes are reduced; `of_kernels` leaves out
    `row_axes`, along which only rows are cut.
    """

    recipe: Recipe
    module: str = "linear"
    name: str = ""
    originals: Originals = NO_ORIGINALS
    record: bool = True
    returns: bool = False
    group: tuple[str, ...] = ()
    op: str = "dense"  # whose words errors have
    row_axes: tuple[str, ...] = ()

    @property
    def plan(self) -> LinearPlan:
        return linear_plan(self.recipe, self.module, self.name)

    @property
    def of_kernels(self) -> Options:
        return self._replace(group=tuple(axis for axis in self.group if axis not in self.row_axes))

    def schedule(self, need_dx: bool, need_dw: bool) -> Schedule:
        return _schedule(self.recipe, self.module, self.name, need_dx, need_dw, self.originals)


@functools.lru_cache(maxsize=1024)
def _schedule(recipe: Recipe, module: str, name: str, need_dx: bool, need_dw: bool, originals: Originals) -> Schedule:
    return make_schedule(linear_plan(recipe, module, name), need_dx, need_dw, originals)


States = dict[str, ScaleState]


Amaxes = dict[str, list[Array]]


class CallState(NamedTuple):
    """The states of delayed scaling and the random bits of one call of a linear layer. `rng`: int32 [4]."""

    states: Any
    rng: Any = None
