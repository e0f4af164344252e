"""torch.func: the transforms that are active, their tensors, and the way below them."""

from __future__ import annotations

from typing import Any

from diptych.torch.private.require import declare, later, need

# --- what every call asks -------------------------------------------------------------------------------------------

_ASK = "to see transforms of torch.func"
transforms_active = need(_ASK, "torch._C._are_functorch_transforms_active")
interpreter_stack = need(_ASK, "torch._C._functorch.peek_interpreter_stack")  # None: no transform is active
is_wrapped = need(_ASK, "torch._C._functorch.is_functorch_wrapped_tensor")
is_legacy_batched = need(_ASK, "torch._C._functorch.is_legacy_batchedtensor")  # of is_grads_batched=True
hide_transforms = need(_ASK, "torch._C._DisableFuncTorch")  # a context

# --- below transforms -----------------------------------------------------------------------------------------------

_RUN = "to run an op below transforms of torch.func"
unwrapped = later(_RUN, "torch._C._functorch.get_unwrapped")
is_batched = later(_RUN, "torch._C._functorch.is_batchedtensor")
level_of = later(_RUN, "torch._C._functorch.maybe_get_level")
add_batch = later(_RUN, "torch._C._functorch._add_batch_dim")
without_interpreters = later(_RUN, "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")  # a context
_interpreters = later(_RUN, "torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters")
_Vmap = later(_RUN, "torch._functorch.pyfunctorch.VmapInterpreter")
for _method in ("level", "batch_size", "randomness"):
    declare(_RUN, "torch._functorch.pyfunctorch.VmapInterpreter", _method)


def vmaps() -> list[Any]:
    """Returns the vmaps that are running, outermost first, each with `level`, `batch_size` and `randomness`."""
    return [each for each in _interpreters() if isinstance(each, _Vmap)]


# --- torch.autograd.grad(is_grads_batched=True), whose vmap is another one --------------------------------------------

_BATCHED = "for torch.autograd.grad(is_grads_batched=True)"
add_legacy_batch = later(_BATCHED, "torch._add_batch_dim")
remove_legacy_batch = later(_BATCHED, "torch._remove_batch_dim")
_enter = later(_BATCHED, "torch._C._vmapmode_increment_nesting")
_leave = later(_BATCHED, "torch._C._vmapmode_decrement_nesting")


def legacy_level() -> int:
    """Returns the number of legacy vmaps that are running in this thread."""
    level = _enter() - 1
    _leave()
    return level
