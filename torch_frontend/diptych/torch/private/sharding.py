"""torch.distributed: DistributedDataParallel, FSDP2, DTensors, pipelines and collectives in graphs."""

from __future__ import annotations

from typing import Any

import torch

from diptych.torch.private.require import attribute, declare, flag, later

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
_states = flag("to find the group of a weight under FSDP2", "torch.distributed._composable_state._module_state_mapping")


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
    return list(_states().values())


def reduce_again(group: Any) -> None:
    """Reduces gradients that a group's weights got after backward, as FSDP2 does at the end of backward."""
    with torch.no_grad(), group.use_training_state(type(training_state(group)).POST_BACKWARD):
        group.post_backward()
    group.finalize_backward()


# --- DTensors ---------------------------------------------------------------------------------------------------------

_CUT = "to cut parameters that stack several"
StridedShard = later(_CUT, "torch.distributed.tensor.placement_types._StridedShard")
root_mesh = later(_CUT, "torch.distributed.device_mesh.DeviceMesh._get_root_mesh")
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

_REDUCE = "to reduce amaxes over process groups"
all_reduce = later(_REDUCE, "torch.distributed._functional_collectives.all_reduce")
AsyncTensor = later(_REDUCE, "torch.distributed._functional_collectives.AsyncCollectiveTensor")
