"""Plans of the three products of a linear layer under recipes."""

from __future__ import annotations

import pytest

from diptych.common import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MMParams,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    linear_plan,
)
from diptych.common.gemm_options import GemmOptions


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_built_in_recipes_quantize_each_tensor_once(recipe):
    plan = linear_plan(recipe)
    for tensor in QuantizerRole.OPERANDS:
        both = recipe.quantizer(QuantizerRole("linear", tensor))
        tensor_plan = getattr(plan, tensor)
        assert tensor_plan.shared and [q for q, _ in tensor_plan.calls(True, True)] == [both]
        assert [q for q, _ in tensor_plan.calls(True, False)] == [both.with_usage(columnwise=False)]
        assert [q for q, _ in tensor_plan.calls(False, True)] == [both.with_usage(rowwise=False)]
        assert tensor_plan.calls(False, False) == ()
    assert plan.quantized == (True, True, True) and plan.results == (None, None, None)
    assert plan.options == tuple(GemmOptions(fast_accum=recipe.fast_accum(p)) for p in ("fprop", "dgrad", "wgrad"))
    assert plan.needs_rng == (type(recipe) is NVFP4BlockScaling)
    delayed = type(recipe) is DelayedScaling
    assert [s.name for s in plan.states] == (["input", "weight", "grad_output"] if delayed else [])
    assert plan is linear_plan(type(recipe)(**{n: getattr(recipe, n) for n in recipe._value_fields()}))


def mixture(role: QuantizerRole) -> Quantizer | None:
    """fprop MXFP8 x delayed, dgrad unquantized, wgrad current x delayed."""
    return {
        ("fprop", "input"): MXFP8Quantizer(),
        ("fprop", "weight"): Float8Quantizer(),
        ("dgrad", "weight"): None,
        ("wgrad", "input"): Float8Quantizer(amax_history_len=4),
        ("wgrad", "grad_output"): Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2"),
    }.get((role.gemm, role.tensor))


def test_each_product_has_its_own_quantizers():
    plan = linear_plan(CustomRecipe(mixture))
    assert plan.quantized == (True, False, True)
    assert plan.input.calls(True, True) == (
        (MXFP8Quantizer(columnwise=False), ""),
        (Float8Quantizer(amax_history_len=4, rowwise=False), "input.wgrad"),
    )
    assert plan.weight.calls(True, True) == ((Float8Quantizer(columnwise=False), "weight.fprop"),)
    assert [s.name for s in plan.states] == ["input.wgrad", "weight.fprop"]
    assert plan.states[0].quantizer == Float8Quantizer(amax_history_len=4)
    assert not plan.input.shared and not plan.weight.shared


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override):
    plan = linear_plan(MXFP8BlockScaling(backward_override=override))
    assert plan.quantized == (True, False, False) and plan.dequantized_backward == (override == "dequantized")
    assert plan.input.calls(True, True) == ((MXFP8Quantizer(columnwise=False), ""),)
    assert plan.grad_output.calls(True, True) == ()


def results(role: QuantizerRole) -> Quantizer | None:
    return MXFP8Quantizer() if role.tensor == "grad_input" else None


def test_results_are_quantized_where_a_recipe_is_asked():
    assert linear_plan(CustomRecipe(results)).results == (None, None, None)
    assert linear_plan(CustomRecipe(results, quantize_results=True)).results == (None, MXFP8Quantizer(), None)
    with pytest.raises(ValueError, match="results cannot be quantized with delayed scaling"):
        linear_plan(CustomRecipe(lambda role: Float8Quantizer(), quantize_results=True))


def rotated_input(role: QuantizerRole) -> Quantizer | None:
    return NVFP4Quantizer(with_rht=role.tensor == "input")


def named(role: QuantizerRole) -> Quantizer | None:
    return MXFP8Quantizer() if role.name == "head" and role.module == "mine" else None


def test_roles_carry_module_and_name():
    recipe = CustomRecipe(named)
    assert linear_plan(recipe, "mine", "head").quantized == (True, True, True)
    assert linear_plan(recipe, "mine", "tail").quantized == (False, False, False)
    assert linear_plan(recipe).quantized == (False, False, False)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: CustomRecipe(rotated_input), ValueError, "a Hadamard transform cancels only where both"),
        (lambda: CustomRecipe(lambda role: "fp8"), TypeError, "returned 'fp8' for QuantizerRole"),
        (lambda: CustomRecipe(3), TypeError, "qfactory must be a function"),
        (lambda: CustomRecipe(), TypeError, "qfactory"),
        (
            lambda: CustomRecipe(mixture, fp8_gemm_fprop=MMParams(use_split_accumulator=False)),
            ValueError,
            "fprop multiplies mxfp8_e4m3 and fp8_e4m3_tensor",
        ),
        (lambda: Float8CurrentScaling(backward_override="bf16"), ValueError, "backward_override"),
    ],
)
def test_bad_recipes_raise_when_made(make, error, message):
    with pytest.raises(error, match=message):
        make()
