"""`QuantizedModule`: the base of modules that run linear layers by a recipe; `Linear` and a user's own alike.

It decides which recipe applies to a call, keeps the states of delayed scaling and of the random generator as buffers,
made by `prepare`, by `load_state_dict` or on first use, and updates scales once in each `autocast` region. Invariants:

- A recomputation under activation checkpointing runs in the region of its forward, which the checkpoint has recorded;
  it updates nothing and records nothing. Where nobody recorded a region, a module that may have had one refuses.
- Outside of regions a module runs by its own recipe, or in high precision if it has none; its state dict has no states
  until a recipe needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.nn import functional as F

from diptych.common.errors import UnsupportedError
from diptych.common.layer_options import NO_ORIGINALS, Originals, WeightGradientOptions
from diptych.common.layers.groups import HIGH_PRECISION
from diptych.common.layers.plan import LinearPlan
from diptych.common.layers.schedule import OFFSETS
from diptych.common.recipes import Recipe
from diptych.common.te_arguments import ModuleArguments
from diptych.torch.graph import eager_only, functorch
from diptych.torch.layers.held import dequantized_weight
from diptych.torch.layers.linear import linear_with
from diptych.torch.layers.options import STATELESS, CallState, Options, plain_options, schedule
from diptych.torch.layers.quantize import rng_take
from diptych.torch.layers.weight_gradients import WeightGradients
from diptych.torch.modules.fx import require_traceable
from diptych.torch.modules.held_state import held_words
from diptych.torch.modules.stateful import StatefulModule, require_no_capture
from diptych.torch.modules.tensor_parallel import TensorParallelModule
from diptych.torch.modules.tracing import before_tracing, begin_again, make_states, note_plain, note_quantized
from diptych.torch.modules.weight_cache import WeightCache, kept_weight
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.autograd import backward_pass
from diptych.torch.private.functorch import transforms_active
from diptych.torch.state.autocast import (
    STATE,
    autocast,
    make_step_counter,
    recognize_pipelines,
    recording,
    unrecorded,
    warn_without_regions,
)
from diptych.torch.state.checkpoint import aside, backward_ahead, tape_call, taped_call
from diptych.torch.state.scales import ScaleStates, StepScales, keep_from_broadcast
from diptych.torch.state.update import update_once
from diptych.torch.tensors.quantized import QuantizedTensorBase, high_precision

_NO_REGION = contextlib.nullcontext()
_PREPARED = "prepared weight "  # begins the name of a tape's entry that holds prepared copies
# Why a layer ran in high precision, for `report`.
_OUTSIDE = "outside of any region and without a recipe of its own: enter diptych.torch.autocast, or give it a recipe"
_DISABLED = "in a region with enabled=False"
_CALIBRATING = "in a calibrating region"


class QuantizedModule(TensorParallelModule, StatefulModule):
    """A module whose linear layers follow the `autocast` region around it.

    Derive from it, and call `self.quantized_linear(x, weight, bias, "fc1")` for each layer in `forward`. The recipe is
    asked about roles of `module_kind` and, as name, the module's `name` and the layer's joined by a dot. Delayed scales
    are the layer's own (`scale_states.fc1.*`); the random generator is the module's.

    **Arguments:** `fuse_wgrad_accumulation`: backward adds the weights' gradients to `weight.main_grad` and does not
    touch `weight.grad`, inside of regions and outside; see `weight_gradients` for the attributes of weights that it
    reads. `delay_wgrad_compute`: backward leaves them to `backward_dw()`. Others go to the next class's `__init__`.
    Forward raises NotImplementedError where something that reduces gradients would miss these.

    Attributes: `recipe`: used instead of the region's, and outside of regions, where each call is a step of its own to
    delayed scaling; a region with `enabled=False` runs the module in high precision all the same. None takes the
    region's. `layers`: names of the layers that `forward` runs, whose states `prepare` makes.
    """

    # Class attributes, so that a converted nn.Linear has the defaults too.
    init_method: Callable[[Tensor], Any] | None = None
    return_bias = False
    save_original_input = False
    save_original_weight = False

    has_rng_state = True
    _ran: frozenset[bool] = frozenset()  # whether it has run quantized, and in high precision, where it may be trained
    _caches: dict[str, WeightCache] | None = None
    _weight_gradients: WeightGradients | None = None
    _prepared: Any = None  # PreparedLayers, while prepare_weights serves the module

    def __init__(
        self, *args: Any, fuse_wgrad_accumulation: bool = False, delay_wgrad_compute: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        recognize_pipelines()
        self._take_gradients(WeightGradientOptions(fuse_wgrad_accumulation, delay_wgrad_compute))

    def _take_gradients(self, options: WeightGradientOptions) -> None:
        if options.fuse or options.delay:
            self._weight_gradients = WeightGradients(options)

    def _take(self, given: ModuleArguments, **extents: int) -> None:
        """Takes what all constructors are given, before the parameters exist. `extents`: as for `_make_cut`, whose
        errors it raises."""
        self.recipe, self.name = given.recipe, given.name
        self.save_original_input, self.save_original_weight = given.originals
        self.init_method, self.return_bias = given.init_method, given.return_bias
        self._take_gradients(given.weight_gradients)
        self._make_cut(given.parallel, **extents)

    # --- the recipe that applies ---

    def _role_name(self, layer: str) -> str:
        """Returns the name in the roles of a layer."""
        return f"{self.name}.{layer}" if self.name and layer else self.name or layer

    def _require_recorded(self, quantized: bool, unknown: bool) -> None:
        """Called before each call. **Raises** NotImplementedError if nothing says which region the call belongs to,
        and the module has run otherwise than the call would: memory may refuse, but never decides."""
        if not unknown:
            if quantized not in self._ran and (self.training or torch.is_grad_enabled()):
                self.__dict__["_ran"] = self._ran | {quantized}
        elif (not quantized) in self._ran:
            raise UnsupportedError(
                f"{type(self).__name__} runs inside of a backward pass, and no autocast region was recorded for it or "
                "entered there: whether it belongs into the region of an earlier call is not known. Enter dt.autocast "
                "inside of the function that runs again (enabled=False for high precision), checkpoint it by "
                "torch.utils.checkpoint or diptych.torch.checkpoint, or use both of diptych.torch.checkpoint_contexts()"
            )

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
        save_original_weight: bool = False,
        quantize_output: bool = False,
        quantize_grad_input: bool = False,
    ) -> Tensor:
        """x @ weight.T + bias by the module's own recipe or the region's, with this module's states; in high precision
        where neither is.

        **Arguments:** `x`, `weight`, `bias`: as for `linear`. `layer`: its name in this module. `is_first_microbatch`:
        True quantizes the weight and keeps the copies, False uses those kept, None quantizes and keeps nothing.
        `skip_weight_update`: a boolean or float32 tensor of one element; where it is not zero the kept copies stay as
        they are, decided on the device (for captured graphs; `is_first_microbatch` must be None).
        `save_original_input`, `save_original_weight`: as for `linear`; kept copies serve backward too.
        `quantize_output`, `quantize_grad_input`: inside of regions the result, or the input's gradient, is quantized
        too, as the recipe quantizes inputs and gradients; no delayed scaling.

        **Raises:** what `linear` raises; CheckpointError if loaded states are another recipe's.
        """
        if not isinstance(x, Tensor):
            require_traceable(type(self).__name__, x)
        if torch.compiler.is_compiling() and (outside := self._eager_only(weight)) is not None:
            return outside.run(
                self.quantized_linear, x, weight, bias, layer, is_first_microbatch=is_first_microbatch,
                skip_weight_update=skip_weight_update, save_original_input=save_original_input,
                save_original_weight=save_original_weight, quantize_output=quantize_output,
                quantize_grad_input=quantize_grad_input,
            )  # fmt: skip
        recipe = self._active_recipe()
        if recipe is None:
            self._note_plain(layer)
            if STATE.calibrating is not None:
                return self._calibrate(high_precision("linear", x), weight, bias, layer, STATE.calibrating)
            return self._plain_linear(high_precision("linear", x), weight, bias, layer)
        if quantize_output or quantize_grad_input:
            recipe = recipe.with_results(quantize_output, quantize_grad_input)
        originals = NO_ORIGINALS  # the one that exists, since each call comes by here
        if save_original_input or save_original_weight:
            originals = Originals(save_original_input, save_original_weight)
        options = self._options_for(recipe, x, weight, layer, originals, is_first_microbatch, skip_weight_update)
        return linear_with(x, weight, bias, recipe, options)

    def _plain_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: str = "") -> Tensor:
        """Runs the layer in high precision; the weight's gradient goes where the module's gradients go."""
        if self._weight_gradients is None and self.tp_size == 1:
            return F.linear(x, dequantized_weight(weight), bias)
        return linear_with(x, weight, bias, HIGH_PRECISION, self._plain_options(weight, layer))

    def _plain_options(self, weight: Tensor, layer: str) -> Options:
        """The options of a layer that runs in high precision."""
        elsewhere = self._weight_gradients
        sink = None if elsewhere is None else elsewhere.of(weight)
        cut = self._cut(layer) if self.tp_size > 1 else None
        if cut is not None:
            self._require_alike(layer, HIGH_PRECISION, self._plan_of(layer, HIGH_PRECISION), weight)
        return Options(self.module_kind, group=self.tp_group, weight_grad=sink, cut=cut)

    def _plain_run(self, weight: Tensor, layer: str = "") -> tuple[Recipe, Options]:
        """The recipe and options by which the op of a norm and a cut layer runs in high precision: it sums the norm's
        gradients over ranks, which torch's own functions would not."""
        if STATE.calibrating is not None:
            raise UnsupportedError(
                f"{type(self).__name__}: a norm and layers that are cut over a tensor-parallel group are not calibrated"
            )
        self._note_plain(layer)
        return HIGH_PRECISION, self._plain_options(weight, layer)

    def _note_plain(self, layer: str) -> None:
        """Notes for `report` that a layer runs in high precision, and why."""
        why = _CALIBRATING if STATE.calibrating is not None else _DISABLED if STATE.inside else _OUTSIDE
        if torch.compiler.is_compiling():
            from diptych.torch.private.dynamo import comptime  # importing it takes a second

            comptime(note_plain)
            return
        self.__dict__.setdefault("_calls", {})[layer] = why

    def _active_recipe(self) -> Recipe | None:
        """The recipe of a call that begins here; None: it runs in high precision."""
        recipe = STATE.recipe
        if recipe is not None or not STATE.inside:
            recipe = recipe if self.recipe is None else self.recipe
        if not torch.compiler.is_compiling():
            self._require_recorded(recipe is not None, unrecorded())
            if recipe is None and not STATE.inside and self.training and torch.is_grad_enabled():
                warn_without_regions(type(self).__name__)
        return recipe

    def _eager_only(self, *weights: Tensor) -> eager_only.EagerOnly | None:
        """Called while tracing. Returns the reason that keeps a call with these weights out of the graph, or None."""
        from diptych.torch.private.dynamo import comptime  # importing it takes a second

        recipe, inside = self._active_recipe(), STATE.inside  # noqa: F841 - read below
        comptime(before_tracing)
        if recipe is not None and transforms_active():
            comptime(eager_only.before_leaving)
            return eager_only.TRANSFORMS
        if recipe is None and STATE.calibrating is not None:
            return eager_only.CALIBRATING
        elsewhere = self._weight_gradients
        if elsewhere is None:
            return None
        if elsewhere.options.delay:
            return eager_only.DELAYED_WGRAD
        return eager_only.MARKED_WGRAD if any([elsewhere.marks(weight) for weight in weights]) else None

    def _options_for(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        layer: str,
        originals: Originals = NO_ORIGINALS,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
    ) -> Options:
        """Returns one layer's options, with its states and a snapshot of its random generator, and moves these on by a
        call."""
        compiling = torch.compiler.is_compiling()
        if compiling:
            from diptych.torch.private.dynamo import comptime  # importing it takes a second

            comptime(note_quantized)
        else:
            held = self.__dict__
            calls = held.get("_calls")
            if calls is None:
                calls = held["_calls"] = {}
            calls[layer] = (recipe, x.shape, x.dtype, x.is_cuda, x.requires_grad, is_grad_enabled())  # a LastCall
        name = self._role_name(layer)
        record = self.training and recording()
        cached = is_first_microbatch is not None or skip_weight_update is not None
        shared = compiling or cached or self._prepared is not None or self._weight_gradients is not None
        shared = shared or self.tp_size > 1 or STATE.played
        if not (shared or "scale_states" in self._modules):
            plain = plain_options(recipe, self.module_kind, name, originals, record)
            if plain is not None:
                return plain
        if not compiling and transforms_active():
            self._require_plain_state(cached)
        s = schedule(recipe, self.module_kind, name, False, False)
        state = STATELESS
        cut = self._cut(layer) if self.tp_size > 1 else None
        if cut is not None and not compiling:  # before delayed scales are reduced over the ranks
            self._require_alike(layer, recipe, s.plan, x)
        if s.plan.states or s.plan.needs_rng or "scale_states" in self._modules:
            given = (s.plan, layer, recipe, x.device, record)
            # Outside of regions a recipe is the module's own, and delayed scaling takes each call as a step.
            with autocast(recipe=recipe) if record and s.plan.states and not STATE.inside else _NO_REGION:
                if compiling:
                    state = self._compiled_states(*given)
                else:
                    state, record = self._states_for(*given)
        group = None
        if cut is not None and compiling:  # after Dynamo has made the states
            self._require_alike(layer, recipe, s.plan, x)
        if recipe.amax_group or cut is not None:
            group = self._amax_group(recipe, STATE.amax_groups)
        gradients = self._weight_gradients
        sink = None if gradients is None else gradients.of(weight)
        options = Options(self.module_kind, name, originals, record, group, state, None, sink, cut)
        if cached and not isinstance(weight, QuantizedTensorBase):
            given = (weight, recipe, options, is_first_microbatch, skip_weight_update)
            options = options._replace(weight_copies=kept_weight(self, layer, *given))
        elif not compiling and STATE.played:  # with what its forward used, whatever has been prepared since
            taped = taped_call(self, _PREPARED + layer, optional=True)
            options = options if taped is None else options._replace(weight_copies=taped.states)
        elif not compiling and self._prepared is not None and group is None and not transforms_active():
            calls = schedule(recipe, self.module_kind, name, True, False).w if backward_ahead() else s.w
            made = self._prepared.get(self, layer, weight, calls, s.w)
            if made is not None:
                options = options._replace(weight_copies=made)
                tape_call(self, _PREPARED + layer, None, made, None)
        return options

    # --- states ---

    def _states_for(
        self, plan: LinearPlan, layer: str, recipe: Recipe, device: torch.device, record: bool
    ) -> tuple[CallState, bool]:
        """Returns the states of one call, and whether it records; `record`: whether it would, which a recomputation
        leaves to its forward."""
        if not (plan.states or plan.needs_rng):
            if record and backward_pass() == -1:
                aside(self._bound_states, plan, layer, recipe, device)  # drops what another recipe left
            return STATELESS, record
        taped = taped_call(self, layer)
        if taped is not None:
            return CallState(taped.states, taped.rng, taped.scales), taped.record
        if backward_pass() != -1:
            raise UnsupportedError(
                f"{type(self).__name__} runs inside of a backward pass with a recipe that has state "
                f"({type(recipe).__name__}): a recomputation must find the scales and random bits of its forward; use "
                "diptych.torch.checkpoint, or torch.utils.checkpoint with context_fn=diptych.torch.checkpoint_contexts"
            )
        return aside(self._advance, plan, layer, recipe, device, record), record

    def _advance(self, plan: LinearPlan, layer: str, recipe: Recipe, device: torch.device, record: bool) -> CallState:
        """Returns the states of a call, with a snapshot of the random generator, and writes the call onto the running
        tapes."""
        states = self._bound_states(plan, layer, recipe, device, record=record)
        used: Any = states
        if states is not None:
            used = self._enter_region(states, recipe, device) if record else states.current()
        rng = None
        if plan.needs_rng:
            rng = rng_take(self._rng(device, recipe), OFFSETS * functorch.examples() if record else 0)
        tape_call(self, layer, states, used, rng, record)
        return CallState(used, rng)

    def _enter_region(self, states: ScaleStates, recipe: Recipe, device: torch.device) -> StepScales | ScaleStates:
        """Returns the states for this call, and updates the scales at their first use in a region. Where graphs may
        share the states, always so on a GPU, the device decides whether it is the first."""
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if states.region == STATE.region and not capturing:
            return states.current()
        keep_from_broadcast(states)
        group = self._amax_group(recipe, STATE.amax_groups, delayed=True)
        if states._buffers["seen"] is None and device.type == "cuda":
            require_no_capture(device)
            with torch.inference_mode(False):
                states.seen = torch.zeros(1, dtype=torch.int64, device=device)
        joint, scales = states.joint, None
        if joint is not None:
            if group is None and not capturing:
                scales = joint.scales(states, STATE.recipe, STATE.region, make_step_counter(device))
            states.__dict__["joint"] = None
        if scales is None:
            if not states.graphed and device.type != "cuda":
                scales = states.update(group)
            else:
                assert states.plan is not None
                scales = update_once(states, states.plan.states, make_step_counter(device), group)
        assert scales is not None
        view = states.freeze(scales)
        if not capturing:  # memory of a captured graph serves that graph alone
            # nn.Module's own way of setting attributes costs microseconds.
            states.__dict__.update(region=STATE.region, view=(view, states.versions()))
        return view

    def _compiled_states(
        self, plan: LinearPlan, layer: str, recipe: Recipe, device: torch.device, record: bool
    ) -> CallState:
        """Does what `_states_for` does, for a traced call: states are made while tracing; the graph reads and writes
        them."""
        from diptych.torch.private.dynamo import comptime  # importing it takes a second

        comptime(make_states)
        states = self._layer_states(layer) if plan.states else None
        rng = self._buffers.get("rng_state") if plan.needs_rng else None
        if (plan.states and states is None) or (plan.needs_rng and rng is None):
            comptime(begin_again)
            raise UnsupportedError(
                f"{type(self).__name__}: the layer {layer!r} has no states yet, and what traces it cannot make them; "
                "run the module once before"
            )
        updated = None
        if states is not None and record:
            group = self._amax_group(recipe, STATE.amax_groups, delayed=True)
            updated = update_once(states, plan.states, STATE.steps[str(device)], group)
        if states is not None and updated is None:
            # Backward, too, uses the scales as they are now.
            updated = torch.cat(states.scales_for(plan))
        taken = None if rng is None else rng_take(rng, OFFSETS if record else 0)
        return CallState(states, taken, updated=updated)

    def _prepare(self, recipe: Recipe, layer: str, device: torch.device, record: bool) -> None:
        """Makes the states and buffers that a graph of this layer reads and writes."""
        _, rng = self._make(recipe, layer, device, in_forward=True, record=record)
        made, states = [] if rng is None else [rng], self._layer_states(layer)
        if states is not None and states.slots():
            states.prepare_for_graphs()
            made += [make_step_counter(device), *states.buffers()]
        from diptych.torch.private.dynamo import static_address

        for t in made:
            static_address(t, guard=False)

    # --- calibration ---

    def _calibrate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: str, recipe: Recipe, product: Any = None
    ) -> Tensor:
        """Runs the layer in high precision, and records the amaxes for the delayed scales of `recipe`."""
        if not torch.compiler.is_compiling() and transforms_active():
            raise UnsupportedError(
                f"{type(self).__name__}: calibration inside of transforms of torch.func: calibrate by a plain call"
            )
        recipe = recipe if self.recipe is None else self.recipe
        s = schedule(recipe, self.module_kind, self._role_name(layer), False, False)
        y = product(x, weight, bias) if product else self._plain_linear(x, weight, bias, layer)
        if not s.plan.states or STATE.dry or backward_pass() != -1:
            return y
        states = aside(self._calibrate_operands, s.plan, layer, recipe, x, weight)
        gradients = [slot.name for slot in s.plan.states if slot.name.startswith("grad_output")]
        if y.requires_grad and gradients:
            y.register_hook(
                lambda dy: [states.record(name, quantize_ops.amax(dy.detach())) for name in gradients] and None
            )
        return y

    def _calibrate_operands(
        self, plan: LinearPlan, layer: str, recipe: Recipe, x: Tensor, weight: Tensor
    ) -> ScaleStates:
        """Records the amaxes of the operands that a forward would quantize. Returns the states."""
        states = self._bound_states(plan, layer, recipe, x.device)
        assert states is not None
        self._enter_region(states, recipe, x.device)
        for slot in plan.states:
            tensor = slot.name.partition(".")[0]
            if tensor != "grad_output":
                t = x if tensor == "input" else dequantized_weight(weight)
                states.record(slot.name, quantize_ops.amax(t.detach()))
        return states

    # --- reports ---

    def _weight_name(self, layer: str) -> str:
        """Returns the name of the attribute that is a layer's weight [..., N, K]; "" if the weight lies otherwise."""
        return f"{layer}_weight" if layer else "weight"

    def _layer_weight(self, layer: str) -> Tensor | None:
        """Returns the weight [..., N, K] of a layer by its name, None for one that is not known."""
        weight = getattr(self, self._weight_name(layer), None)
        return weight if isinstance(weight, Tensor) else None

    def __repr__(self) -> str:
        """Shows a layer in one line, without its states, which `named_buffers` lists."""
        shown = object.__new__(type(self))
        shown.__dict__.update(self.__dict__, _modules={k: m for k, m in self._modules.items() if k != "scale_states"})
        return nn.Module.__repr__(shown)

    def _repr_recipe(self) -> str:
        """Returns the recipe in few characters for `print`, with given fields if they fit, and held weights' format."""
        recipe: Any = self.recipe
        weights = held_words(self)
        if recipe is None:
            return f", recipe=None: needs autocast{weights}"
        fields = dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ()
        given = [f"{f.name}={held!r}" for f in fields if (held := getattr(recipe, f.name)) != f.default]
        said = ", ".join(given)
        return f", recipe={type(recipe).__name__}({said if len(said) < 20 else '...'}){weights}"

    def backward_dw(self) -> None:
        """Computes the weight gradients that backward left, oldest first, into each weight.grad or main_grad; hooks of
        the weights, DistributedDataParallel and FSDP2 get them as they get any gradient.

        **Raises** NotImplementedError for a module made without `delay_wgrad_compute`; ValueError, and keeps the
        gradients, for a weight that was frozen since.
        """
        if self._weight_gradients is None or not self._weight_gradients.options.delay:
            raise UnsupportedError(
                "backward_dw: the module computes its weight gradients in backward; "
                "make it with delay_wgrad_compute=True"
            )
        self._weight_gradients.run()
