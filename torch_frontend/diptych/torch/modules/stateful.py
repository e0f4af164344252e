"""`StatefulModule`: the buffers that a module of linear layers keeps from step to step, and how they are made, copied,
saved, loaded and moved.

    scale_states    `ScaleStates`, for delayed scaling; one for each layer where there are several
    rng_state       int32 [4], the random generator of stochastic rounding

Invariants: states are ordinary tensors, even if made in inference mode; if the recipe is known, all exist before the
module is copied or saved, and a forward that makes them later warns (`late`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from diptych.common.errors import CheckpointError, UnsupportedError
from diptych.common.layers.plan import LinearPlan
from diptych.common.recipes import Recipe
from diptych.torch.functional import quantize as quantize_verbs
from diptych.torch.layers.options import schedule
from diptych.torch.modules import late
from diptych.torch.modules.held_state import read_weights
from diptych.torch.modules.model_init import initial_recipe
from diptych.torch.modules.te_states import take_extra_state
from diptych.torch.primitives.checks import wrapped
from diptych.torch.state.scales import ScaleStates, check_tree, keys_below, warn_once


class LastCall(NamedTuple):
    """One layer's last call as `report` finds it. `shape`: of the input, None for an extent that a graph does not know.
    `cuda`: whether it was on a GPU. `needs_dx`: whether it required a gradient. `grad`: whether the call was made in
    grad mode."""

    recipe: Recipe
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    cuda: bool
    needs_dx: bool
    grad: bool
    compiled: bool = False


class StatefulModule(nn.Module):
    """The base of `QuantizedModule`, whose attributes `module_kind`, `layers`, `name` and `recipe` it reads."""

    module_kind: str = "linear"
    layers: tuple[str, ...] = ("",)
    name: str = ""
    recipe: Recipe | None = None
    state_prefixes: ClassVar[tuple[str, ...]] = ("scale_states.", "rng_state")  # of the states' keys in a state dict
    _role_name: Callable[[str], str]
    _prepared_for: Recipe | None = None
    _caches: Any = None
    # The last call of each layer, for `report` alone: the fields of a LastCall, or why it ran in high precision.
    _calls: dict[str, tuple[Any, ...] | str] | None = None

    # --- making ---

    def _layer_states(self, layer: str) -> ScaleStates | None:
        states: Any = self._modules.get("scale_states")
        return states._modules.get(layer) if layer and states is not None else states

    def _bound_states(
        self,
        plan: LinearPlan,
        layer: str,
        recipe: Recipe,
        device: torch.device,
        in_forward: bool = True,
        record: bool = True,
    ) -> ScaleStates | None:
        """The states of one layer, made and bound to a plan where they are not yet; None where it has none.

        A call that does not record changes none: where the plan does not fit, it gets copies of the scales that do.
        """
        states = self._layer_states(layer)
        if states is None:
            if not plan.states:
                return None
            states = self._make_states(layer, device)
        if states.plan is not plan:
            if not record and states.slots() and not states.serves(plan):
                return states.borrowed(plan) if plan.states else None
            before, held = states.plan, states.slots()
            lost = states.bind(plan, device)
            if self._prepared_for is not None:
                self._prepared_for = recipe
            if lost:
                _announce(before, plan, lost, recipe)
            if in_forward and states.slots().keys() - held.keys():
                late.announce(self, "delayed scales", recipe)
        return states if plan.states else None

    def _make_states(self, layer: str, device: Any) -> ScaleStates:
        require_no_capture(torch.device(device))
        root: Any = self._modules.get("scale_states")
        if root is None:
            root = self._modules["scale_states"] = ScaleStates(None, device)
        if not layer:
            return root
        made = root._modules[layer] = ScaleStates(None, device)
        return made

    def reset_scale_states(self) -> None:
        """Drops the states of delayed scaling; the next region makes new ones."""
        self._modules.pop("scale_states", None)
        late.forget(self)
        self._make_missing()

    def leave_meta(self) -> None:
        """Makes states anew that are missing, or on the meta device, which the parameters have left."""
        states, rng = self._modules.get("scale_states"), self._buffers.get("rng_state")
        if states is not None and any([b.is_meta for b in states.buffers()]):
            self._modules.pop("scale_states")
        if rng is not None and rng.is_meta:
            self._buffers.pop("rng_state")
        self._make_missing()

    def _rng(self, device: torch.device, in_forward_by: Recipe | None = None) -> Tensor:
        rng = self._buffers.get("rng_state")
        if rng is None:
            require_no_capture(device)
            with torch.inference_mode(False):
                rng = _drawn_rng(device)
            self.register_buffer("rng_state", rng)
            if in_forward_by is not None:
                late.announce(self, "random generator", in_forward_by)
        return rng

    def prepare_states(self, recipe: Recipe | None = None) -> None:
        """Makes the states of all `layers` by the module's own recipe, or by `recipe` where it has none; see `prepare`.
        Without either it does nothing."""
        own = self.recipe if self.recipe is not None else recipe
        if own is None:
            return
        self._prepared_for = own
        device = self._device()
        for layer in self.layers:
            self._make(own, layer, device)

    def _make_missing(self) -> None:
        """Makes the missing states for the module's own recipe, or the one that it was prepared for. Called before the
        module is copied or saved."""
        recipe = self.recipe if self.recipe is not None else self._prepared_for
        if recipe is None:
            return
        for layer in self.layers:
            plan = schedule(recipe, self.module_kind, self._role_name(layer), False, False).plan
            states = self._layer_states(layer)
            missing = plan.states and (states is None or not states.slots())
            if missing or (plan.needs_rng and "rng_state" not in self._buffers):
                self._make(recipe, layer, self._device())

    def _make_initial_states(self) -> None:
        """Called at the end of constructors: makes the states for the module's own recipe or
        `quantized_model_init`'s."""
        self.prepare_states(initial_recipe())

    def _device(self) -> torch.device:
        return next((t.device for t in self.parameters()), torch.device("cpu"))

    def _make(
        self, recipe: Recipe, layer: str, device: torch.device, in_forward: bool = False, record: bool = True
    ) -> tuple[ScaleStates | None, Tensor | None]:
        """Makes one layer's states, the tensors that graphs read and write beside them, and its random generator."""
        plan = schedule(recipe, self.module_kind, self._role_name(layer), False, False).plan
        states = self._bound_states(plan, layer, recipe, device, in_forward, record)
        if states is not None:
            states.make_graph_buffers()
        return states, self._rng(device, recipe if in_forward else None) if plan.needs_rng else None

    def _require_plain_state(self, kept: bool) -> None:
        """Called inside of transforms of torch.func. **Raises** NotImplementedError if the call would keep a
        transform's tensors (`kept`: as quantized weights), or if its own states are such."""
        if kept:
            raise UnsupportedError(
                f"{type(self).__name__}: is_first_microbatch, skip_weight_update inside of a transform of torch.func, "
                "whose tensors no module can keep: leave them out"
            )
        for name, t in self.named_buffers():
            if wrapped(t):
                raise UnsupportedError(
                    f"{type(self).__name__}: {name} is a tensor of a transform of torch.func, which cannot be updated: "
                    "pass parameters alone to functional_call and to the transform"
                )

    def seed_rng(self, seed: int, offset: int = 0) -> None:
        """Sets the random generator of stochastic rounding. Without it, the seed is drawn from torch's CPU generator
        when it is first needed. **Raises** ValueError for a seed outside of 0..2^64-1."""
        device = next((t.device for t in self.parameters()), None)
        with torch.inference_mode(False):
            rng = quantize_verbs.rng_state(seed, offset, device)
        self._buffers.pop("rng_state", None)
        self.register_buffer("rng_state", rng)

    # --- copying, saving, loading, moving ---

    def __getstate__(self) -> dict[str, Any]:
        """Returns a module's attributes without those of its last step; kept weights and region are made again."""
        return {k: v for k, v in self.__dict__.items() if k not in _OF_A_STEP and k != "_prepared_for"}

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """Copies by `__getstate__`, after making the states that an already known recipe needs."""
        self._make_missing()
        late.see(self, late.by_deepcopy(memo))
        copied = memo[id(self)] = type(self).__new__(type(self))
        if type(self).__getstate__ is StatefulModule.__getstate__ or is_parametrized(self):
            state = {k: v for k, v in self.__dict__.items() if k not in _OF_A_STEP}
        else:
            state = self.__getstate__()
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def _save_to_state_dict(self, destination: Any, *args: Any) -> None:
        self._make_missing()
        late.see(self, late.by_state_dict(destination))
        super()._save_to_state_dict(destination, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StatefulModule:
        rng = self._buffers.get("rng_state")
        super()._apply(fn, recurse)
        moved = self._buffers.get("rng_state")
        if rng is not None and moved is not None and rng.is_meta and not moved.is_meta:
            moved.copy_(_drawn_rng(moved.device))  # the model left meta, and the buffer is uninitialized
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        take_extra_state(self, state_dict, prefix)
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
            if keys_below(state_dict, prefix):  # else it says nothing of this module: adapters alone, another part
                self._modules.pop("scale_states", None)
        elif "scale_states" not in self._modules:
            self._modules["scale_states"] = ScaleStates(None, device)
        if rng is not None and "rng_state" not in self._buffers:
            with torch.inference_mode(False):
                self.register_buffer("rng_state", torch.zeros(4, dtype=torch.int32, device=device))
        self._caches = None
        super()._load_from_state_dict(read_weights(self, state_dict, prefix, args[0]), prefix, *args)
        missing = args[2]
        if f"{prefix}rng_state" in missing:  # weights alone: a seed serves other weights as well
            missing.remove(f"{prefix}rng_state")


_OF_A_STEP = ("_ran", "_calls", "_caches", "_compared", "_differs")


def _drawn_rng(device: torch.device) -> Tensor:
    """Makes a random state, int32 [4], whose seed torch's CPU generator draws."""
    words = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int64, device="cpu")
    return torch.cat([words, torch.zeros(2, dtype=torch.int64, device="cpu")]).to(torch.int32).to(device)


def require_no_capture(device: torch.device) -> None:
    """Called before a state is made. **Raises** NotImplementedError where a CUDA graph would reset it in each
    replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a module's first call with a recipe that has state makes that state, which must lie outside of CUDA "
            "graphs: run the module once before capturing it, as diptych.torch.make_graphed_callables does"
        )


def _announce(before: LinearPlan | None, after: LinearPlan, lost: list[str], recipe: Recipe) -> None:
    warn_once(
        (None if before is None else before.states, after.states),
        f"switching to {type(recipe).__name__}: the delayed scales of {', '.join(sorted(lost))} were another recipe's "
        "and are dropped; further modules and later switches of this kind are not reported",
    )
