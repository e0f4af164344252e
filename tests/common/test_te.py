"""TransformerEngine's arguments of recipes: each means the recipe that the right column says, or is refused by name."""

import pickle

import pytest

from diptych.common import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
)
from diptych.common.errors import UnsupportedError
from diptych.common.recipes import Format, QParams

F32 = {f"fp8_quant_{t}": QParams() for t in ("fwd_inp", "fwd_weight", "bwd_grad")}
POW2 = {f"fp8_quant_{t}": QParams(power_2_scale=True) for t in ("fwd_inp", "fwd_weight", "bwd_grad")}
BUILT_IN = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)
ROTATED, PLAIN = QParams(random_hadamard_transform=True), QParams()


def factory(role):
    return MXFP8Quantizer()


@pytest.mark.parametrize("cls", BUILT_IN)
def test_arguments_of_all_recipes(cls):
    given = cls(backward_override=None, fp8_dpa=False, fp8_mha=False)
    assert given == cls() and given.fingerprint == cls().fingerprint
    assert cls(backward_override="dequantized").backward_override == "dequantized"
    for name in ("fp8_dpa", "fp8_mha"):
        with pytest.raises(UnsupportedError, match=f"{cls.__name__}.{name} must be False, got True: .*no attention"):
            cls(**{name: True})
    with pytest.raises(TypeError, match=r"Scaling has no argument 'no_such_argument'; it has .*fp8_gemm_fprop"):
        cls(no_such_argument=1)
    assert CustomRecipe(factory, backward_override=None) == CustomRecipe(factory)


@pytest.mark.parametrize(
    "given, meant",
    [
        (DelayedScaling(scaling_factor_compute_algo=None, reduce_amax=False), DelayedScaling()),
        (Float8CurrentScaling(use_power_2_scales=True), Float8CurrentScaling(**POW2)),
        (Float8CurrentScaling(use_power_2_scales=False), Float8CurrentScaling()),
        (Float8BlockScaling(use_f32_scales=True), Float8BlockScaling(**F32)),
        (Float8BlockScaling(use_f32_scales=False), Float8BlockScaling()),
        (Float8BlockScaling(use_f32_scales=True, fp8_quant_fwd_inp=PLAIN), Float8BlockScaling(**F32)),
        (MXFP8BlockScaling(margin=0), MXFP8BlockScaling()),
        (
            NVFP4BlockScaling(nvfp4_4over6="none", nvfp4_4over6_e4m3_use_256="all", nvfp4_4over6_err_mode="MAE"),
            NVFP4BlockScaling(),
        ),
        (CustomRecipe(factory, fp8_format=Format.HYBRID, quantization_alignment=128), CustomRecipe(factory)),
        (NVFP4BlockScaling(fp4_format=Format.E2M1, fp8_format=Format.E4M3), NVFP4BlockScaling()),
        (NVFP4BlockScaling(fp4_quant_fwd_weight=PLAIN), NVFP4BlockScaling(disable_2d_quantization=True)),
        (
            NVFP4BlockScaling(fp4_quant_fwd_inp=ROTATED, fp4_quant_bwd_grad=ROTATED),
            NVFP4BlockScaling(disable_stochastic_rounding=True),
        ),
    ],
)
def test_what_an_argument_means(given, meant):
    assert given == meant and given.fingerprint == meant.fingerprint


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: DelayedScaling(reduce_amax=True), UnsupportedError, "amax_group"),
        (lambda: DelayedScaling(scaling_factor_compute_algo=max), UnsupportedError, "CustomRecipe"),
        (lambda: MXFP8BlockScaling(margin=1), UnsupportedError, "MXFP8BlockScaling.margin must be 0, got 1"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), UnsupportedError, "no 4-over-6 scaling"),
        (lambda: CustomRecipe(factory, quantization_alignment=32), UnsupportedError, "row_align"),
        (lambda: NVFP4BlockScaling(fp8_format=Format.E5M2), UnsupportedError, "block scales are E4M3"),
        (lambda: NVFP4BlockScaling(fp4_quant_fwd_inp=True), TypeError, "must be QParams, got bool"),
        (
            lambda: NVFP4BlockScaling(fp4_quant_fwd_inp=QParams(stochastic_rounding=True)),
            UnsupportedError,
            "fp4_quant_fwd_inp: .* no stochastic_rounding",
        ),
        (
            lambda: NVFP4BlockScaling(fp4_quant_fwd_inp=ROTATED, fp4_quant_bwd_grad=PLAIN),
            ValueError,
            "fp4_quant_bwd_grad means disable_rht=True, and disable_rht=False is given",
        ),
        (
            lambda: Float8BlockScaling(use_f32_scales=True, fp8_quant_fwd_inp=QParams(True)),
            ValueError,
            "use_f32_scales means fp8_quant_fwd_inp",
        ),
        (
            lambda: Float8CurrentScaling(fp8_quant_bwd_grad=QParams(stochastic_rounding=True)),
            UnsupportedError,
            "FP8 has no stochastic_rounding",
        ),
        (lambda: Float8CurrentScaling(fp8_format=Format.E2M1), ValueError, "fp8_dtype must be one of"),
    ],
)
def test_what_would_mean_something_else_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_questions_about_recipes():
    asked = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "custom")
    for i, recipe in enumerate([cls() for cls in BUILT_IN] + [CustomRecipe(factory)]):
        assert [getattr(recipe, name)() for name in asked] == [i == j for j in range(len(asked))]
        assert recipe.float8_per_tensor_scaling() is (i < 2)


def test_largest_values():
    largest = {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format}
    assert largest == {"E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344), "E2M1": (6, 6)}


def test_roles_by_both_names():
    role = QuantizerRole(module="mine", tensor="weight")
    assert (role.module_type, role.tensor_type) == ("mine", "weight")
    assert QuantizerRole(module_type="mine", tensor_type="weight", name="a") == role.replace(name="a")
    with pytest.raises(ValueError, match="'b' and 'a' are given for one thing"):
        QuantizerRole(module_type="a", module="b")
    fused = {kind: QuantizerRole(module=kind).module_type for kind in ("layernorm_linear", "layernorm_mlp")}
    assert set(fused.values()) == {"linear"} and QuantizerRole(module="grouped_linear").module_type == "grouped_linear"


@pytest.mark.parametrize("cls", BUILT_IN[1:])
def test_recipes_with_quantized_results(cls):
    recipe = cls(backward_override="dequantized") if cls is MXFP8BlockScaling else cls()
    made = recipe.with_results(True, False)
    assert made is recipe.with_results(True, False) != recipe.with_results(False, True)
    assert made == recipe.replace().with_results(True, False) and recipe == recipe.replace()
    assert pickle.loads(pickle.dumps(recipe)).with_results(True, False) == made
    assert made.backward_override == recipe.backward_override and made.fp8_gemm_fprop == recipe.fp8_gemm_fprop
    for gemm, operands in QuantizerRole.GEMMS.items():
        for tensor in operands[:2]:
            role = QuantizerRole(tensor=tensor, gemm=gemm)
            assert made.quantizer(role) == recipe.quantizer(role)
    output, grad = QuantizerRole(tensor="output"), QuantizerRole(tensor="grad_input")
    assert made.quantizer(output) == recipe.quantizer(QuantizerRole()) and made.quantizer(grad) is None
    both = recipe.with_results(True, True)
    assert both.quantizer(grad) == recipe.quantizer(QuantizerRole(tensor="grad_output"))


def test_results_have_no_delayed_scale():
    with pytest.raises(UnsupportedError, match=r"DelayedScaling has no delayed scale for a module's result"):
        DelayedScaling().with_results(True, False)
