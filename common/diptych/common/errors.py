"""Error and warning types. Each derives from the built-in class that a caller would expect to catch.

The docstring of each class names its cause and its remedy: `diptych explain NAME` prints them, the page Troubleshooting
shows them, and messages point there. A traceback ends with that line as a note, so `str(error)` is the message alone; a
warning has no traceback, so its message ends with it.
"""

from __future__ import annotations

from typing import Any


def pointer(cls: type) -> str:
    """Returns the command that prints what causes an error or warning of a class, and its remedy."""
    known = next((c for c in cls.__mro__ if c.__module__.startswith("diptych.")), cls)
    return f"diptych explain {known.__name__}"


class _Notes:
    """The notes of an exception (PEP 678), which are made when a traceback or `add_note` first reads them."""

    def __get__(self, held: BaseException | None, cls: type) -> Any:
        if held is None:
            return self
        return held.__dict__.setdefault("__notes__", [f"Cause and remedy: {pointer(cls)}"])


class ExplainedError(Exception):
    """The base of diptych's errors: a traceback names the command that explains the class."""

    __notes__: Any = _Notes()


class ExplainedWarning(UserWarning):
    """The base of diptych's warnings: the message names the command that explains the class."""

    def __str__(self) -> str:
        return f"{super().__str__()} ({pointer(type(self))})"


# --- errors ----------------------------------------------------------------------------------------------------------


class ShapeError(ExplainedError, ValueError):
    """A shape that an op or a format cannot take.

    **Cause:** Extents that do not fit each other (the input's features and the weight's), or that a format cannot
    divide: blocks of 16, 32 or 128 elements end where a tensor, or a device's part of it, ends.

    **Remedy:** The message names the operand and the multiple. Pad rows to it (`dj.moe_map(..., align=...)` and
    `row_align` do it for experts), leave such layers out (`dt.filters`), or cut meshes so that each part has whole
    blocks.
    """


class DTypeError(ExplainedError, TypeError):
    """A dtype that an op or a format cannot take.

    **Cause:** An operand of integers or float64, a scale or state of another dtype, or NumPy data in another byte
    order.

    **Remedy:** Cast the operand that the message names; data is float32, bfloat16 or float16.
    """


class ArgumentError(ExplainedError, TypeError):
    """An argument of a wrong Python type, or one that is missing.

    **Cause:** A class in the place of an object (`recipe=MXFP8BlockScaling` without parentheses), a name in the place
    of a recipe, a state or random state that the recipe needs and the call lacks.

    **Remedy:** The message names the argument, what it was given and what it takes.
    """


class DeviceError(ExplainedError, ValueError):
    """Operands on different devices, or on a device without a backend.

    **Cause:** A model and its input on two devices, or tensors on a device that diptych has no kernels for. A build
    without CUDA has none for GPUs.

    **Remedy:** Move operands to one device. `diptych doctor` says whether this build has a CUDA backend, and why not.
    """


class UnsupportedError(ExplainedError, NotImplementedError):
    """No kernel for this op, format and device, or a feature that diptych does not have.

    **Cause:** A combination without a kernel (the message names the nearest ones), a second derivative of a quantized
    product, or an option of TransformerEngine's that asks for what diptych does not do.

    **Remedy:** Choose one of the combinations that the message names; `diptych doctor` lists those of this machine.
    """


class FrameworkVersionError(UnsupportedError, ImportError):
    """A version of a framework that lacks what diptych takes from its private API.

    **Cause:** A torch or JAX that is older or newer than those that diptych supports.

    **Remedy:** Install a version that the message names, or a newer diptych.
    """


class CheckpointError(ExplainedError, ValueError):
    """A checkpoint that is damaged or belongs to another model or recipe.

    **Cause:** Keys, shapes or dtypes that differ from the model's, scales that do not fit their payload, states of
    another recipe, another optimizer, or a file that was cut short.

    **Remedy:** The message names the key or file. Make the model with the recipe of the checkpoint; where delayed
    scales are to be dropped, call `reset_scale_states()` before loading.
    """


class RankMismatchError(ExplainedError, ValueError):
    """Ranks of a process group that were given unlike recipes, options or modules for what they compute together.

    **Cause:** A setting that depends on the rank, such as an environment variable, an `if rank == 0` around a call
    that all ranks must make, or a model that was built in another order.

    **Remedy:** The message names what differs and both values with their ranks. Set it alike on all ranks.
    """


# --- warnings --------------------------------------------------------------------------------------------------------


class EmulationWarning(ExplainedWarning):
    """A quantized product ran on decoded operands because the hardware has no units for it.

    **Cause:** MXFP8 or NVFP4 on a GPU without such units; or FP8 operands that tensor cores do not take: an extent
    that is no multiple of 16, or an address off a 16-byte boundary. The result is right; it is not faster than
    bfloat16.

    **Remedy:** Take an FP8 recipe on Hopper, make extents multiples of 16, or leave such layers in high precision
    (`dt.filters`). `diptych doctor` and `dt.report(model)` name the products.
    """


class HighPrecisionWarning(ExplainedWarning):
    """A module that could quantize trains in high precision, and nothing has asked it for either.

    **Cause:** A `dt.Linear`, or a layer that `dt.convert` made without a recipe, was called outside of
    `dt.autocast`, in a process that has not entered any region.

    **Remedy:** Call the model inside of `dt.autocast(recipe=...)`, or give it a recipe: `dt.convert(model, recipe)`.
    If high precision is meant, `dt.autocast(enabled=False)` says so.
    """


class GatherWarning(ExplainedWarning):
    """Weights that FSDP2 gathers in high precision, though the recipe quantizes them.

    **Cause:** A weight whose rows do not divide into ranks × block, one that other modules share (a tied head), or
    factors of adapters.

    **Remedy:** None is needed: the layer quantizes what was gathered, with the same bits. For smaller gathers, make
    the rows that the message names a multiple of ranks × block.
    """


class RecipeSwitchWarning(ExplainedWarning):
    """A module changed to a recipe that cannot use the module's states, such as delayed scales; they were reset.

    **Cause:** A module ran under delayed scaling and then under another recipe, or under one with another history.

    **Remedy:** If the switch is meant, none: the new states begin as in a new model. Otherwise give all regions of a
    run one recipe.
    """


class LostUpdateWarning(ExplainedWarning):
    """A weight that is held quantized was updated without a float32 master, so small updates are lost in rounding.

    **Cause:** An optimizer stepped a weight that `quantized_model_init` made, and `weight.main_param` is not set.

    **Remedy:** Set `weight.main_param` to a float32 tensor, such as
    `weight.get_high_precision_init_val().float().to(weight.device)`; updates are then added there.
    """


class CheckpointWarning(ExplainedWarning):
    """A checkpoint's weights were converted while loading, or a folder's newest checkpoint is not the one it names.

    **Cause:** The checkpoint holds weights in another format than the model: they were quantized again, or
    dequantized, which rounds. Or `latest` names a checkpoint that is not complete.

    **Remedy:** To take payloads and scales unchanged, make the model inside of `quantized_model_init` with the recipe
    of the checkpoint's layout. For a folder, check that the step that was loaded is the one you want.
    """


class IgnoredArgumentWarning(ExplainedWarning):
    """A TransformerEngine argument was given that has no effect in diptych.

    **Cause:** An argument such as `ub_name` or `seq_length`, which names something that diptych does not have.

    **Remedy:** Leave the argument out. The message says why it has no effect.
    """


class LateStateWarning(ExplainedWarning):
    """A forward made states of a module after it was copied, saved or wrapped; the copy or file lacks these states.

    **Cause:** Delayed scales and random states are made in a module's first forward, unless they were prepared.

    **Remedy:** Call `dt.prepare(model, recipe)` before copying, saving, loading by keys or wrapping (EMA, DDP, FSDP).
    """


class EagerWarning(ExplainedWarning):
    """A part of compiled code that runs eagerly.

    **Cause:** A call that torch.compile cannot trace, such as `delay_wgrad_compute` or calibration. Graphs end before
    it and begin after it; results have the same bits.

    **Remedy:** The message names it and what to do instead, often `torch.compiler.disable` around one module. With
    `fullgraph=True` it is an error.
    """
