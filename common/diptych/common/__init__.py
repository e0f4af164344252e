"""What both panels share, on nothing but the standard library: formats, quantizers, recipes, shape rules, errors."""

from diptych.common.errors import (
    CheckpointError,
    DeviceError,
    DTypeError,
    EmulationWarning,
    ShapeError,
    UnsupportedError,
)
from diptych.common.formats import FORMATS, FormatRow, find_format, format_by_name
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
    QuantizerRole,
)
from diptych.common.recipes import (
    DEFAULT_RECIPE,
    RECIPES,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    QParams,
    Recipe,
    recipe_by_name,
)
from diptych.common.value import Value, ValueMeta

__all__ = [
    "DEFAULT_RECIPE",
    "FORMATS",
    "RECIPES",
    "CheckpointError",
    "DTypeError",
    "DeviceError",
    "EmulationWarning",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Format",
    "FormatRow",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "QParams",
    "Quantizer",
    "QuantizerRole",
    "Recipe",
    "ShapeError",
    "UnsupportedError",
    "Value",
    "ValueMeta",
    "find_format",
    "format_by_name",
    "recipe_by_name",
]
