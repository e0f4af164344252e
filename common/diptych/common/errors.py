"""Error and warning types. Each derives from the built-in class that a caller would expect to catch."""


class ShapeError(ValueError):
    """A shape that an op or a format cannot take."""


class DTypeError(TypeError):
    """A dtype that an op or a format cannot take."""


class ArgumentError(TypeError):
    """An argument of a wrong Python type, or one that is missing."""


class DeviceError(ValueError):
    """Operands on different devices, or on a device without a backend."""


class UnsupportedError(NotImplementedError):
    """No kernel for this op, format and device; the message names the nearest ones."""


class FrameworkVersionError(UnsupportedError, ImportError):
    """A version of a framework that lacks what diptych takes from its private API."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs to another model or recipe."""


class RankMismatchError(ValueError):
    """Ranks of a process group that were given unlike recipes, options or modules for what they compute together."""


class EmulationWarning(UserWarning):
    """A quantized product ran on decoded operands because the hardware has no units for it."""


class HighPrecisionWarning(UserWarning):
    """A module that could quantize trains in high precision, and nothing has asked it for either."""


class GatherWarning(UserWarning):
    """Weights that FSDP2 gathers in high precision, though the recipe quantizes them."""


class RecipeSwitchWarning(UserWarning):
    """A module changed to a recipe that cannot use the module's states, such as delayed scales; they were reset."""


class LostUpdateWarning(UserWarning):
    """A weight that is held quantized was updated without a float32 master, so small updates are lost in rounding."""


class CheckpointWarning(UserWarning):
    """A checkpoint's weights were converted while loading: quantized again, or dequantized."""


class IgnoredArgumentWarning(UserWarning):
    """A TransformerEngine argument was given that has no effect in diptych."""


class LateStateWarning(UserWarning):
    """A forward made states of a module after it was copied, saved or wrapped; the copy or file lacks these states."""
