"""Code that runs where Dynamo traces a module's call: it makes the states and buffers that a graph reads and writes,
before it is traced and before it runs, and refuses calls that nobody recorded.

A graph makes no buffers. Where Dynamo traces a module's call, `comptime` runs diptych's code on the real module, which
makes the missing ones. A guard does the same for each other module that runs the graph later, so that equal modules
share one graph, wherever their states come from. Invariants:

- A guard changes no state that exists unless the call that it checks would: where another recipe's states would be
  lost and the recipe of the call is not known yet, the module does not fit the graph. A graph that records nothing
  changes none; one that was traced with scales of another recipe runs with such scales alone.
- An error while a guard makes states means that the module does not fit; tracing it anew then raises the same error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from diptych.common.layers.plan import LinearPlan
from diptych.torch.graph.eager_only import set_runs
from diptych.torch.graph.guards import before_each_call
from diptych.torch.layers.options import schedule
from diptych.torch.layers.weight_gradients import require_while_tracing
from diptych.torch.modules.stateful import LastCall
from diptych.torch.primitives.register import traced_local
from diptych.torch.private.graphs import forget, output
from diptych.torch.state.autocast import STATE, unrecorded, warn_without_regions

# --- regions ----------------------------------------------------------------------------------------------


class _Outside:
    """The guard of a graph that was traced outside of regions. It may not run where nothing says which region the call
    belongs to and the module has run otherwise: `before_tracing` then refuses."""

    def __init__(self, quantized: bool) -> None:
        self.quantized = quantized

    def __call__(self, module: Any) -> bool:
        return not unrecorded() or (not self.quantized) not in getattr(module, "_ran", ())


def before_tracing(context: Any) -> None:
    """Runs first where Dynamo traces a module's call. **Raises** what `_require_recorded` raises."""
    set_runs()
    module, quantized = traced_local(context, "self"), traced_local(context, "recipe") is not None
    if module._prepared is not None:
        module._prepared.warn_of_graphs()
    require_while_tracing(context, module)
    inside = traced_local(context, "inside")
    module._require_recorded(quantized, not inside and unrecorded())
    if not inside:
        before_each_call(context, "self", _Outside(quantized))
        if not quantized and module.training and torch.is_grad_enabled():
            warn_without_regions(type(module).__name__)


# --- notes for `report` -----------------------------------------------------------------------------------


class _Noted:
    """A guard that fits always, and notes before each run of a graph how it runs a module's layer. Where another guard
    does not hold, the graph, or the eager code, that runs instead notes its own."""

    def __init__(self, layer: str, call: LastCall | str) -> None:
        self.layer, self.call = layer, call

    def __call__(self, module: Any) -> bool:
        module.__dict__.setdefault("_calls", {})[self.layer] = self.call
        return True


def _note(context: Any, call: LastCall | str) -> None:
    noted = _Noted(traced_local(context, "layer"), call)
    noted(traced_local(context, "self"))
    before_each_call(context, "self", noted)


def note_plain(context: Any) -> None:
    """Runs where Dynamo traces a layer in high precision (`QuantizedModule._note_plain`)."""
    _note(context, traced_local(context, "why"))


def note_quantized(context: Any) -> None:
    """Runs where Dynamo traces a layer's call (`QuantizedModule._options_for`)."""
    x = context.get_local("x").as_fake()
    shape = tuple([extent if type(extent) is int else None for extent in x.shape])
    grad = torch.is_grad_enabled()
    _note(context, LastCall(traced_local(context, "recipe"), shape, x.dtype, x.is_cuda, x.requires_grad, grad, True))


# --- states -----------------------------------------------------------------------------------------------


class _Ready:
    """Makes the states of a module that runs a graph of `recipe`, which was traced in a region of `entered`."""

    def __init__(self, module: Any, recipe: Any, layer: str, device: torch.device, record: bool, seeds: _Seeds) -> None:
        self.kind, self.name, self.own = type(module), module.name, module.recipe
        self.recipe, self.device, self.entered, self.record = recipe, device, STATE.recipe, record
        self.layers = tuple(dict.fromkeys((*module.layers, layer)))
        self.plans = self._plans(module)
        self.needs_rng = any([plan.needs_rng for plan in self.plans.values()])
        self.seeds, self.place = seeds, seeds.places
        seeds.places += 1

    def _plans(self, module: Any) -> dict[str, LinearPlan]:
        kind, recipe = module.module_kind, self.recipe
        return {each: schedule(recipe, kind, module._role_name(each), False, False).plan for each in self.layers}

    def make(self, module: Any) -> None:
        """Makes the missing states, and replaces those of another recipe."""
        unseeded = self.needs_rng and "rng_state" not in module._buffers
        before = torch.random.get_rng_state() if unseeded else None
        with torch.inference_mode(False), torch.no_grad():
            for layer in self.layers:
                module._prepare(self.recipe, layer, self.device, self.record)
            if before is not None:
                self.seeds.drawn(self.place, module._buffers["rng_state"], before)
        self.plans = self._plans(module)  # the plans by identity, as the states are bound to them now
        self.served = {layer: self._serve(module, layer) for layer in self.layers}

    def _serve(self, module: Any, layer: str) -> bool:
        """Whether a layer's states are bound to the plan, or could be without a change."""
        plan, states = self.plans[layer], module._layer_states(layer)
        return not plan.states or (states is not None and (states.plan is plan or states.serves(plan)))

    def __call__(self, module: Any) -> bool:
        """Returns whether a graph that was traced under this guard may run."""
        if self._has_all(module):
            return True
        if type(module) is not self.kind or module.name != self.name or STATE.recipe != self.entered:
            return True  # Dynamo's own guards refuse it
        if module.recipe != self.own or any(p.device != self.device for p in module.parameters(recurse=False)):
            return True
        known = self.recipe is self.own or self.recipe == self.entered
        for layer, plan in self.plans.items():
            states = module._layer_states(layer)
            if not self.record:
                if states is not None and states.slots() and self._serve(module, layer) != self.served[layer]:
                    return False
            elif not known and states is not None and states.plan is not None and states.plan != plan:
                return False
        served = self.served
        self.make(module)
        return self.record or self.served == served

    def _has_all(self, module: Any) -> bool:
        if type(module) is not self.kind:
            return False
        for layer, plan in self.plans.items():
            if plan.states:
                states = module._layer_states(layer)
                if states is None or not states.ready_for_graphs():
                    return False
                if states.plan is not plan and (self.record or self._serve(module, layer) != self.served[layer]):
                    return False
        return not self.needs_rng or "rng_state" in module._buffers


def make_states(context: Any) -> None:
    """Runs where Dynamo traces `QuantizedModule._compiled_states`."""
    names = ("self", "recipe", "layer", "device", "record")
    module, recipe, layer, device, record = [traced_local(context, name) for name in names]
    seeds = vars(output(context)).setdefault("_seeds_of_diptych", _Seeds())
    ready = _Ready(module, recipe, layer, device, record, seeds)
    before, seeded = _names(module), "rng_state" in module._buffers
    ready.make(module)
    if ready.needs_rng and not seeded:
        _keep_drawn()
    if _names(module) != before:
        _forget(context, module)
    if ready.needs_rng or any([plan.states for plan in ready.plans.values()]):
        before_each_call(context, "self", ready)


def begin_again(_: Any) -> None:
    """Runs where traced code does not find states that exist, because Dynamo read their dict before they were made.
    Makes Dynamo trace the whole function again."""
    from diptych.torch.private.dynamo import RestartAnalysis

    raise RestartAnalysis(restart_reason="diptych made states of a module that was looked at before")


def _holders(module: nn.Module) -> list[nn.Module]:
    states = module._modules.get("scale_states")
    return [module] if states is None else [module, *states.modules()]


def _names(module: nn.Module) -> list[tuple[int, int, int]]:
    return [(id(m), len(m._modules), len([b for b in m._buffers.values() if b is not None])) for m in _holders(module)]


def _forget(context: Any, module: nn.Module) -> None:
    """Makes Dynamo read dicts again that have got states since it read them. A dict that the traced code has changed
    stays as it is (`begin_again`)."""
    for holder in _holders(module):
        for held in (holder._modules, holder._buffers):
            forget(context, held)


# --- seeds ------------------------------------------------------------------------------------------------


class _Seeds:
    """Gives the modules of one graph the seeds that eager calls draw for them.

    Modules draw in the order of their calls, and guards run in an order that torch changes. So seeds that the guards of
    a graph draw one after the other, with no other draw between them, are dealt out anew by the modules' places in it.
    """

    def __init__(self) -> None:
        self.places = 0
        self.after: Tensor | None = None  # state of torch's CPU generator after the last draw
        self.words: list[Tensor] = []  # in the order of draws
        self.states: list[tuple[int, Tensor, int]] = []  # place, random state and its version

    def drawn(self, place: int, rng: Tensor, before: Tensor) -> None:
        """Takes a random state that was just drawn. `before`: the generator's state before that."""
        if (
            self.after is None
            or not torch.equal(self.after, before)
            or any([r._version != v for _, r, v in self.states])
        ):
            self.words, self.states = [], []
        self.after = torch.random.get_rng_state()
        self.words.append(rng.clone())
        held = sorted([(place, rng), *[(p, r) for p, r, _ in self.states]], key=lambda state: state[0])
        for (_, r), words in zip(held, self.words, strict=True):
            r.copy_(words)
        self.states = [(p, r, r._version) for p, r in held]


def _keep_drawn() -> None:
    """Keeps torch's CPU generator where drawing a seed has left it. torch sets it back to where it was before the
    frame was traced; then the modules of the next frame would draw the same seeds again."""
    from diptych.torch.private.dynamo import after_tracing

    drawn = torch.random.get_rng_state()
    after_tracing(lambda: torch.random.set_rng_state(drawn))
