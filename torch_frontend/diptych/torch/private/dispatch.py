"""torch's dispatcher: modes and keys, subclasses of tensors, trees of arguments, and operators with an underscore."""

from __future__ import annotations

from operator import attrgetter, methodcaller
from typing import Any

from diptych.torch.private.require import flag, later, need

# --- modes that see ops -----------------------------------------------------------------------------------------------

_MODES = "to see which dispatch modes are active, and to hide ops from some of them"
TorchDispatchMode = need("to observe the ops that a call runs", "torch.utils._python_dispatch.TorchDispatchMode")
mode_count = need(_MODES, "torch._C._len_torch_dispatch_stack")
drop_mode = need(_MODES, "torch._C._pop_torch_dispatch_stack")  # called with None: the innermost one
current_mode = need(_MODES, "torch.utils._python_dispatch._get_current_dispatch_mode")
mode_stack = need(_MODES, "torch.utils._python_dispatch._get_current_dispatch_mode_stack")
push_mode = need(_MODES, "torch.utils._python_dispatch._push_mode")
pop_mode = need(_MODES, "torch.utils._python_dispatch._pop_mode")
without_modes = later("to compare ranks below dispatch modes", "torch.utils._python_dispatch._disable_current_modes")

# --- modes that see functions, for captures ---------------------------------------------------------------------------

_CAPTURE = "to capture what a model calls"
without_function_modes = later(_CAPTURE, "torch._C.DisableTorchFunction")  # a context; overrides of tensors go too
function_modes = later(_CAPTURE, "torch.overrides._get_current_function_mode_stack")
push_function_mode = later(_CAPTURE, "torch.overrides._push_mode")
pop_function_mode = later(_CAPTURE, "torch.overrides._pop_mode")
# The same in code that Dynamo traces.
push_traced_mode = later(_CAPTURE, "torch._C._push_on_torch_function_stack")
pop_traced_mode = later(_CAPTURE, "torch._C._pop_torch_function_stack")
_devices = flag(_CAPTURE, "torch._GLOBAL_DEVICE_CONTEXT")


def default_device_mode() -> Any:
    """Returns the mode of torch.set_default_device, which torch keeps below all others; None without one."""
    return getattr(_devices(), "device_context", None)


# --- keys and flags of the dispatcher ---------------------------------------------------------------------------------

below_autograd = need("to run an op below autograd", "torch._C._AutoDispatchBelowAutograd")
jit_traces = need("to see torch.jit.trace", "torch._C._is_tracing")
any_autocast = need("to follow torch.autocast", "torch._C._is_any_autocast_enabled")

# --- subclasses of tensors --------------------------------------------------------------------------------------------

_SUBCLASSES = "for tensors that are held quantized"
no_torch_function = need(_SUBCLASSES, "torch._C._disabled_torch_function_impl")  # a class' `__torch_function__`
new_wrapper = need(_SUBCLASSES, "torch.Tensor._make_wrapper_subclass")  # a tensor without memory
new_alias = need(_SUBCLASSES, "torch.Tensor._make_subclass")  # one that has another's memory
REBUILD = ("torch._utils", "_rebuild_tensor_v2")  # by which pickled tensors name it
rebuild_tensor = later("to read states that TransformerEngine has pickled", ".".join(REBUILD))

# --- trees of arguments -----------------------------------------------------------------------------------------------

_TREES = "to find the tensors among an op's arguments"
tree_map = need(_TREES, "torch.utils._pytree.tree_map")
tree_map_only = need(_TREES, "torch.utils._pytree.tree_map_only")
tree_flatten = need(_TREES, "torch.utils._pytree.tree_flatten")
tree_unflatten = later(_CAPTURE, "torch.utils._pytree.tree_unflatten")
tree_leaves = later(_CAPTURE, "torch.utils._pytree.tree_leaves")

# --- operators --------------------------------------------------------------------------------------------------------

check = need("to enforce symbolic sizes", "torch._check")
foreach_copy_ = need("to copy several tensors at once", "torch._foreach_copy_")
unsafe_view = need("to give an op's result its leading dimensions", "torch.ops.aten._unsafe_view")
assert_async = later("to compare steps on the device", "torch.ops.aten._assert_async.msg")
to_copy = need("to move quantized tensors", "torch.ops.aten._to_copy.default")
pin_memory = need("to pin quantized tensors", "torch.ops.aten._pin_memory.default")

Operator = later(_CAPTURE, "torch._ops.OpOverload")
need("to read the arguments of an operator", "torch.ops.aten.add.Tensor._schema")
schema = attrgetter("_schema")
need("to run composite operators as their parts", "torch.ops.aten.add.Tensor._can_decompose")
can_decompose = methodcaller("_can_decompose")
