"""The states of delayed scaling and stochastic rounding, which travel from step to step as buffers beside a module.

    <module>.scale_states.<state>.scale        float32 [1]   the factor by which the next quantize multiplies
                                .amax_history  float32 [L]   pending amax, then earlier ones, the newest last
                                .fp8_max       float32 [1]   largest value of the element that the scale is for
    <module>.rng_state                         int32 [4]     seed and offset, each low word first

States have the names of `LinearPlan.states`, with "_" for "."; a module of several linears has one more level, their
names. States consist of these tensors alone, which safetensors and `torch.load(weights_only=True)` take. Invariants:
scales stay float32 whatever the module is cast to; a state that was loaded is checked against the first recipe that
uses it; nothing is overwritten by a state that does not fit.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from diptych.common.errors import CheckpointError, RecipeSwitchWarning
from diptych.common.layers.plan import LinearPlan, StateSlot
from diptych.common.quantizers import FP8_DTYPES, Float8Quantizer
from diptych.torch.primitives.checks import describe
from diptych.torch.private.graphs import fake_mode
from diptych.torch.private.sharding import active_ddp
from diptych.torch.state.checkpoint import aside
from diptych.torch.state.update import LOG, collect, forget, fp8_max, log_buffers, update_all, update_eagerly

BUFFERS = ("scale", "amax_history", "fp8_max")
_LARGEST = tuple(torch.finfo(getattr(torch, dtype)).max for dtype in FP8_DTYPES)
_ROUNDED = 1e-4  # the relative rounding error of fp8_max in averaged checkpoints
_RESET = "if the module is to run that recipe, call reset_scale_states() before loading"

_warned: set[Any] = set()


def warn_once(key: Any, message: str) -> None:
    """Emits a RecipeSwitchWarning once in a process for each key."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RecipeSwitchWarning, stacklevel=5)


def key_of(name: str) -> str:
    """Returns the key of a state name in a state dict: "input_fprop" for "input.fprop"."""
    return name.replace(".", "_")


def resize_history(history: Tensor, length: int) -> Tensor:
    """Returns a history of another length: the pending amax stays first, the newest ones last, with zeros between."""
    if history.numel() == length:
        return history
    kept = min(length, history.numel()) - 1
    out = history.new_zeros(length)
    out[0] = history[0]
    if kept:
        out[length - kept :] = history[history.numel() - kept :]
    return out


def record_amax(history: Tensor, amax: Tensor) -> None:
    """Sets history[0] = max(history[0], amax), as quantizing by a delayed scale does."""
    aside(_record_amax, history, amax)


def _record_amax(history: Tensor, amax: Tensor) -> None:
    pending = history[:1]
    torch.maximum(pending, amax, out=pending)


class _Float32(nn.Module):
    """A module whose float buffers stay float32 when the model is cast, and start anew when they leave meta."""

    def start(self, name: str) -> float:
        """Returns the initial value of a buffer."""
        return 0.0

    def reset_parameters(self) -> None:
        """Sets every buffer to its initial value."""
        self._restart(list(self._buffers))

    def _restart(self, names: list[str]) -> None:
        with torch.no_grad():
            for name in names:
                t = self._buffers[name]
                if t is not None:
                    t.fill_(self.start(name))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Float32:
        def moved(t: Tensor) -> Tensor:
            out = fn(t)
            return out if out.dtype == t.dtype else t.to(out.device)

        unset = [name for name, t in self._buffers.items() if t is not None and t.is_meta]
        super()._apply(moved, recurse)
        self._restart([name for name in unset if not self._buffers[name].is_meta])  # type: ignore[union-attr]
        return self


class ScaleSlot(_Float32):
    """The delayed-scaling state of one tensor. `quantizer` is None if no recipe has used the state since loading."""

    scale: Tensor
    amax_history: Tensor
    fp8_max: Tensor

    def __init__(self, length: int, largest: float, device: torch.device | str | None) -> None:
        super().__init__()
        self.quantizer: Float8Quantizer | None = None
        self.largest = largest
        with torch.inference_mode(False):
            self.register_buffer("scale", torch.ones(1, dtype=torch.float32, device=device))
            self.register_buffer("amax_history", torch.zeros(length, dtype=torch.float32, device=device))
            self.register_buffer("fp8_max", torch.full((1,), largest, dtype=torch.float32, device=device))

    def start(self, name: str) -> float:
        return {"scale": 1.0, "amax_history": 0.0, "fp8_max": self.largest}[name]

    def adopt(self, quantizer: Float8Quantizer) -> None:
        """Binds the state to a quantizer of the same element, and resizes the history to its length."""
        self.quantizer, self.largest = quantizer, fp8_max(quantizer)
        if self.amax_history.numel() != quantizer.amax_history_len:
            with torch.inference_mode(False):
                self._buffers["amax_history"] = resize_history(self.amax_history, quantizer.amax_history_len)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}amax_history")
        if given is not None and given.numel() != self.amax_history.numel():
            if self.quantizer is None:
                with torch.inference_mode(False):
                    self._buffers["amax_history"] = self.amax_history.new_zeros(given.numel())
            else:
                state_dict = dict(state_dict) | {
                    f"{prefix}amax_history": resize_history(given, self.amax_history.numel())
                }
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}fp8_max" in state_dict and has_values(self.fp8_max):
            held = self.fp8_max.item()
            exact = [largest for largest in _LARGEST if math.isclose(held, largest, rel_tol=_ROUNDED)]
            self.largest = exact[0] if exact else held
            if exact and held != exact[0]:
                with torch.inference_mode(False):
                    self._buffers["fp8_max"] = torch.full_like(self.fp8_max, exact[0])


def has_values(*tensors: Tensor) -> bool:
    """Returns whether the tensors have values that can be read: none is fake or on the device meta."""
    return not any([t.is_meta for t in tensors]) and fake_mode(tensors) is None


class StepScales:
    """The delayed scales of one forward and its backward, by name, each with the history that its amax enters."""

    def __init__(self, names: tuple[str, ...], scales: list[Tensor], histories: list[Any]) -> None:
        self._tensors = dict(zip(names, zip(scales, histories, strict=True), strict=True))

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns (scale, history) of a state."""
        return self._tensors[name]

    def record(self, name: str, amax: Tensor) -> None:
        """Enters an amax, float32 [1], into the state."""
        record_amax(self._tensors[name][1], amax)


class ScaleStates(_Float32):
    """The delayed-scaling states of one linear layer, one `ScaleSlot` for each name in `LinearPlan.states`.

    `diptych.torch.Linear` has its own. For `diptych.torch.linear` make it with a plan, and call `update()` once a step.

    **Arguments:** `plan`: from `linear_plan(recipe, module, name)`. With None there are no states until `bind` or
    `load_state_dict`.
    """

    seen: Tensor | None
    pending: Tensor
    graphed = False  # whether graphs record here; their buffers may exist before that
    joint: Any = None  # the JointUpdate to which the next update belongs

    def __init__(self, plan: LinearPlan | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.plan: LinearPlan | None = None
        self.region = 0  # the region of the last update
        self.register_buffer("seen", None, persistent=False)  # for graphs: the step counter at the last update
        for name in LOG:  # graphs record in these buffers (update.py)
            self.register_buffer(name, None, persistent=False)
        self.view: tuple[StepScales, list[int]] | None = None  # this region's scales, with their version counters
        self.wrapper: Any = None  # weak reference to the DistributedDataParallel that leaves these states alone
        self.device = device
        if plan is not None:
            self.bind(plan, device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._modules)})"

    def slots(self) -> dict[str, ScaleSlot]:
        """Returns the states by their keys."""
        return {k: m for k, m in self._modules.items() if isinstance(m, ScaleSlot)}

    def tensors(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns (scale, amax_history) of a state. **Raises** KeyError for an unknown name."""
        buffers = self._modules[name if "." not in name else key_of(name)]._buffers  # type: ignore[union-attr]
        return buffers["scale"], buffers["amax_history"]  # type: ignore[return-value]

    def forward_scales(self) -> list[tuple[str, Tensor]]:
        """Returns (state name, scale) for each tensor that a forward quantizes."""
        states = () if self.plan is None else self.plan.states
        return [(s.name, self.tensors(s.name)[0]) for s in states if not s.name.startswith("grad_output")]

    def bind(self, plan: LinearPlan, device: torch.device | str | None = None) -> list[str]:
        """Makes the states those of a plan: what fits is kept, the rest is made anew or dropped.

        **Returns:** the keys of states that were lost. **Raises** CheckpointError if a loaded state belongs to
        another recipe; nothing changes then.
        """
        held, wanted = self.slots(), {key_of(s.name): s for s in plan.states}
        loaded = {k: s for k, s in held.items() if s.quantizer is None}
        if loaded and wanted:
            self._check_loaded(loaded, wanted)
        lost = [key for key, slot in held.items() if key not in wanted or not _fits(slot, wanted[key])]
        if lost or len(held) != len(wanted):
            self.collect()  # the states that stay keep their recorded amaxes
        for key in lost:
            del self._modules[key]
        for key, want in wanted.items():
            if key not in self._modules:
                self._modules[key] = ScaleSlot(want.quantizer.amax_history_len, fp8_max(want.quantizer), device)
                self.wrapper = None
            self._modules[key].adopt(want.quantizer)  # type: ignore[union-attr,operator]
        if self._buffers["pending"] is not None and len(wanted) != self.pending.numel():
            self._buffers |= dict.fromkeys(LOG)
        self.plan, self.view = plan, None
        return lost

    @staticmethod
    def _check_loaded(loaded: dict[str, ScaleSlot], wanted: dict[str, StateSlot]) -> None:
        said = "call reset_scale_states() to start anew"
        if loaded.keys() != wanted.keys():
            raise CheckpointError(
                f"the loaded scale states are {sorted(loaded)}, and this recipe needs {sorted(wanted)}: they belong to "
                f"another recipe; {said}"
            )
        for key, slot in loaded.items():
            if not _fits(slot, wanted[key]):
                raise CheckpointError(
                    f"the loaded scale state {key!r} is for elements up to {slot.fp8_max.item():g}, and this recipe's "
                    f"{wanted[key].quantizer.fp8_dtype} has elements up to {fp8_max(wanted[key].quantizer):g}: it "
                    f"belongs to another recipe; {said}"
                )

    def serves(self, plan: LinearPlan) -> bool:
        """Returns whether binding a plan would leave every scale and history as it is."""
        held = self.slots()
        return held.keys() == {key_of(s.name) for s in plan.states} and all(
            _fits(held[key_of(s.name)], s) and held[key_of(s.name)].amax_history.numel() == s.quantizer.amax_history_len
            for s in plan.states
        )

    def scales_for(self, plan: LinearPlan) -> list[Tensor]:
        """Returns scales for a call by another plan that must not change states: the present scale of each state that
        fits, and 1 for others."""
        found: list[Tensor] = []
        for want in plan.states:
            slot: Any = self._modules.get(key_of(want.name))
            if slot is not None and _fits(slot, want):
                found.append(slot.scale)
            else:
                found.append(torch.ones(1, dtype=torch.float32, device=self.scale_device()))
        return found

    def scale_device(self) -> Any:
        """Returns the device of the scales, or the one that the constructor was given if there are no scales."""
        return next((b.device for b in self.buffers()), self.device)

    def borrowed(self, plan: LinearPlan) -> ScaleStates:
        """Returns new states, with the scales of `scales_for`, for a call by another plan that records nothing.

        **Raises** CheckpointError if a loaded state belongs to another recipe.
        """
        loaded = {k: s for k, s in self.slots().items() if s.quantizer is None}
        if loaded:
            self._check_loaded(loaded, {key_of(s.name): s for s in plan.states})
        made = ScaleStates(plan, self.scale_device())
        for want, scale in zip(plan.states, self.scales_for(plan), strict=True):
            made.tensors(want.name)[0].copy_(scale)
        return made

    def freeze(self, scales: Tensor) -> StepScales:
        """Returns the states with a copy of the scales [n], so that backward quantizes by the scales of its forward."""
        assert self.plan is not None
        names = tuple([slot.name for slot in self.plan.states])
        return StepScales(names, list(scales.view(-1, 1).unbind()), [self.tensors(name)[1] for name in names])

    def versions(self) -> list[int]:
        """Returns the scales' version counters, which change when a scale is written."""
        scales = [slot.scale for slot in self.slots().values()]
        return [0 if t.is_inference() else t._version for t in scales]

    def current(self) -> StepScales | ScaleStates:
        """Returns what `freeze` made in this region, unless the scales were written or replaced since."""
        return self if self.view is None or self.view[1] != self.versions() else self.view[0]

    def update(self, group: Any = None) -> Tensor | None:
        """Updates the scales for the next step and returns a copy of them, [n]; None without states.

        `group`: process group over which the pending amaxes are reduced first.
        """
        slots = self._in_order()
        if not slots:
            return None
        quantizers = tuple([s.quantizer for s in slots])
        if None in quantizers:
            raise RuntimeError(
                "ScaleStates.update: no recipe has used this state since it was loaded, so that its update is unknown; "
                "call bind(plan) first"
            )
        histories, scales = [s.amax_history for s in slots], [s.scale for s in slots]
        if self.plan is None:
            return update_all(histories, scales, self.recorded(), quantizers, group, shown=True)[0]
        return update_eagerly(self.plan.states, histories, scales, self.recorded(), group)

    def _in_order(self) -> list[ScaleSlot]:
        names = self.slots() if self.plan is None else [key_of(s.name) for s in self.plan.states]
        return [self._modules[name] for name in names]  # type: ignore[misc]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaleStates:
        self.view = None
        super()._apply(fn, recurse)
        return self

    def recorded(self) -> list[Tensor]:
        """Returns the buffers in which graphs record; none if no graph records here."""
        return [self._buffers[name] for name in LOG] if self.ready_for_graphs() else []  # type: ignore[misc]

    def ready_for_graphs(self) -> bool:
        """Returns whether graphs can record here."""
        return self.graphed and self._buffers["pending"] is not None

    def prepare_for_graphs(self) -> None:
        """Makes the states ready for a graph that is about to be traced."""
        self.make_graph_buffers()
        self.graphed = True

    def make_graph_buffers(self) -> None:
        """Makes the buffers that graphs read and write beside these states."""
        if not self.slots():
            return
        device = next(iter(self.slots().values())).scale.device
        with torch.inference_mode(False):
            if self.seen is None:
                self.seen = torch.zeros(1, dtype=torch.int64, device=device)
            if self._buffers["pending"] is None:
                for name, buffer in log_buffers(len(self.slots()), device).items():
                    setattr(self, name, buffer)

    def collect(self) -> None:
        """Moves what graphs have recorded into the histories."""
        slots = self._in_order()
        collect([s.amax_history for s in slots], [s.scale for s in slots], self.recorded())

    def record(self, name: str, amax: Tensor) -> None:
        """Enters the amax [1] of a tensor that is not quantized."""
        record_amax(self.tensors(name)[1], amax)

    def reset(self) -> None:
        """Forgets all states."""
        for key in list(self._modules):
            del self._modules[key]
        self.plan = self.view = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"region": 0, "view": None, "wrapper": None, "joint": None}

    # --- saving and loading ---

    def _save_to_state_dict(self, *args: Any) -> None:
        self.collect()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Makes the children that the state dict has, for torch to load them next."""
        tree = keys_below(state_dict, prefix)
        check_tree(tree, state_dict, prefix, self)
        device = self.scale_device()
        for name, keys in tree.items():
            if name not in self._modules:
                if "scale" in keys:
                    length = state_dict[f"{prefix}{name}.amax_history"].numel()
                    self._modules[name] = ScaleSlot(length, 0.0, device)
                    self.plan = None  # the next recipe must check the loaded states, even if it used the former ones
                else:
                    self._modules[name] = ScaleStates(None, device)
        if tree:  # else the dict says nothing of these states
            for name in [n for n in self._modules if n not in tree]:
                del self._modules[name]
            forget(self.recorded())
        self.view = None
        super()._load_from_state_dict(state_dict, prefix, *args)


def keep_from_broadcast(states: ScaleStates) -> None:
    """Takes states out of the buffers that DistributedDataParallel sends from rank 0 before each forward: a rank's
    pending amaxes are its own until they are reduced.

    The wrapper lists the buffers anew in each forward, without the names in `parameters_to_ignore`; the first forward
    that uses the states adds theirs. One broadcast comes before that, so all ranks start with the states of rank 0.
    """
    wrapper = active_ddp()
    if wrapper is None or (states.wrapper is not None and states.wrapper() is wrapper):
        return
    own = {id(b) for b in states.buffers()}
    wrapper.parameters_to_ignore |= {name for name, b in wrapper.module.named_buffers() if id(b) in own}
    wrapper.modules_buffers = [b for b in wrapper.modules_buffers if id(b) not in own]
    states.wrapper = weakref.ref(wrapper)


def _fits(slot: ScaleSlot, want: StateSlot) -> bool:
    if slot.quantizer is not None:
        return slot.quantizer.fp8_dtype == want.quantizer.fp8_dtype
    return (slot.largest or slot.fp8_max.item()) == fp8_max(want.quantizer)


def keys_below(state_dict: Any, prefix: str) -> dict[str, set[str]]:
    """Returns the names under a prefix, each with the rest of its keys."""
    tree: dict[str, set[str]] = {}
    for key in state_dict:
        if key.startswith(prefix):
            name, _, rest = key[len(prefix) :].partition(".")
            tree.setdefault(name, set()).add(rest)
    return tree


def check_tree(tree: dict[str, set[str]], state_dict: Any, prefix: str, states: ScaleStates | None) -> None:
    """Checks the form of states that are about to be loaded, and that they fit the states that they replace.

    **Raises** CheckpointError naming the key; nothing has been loaded then.
    """
    for name, keys in tree.items():
        held = None if states is None else states._modules.get(name)
        if "scale" not in keys and all("." in k for k in keys):  # `name` is a linear layer's, with states below it
            below = f"{prefix}{name}."
            check_tree(
                keys_below(state_dict, below), state_dict, below, held if isinstance(held, ScaleStates) else None
            )
            continue
        if keys != set(BUFFERS):
            raise CheckpointError(f"the scale state {prefix}{name} has {sorted(keys)} and must hold {sorted(BUFFERS)}")
        for buffer in BUFFERS:
            t = state_dict[f"{prefix}{name}.{buffer}"]
            right = isinstance(t, Tensor) and t.dtype == torch.float32 and t.dim() == 1 and t.numel() > 0
            if not right or (buffer != "amax_history" and t.numel() != 1):
                shape = "[L], L >= 1" if buffer == "amax_history" else "[1]"
                got = describe(t) if isinstance(t, Tensor) else type(t).__name__
                raise CheckpointError(f"{prefix}{name}.{buffer} must be float32 {shape}, got {got}")
        values = {b: state_dict[f"{prefix}{name}.{b}"] for b in BUFFERS}
        if not has_values(*values.values()):
            continue
        _check_values(f"{prefix}{name}", **values)
        if isinstance(held, ScaleSlot) and held.quantizer is not None:
            largest = values["fp8_max"].item()
            if not math.isclose(largest, fp8_max(held.quantizer), rel_tol=_ROUNDED):
                raise CheckpointError(
                    f"{prefix}{name} is a state for elements up to {largest:g}, and the module's "
                    f"{held.quantizer.fp8_dtype} has elements up to {fp8_max(held.quantizer):g}: it belongs to another "
                    f"recipe; {_RESET}"
                )
    bound = {} if states is None else {k: s for k, s in states.slots().items() if s.quantizer is not None}
    if bound and tree and bound.keys() != tree.keys():
        raise CheckpointError(
            f"{prefix}* has the states {sorted(tree)}, and the module has {sorted(bound)}: they belong to another "
            f"recipe; {_RESET}"
        )


def _check_values(name: str, scale: Tensor, amax_history: Tensor, fp8_max: Tensor) -> None:
    """**Raises** CheckpointError for values that no state has, which would spoil products for as long as they stay."""
    value = scale.item()
    if not 0 < value < math.inf:
        raise CheckpointError(f"{name}.scale must be finite and greater than 0, got {value:g}")
    wrong = amax_history[~((amax_history >= 0) & amax_history.isfinite())]
    if wrong.numel():
        raise CheckpointError(f"{name}.amax_history must hold finite amaxes of 0 or more, got {wrong[0].item():g}")
    largest = fp8_max.item()
    if not any([math.isclose(largest, known, rel_tol=_ROUNDED) for known in _LARGEST]):
        raise CheckpointError(f"{name}.fp8_max must be the largest value of an FP8 element, got {largest:g}")
