"""`QuantizedModule`: the base of modules that run linear layers by a recipe; `Linear` and a user's own alike.

It says which recipe holds for a call, keeps the states of delayed scaling and of the random generator as buffers, made
on first use or by `load_state_dict`, and updates scales once in each `autocast` region. Invariants:

- What is recomputed under activation checkpointing runs by the recipe of its forward, updates nothing and records
  nothing; with states it takes `diptych.torch.checkpoint` to find them.
- Outside of regions a module is plain, and its state dict holds nothing of this until a recipe needs it.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diptych.common.errors import CheckpointError, UnsupportedError
from diptych.common.grouped import HIGH_PRECISION
from diptych.common.plan import LinearPlan
from diptych.common.recipes import Recipe
from diptych.common.schedule import OFFSETS
from diptych.torch import functional, primitives
from diptych.torch.autocast import STATE, amax_group, make_step_counter
from diptych.torch.checkpoint import recorded, replayed
from diptych.torch.delayed import update_once
from diptych.torch.eager_only import CALIBRATING, DELAYED_WGRAD, MARKED_WGRAD, EagerOnly, prepare
from diptych.torch.fx import require_traceable
from diptych.torch.layer import linear_with
from diptych.torch.products import Options, dequantized_weight, schedule
from diptych.torch.quantized import QuantizedTensorBase, high_precision
from diptych.torch.rules import traced_local
from diptych.torch.state import (
    ScaleStates,
    States,
    check_tree,
    keep_from_broadcast,
    keys_below,
    rng_take,
    warn_once,
)
from diptych.torch.weight_gradients import WeightGradients
from diptych.torch.weights import WeightCache


class QuantizedModule(nn.Module):
    """A module whose linear layers follow the `autocast` region around it.

    Derive from it, and call `self.quantized_linear(x, weight, bias, "fc1")` for each layer in `forward`. The recipe is
    asked about roles of `module_kind` and, as name, the module's `name` and the layer's joined by a dot. Delayed scales
    are the layer's own (`scale_states.fc1.*`); the random generator is the module's.

    **Arguments:** `fuse_wgrad_accumulation`: backward adds the weights' gradients to their `weight.main_grad`, and
    leaves `weight.grad` alone, inside of regions and outside; see `weight_gradients` for the attributes of weights that
    it reads. `delay_wgrad_compute`: backward leaves them to `backward_dw()`. Others go to the next class's `__init__`.

    Attributes: `recipe`: used instead of the region's wherever a region is enabled; None takes the region's. `layers`:
    names of the layers that `forward` runs; torch.compile needs them where a recipe has state.
    """

    module_kind: str = "linear"
    layers: tuple[str, ...] = ("",)
    has_rng_state = True
    name: str = ""
    recipe: Recipe | None = None
    _last_region: Recipe | None = None
    _last_groups: Any = None
    _caches: dict[str, WeightCache] | None = None
    _weight_gradients: WeightGradients | None = None

    def __init__(
        self, *args: Any, fuse_wgrad_accumulation: bool = False, delay_wgrad_compute: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if fuse_wgrad_accumulation or delay_wgrad_compute:
            self._weight_gradients = WeightGradients(fuse_wgrad_accumulation, delay_wgrad_compute)

    # --- the recipe that holds ---

    def _recomputed(self, region: Recipe | None) -> Recipe | None:
        """The region to run in: that of the last forward where a checkpoint recomputes it outside of any region."""
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
            if region is not self._last_region:
                self._last_region = region
            if STATE.amax_groups is not self._last_groups:
                self._last_groups = STATE.amax_groups
        elif region is None:
            return self._last_region
        return region

    def quantized_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: str = "",
        *,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
        save_original_input: bool = False,
    ) -> Tensor:
        """x @ weight.T + bias by the region's recipe, with this module's states; in high precision outside of regions.

        **Arguments:** `x`, `weight`, `bias`: as for `linear`. `layer`: its name in this module. `is_first_microbatch`:
        True quantizes the weight and keeps the copies, False uses those kept, None quantizes and keeps nothing.
        `skip_weight_update`: a boolean or float32 tensor of one element; where it is not zero the kept copies stay as
        they are, decided on the device (for captured graphs; `is_first_microbatch` must be None).

        **Raises:** what `linear` raises; CheckpointError if loaded states are another recipe's.
        """
        if not isinstance(x, Tensor):
            require_traceable(type(self).__name__, x)
        if torch.compiler.is_compiling() and (outside := self._eager_only(weight)) is not None:
            return outside.run(
                self.quantized_linear, x, weight, bias, layer, is_first_microbatch=is_first_microbatch,
                skip_weight_update=skip_weight_update, save_original_input=save_original_input,
            )  # fmt: skip
        recipe = self._active_recipe()
        if recipe is None:
            if STATE.calibrating is not None:
                return self._calibrate(high_precision("linear", x), weight, bias, layer, STATE.calibrating)
            return self._plain_linear(high_precision("linear", x), weight, bias)
        given = (is_first_microbatch, skip_weight_update, save_original_input)
        options, rng = self._options_for(recipe, x, weight, layer, *given)
        return linear_with(x, weight, bias, rng, recipe, options)

    def _plain_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """In high precision; the weight's gradient goes where the module's do."""
        if self._weight_gradients is None:
            return F.linear(x, dequantized_weight(weight), bias)
        options = Options(self.module_kind, weight_grad=self._weight_gradients.of(weight))
        return linear_with(x, weight, bias, None, HIGH_PRECISION, options)

    def _active_recipe(self) -> Recipe | None:
        """The recipe of a call that begins here; None: it runs in high precision."""
        recipe = STATE.recipe
        if not torch.compiler.is_compiling():
            recipe = self._recomputed(recipe)
        return recipe if recipe is None or self.recipe is None else self.recipe

    def _eager_only(self, *weights: Tensor) -> EagerOnly | None:
        """While tracing: what keeps a call with these weights out of the graph."""
        from torch._dynamo.comptime import comptime  # importing it takes a second

        recipe = self._active_recipe()
        comptime(_before_tracing)
        if recipe is None and STATE.calibrating is not None:
            return CALIBRATING
        elsewhere = self._weight_gradients
        if elsewhere is None:
            return None
        if elsewhere.delay:
            return DELAYED_WGRAD
        return MARKED_WGRAD if any([elsewhere.marks(weight) for weight in weights]) else None

    def _role_name(self, layer: str) -> str:
        return f"{self.name}.{layer}" if self.name and layer else self.name or layer

    def _options_for(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        layer: str,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
        save_original_input: bool = False,
    ) -> tuple[Options, Tensor | None]:
        """What one layer's call runs with, and its snapshot of the random generator; the states go on by one call."""
        compiling = torch.compiler.is_compiling()
        name = self._role_name(layer)
        s = schedule(recipe, self.module_kind, name, False, False)
        states, rng, scales, updated = None, None, None, None
        if s.plan.states or s.plan.needs_rng or "scale_states" in self._modules:
            if compiling:
                states, rng, updated = self._compiled_states(s.plan, layer, recipe, x.device)
            else:
                states, rng, scales = self._states_for(s.plan, layer, recipe, x.device)
        group = None
        if recipe.amax_group:
            backward = not compiling and torch._C._current_graph_task_id() != -1  # maybe in a thread of its own
            group = amax_group(recipe, self._last_groups if backward else STATE.amax_groups)
        gradients = self._weight_gradients
        options = Options(
            self.module_kind, name, save_original_input, self.training, group, states, scales, None,
            None if gradients is None else gradients.of(weight), updated,
        )  # fmt: skip
        cached = is_first_microbatch is not None or skip_weight_update is not None
        if cached and not isinstance(weight, QuantizedTensorBase):
            columnwise = self.training or x.requires_grad
            copies = self._cache(layer).get(
                weight, recipe, options, rng, columnwise, is_first_microbatch, skip_weight_update
            )
            options = options._replace(weight_copies=copies)
        return options, rng

    # --- states ---

    def _states_for(
        self, plan: LinearPlan, layer: str, recipe: Recipe, device: torch.device
    ) -> tuple[ScaleStates | States | None, Tensor | None, dict[str, Tensor] | None]:
        """(states, snapshot of the random generator, scales to use instead of the states') of one call."""
        if not (plan.states or plan.needs_rng):
            if torch._C._current_graph_task_id() == -1:
                self._bound_states(plan, layer, recipe, device)  # drops what another recipe left
            return None, None, None
        replaying = replayed(self, layer)
        if replaying is not None:
            return self._layer_states(layer), replaying.rng, replaying.scales
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                f"{type(self).__name__} runs inside of a backward pass with a recipe that has state "
                f"({type(recipe).__name__}): a recomputation must find the scales and random bits of its forward; use "
                "diptych.torch.checkpoint, or torch.utils.checkpoint with context_fn=diptych.torch.checkpoint_contexts"
            )
        states = self._bound_states(plan, layer, recipe, device)
        used: Any = states
        if states is not None:
            used = self._enter_region(states, recipe, device) if self.training else states.current()
        rng = None
        if plan.needs_rng:
            rng = rng_take(self._rng(device), OFFSETS)
        recorded(self, layer, states, rng)
        return used, rng, None

    @staticmethod
    def _enter_region(states: ScaleStates, recipe: Recipe, device: torch.device) -> States | ScaleStates:
        """The states for this call. Updates the scales at their first use in a region. Where graphs may share the
        states, which they all may on a GPU, the device decides that too."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if states.region == STATE.region and not capturing:
            return states.current()
        keep_from_broadcast(states)
        group = amax_group(recipe, STATE.amax_groups)
        if states._buffers["seen"] is None and device.type == "cuda":
            _require_no_capture(device)
            states.seen = torch.zeros(1, dtype=torch.int64, device=device)
        if states._buffers["seen"] is None:
            scales = states.update(group)
        else:
            assert states.plan is not None
            scales = update_once(states, states.plan.states, make_step_counter(device), group)
        assert scales is not None
        view = states.freeze(scales)
        if not capturing:  # memory of a captured graph serves that graph alone
            states.region, states.view = STATE.region, (view, states.versions())
        return view

    def _layer_states(self, layer: str) -> ScaleStates | None:
        states: Any = self._modules.get("scale_states")
        return states._modules.get(layer) if layer and states is not None else states

    def _bound_states(self, plan: LinearPlan, layer: str, recipe: Recipe, device: torch.device) -> ScaleStates | None:
        states = self._layer_states(layer)
        if states is None:
            if not plan.states:
                return None
            states = self._make_states(layer, device)
        if states.plan is not plan:
            if not plan.states and not self.training:
                return None  # evaluated by a recipe without states: what training left stays
            before = states.plan
            lost = states.bind(plan, device)
            if lost:
                _announce(before, plan, lost, recipe)
        return states if plan.states else None

    def _make_states(self, layer: str, device: Any) -> ScaleStates:
        _require_no_capture(torch.device(device))
        root: Any = self._modules.get("scale_states")
        if root is None:
            root = self._modules["scale_states"] = ScaleStates(None, device)
        if not layer:
            return root
        made = root._modules[layer] = ScaleStates(None, device)
        return made

    def reset_scale_states(self) -> None:
        """Forgets the states of delayed scaling; the next region starts them anew."""
        self._modules.pop("scale_states", None)

    def _rng(self, device: torch.device) -> Tensor:
        rng = self._buffers.get("rng_state")
        if rng is None:
            _require_no_capture(device)
            words = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int64, device="cpu")
            rng = torch.cat([words, torch.zeros_like(words)]).to(torch.int32).to(device)
            self.register_buffer("rng_state", rng)
        return rng

    def seed_rng(self, seed: int, offset: int = 0) -> None:
        """Sets the random generator of stochastic rounding. Without it, the seed is drawn from torch's CPU generator
        when it is first needed. **Raises** ValueError for a seed outside of 0..2^64-1."""
        device = next((t.device for t in self.parameters()), None)
        rng = functional.rng_state(seed, offset, device)
        self._buffers.pop("rng_state", None)
        self.register_buffer("rng_state", rng)

    def _compiled_states(
        self, plan: LinearPlan, layer: str, recipe: Recipe, device: torch.device
    ) -> tuple[ScaleStates | None, Tensor | None, Tensor | None]:
        """`_states_for` of a call that is traced: made or bound while tracing, read and written by the graph."""
        from torch._dynamo.comptime import comptime  # importing it takes a second

        comptime(_made_while_tracing)
        states = self._layer_states(layer) if plan.states else None
        if plan.states and states is None:
            raise UnsupportedError(
                f"{type(self).__name__} under torch.compile: the layer {layer!r} has state, and is not in `layers`"
            )
        scales = None
        if states is not None and self.training:
            scales = update_once(states, plan.states, STATE.steps[str(device)], amax_group(recipe, STATE.amax_groups))
        rng = self._buffers.get("rng_state")
        return states, rng_take(rng, OFFSETS) if plan.needs_rng and rng is not None else None, scales

    def _prepare(self, recipe: Recipe, layer: str, device: torch.device) -> None:
        """Makes what a graph of this layer reads and writes."""
        plan = schedule(recipe, self.module_kind, self._role_name(layer), False, False).plan
        states = self._bound_states(plan, layer, recipe, device)
        made: list[Tensor] = []
        if states is not None:
            states.prepare_for_graphs()
            made += [make_step_counter(device), *states.buffers()]
        if plan.needs_rng:
            made.append(self._rng(device))
        for t in made:
            torch._dynamo.mark_static_address(t, guard=False)

    # --- calibration ---

    def _calibrate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: str, recipe: Recipe, product: Any = None
    ) -> Tensor:
        """High precision, with the amaxes recorded that `recipe` asks for."""
        recipe = recipe if self.recipe is None else self.recipe
        s = schedule(recipe, self.module_kind, self._role_name(layer), False, False)
        y = (product or self._plain_linear)(x, weight, bias)
        if not s.plan.states or torch._C._current_graph_task_id() != -1:
            return y
        states = self._bound_states(s.plan, layer, recipe, x.device)
        assert states is not None
        self._enter_region(states, recipe, x.device)
        gradients = []
        for slot in s.plan.states:
            tensor = slot.name.partition(".")[0]
            if tensor == "grad_output":
                gradients.append(slot.name)
            else:
                t = x if tensor == "input" else dequantized_weight(weight)
                states.record(slot.name, primitives.amax(t.detach()))
        if y.requires_grad and gradients:
            y.register_hook(
                lambda dy: [states.record(name, primitives.amax(dy.detach())) for name in gradients] and None
            )
        return y

    # --- weights ---

    def __repr__(self) -> str:
        """One line for a layer: its states are not shown, which `named_buffers` names."""
        shown = object.__new__(type(self))
        shown.__dict__.update(self.__dict__, _modules={k: m for k, m in self._modules.items() if k != "scale_states"})
        return nn.Module.__repr__(shown)

    def _repr_recipe(self) -> str:
        """What `print` says of the recipe, in few characters: with the fields that were given, if they fit."""
        recipe: Any = self.recipe
        if recipe is None:
            return ", recipe=autocast"
        fields = dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ()
        given = [f"{f.name}={held!r}" for f in fields if (held := getattr(recipe, f.name)) != f.default]
        said = ", ".join(given)
        return f", recipe={type(recipe).__name__}({said if len(said) < 20 else '...'})"

    def backward_dw(self) -> None:
        """Computes the weight gradients that backward left, oldest first, into each weight.grad or main_grad.

        **Raises** NotImplementedError for a module made without `delay_wgrad_compute`.
        """
        if self._weight_gradients is None or not self._weight_gradients.delay:
            raise UnsupportedError(
                "backward_dw: the module computes its weight gradients in backward; "
                "make it with delay_wgrad_compute=True"
            )
        self._weight_gradients.run()

    def _cache(self, layer: str) -> WeightCache:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime  # importing it takes a second

            comptime(_cache_made_while_tracing)
        else:
            self._make_cache(layer)
        return self._caches[layer]  # type: ignore[index]

    def _make_cache(self, layer: str) -> None:
        if self._caches is None:
            self._caches = {}
        self._caches.setdefault(layer, WeightCache())

    # --- saving and loading ---

    def __getstate__(self) -> dict[str, Any]:
        """What a module is without its last step; kept weights and region are remade."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_last_region", "_last_groups", "_caches")}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        device = next((t.device for t in self.parameters()), None)
        below = f"{prefix}scale_states."
        tree = keys_below(state_dict, below)
        check_tree(tree, state_dict, below, self._modules.get("scale_states"))  # type: ignore[arg-type]
        rng = state_dict.get(f"{prefix}rng_state")
        if rng is not None and (rng.dtype != torch.int32 or tuple(rng.shape) != (4,)):
            raise CheckpointError(
                f"{prefix}rng_state must be int32 [4], seed and offset of a generator, got {rng.dtype}{list(rng.shape)}"
            )
        if not tree:
            self.reset_scale_states()
        elif "scale_states" not in self._modules:
            self._modules["scale_states"] = ScaleStates(None, device)
        if rng is not None and "rng_state" not in self._buffers:
            self.register_buffer("rng_state", torch.zeros(4, dtype=torch.int32, device=device))
        elif rng is None and "rng_state" in self._buffers:
            del self._buffers["rng_state"]  # the state that the dict is of had none yet
        self._caches = None
        super()._load_from_state_dict(state_dict, prefix, *args)


def _require_no_capture(device: torch.device) -> None:
    """Before a state is made. **Raises** NotImplementedError where a CUDA graph would begin it anew each time."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a module's first call with a recipe that has state makes that state, which must lie outside of CUDA "
            "graphs: run the module once before capturing it, as diptych.torch.make_graphed_callables does"
        )


_traced_in_regions: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _before_tracing(context: Any) -> None:
    """Runs first where Dynamo traces a module's call. **Raises** NotImplementedError for a recomputation that lost its
    region, which would differentiate in high precision."""
    prepare()
    module = traced_local(context, "self")
    if traced_local(context, "recipe") is not None:
        _traced_in_regions.add(module)
    elif torch._C._current_graph_task_id() != -1 and module in _traced_in_regions:
        raise UnsupportedError(
            f"{type(module).__name__} is traced inside of a backward pass and outside of the autocast region of its "
            "forward: a checkpoint recomputes it; use diptych.torch.checkpoint, or run backward inside of the region"
        )


def _made_while_tracing(context: Any) -> None:
    """Runs where Dynamo traces `_compiled_states`, on the real objects: a graph cannot make buffers."""
    with torch.inference_mode(False):
        module = traced_local(context, "self")
        for layer in dict.fromkeys(
            (*module.layers, traced_local(context, "layer"))
        ):  # at once: what Dynamo has looked at it does not look at again
            module._prepare(traced_local(context, "recipe"), layer, traced_local(context, "device"))


def _cache_made_while_tracing(context: Any) -> None:
    """So that a first call's graph serves later calls, too. Of all layers: see `_made_while_tracing`."""
    module = traced_local(context, "self")
    for layer in dict.fromkeys((*module.layers, traced_local(context, "layer"))):
        module._make_cache(layer)


def _announce(before: LinearPlan | None, after: LinearPlan, lost: list[str], recipe: Recipe) -> None:
    warn_once(
        (None if before is None else before.states, after.states),
        f"switching to {type(recipe).__name__}: the delayed scales of {', '.join(sorted(lost))} were another recipe's "
        "and are dropped; further modules and later switches of this kind are not reported",
    )


def seed_rng(model: nn.Module, seed: int) -> None:
    """Gives every module of a model that can round stochastically its own stretch of one random stream.

    The modules' places in the model alone decide: the i-th gets offsets from i * 2^40 on. Ranks of a data-parallel
    group should pass different seeds, and DistributedDataParallel `broadcast_buffers=False`, which would undo that.

    **Raises** ValueError for a seed outside of 0..2^64-1.
    """
    modules = [m for m in model.modules() if isinstance(m, QuantizedModule)]
    for i, module in enumerate(modules):
        module.seed_rng(seed, i << 40)
