"""`prepare`: makes FSDP2 gather the weights of a model quantized, after checking that each weight can be cut so."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from diptych.common.layers.plan import held_quantizer
from diptych.common.quantizers import RHT, ROW_AMAX, Quantizer
from diptych.common.recipes import Recipe
from diptych.torch.distributed.amaxes import WholeAmaxes
from diptych.torch.distributed.gather import Gather
from diptych.torch.distributed.parts import Parts
from diptych.torch.distributed.sharded_weight import ShardedWeight
from diptych.torch.layers.tensor_parallel import COLUMN, require_whole
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.tensors.quantized import QuantizedTensorBase


def prepare(model: nn.Module, mesh: Any, recipe: Recipe, *, recompute: bool = False) -> None:
    """Makes FSDP2 gather the weights of a model's quantized layers in a recipe's format: bytes and scales.

    Call it after `fully_shard`, before the first forward, on every rank; it communicates nothing. Weights stay sharded
    in high precision, and optimizers, clipping and checkpoints see them so. Forward and backward read a gathered weight
    as one that is held quantized (`quantized_model_init`): the amaxes of per-tensor formats and of NVFP4 are those of
    the whole weights, reduced over the ranks in one call for all weights when a step has changed them, and delayed
    scaling scales weights by their current amax. Of a module that is cut over a tensor-parallel group FSDP2 gathers
    this rank's part, by the amax of the whole weight: amaxes are reduced over that group, too. Outside of `autocast`
    regions layers read dequantized weights. Weights that the recipe leaves in high precision are gathered so.

    **Arguments:** `model`: the root module that `fully_shard` was applied to. `mesh`: the DeviceMesh that it shards
    over, of one dimension (with a dimension of replicas before it: HSDP); beside tensor parallelism the part of the
    job's mesh that has these dimensions, as `mesh["dp"]`. `recipe`: the recipe that the layers will run
    by; a module's own `recipe` has precedence. `recompute`: whether layers run again in backward, as under activation
    checkpointing; backward then gathers the rowwise copy too of formats with one-dimensional blocks.

    **Raises**, naming the weight, before anything is sent: ArgumentError for a model that is not sharded by
    `fully_shard` or is prepared already, or that has a cut module without its group or with one that `mesh` shares
    ranks with; ShapeError for a weight that ranks would cut inside of a block or unevenly; ValueError for a recipe that
    quantizes a weight in two ways or stochastically; UnsupportedError for a user's own quantizer, for amaxes of rows,
    Hadamard transforms of weights, weights offloaded to the CPU, and weights sharded over another mesh or dimension.
    """
    from torch.distributed.fsdp import FSDPModule  # a torch may be built without distributed

    require_recipe("parallel.prepare", recipe, optional=False)
    require_switches("parallel.prepare", recompute=recompute)
    if not isinstance(model, FSDPModule):
        raise ArgumentError(
            f"parallel.prepare: {type(model).__name__} is not sharded; "
            "call torch.distributed.fsdp.fully_shard on it first"
        )
    found = []
    shared: dict[int, tuple[str, Quantizer]] = {}
    for name, module, layer, attribute, quantizer in _weights(model, recipe):
        _require_cuttable(name, module, attribute, quantizer, mesh)
        if layer in module._modes:
            _require_whole_parts(name, module, layer, attribute, quantizer, mesh)
        first, its = shared.setdefault(id(module._parameters[attribute]), (name, quantizer))
        if its != quantizer:
            raise ValueError(
                f"parallel.prepare: {first} and {name} are one weight, which the recipe quantizes in two ways: "
                f"{its} and {quantizer}"
            )
        found.append((name, module, layer, attribute, quantizer))
    amaxes, managed = WholeAmaxes(), _managed(model)
    parts: dict[int, Parts] = collections.defaultdict(Parts)
    gathers: dict[int, Gather] = {}  # modules may share a weight
    gathered = []
    for name, module, layer, attribute, quantizer in found:
        parameter: Any = module._parameters[attribute]
        gather = gathers.get(id(parameter))
        if gather is None:
            gather = Gather(name, quantizer, parameter.dim() == 3, *managed[id(module), attribute], recompute)
            # Blocks are never cut, and neither are a stack's weights.
            if not gather.stack and (quantizer.format.per_tensor or quantizer.format.two_level):
                number = amaxes.place(module.tp_group if layer in module._modes else None)
                gather.amaxes, gather.number = amaxes, number
            gather.parts = parts[id(gather.group)]
            gather.parts.add(gather)
            gathers[id(parameter)] = gather
        module._gathered = (*module._gathered, layer)
        gathered.append((weakref.ref(module), attribute, gather))
    _attach(gathered)

    def before_forward(*_: Any) -> None:
        _attach(gathered)
        amaxes.forget()

    model.register_forward_pre_hook(before_forward, prepend=True)


def _managed(model: nn.Module) -> dict[tuple[int, str], tuple[Any, Any]]:
    """FSDP2's objects (of the parameter, of its group) by the module's id and the parameter's name in it."""
    from torch.distributed.fsdp import FSDPModule

    made = {}
    for module in model.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group for each module
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            for param in () if group is None else group.fsdp_params:
                at = param._module_info
                modules = zip([at.module, *at.shared_modules], [at.param_name, *at.shared_param_names], strict=True)
                made |= {(id(owner), name): (param, group) for owner, name in modules}
    return made


def _weights(model: nn.Module, recipe: Recipe) -> Iterator[tuple[str, QuantizedModule, str, str, Quantizer]]:
    """The weights that the recipe quantizes: (full name, module, layer, attribute, quantizer)."""
    for prefix, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for layer in module.layers:
            attribute = f"{layer}_weight" if layer else "weight"
            name = f"{prefix}.{attribute}" if prefix else attribute
            chosen = recipe if module.recipe is None else module.recipe
            quantizer = held_quantizer("parallel.prepare", chosen, module.module_kind, module._role_name(layer), name)
            if quantizer is not None and attribute in module._parameters:
                yield name, module, layer, attribute, quantizer


def _shape_of_part(module: QuantizedModule, attribute: str) -> list[int]:
    """The shape of what FSDP2 shards: the parameter, or this rank's part where a style has made it a DTensor."""
    shape = list(module._parameters[attribute].shape)  # type: ignore[union-attr]
    if module._styled and attribute in (cuts := module.cuts()):
        shape[cuts[attribute].dim] //= module.tp_size
    return shape


def _require_cuttable(name: str, module: QuantizedModule, attribute: str, quantizer: Quantizer, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor

    op, parameter = f"parallel.prepare: {name}", module._parameters[attribute]
    if isinstance(parameter, QuantizedTensorBase) or not isinstance(parameter, DTensor):
        raise UnsupportedError(f"{op} is {type(parameter).__name__}, not a DTensor that fully_shard made")
    of_parameter: Any = parameter.device_mesh
    placements = parameter.placements
    if module._styled and of_parameter.ndim > 1:  # FSDP2's dimensions, and then the tensor-parallel one
        of_parameter, placements = of_parameter[of_parameter.mesh_dim_names[:-1]], placements[:-1]
    if of_parameter != mesh or getattr(placements[-1], "dim", None) != 0 or of_parameter.ndim > 2:
        raise UnsupportedError(
            f"{op} is placed {placements} on {of_parameter}; it must be cut along dimension 0 over {mesh}"
        )
    part = parameter._local_tensor
    if isinstance(part, ShardedWeight):
        raise ArgumentError(f"{op} is prepared already, to be gathered by {part.gather.quantizer}")
    if part.device.type not in (of_parameter.device_type, "meta"):
        raise UnsupportedError(f"{op} is kept on {part.device} and gathered on {of_parameter.device_type} (offloading)")
    if quantizer.custom:
        raise UnsupportedError(f"{op}: {quantizer} is the user's own and may read the whole weight; it cannot be cut")
    if quantizer.spec.flags & (ROW_AMAX | RHT):
        raise UnsupportedError(
            f"{op}: {quantizer} has amaxes of rows or of a transform, which are not reduced over ranks"
        )
    rows, ranks = _shape_of_part(module, attribute)[0], of_parameter.size(of_parameter.ndim - 1)
    fmt = quantizer.format
    if parameter.dim() == 3:
        if rows % ranks:
            raise ShapeError(f"{op} {list(parameter.shape)} stacks {rows} weights, and {ranks} ranks hold whole ones")
        return
    block = 1 if fmt.per_tensor else max(fmt.block_rows, fmt.block_cols if quantizer.columnwise else 1)
    if rows % (ranks * block):
        raise ShapeError(
            f"{op} has {rows} rows, and {ranks} ranks with blocks of {block} rows ({fmt.name}) need a multiple of "
            f"{ranks * block}: pad out_features, or use a format with smaller blocks"
        )


def _require_whole_parts(
    name: str, module: QuantizedModule, layer: str, attribute: str, quantizer: Quantizer, mesh: Any
) -> None:
    """Checks the tensor-parallel cut of a weight, of which ranks of `mesh` hold parts of this rank's part."""
    op, cut = f"parallel.prepare: {name}", module._cut(layer)
    assert cut is not None
    shared = set(torch.distributed.get_process_group_ranks(module.tp_group)) & set(mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        raise ArgumentError(
            f"{op} is cut over a tensor-parallel group and sharded over {mesh}, which share the ranks "
            f"{sorted(shared)}; shard over a dimension of the mesh that the group does not lie along"
        )
    n, k = _shape_of_part(module, attribute)
    rows, cols = (n // module._stacked(layer), None) if cut.mode == COLUMN else (None, k)
    require_whole(op, quantizer, rows, cols)


def _attach(gathered: list[tuple[weakref.ref[QuantizedModule], str, Gather]]) -> None:
    """Makes local tensors `ShardedWeight`s where loading, moving or materializing has put plain ones in their place."""
    for reference, attribute, gather in gathered:
        module = reference()
        parameter: Any = None if module is None else module._parameters.get(attribute)
        part = getattr(parameter, "_local_tensor", None)
        if part is None or isinstance(part, ShardedWeight):  # None: the weight is gathered now
            continue
        parameter._local_tensor = ShardedWeight.of(part, gather)
        if gather.amaxes is not None:
            gather.amaxes.set(gather.number, parameter)
