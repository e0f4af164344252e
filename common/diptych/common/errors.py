"""Error and warning types. Each is also the built-in that a caller would expect to catch."""


class ShapeError(ValueError):
    """A shape that an op or a format cannot take."""


class DTypeError(TypeError):
    """A dtype that an op or a format cannot take."""


class ArgumentError(TypeError):
    """An argument of a wrong Python type, or one that is missing."""


class DeviceError(ValueError):
    """Operands on different devices, or on a device that no backend serves."""


class UnsupportedError(NotImplementedError):
    """No kernel for this op, format and device; the message names the nearest ones."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs to another model or recipe."""


class EmulationWarning(UserWarning):
    """A quantized product ran on decoded operands because the hardware's own units do not take it."""


class RecipeSwitchWarning(UserWarning):
    """A module changed to a recipe that cannot use what it held, such as delayed scales, and starts anew."""
