"""Recipes are values; their defaults are the documented ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from common import values
from diptych.common import recipes
from diptych.common.quantizers import POW2, MXFP8Quantizer, NVFP4Quantizer, Quantizer, QuantizerRole
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

FAST = MMParams(use_split_accumulator=False)


def hybrid(role: QuantizerRole) -> Quantizer | None:
    """MXFP8 forward, high-precision weight gradients."""
    return None if role.gemm == "wgrad" else MXFP8Quantizer()


ALL = (
    *RECIPES.values(),
    Float8CurrentScaling(fp8_format=Format.E5M2, fp8_quant_bwd_grad=QParams(True, 1e-12), fp8_gemm_wgrad=FAST),
    Float8BlockScaling(fp8_format=Format.HYBRID, w_block_scaling_dim=1, fp8_quant_fwd_inp=QParams(amax_epsilon=0.5)),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
    DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo="most_recent", amax_group="data"),
    NVFP4BlockScaling(disable_rht=True, backward_override="dequantized"),
    CustomRecipe(hybrid, backward_override="high_precision"),
)
PRODUCTS = ("fprop", "dgrad", "wgrad")
OPERANDS = QuantizerRole.OPERANDS


def formats(recipe: Recipe) -> list[str]:
    return [recipe.quantizer(QuantizerRole(module="linear", tensor=t)).format.name for t in OPERANDS]


@pytest.mark.parametrize("recipe", ALL, ids=lambda r: f"{type(r).__name__}-{r.fingerprint}")
def test_value(recipe):
    for part in values.parts(recipe):
        values.check_value(part)
    assert values.scalars_only(recipe)


def test_fingerprints_in_other_processes():
    values.check_other_processes([r for r in ALL if not isinstance(r, CustomRecipe)])
    assert len({r.fingerprint for r in ALL}) == len(ALL)


def test_every_field_matters():
    gemms = {f"fp8_gemm_{p}": FAST for p in PRODUCTS}
    base = {"backward_override": "dequantized", "amax_group": "data"}
    quants = {f"fp8_quant_{n}": QParams(True, 0.5) for n in ("fwd_inp", "fwd_weight", "bwd_grad")}
    values.check_fields_matter(
        Float8CurrentScaling(), {"fp8_format": Format.E4M3, **quants, **gemms, "fp8_gemm_fprop": MMParams(), **base}
    )
    history = {"margin": 1, "amax_history_len": 4, "amax_compute_algo": "most_recent"}
    values.check_fields_matter(
        DelayedScaling(),
        {"fp8_format": Format.E4M3, **history, **gemms, "fp8_gemm_fprop": MMParams(), **base},
    )
    of_nvfp4 = dict.fromkeys(("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"), True)
    values.check_fields_matter(QParams(), {"power_2_scale": True, "amax_epsilon": 1.0, **of_nvfp4})
    values.check_fields_matter(MMParams(), {"use_split_accumulator": False})


def test_defaults_are_the_documented_ones():
    assert type(DEFAULT_RECIPE) is Float8CurrentScaling and Float8CurrentScaling() == DEFAULT_RECIPE
    assert formats(Float8CurrentScaling()) == ["fp8_e4m3_tensor", "fp8_e4m3_tensor", "fp8_e5m2_tensor"]
    assert formats(Float8BlockScaling()) == ["fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e4m3_1x128"]
    assert formats(MXFP8BlockScaling()) == ["mxfp8_e4m3"] * 3
    assert formats(DelayedScaling()) == formats(Float8CurrentScaling())
    assert formats(NVFP4BlockScaling()) == ["nvfp4"] * 3
    delayed = DelayedScaling().quantizer(QuantizerRole())
    assert (delayed.margin, delayed.amax_history_len, delayed.amax_compute_algo) == (0, 1024, "max")
    assert [NVFP4BlockScaling().quantizer(QuantizerRole(tensor=t)) for t in OPERANDS] == [
        NVFP4Quantizer(with_rht=True),
        NVFP4Quantizer(with_2d_quantization=True),
        NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    ]
    fast = {type(r): [r.fast_accum(p) for p in PRODUCTS] for r in RECIPES.values()}
    assert fast == {
        DelayedScaling: [True, False, False],
        Float8CurrentScaling: [True, False, False],  # on for fprop, off for both gradients
        Float8BlockScaling: [False] * 3,
        MXFP8BlockScaling: [False] * 3,
        NVFP4BlockScaling: [False] * 3,
    }
    for tensor in OPERANDS:
        role = QuantizerRole(tensor=tensor)
        assert Float8CurrentScaling().quantizer(role).spec[1:] == (0, 0.0), "pow2 off per tensor"
        assert Float8BlockScaling().quantizer(role).spec[1:] == (POW2, 0.0), "pow2 on per block"
        assert MXFP8BlockScaling().quantizer(role).spec[1:] == (0, 0.0)
        for recipe in ALL:
            q = recipe.quantizer(role)
            assert q.rowwise and q.columnwise and q == recipe.quantizer(role), "both copies, the same each time"


def test_the_docs_table_names_the_same_formats():
    """The module's own table of defaults, row by row."""
    table = [line for line in (recipes.__doc__ or "").splitlines() if line.startswith("| `")]
    recipes_by_type = {type(r).__name__: r for r in reversed(RECIPES.values())}
    assert len(table) == len(recipes_by_type) + 1  # and the custom one
    for line in table[:-1]:
        name, forward, backward, _ = (cell.strip() for cell in line.strip("|").split("|"))
        recipe = recipes_by_type[name.strip("`")]
        quantizers = [recipe.quantizer(QuantizerRole(tensor=t)) for t in OPERANDS]
        elements = [q.format.element.removeprefix("float8_").removeprefix("float4_").upper()[:4] for q in quantizers]
        for cell, element in ((forward, elements[0]), (backward, elements[2])):
            assert element in cell, line
        assert ("128x128" in forward) == ("128x128" in formats(recipe)[1])


def test_options_reach_their_tensor():
    options = {"fwd_inp": QParams(True, 0.25), "fwd_weight": QParams(False, 0.5), "bwd_grad": QParams(True, 1.0)}
    for cls in (Float8CurrentScaling, Float8BlockScaling):
        recipe = cls(**{f"fp8_quant_{name}": p for name, p in options.items()})
        for tensor, p in zip(OPERANDS, options.values(), strict=True):
            assert recipe.quantizer(QuantizerRole(tensor=tensor)).spec[1:] == (POW2 * p.power_2_scale, p.amax_epsilon)
    dims = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1, grad_block_scaling_dim=2)
    assert formats(dims) == ["fp8_e4m3_128x128", "fp8_e4m3_1x128", "fp8_e4m3_128x128"]
    assert formats(MXFP8BlockScaling(fp8_format=Format.HYBRID)) == ["mxfp8_e4m3", "mxfp8_e4m3", "mxfp8_e5m2"]
    assert formats(Float8CurrentScaling(fp8_format=Format.E5M2)) == ["fp8_e5m2_tensor"] * 3


@pytest.mark.parametrize("cls", [Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling])
@pytest.mark.parametrize("product", PRODUCTS)
def test_block_recipes_refuse_fast_accumulation(cls, product):
    with pytest.raises(ValueError, match=f"{cls.__name__}: fast accumulation exists for per-tensor FP8 only"):
        cls(**{f"fp8_gemm_{product}": FAST})


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), "block_scaling_dim"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2, wgrad_input_square=True), "wgrad_input_square"),
        (lambda: Float8BlockScaling(fp8_quant_fwd_inp=QParams(), wgrad_input_square=True), "wgrad_input_square"),
        (lambda: Float8BlockScaling(fp8_quant_bwd_grad=QParams(amax_epsilon=-1.0)), "amax_epsilon"),
        (lambda: Float8CurrentScaling(fp8_quant_fwd_weight=QParams(amax_epsilon=float("nan"))), "amax_epsilon"),
        (lambda: recipe_by_name("fp8"), "fp8-delayed, fp8-current, fp8-block, mxfp8, mxfp8-2d, nvfp4"),
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len"),
        (lambda: MXFP8BlockScaling(backward_override="none"), "backward_override"),
    ],
)
def test_bad_values_raise_when_made(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_names():
    assert list(RECIPES) == ["fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "mxfp8-2d", "nvfp4"]
    assert all(recipe_by_name(name) is recipe for name, recipe in RECIPES.items())
    with pytest.raises(TypeError):
        Float8CurrentScaling(margin=1)  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="must define `quantizer`"):
        Recipe()


def test_the_environment_is_not_read():
    """No variable, whatever its name, changes a default."""
    code = "from diptych.common import RECIPES; print([r.fingerprint for r in RECIPES.values()])"
    names = ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "NVTE_FP8_FORMAT", "DIPTYCH_RECIPE", "FP8_FORMAT")
    env = {**os.environ, **dict.fromkeys(names, "1")}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([r.fingerprint for r in RECIPES.values()])


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: RECIPES["fp8"], KeyError, "unknown recipe 'fp8'; known: fp8-delayed, "),
        (
            lambda: DelayedScaling(amax_history_len=0),
            ValueError,
            r"^DelayedScaling\.amax_history_len must be >= 1, got 0",
        ),
        (lambda: DelayedScaling(margin=100), ValueError, r"^DelayedScaling\.margin must lie in"),
        (lambda: DelayedScaling(margin="1"), TypeError, r"^DelayedScaling\.margin must be int, got '1'"),
        (
            lambda: DelayedScaling(history=3),
            TypeError,
            r"no argument 'history' \(nearest: 'amax_history_len'\); it has .*margin, ",
        ),
        (lambda: MXFP8BlockScaling(fp8_format="E4M3"), TypeError, r"fp8_format must be one of Format\.E4M3, "),
        (
            lambda: NVFP4BlockScaling(fp8_gemm_fprop=True),
            TypeError,
            r"fp8_gemm_fprop must be a diptych\.common\.MMParams",
        ),
    ],
    ids=range(7),
)
def test_messages_name_what_the_user_wrote(make, error, said):
    with pytest.raises(error, match=said):
        make()
