"""The entries of a checkpoint for a model and its optimizer, by names that no wrapper changes.

torch.distributed.checkpoint (DCP) writes these tensors, which any number of ranks can read:

    model.<name>                    the state dict, as `plain_state_dict` makes it, without quantizers' states
    masters.<name>                  `main_param` of a weight that is held quantized
    optimizer.state.<name>.<key>    tensors of the optimizer's state, by the weight's name

Each rank writes a file with `states` (delayed scales and random generators, which differ from rank to rank), `groups`
(the optimizer's options, with the weights' names), `values` (entries of its state that are not tensors) and `cut_over`
(the ranks that modules are cut over).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diptych.common.errors import CheckpointError, UnsupportedError
from diptych.torch.distributed.checkpoint_tensors import ModuleCut, described, is_sharded, part_of
from diptych.torch.modules.held_state import plain_state_dict
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.modules.stateful import StatefulModule
from diptych.torch.modules.tensor_parallel import TensorParallelModule
from diptych.torch.private.checkpointing import WRAPPED
from diptych.torch.private.graphs import COMPILED
from diptych.torch.state.scales import check_tree, keys_below

MODEL, MASTERS, OPTIMIZER = "model.", "masters.", "optimizer.state."
_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{COMPILED}|{WRAPPED})\.")
_STATE = re.compile(r"(?:(?P<owner>.*)\.)?(?:rng_state|scale_states\..+)")


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get(COMPILED)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def name_of(key: str) -> str:
    """Returns a key without the parts that torch.compile and activation checkpointing add to it."""
    return _WRAPPERS.sub("", key)


def module_cuts(model: nn.Module) -> dict[str, ModuleCut]:
    """Returns how modules cut their parameters over tensor-parallel groups, by the parameters' names.

    **Raises** UnsupportedError if a cut module holds a parameter in another form.
    """
    found: dict[Tensor, ModuleCut] = {}
    for key, module in model.named_modules():
        if not isinstance(module, TensorParallelModule):
            continue
        for name, how in module.cuts().items():
            p = module._parameters.get(name)
            if p is None and getattr(module, name, None) is not None:
                raise UnsupportedError(
                    f"{key or type(module).__name__} is cut over {module.tp_size} ranks, and its {name} is no "
                    "parameter of its own (parametrized), so that this rank's part of it is not known; remove the "
                    "parametrization before"
                )
            if p is not None:
                found[p] = ModuleCut(how, module._require_group())
    named = model.named_parameters(remove_duplicate=False)  # another module may have the same parameter
    return {name_of(key): found[p] for key, p in named if p in found}


def cut_over(model: nn.Module) -> dict[str, list[int]]:
    """Returns the ranks that modules are cut over, by the modules' names."""
    return {
        name_of(f"{key}.")[:-1]: sorted(torch.distributed.get_process_group_ranks(module._require_group()))
        for key, module in model.named_modules()
        if isinstance(module, TensorParallelModule) and module.tp_size > 1
    }


class ModelState:
    """A model's state dict, divided into `tensors` for DCP and `states` of this rank, both by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.keys: dict[str, str] = {}
        self.tensors: dict[str, Any] = {}
        self.states: dict[str, Tensor] = {}
        self.owners = {
            name_of(f"{key}.")[:-1]: key
            for key, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, StatefulModule)
        }
        entries = plain_state_dict(model)  # this makes FSDP2 reshard its parameters first
        self.cuts = module_cuts(model)
        for key, t in entries.items():
            name = name_of(key)
            if self.owner(name) is None:
                self.keys[name] = key
                self.tensors[MODEL + name] = described(name, t, self.cuts.get(name))
            else:
                self.states[name] = t
        self.masters = {
            MASTERS + name_of(key): p.main_param.detach()
            for key, p in model.named_parameters()
            if isinstance(p, QuantizedParameter) and p.main_param is not None
        }
        self.tensors |= self.masters

    def owner(self, name: str) -> str | None:
        """Returns the name of the module that a quantizer's state belongs to, None if `name` is not that of such a
        state."""
        found = _STATE.fullmatch(name)
        owner = (found["owner"] or "") if found else None
        return owner if owner in self.owners else None

    def check(self, states: Mapping[str, Tensor]) -> None:
        """**Raises** CheckpointError if the model cannot take these states."""
        if unknown := [name for name in states if self.owner(name) is None]:
            raise CheckpointError(f"it holds states of modules that this model does not have: {listed(unknown)}")
        if lacking := self.states.keys() - states.keys():
            raise CheckpointError(f"it lacks {listed(lacking)}, which this model was prepared with")
        for name, module in self.owners.items():
            below = f"{name}.scale_states." if name else "scale_states."
            held = self.model.get_submodule(module)._modules.get("scale_states")
            check_tree(keys_below(states, below), states, below, held)  # type: ignore[arg-type]

    def load(self, tensors: Mapping[str, Any], states: Mapping[str, Tensor]) -> None:
        """Loads a state dict into the model. Masters are loaded last, since a weight that is loaded overwrites its
        master."""
        masters = {name: tensors[name].clone() for name in self.masters}
        state = {key: part_of(tensors[MODEL + name]) for name, key in self.keys.items()}
        for name, t in states.items():
            owner = self.owner(name) or ""
            state[f"{self.owners[owner]}.{name[len(owner) :].removeprefix('.')}".removeprefix(".")] = t
        self.model.load_state_dict(state)
        for name, t in self.masters.items():
            t.copy_(masters[name])


def combined(
    ranks: list[Mapping[str, Tensor]], rank: int, cut: Mapping[str, list[int]] | None = None
) -> dict[str, Tensor]:
    """Returns the states for a rank, made from those of all ranks of a checkpoint. That is needed if the number of
    ranks differs, or if they share other layers.

    Scales are those of the largest amaxes, as a reduction over all ranks would have made them, so that ranks that share
    a layer agree. A random generator that all ranks share is kept; otherwise a rank continues one of the generators,
    with another seed if a rank before it continues the same one. `cut`: the ranks that modules are cut over, by the
    modules' names; these ranks continue one generator, also for modules that each of them has whole.
    """
    out: dict[str, Tensor] = {}
    cut = cut or {}
    sharing = next(iter(cut.values()), [rank])
    for name in ranks[0]:
        all_ = [states[name] for states in ranks if name in states]
        owner, _, last = name.rpartition(".")
        if last == "rng_state":
            different = list({tuple(t.tolist()): t for t in all_}.values())
            first = min(cut.get(owner, sharing))
            out[name] = different[first % len(different)].clone()
            if len(different) > 1:
                out[name][1] ^= first // len(different)  # the high word of the seed
        else:
            stack = torch.stack(all_)
            out[name] = stack.amin(0) if name.endswith(".scale") else stack.amax(0)
    return out


class OptimizerState:
    """An optimizer's state by the names of weights: `tensors` for DCP, `groups` and `values` of this rank."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        names: dict[Tensor, str] = {p: name_of(key) for key, p in model.named_parameters()}
        self.cuts = module_cuts(model)
        self.params: dict[str, Any] = {}
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p not in names:
                raise CheckpointError(
                    f"the optimizer steps a tensor {list(p.shape)} that is no weight of the model; give the whole "
                    "model that it trains"
                )
            self.params[names[p]] = p
        self.groups: list[dict[str, Any]] = [
            {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
        ]
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, dict[str, Any]] = {}
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    self.values.setdefault(names[p], {})[key] = value
                    continue
                name, cut = f"{OPTIMIZER}{names[p]}.{key}", self.cuts.get(names[p])
                alike = value.shape == p.shape and value.dim() > 0
                kind, wanted = (("a DTensor" if is_sharded(t) else "a plain tensor") for t in (value, p))
                if value.numel() > 1 and ((is_sharded(p) and kind != wanted) or (cut is not None and not alike)):
                    raise CheckpointError(
                        f"the optimizer's {key} of {names[p]} is {kind} {list(value.shape)} on each rank, and the "
                        f"weight is {wanted} {list(p.shape)}, cut over ranks: such a state cannot be saved, since its "
                        "whole is not known; make it in the weight's form"
                    )
                self.tensors[name] = described(name, value, cut if alike else None)

    def check(self, groups: list[dict[str, Any]]) -> None:
        """**Raises** CheckpointError unless the saved groups have the weights of this optimizer's groups."""
        here, there = ([sorted(group["params"]) for group in some] for some in (self.groups, groups))
        if here != there:
            one, other = ({name for group in some for name in group} for some in (here, there))
            said = differences(one, other) or "its groups have other weights"
            raise CheckpointError(f"the optimizer's weights differ: {said}")

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor to load a state into: the present state, or a new tensor, sharded as the weight if it has
        its shape.

        **Raises** CheckpointError if the state has another shape than its weight, and a module cuts the weight.
        """
        held = self.tensors.get(name)
        if held is not None and (tuple(held.shape), held.dtype) == (shape, dtype):
            return held
        weight = name.removeprefix(OPTIMIZER).rpartition(".")[0]
        p, cut = self.params[weight], self.cuts.get(weight)
        whole = tuple(described(weight, p, cut).shape)
        if shape != whole or not shape:
            if cut is not None and math.prod(shape) > 1:
                raise CheckpointError(
                    f"{name} is {list(shape)} in the checkpoint, and {weight} {list(whole)} is cut over ranks, which "
                    "can share a state of the weight's shape only"
                )
            # Counters are read to the CPU, and loading moves them to the device that the optimizer needs.
            return torch.empty(shape, dtype=dtype, device=p.device if shape else "cpu")
        return described(name, _empty_like(p, dtype), cut)

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
        """Loads options and state into the optimizer."""
        packed = self.optimizer.state_dict()
        state: dict[str, dict[str, Any]] = {name: dict(kept) for name, kept in values.items()}
        for key, t in tensors.items():
            name, _, kind = key.removeprefix(OPTIMIZER).rpartition(".")
            state.setdefault(name, {})[kind] = part_of(t)
        numbers: dict[str, int] = {}
        for names, group in zip(self.groups, packed["param_groups"], strict=True):
            numbers |= dict(zip(names["params"], group["params"], strict=True))
        options = []
        for held, saved in zip(self.groups, groups, strict=True):
            moved = {k: _moved(v, held.get(k)) for k, v in saved.items()}
            options.append({**moved, "params": [numbers[name] for name in held["params"]]})
        self.optimizer.load_state_dict({
            **packed, "state": {numbers[name]: kept for name, kept in state.items()}, "param_groups": options,
        })  # fmt: skip
        for name, kept in state.items():
            p = self.params[name]
            for key, t in kept.items():  # torch casts a state to its weight's dtype, which loses digits
                if isinstance(t, Tensor) and self.optimizer.state[p][key].dtype != t.dtype:
                    self.optimizer.state[p][key] = t.to(p.device)


def _empty_like(p: Any, dtype: torch.dtype) -> Any:
    """Returns a new tensor with the shape, device and sharding of a weight."""
    if not is_sharded(p):
        return torch.empty(p.shape, dtype=dtype, device=p.device)
    from torch.distributed.tensor import DTensor

    part = torch.empty(p.to_local().shape, dtype=dtype, device=p.device)
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _moved(value: Any, held: Any) -> Any:
    return value.to(held.device) if isinstance(value, Tensor) and isinstance(held, Tensor) else value


def differences(here: Iterable[str], there: Iterable[str]) -> str:
    """Returns a message with the names that a checkpoint lacks or has in addition, "" if there are none."""
    here, there = set(here), set(there)
    said = [f"it lacks {listed(here - there)}"] if here - there else []
    said += [f"it holds {listed(there - here)}, unlike this run"] if there - here else []
    return "; ".join(said)


def listed(names: Iterable[str]) -> str:
    """Returns some names as text for an error message."""
    names = sorted(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
