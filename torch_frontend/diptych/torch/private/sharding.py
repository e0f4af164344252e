"""torch.distributed: DistributedDataParallel, FSDP2, DTensors, pipelines and collectives in graphs."""

from __future__ import annotations

from typing import Any

import torch

from diptych.torch.private.require import attribute, declare, flag, lacks, later, need

# --- DistributedDataParallel ------------------------------------------------------------------------------------------

_DDP = "torch.nn.parallel.DistributedDataParallel"
# The wrapper whose forward is running, or None.
active_ddp = flag("to keep states out of broadcasts", f"{_DDP}._active_ddp_module")
reduced_parameters = attribute("to see which gradients are reduced", _DDP, "_module_parameters")

# --- FSDP2 ------------------------------------------------------------------------------------------------------------

_FSDP, _GATHER = "torch.distributed.fsdp._fully_shard", "to gather weights quantized under FSDP2"
_PARAM, _GROUP = f"{_FSDP}._fsdp_param.FSDPParam", f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
fsdp_state = attribute(_GATHER, f"{_FSDP}._fully_shard.FSDPModule", "_get_fsdp_state")  # a method
sharded_part = attribute(_GATHER, _PARAM, "_sharded_local_tensor")
inner_tensors = attribute(_GATHER, _PARAM, "_unsharded_inner_tensors")  # FSDP2 allocates and frees them too
module_info = attribute(_GATHER, _PARAM, "_module_info")
training_state = attribute(_GATHER, _GROUP, "_training_state")
reshards_after_forward = attribute(_GATHER, _GROUP, "_reshard_after_forward")
reshards_over_fewer = attribute(_GATHER, _GROUP, "_use_post_forward_mesh")
declare(_GATHER, _PARAM, "_unsharded_param")
for _method in ("post_backward", "finalize_backward", "use_training_state"):
    declare("to reduce gradients that were delayed under FSDP2", _GROUP, _method)
declare(_GATHER, f"{_FSDP}._fsdp_state.FSDPState", "_fsdp_param_groups", "_fsdp_param_group")
_STATES = "to find the group of a weight under FSDP2", "torch.distributed._composable_state", "_module_state_mapping"
declare(*_STATES)


def set_inner_tensors(param: Any, tensors: list[torch.Tensor]) -> None:
    """Replaces the further tensors that FSDP2 allocates and frees with a gathered parameter."""
    param._unsharded_inner_tensors = tensors


def is_gathered(param: Any, weight: torch.Tensor) -> bool:
    """Whether a weight is what forward sees of one of FSDP2's parameters."""
    return getattr(param, "_unsharded_param", None) is weight


def groups_of(state: Any) -> list[Any]:
    """Returns the groups of parameters of one state of FSDP2, which gathers and reduces each as one; none for the state
    of another composable API."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one group for each state
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def module_states() -> list[Any]:
    """Returns weak references to the states of all modules that FSDP2, or another composable API, manages."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        raise lacks(*_STATES) from None
    return list(_module_state_mapping.values())


def reduce_again(group: Any) -> None:
    """Reduces gradients that a group's weights got after backward, as FSDP2 does at the end of backward."""
    with torch.no_grad(), group.use_training_state(type(training_state(group)).POST_BACKWARD):
        group.post_backward()
    group.finalize_backward()


# --- DTensors ---------------------------------------------------------------------------------------------------------

_CUT = "to cut parameters that stack several"
_STRIDED = "torch.distributed.tensor.placement_types"
declare(_CUT, _STRIDED, "_StridedShard")
root_mesh = later(_CUT, "torch.distributed.device_mesh.DeviceMesh._get_root_mesh")


def strided_shard(parts: int) -> Any:
    """Returns the placement of a parameter that stacks so many parts along dimension 0, each of which is cut there."""
    return need(_CUT, f"{_STRIDED}._StridedShard")(0, split_factor=parts)


local_tensor = attribute(_GATHER, "torch.distributed.tensor.DTensor", "_local_tensor")


def part_of(parameter: Any) -> torch.Tensor | None:
    """Returns the part of a DTensor that this rank holds; None for another tensor."""
    return getattr(parameter, "_local_tensor", None)


def set_local_tensor(parameter: Any, part: torch.Tensor) -> None:
    """Replaces the part of a DTensor that this rank holds."""
    parameter._local_tensor = part


# --- pipelines, whose module is not imported for it -------------------------------------------------------------------

STAGES = "torch.distributed.pipelining.stage"
STAGE_CLASSES = ("PipelineStage", "_PipelineStage")
# By what they are: the names of methods of stages, of which torch 2.11 has the first, later ones the second.
INFERENCE = ("_shape_inference", "_forward_metadata_inference")
BEFORE_BACKWARD = "_prepare_backward_infra"
declare("to make a pipeline's shape inference a dry run", f"{STAGES}.PipelineStage", *INFERENCE)
declare("to refuse delayed weight gradients in pipelines", f"{STAGES}.PipelineStage", BEFORE_BACKWARD)

# --- collectives in graphs --------------------------------------------------------------------------------------------

_MAXIMUM = "to reduce amaxes over process groups", "torch.distributed._functional_collectives"
for _name in ("all_reduce", "AsyncCollectiveTensor"):
    declare(*_MAXIMUM, _name)


def maximum(t: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the elementwise maximum of a tensor over the ranks of a process group, in traced code too."""
    try:  # a torch may be built without torch.distributed
        from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
    except ImportError:
        raise lacks(*_MAXIMUM, "all_reduce", "AsyncCollectiveTensor") from None
    out = all_reduce(t, "max", group)
    return out.wait() if isinstance(out, AsyncCollectiveTensor) else out
