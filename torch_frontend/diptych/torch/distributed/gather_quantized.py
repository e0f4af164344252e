"""`parallel.prepare`: makes FSDP2 gather the weights of a model quantized, and first checks that each can be cut so."""

from __future__ import annotations

import collections
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.errors import ArgumentError, GatherWarning, RankMismatchError, ShapeError, UnsupportedError
from diptych.common.layer_options import COLUMN
from diptych.common.layers.plan import held_quantizer
from diptych.common.quantizers import RHT, ROW_AMAX, Quantizer
from diptych.common.recipes import Recipe
from diptych.torch.distributed.amaxes import WholeAmaxes
from diptych.torch.distributed.gather import Gather
from diptych.torch.distributed.quantized_parts import Parts
from diptych.torch.distributed.sharded_weight import ShardedWeight
from diptych.torch.layers.tensor_parallel import require_whole
from diptych.torch.modules.agreement import described, require_alike
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.private.sharding import (
    fsdp_state,
    groups_of,
    local_tensor,
    module_info,
    part_of,
    reshards_over_fewer,
    set_local_tensor,
)
from diptych.torch.tensors.quantized import QuantizedTensorBase


def gather_quantized(model: nn.Module, mesh: Any, recipe: Recipe, *, recompute: bool = False) -> None:
    """Makes FSDP2 gather the weights of a model's quantized layers in a recipe's format: bytes and scales.

    Call it after `fully_shard`, before the first forward, on every rank: the ranks of `mesh`, and of the modules'
    tensor-parallel groups, compare what each would gather. Weights stay sharded in high precision, and optimizers,
    clipping and checkpoints see them so. Forward and backward read a gathered weight as one that is held quantized
    (`quantized_model_init`): the amaxes of per-tensor formats and of NVFP4 are those of the whole weights, reduced over
    the ranks in one call for all weights when a step has changed them, and delayed scaling scales weights by their
    current amax. If a module is cut over a tensor-parallel group, FSDP2 gathers this rank's part, quantized by the amax
    of the whole weight: amaxes are reduced over that group, too. Outside of `autocast` regions layers read dequantized
    weights. Weights that the recipe leaves in high precision are gathered so. Weights that ranks would cut inside of a
    block or unevenly, and weights that other modules share, are gathered so too, and one GatherWarning lists them.

    **Arguments:** `model`: the root module that `fully_shard` was applied to. `mesh`: the DeviceMesh that it shards
    over, of one dimension (with a dimension of replicas before it: HSDP); beside tensor parallelism the part of the
    job's mesh that has these dimensions, as `mesh["dp"]`. `recipe`: the recipe that the layers will run
    by; a module's own `recipe` has precedence. `recompute`: whether layers run again in backward, as under activation
    checkpointing; backward then gathers the rowwise copy too of formats with one-dimensional blocks.

    **Raises**, naming the weight, before anything is changed: ArgumentError for a model that is not sharded by
    `fully_shard` or is prepared already, or that has a cut module without its group or with one that `mesh` shares
    ranks with; ShapeError if no weight is left to gather quantized; ValueError for a recipe that
    quantizes a weight in two ways or stochastically; UnsupportedError for a user's own quantizer, for amaxes of rows,
    Hadamard transforms of weights, weights offloaded to the CPU, weights sharded over another mesh or dimension, and
    `reshard_after_forward` given as a number. If ranks differ, or one of them raises, the others raise
    RankMismatchError. A `mesh` that is no DeviceMesh is an ArgumentError on its own rank alone.
    """
    from torch.distributed.device_mesh import DeviceMesh  # a torch may be built without distributed

    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"parallel.prepare: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    error: Exception | None = None
    found: list[_Weight] = []
    left: dict[str, str] = {}
    try:
        found, left = _found(model, mesh, recipe, recompute)
    except Exception as raised:  # the other ranks must learn of every error
        error = raised
    _require_alike(model, mesh, recipe, recompute, (found, left), error)
    if left:
        said = f"parallel.prepare: FSDP2 gathers these weights in high precision: {_listed(left)}"
        warnings.warn(said, GatherWarning, stacklevel=2)
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
            if not gather.stack and quantizer.format.tensor_amax:
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


class _Weight(NamedTuple):
    """A weight that the recipe quantizes. `name`: its full name."""

    name: str
    module: QuantizedModule
    layer: str
    attribute: str
    quantizer: Quantizer


def _found(model: nn.Module, mesh: Any, recipe: Recipe, recompute: bool) -> tuple[list[_Weight], dict[str, str]]:
    """Returns the weights that are gathered quantized, and the reasons why others are not, by name."""
    from torch.distributed.fsdp import FSDPModule  # a torch may be built without distributed

    require_recipe("parallel.prepare", recipe, optional=False)
    require_switches("parallel.prepare", recompute=recompute)
    if not isinstance(model, FSDPModule):
        raise ArgumentError(
            f"parallel.prepare: {type(model).__name__} is not sharded; "
            "call torch.distributed.fsdp.fully_shard on it first"
        )
    weights, reasons = list(_weights(model, recipe)), {}
    shared: dict[int, tuple[str, Quantizer]] = {}
    for weight in weights:
        name, module, layer, attribute, quantizer = weight
        reasons[name] = _require_cuttable(name, module, attribute, quantizer, mesh)
        if layer in module._modes:
            _require_whole_parts(name, module, layer, attribute, quantizer, mesh)
        first, its = shared.setdefault(id(module._parameters[attribute]), (name, quantizer))
        if its != quantizer:
            raise ValueError(
                f"parallel.prepare: {first} and {name} are one weight, which the recipe quantizes in two ways: "
                f"{its} and {quantizer}"
            )
    reasons |= _read_otherwise(model, weights)
    found = [weight for weight in weights if not reasons[weight.name]]
    left = {name: reason for name, reason in reasons.items() if reason}
    if left and not found:
        raise ShapeError(f"parallel.prepare: no weight can be gathered quantized: {_listed(left)}")
    return found, left


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join([f"{name} {reason}" for name, reason in reasons.items()])


def _read_otherwise(model: nn.Module, weights: list[_Weight]) -> dict[str, str]:
    """Returns, by name, the reasons why weights stay in high precision because other modules read them unquantized.
    **Raises** UnsupportedError for a weight that FSDP2 does not gather, or reshards over fewer ranks."""
    managed, quantized = _managed(model), {(id(weight.module), weight.attribute) for weight in weights}
    names, reasons = {id(module): name for name, module in model.named_modules()}, {}
    for name, module, _, attribute, _ in weights:
        if (id(module), attribute) not in managed:
            raise UnsupportedError(
                f"parallel.prepare: {name} is a DTensor that no fully_shard in the model gathers; prepare the module "
                "that fully_shard was called on"
            )
        param, group = managed[id(module), attribute]
        if reshards_over_fewer(group):
            raise UnsupportedError(
                f"parallel.prepare: {name} is sharded with reshard_after_forward="
                f"{group.post_forward_mesh_info.shard_mesh_size}: after forward FSDP2 cuts what was gathered over "
                "fewer ranks, and quantized weights cannot be cut again; give fully_shard reshard_after_forward=True "
                "or False"
            )
        others = [
            f"{names.get(id(owner), '')}.{of_owner} ({type(owner).__name__})".removeprefix(".")
            for owner, of_owner in _owners(param)
            if (id(owner), of_owner) not in quantized
        ]
        if others:
            reasons[name] = f"is the same as {', '.join(others)}, which reads it in high precision"
    return reasons


def _require_alike(
    model: Any,
    mesh: Any,
    recipe: Any,
    recompute: Any,
    weights: tuple[list[_Weight], dict[str, str]],
    error: Exception | None,
) -> None:
    """Compares over a mesh and the modules' tensor-parallel groups what ranks will gather. **Raises** this rank's own
    error, or RankMismatchError if ranks differ."""
    modules = [m for m in model.modules() if isinstance(m, QuantizedModule)] if isinstance(model, nn.Module) else []
    cut = {id(m.tp_group): m.tp_group for m in modules if m.tp_group is not None}
    values = {"an error": "none" if error is None else f"{type(error).__name__}: {error}"}
    for name, module, _, attribute, quantizer in weights[0]:
        values |= {
            f"the module of {name}": type(module).__name__,
            f"the recipe of {name}": described(recipe if module.recipe is None else module.recipe),
            f"the format of {name}": described(quantizer),
            f"the shape of {name}": str(list(module._parameters[attribute].shape)),  # type: ignore[union-attr]
            f"recompute of {name}": str(recompute),
            f"tp_size of {name}": str(module.tp_size),
            f"sequence_parallel of {name}": str(module.sequence_parallel),
        }
    values |= {f"the gather of {name}": f"high precision: {reason}" for name, reason in weights[1].items()}
    groups = [mesh.get_group(i) for i in range(mesh.ndim)] + list(cut.values())
    try:
        require_alike("parallel.prepare", values, groups, torch.empty(0, device=mesh.device_type).device)
    except RankMismatchError:
        if error is None:
            raise
    if error is not None:
        raise error


def _managed(model: nn.Module) -> dict[tuple[int, str], tuple[Any, Any]]:
    """Returns FSDP2's objects (parameter, group) by the module's id and the parameter's name in it."""
    from torch.distributed.fsdp import FSDPModule

    made = {}
    for module in model.modules():
        state: Any = fsdp_state(module)() if isinstance(module, FSDPModule) else None
        for group in () if state is None else groups_of(state):
            for param in group.fsdp_params:
                made |= {(id(owner), name): (param, group) for owner, name in _owners(param)}
    return made


def _owners(param: Any) -> list[tuple[nn.Module, str]]:
    """Returns the modules that have an FSDP2 parameter, with its name in each."""
    at = module_info(param)
    return list(zip([at.module, *at.shared_modules], [at.param_name, *at.shared_param_names], strict=True))


def _weights(model: nn.Module, recipe: Recipe) -> Iterator[_Weight]:
    """Yields the weights that the recipe quantizes."""
    for prefix, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        for layer in module.layers:
            attribute = f"{layer}_weight" if layer else "weight"
            name = f"{prefix}.{attribute}" if prefix else attribute
            chosen = recipe if module.recipe is None else module.recipe
            quantizer = held_quantizer("parallel.prepare", chosen, module.module_kind, module._role_name(layer), name)
            if quantizer is not None and attribute in module._parameters:
                yield _Weight(name, module, layer, attribute, quantizer)


def _shape_of_part(module: QuantizedModule, attribute: str) -> list[int]:
    """Returns the shape that FSDP2 shards: the parameter's, or that of this rank's part if a style has made it a
    DTensor."""
    shape = list(module._parameters[attribute].shape)  # type: ignore[union-attr]
    if module._styled and attribute in (cuts := module.cuts()):
        shape[cuts[attribute].dim] //= module.tp_size
    return shape


def _require_cuttable(name: str, module: QuantizedModule, attribute: str, quantizer: Quantizer, mesh: Any) -> str:
    """Returns the reason why ranks cannot shard a weight of this shape, or "". **Raises** UnsupportedError or
    ArgumentError if there is a reason other than the shape."""
    from torch.distributed.tensor import DTensor

    op, parameter = f"parallel.prepare: {name}", module._parameters[attribute]
    if isinstance(parameter, QuantizedTensorBase) or not isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"{op} is {type(parameter).__name__}, not a DTensor that fully_shard made; call fully_shard first"
        )
    of_parameter: Any = parameter.device_mesh
    placements = parameter.placements
    if module._styled and of_parameter.ndim > 1:  # FSDP2's dimensions, and then the tensor-parallel one
        of_parameter, placements = of_parameter[of_parameter.mesh_dim_names[:-1]], placements[:-1]
    if of_parameter != mesh or getattr(placements[-1], "dim", None) != 0 or of_parameter.ndim > 2:
        raise UnsupportedError(
            f"{op} is placed {placements} on {of_parameter}; it must be cut along dimension 0 over {mesh}"
        )
    part = local_tensor(parameter)
    if isinstance(part, ShardedWeight):
        raise ArgumentError(
            f"{op} is prepared already, to be gathered by {part.gather.quantizer}; call parallel.prepare once"
        )
    if part.device.type not in (of_parameter.device_type, "meta"):
        raise UnsupportedError(
            f"{op} is kept on {part.device} and gathered on {of_parameter.device_type} (offloading), and only parts on "
            f"the device of the gather are quantized; call fully_shard without an offload policy"
        )
    remedy = "use another recipe for this module, or train without parallel.prepare"
    if quantizer.custom:
        raise UnsupportedError(
            f"{op}: {quantizer} is the user's own and may read the whole weight, so it cannot be cut; {remedy}"
        )
    if quantizer.spec.flags & (ROW_AMAX | RHT):
        raise UnsupportedError(
            f"{op}: {quantizer} has amaxes of rows or of a transform, which are not reduced over ranks; {remedy}"
        )
    rows, ranks = _shape_of_part(module, attribute)[0], of_parameter.size(of_parameter.ndim - 1)
    fmt = quantizer.format
    if parameter.dim() == 3:
        whole = rows % ranks == 0
        return (
            "" if whole else f"{list(parameter.shape)} stacks {rows} weights, which {ranks} ranks cannot share evenly"
        )
    made = [c for c in (False, True) if (quantizer.columnwise if c else quantizer.rowwise)]
    blocks = [quantizer.copy_format(c).block(c)[0] for c in made]
    if not all(blocks) and not fmt.one_scale:
        return f"is cut into rows, and a scale of {fmt.name} belongs to a block of all rows"
    block = max(1, *blocks)
    if rows % (ranks * block) == 0:
        return ""
    if block == 1:
        return f"has {rows} rows, and {ranks} ranks need a multiple of {ranks}: pad out_features"
    return (
        f"has {rows} rows, and {ranks} ranks with blocks of {block} rows ({fmt.name}) need a multiple of "
        f"{ranks * block}: pad out_features, or use a format with smaller blocks"
    )


def _require_whole_parts(
    name: str, module: QuantizedModule, layer: str, attribute: str, quantizer: Quantizer, mesh: Any
) -> None:
    """**Raises** an error if the ranks of `mesh` cannot shard this rank's tensor-parallel part of a weight."""
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
    """Makes local tensors `ShardedWeight`s where loading, moving or materializing has replaced them by plain
    tensors."""
    for reference, attribute, gather in gathered:
        module = reference()
        parameter: Any = None if module is None else module._parameters.get(attribute)
        part = part_of(parameter)
        if part is None or isinstance(part, ShardedWeight):  # a weight that is gathered at present has no part
            continue
        set_local_tensor(parameter, ShardedWeight.of(part, gather))
        if gather.amaxes is not None:
            gather.amaxes.set(gather.number, parameter)
