"""torch.utils.checkpoint's internals: the modes of selective checkpoints, and the functions that every checkpoint
calls, which `state/checkpoint.py` wraps. torch looks them up by these names when it is called."""

from __future__ import annotations

from functools import partial

import torch.utils.checkpoint as checkpoints

from diptych.torch.private.require import declare, known, need

_SELECTIVE = "to hide ops on states from selective checkpoints"
CachingMode = need(_SELECTIVE, "torch.utils.checkpoint._CachingTorchDispatchMode")  # of a forward
CachedMode = need(_SELECTIVE, "torch.utils.checkpoint._CachedTorchDispatchMode")  # of a recomputation

# What every checkpoint without reentrant autograd calls: the last of these that torch has, from 2.14 on the second one,
# which takes its options by name alone.
_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
need("to tape the forward of a checkpoint", *[f"{checkpoints.__name__}.{name}" for name in _GENERATORS])
GENERATOR = [name for name in _GENERATORS if hasattr(checkpoints, name)][-1]
OPTIONS_BY_NAME = _GENERATORS[1] == GENERATOR
# The module of torch's composable checkpoints, which imports the generator by its name.
COMPOSABLE = "torch.distributed._composable.checkpoint_activation"

WRAPPED = "_checkpoint_wrapped_module"  # the name of the module that torch's checkpoint_wrapper wraps, in the wrapper
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
declare("to name what a checkpoint_wrapper wraps", f"{_WRAPPER}.ActivationWrapper", WRAPPED)

# The value that set_checkpoint_debug_enabled forces, or None; torch refuses contexts where it is True.
known("to leave debugged checkpoints alone", "torch.utils.checkpoint._checkpoint_debug_enabled", "2.11", "2.13", "2.14")
debug_forced = partial(getattr, checkpoints, "_checkpoint_debug_enabled", None)
