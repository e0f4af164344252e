"""torch's autograd: its engine, version counters, hooks, and the flags of grad mode, forward mode and the profiler."""

from __future__ import annotations

from operator import methodcaller

import torch

from diptych.torch.private.require import attribute, declare, flag, known, later, need

backward_pass = need("to tell a backward pass from a forward", "torch._C._current_graph_task_id")  # -1: none runs
will_run = need("to compute the gradients that are asked for alone", "torch._C._will_engine_execute_node")
saved_hooks = need("to see hooks of saved tensors", "torch._C._autograd._top_saved_tensors_default_hooks")
set_grad_enabled = need("to switch grad mode inside of a node", "torch._C._set_grad_enabled")

_VERSIONS = "to let autograd notice writes to saved tensors"
increment_version = need(_VERSIONS, "torch._C._increment_version")
keep_version = need(_VERSIONS, "torch.autograd._unsafe_preserve_version_counter")  # a context: writes are not counted

forward_level = flag("to refuse forward-mode differentiation", "torch.autograd.forward_ad._current_level")  # -1: off
# The profiler's flag covers all threads: a backward may run in another one.
profiled = flag("to let profilers see each op", "torch.autograd.profiler._is_profiler_enabled")

# --- nodes and hooks, for captures ------------------------------------------------------------------------------------

_CAPTURE = "to capture a model"
current_node = later(_CAPTURE, "torch._C._current_autograd_node")
nodes_made = later(_CAPTURE, "torch._C._autograd._get_sequence_nr")  # by this thread; the `node_number` of its next one
declare(_CAPTURE, "torch.autograd.graph.Node", "_sequence_nr")
node_number = methodcaller("_sequence_nr")
forward_hooks = attribute(_CAPTURE, "torch.nn.Module", "_forward_hooks")
forward_pre_hooks = attribute(_CAPTURE, "torch.nn.Module", "_forward_pre_hooks")
hooks_with_kwargs = attribute(_CAPTURE, "torch.nn.Module", "_forward_hooks_with_kwargs")
gradient_hooks = attribute(_CAPTURE, "torch.Tensor", "_post_accumulate_grad_hooks")

# --- modules and parameters, for weights that become held -----------------------------------------------------------

_HELD = "to hold weights of a model that exists"
unsaved_buffers = attribute(_HELD, "torch.nn.Module", "_non_persistent_buffers_set")
value_hooks = attribute(_HELD, "torch.Tensor", "_backward_hooks")  # None, or hooks on its gradient

# --- the engine -------------------------------------------------------------------------------------------------------

# The function that runs a backward pass, in each module that calls it by this name. Where torch lacks it, a call of a
# quantized module in a backward pass finds the regions around that pass, or refuses on a GPU.
ENGINE, ENGINE_USERS = "_engine_run_backward", (torch.autograd.graph, torch.autograd)
for _user in ENGINE_USERS:
    known("to hide regions from a backward pass", f"{_user.__name__}.{ENGINE}", "2.11", "2.13", "2.14")
