"""Code that both panels share, using only the standard library: formats, quantizers, recipes, shape rules, errors."""

from diptych.common.earlier_names import keep
from diptych.common.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointWarning,
    DeviceError,
    DTypeError,
    EmulationWarning,
    GatherWarning,
    HighPrecisionWarning,
    LateStateWarning,
    LostUpdateWarning,
    RankMismatchError,
    RecipeSwitchWarning,
    ShapeError,
    UnsupportedError,
)
from diptych.common.formats import FORMATS, FormatRow, find_format, format_by_name
from diptych.common.layers.groups import row_align
from diptych.common.layers.plan import LinearPlan, StateSlot, TensorPlan, linear_plan
from diptych.common.ops.activation import ActivationOptions as _ActivationOptions
from diptych.common.ops.norm import NormOptions as _NormOptions
from diptych.common.ops.permute import padded_rows
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    QuantSpec,
)
from diptych.common.recipes import (
    DEFAULT_RECIPE,
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
    recipe_by_name,
)
from diptych.common.value import Value, ValueMeta

__all__ = [
    "DEFAULT_RECIPE",
    "FORMATS",
    "RECIPES",
    "ArgumentError",
    "CheckpointError",
    "CheckpointWarning",
    "CustomRecipe",
    "DTypeError",
    "DelayedScaling",
    "DeviceError",
    "EmulationWarning",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Format",
    "FormatRow",
    "GatherWarning",
    "HighPrecisionWarning",
    "LateStateWarning",
    "LinearPlan",
    "LostUpdateWarning",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "QParams",
    "QuantSpec",
    "Quantizer",
    "QuantizerRole",
    "RankMismatchError",
    "Recipe",
    "RecipeSwitchWarning",
    "ShapeError",
    "StateSlot",
    "TensorPlan",
    "UnsupportedError",
    "Value",
    "ValueMeta",
    "find_format",
    "format_by_name",
    "linear_plan",
    "padded_rows",
    "recipe_by_name",
    "row_align",
]

# Module paths of earlier versions, so that pickled files load and old imports work.
keep(
    {
        "diptych.common.fused.ActivationOptions": _ActivationOptions,
        "diptych.common.fused.NormOptions": _NormOptions,
        "diptych.common.grouped.row_align": row_align,
        "diptych.common.moe.padded_rows": padded_rows,
        "diptych.common.plan.LinearPlan": LinearPlan,
        "diptych.common.plan.StateSlot": StateSlot,
        "diptych.common.plan.TensorPlan": TensorPlan,
    }
)
