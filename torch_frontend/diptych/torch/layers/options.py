"""Options of a layer's call, and the schedule of products that a recipe gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.layers.plan import linear_plan, make_plan
from diptych.common.layers.schedule import OFFSETS, Schedule, make_schedule
from diptych.common.recipes import Recipe
from diptych.torch.layers.tensor_parallel import Cut
from diptych.torch.state.scales import ScaleStates, StepScales
from diptych.torch.tensors.copies import Copies


class Options(NamedTuple):
    """The options of one call of a linear layer. `products.py` passes them into graphs. `group`: the process group that
    amaxes are reduced over, which is the tensor-parallel group where `cut` says that the layer is cut."""

    module: str = "linear"
    name: str = ""
    save_original_input: bool = False
    record: bool = True
    group: Any = None
    state: ScaleStates | StepScales | None = None
    recomputed_scales: dict[str, Tensor] | None = None  # scales of the forward that a checkpoint recomputes
    weight_copies: Copies | None = None
    weight_grad: Any = None
    scales: Tensor | None = None  # [n], the scales of `state` in the plan's order, from a graph's update
    save_original_weight: bool = False
    cut: Cut | None = None


_schedules: dict[tuple[Any, ...], Schedule] = {}


_recent: dict[tuple[Any, ...], tuple[Recipe, Schedule]] = {}  # by identity: hashing a recipe costs microseconds


def schedule(
    recipe: Recipe,
    module: str,
    name: str,
    need_dx: bool,
    need_dw: bool,
    original: bool = False,
    original_weight: bool = False,
) -> Schedule:
    """Returns the schedule of one call, cached by the recipe's value outside of graphs. `original`, `original_weight`:
    backward keeps x or the weight, not its copy.

    Code that runs eagerly while a graph is traced, such as preparing its states, gets the objects that later calls get.
    """
    if torch.compiler.is_dynamo_compiling():
        return make_schedule(make_plan(recipe, module, name), need_dx, need_dw, original, original_weight)
    key = (id(recipe), module, name, need_dx, need_dw, original, original_weight)
    known = _recent.get(key)
    if known is None:
        by_value = (recipe, *key[1:])
        if by_value not in _schedules:
            if len(_schedules) >= 4096:
                _schedules.clear()
            plan = linear_plan(recipe, module, name)
            _schedules[by_value] = make_schedule(plan, need_dx, need_dw, original, original_weight)
        if len(_recent) >= 1024:
            _recent.pop(next(iter(_recent)), None)  # another thread may have removed it
        known = _recent[key] = (recipe, _schedules[by_value])
    return known[1]  # the entry keeps its recipe alive, so that the id stays its own


_plain: dict[tuple[Any, ...], tuple[Recipe, Options | None]] = {}


def plain_options(
    recipe: Recipe, module: str, name: str, original: bool, original_weight: bool, record: bool
) -> Options | None:
    """Returns the options of an eager call whose recipe needs no states, random bits or process group, else None."""
    key = (id(recipe), module, name, original, original_weight, record)
    known = _plain.get(key)
    if known is None:
        plan = schedule(recipe, module, name, False, False).plan
        bare = not (plan.states or plan.needs_rng or recipe.amax_group)
        if len(_plain) >= 1024:
            _plain.pop(next(iter(_plain)), None)  # another thread may have removed it
        made = Options(module, name, original, record, save_original_weight=original_weight)
        known = _plain[key] = (recipe, made if bare else None)
    return known[1]


def draws(rngs: Sequence[str], schedules: Sequence[Schedule], options: Sequence[Options]) -> dict[str, tuple[int, int]]:
    """Returns what `CustomOp.draws` does, of layers whose states one generator gives one after the other. Calls that do
    not record leave the generator as it is, so that each example has the bits that every such call has."""
    taken = [i for i, s in enumerate(schedules) if s.plan.needs_rng]
    found = {}
    for place, i in enumerate(taken):
        s = schedules[i]
        drawn = s.backward_rng or any([call is not None and call.needs_rng for call in (*s.x, *s.w, *s.results)])
        if drawn and options[i].record:
            found[rngs[i]] = (OFFSETS * len(taken), OFFSETS * place)
    return found
