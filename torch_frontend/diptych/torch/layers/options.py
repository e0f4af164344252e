"""Options of a layer's call, and the schedule of products that a recipe gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.layer_options import NO_ORIGINALS, Originals
from diptych.common.layers.plan import linear_plan, make_plan
from diptych.common.layers.schedule import OFFSETS, Schedule, make_schedule
from diptych.common.recipes import Recipe
from diptych.torch.layers.tensor_parallel import Cut
from diptych.torch.state.scales import ScaleStates, StepScales
from diptych.torch.tensors.copies import Copies, Spec
from diptych.torch.tensors.quantized import QuantizedTensorBase


class CallState(NamedTuple):
    """The states of delayed scaling and the random bits of one call of a linear layer. `rng`: int32 [4], or [calls, 4]
    for each quantize call. `recomputed`: scales of the forward that a checkpoint recomputes. `updated`: [n], the scales
    of `states` in the plan's order, from a graph's update."""

    states: ScaleStates | StepScales | None = None
    rng: Tensor | None = None
    recomputed: dict[str, Tensor] | None = None
    updated: Tensor | None = None


STATELESS = CallState()


class Options(NamedTuple):
    """The options of one call of a linear layer. `products.py` passes them into graphs. `originals`: those that
    backward keeps. `group`: the process group that amaxes are reduced over, which is the tensor-parallel group where
    `cut` says that the layer is cut. `weight_grad`: takes the weight's gradient; None: autograd does."""

    module: str = "linear"
    name: str = ""
    originals: Originals = NO_ORIGINALS
    record: bool = True
    group: Any = None
    state: CallState = STATELESS
    weight_copies: Copies | None = None
    weight_grad: Any = None
    cut: Cut | None = None


class LayerConstants(NamedTuple):
    """The part of a layer's options that crosses into a graph as constants; the first fields are those of `Options`.
    `specs`: of the copies that the caller passed. `how`: how a main_grad is written, or "". `cut`: `Cut.constants`, or
    nothing."""

    module: str
    name: str
    originals: tuple[bool, ...]
    record: bool
    specs: tuple[Spec, ...]
    how: str
    cut: tuple[Any, ...]


def originals_of(options: Options, weight: Any) -> Originals:
    """Returns the originals that backward keeps: not of a weight whose copies exist anyway."""
    kept = options.originals
    exist = kept.weight and (options.weight_copies is not None or isinstance(weight, QuantizedTensorBase))
    return kept._replace(weight=False) if exist else kept


def state_names(s: Schedule) -> tuple[str, ...]:
    """Names of a plan's states, in its order."""
    return tuple([state.name for state in s.plan.states])


_schedules: dict[tuple[Any, ...], Schedule] = {}


# Schedules by the recipe's id, since hashing a recipe costs microseconds.
_recent: dict[tuple[Any, ...], tuple[Recipe, Schedule]] = {}


def schedule(
    recipe: Recipe,
    module: str,
    name: str,
    need_dx: bool,
    need_dw: bool,
    originals: Originals = NO_ORIGINALS,
) -> Schedule:
    """Returns the schedule of one call, cached by the recipe's value outside of graphs.

    Code that runs eagerly while a graph is traced, such as preparing its states, gets the objects that later calls get.
    """
    if torch.compiler.is_dynamo_compiling():
        return make_schedule(make_plan(recipe, module, name), need_dx, need_dw, originals)
    key = (id(recipe), module, name, need_dx, need_dw, originals)
    known = _recent.get(key)
    if known is None:
        by_value = (recipe, *key[1:])
        if by_value not in _schedules:
            if len(_schedules) >= 4096:
                _schedules.clear()
            plan = linear_plan(recipe, module, name)
            _schedules[by_value] = make_schedule(plan, need_dx, need_dw, originals)
        if len(_recent) >= 1024:
            _recent.pop(next(iter(_recent)), None)  # another thread may have removed the key
        known = _recent[key] = (recipe, _schedules[by_value])
    return known[1]  # the entry keeps its recipe alive, so that the id stays its own


_plain: dict[tuple[Any, ...], tuple[Recipe, Options | None]] = {}


def plain_options(recipe: Recipe, module: str, name: str, originals: Originals, record: bool) -> Options | None:
    """Returns the options of an eager call whose recipe needs no states, random bits or process group, else None."""
    key = (id(recipe), module, name, originals, record)
    known = _plain.get(key)
    if known is None:
        plan = schedule(recipe, module, name, False, False).plan
        bare = not (plan.states or plan.needs_rng or recipe.amax_group)
        if len(_plain) >= 1024:
            _plain.pop(next(iter(_plain)), None)  # another thread may have removed the key
        made = Options(module, name, originals, record)
        known = _plain[key] = (recipe, made if bare else None)
    return known[1]


def draws(rngs: Sequence[str], schedules: Sequence[Schedule], options: Sequence[Options]) -> dict[str, tuple[int, int]]:
    """Returns the offsets that `CustomOp.draws` describes, for layers that take their states one after the other from
    one generator. A call that does not record leaves the generator as it is, so all examples of a vmap get its bits."""
    taken = [i for i, s in enumerate(schedules) if s.plan.needs_rng]
    found = {}
    for place, i in enumerate(taken):
        s = schedules[i]
        drawn = s.backward_rng or any([call is not None and call.needs_rng for call in (*s.x, *s.w, *s.results)])
        if drawn and options[i].record:
            found[rngs[i]] = (OFFSETS * len(taken), OFFSETS * place)
    return found
