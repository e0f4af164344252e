"""convert: its arguments, which both of flax's frameworks share, and the choice of one layer."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.jax.modules.choose import _misfit, misfit

nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
from jax_frontend.modules import models_linen, models_nnx  # noqa: E402

MX = dj.MXFP8BlockScaling()
TOKENS = jax.ShapeDtypeStruct((2, 32), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)


def linen(rules, **options):
    return dj.convert(models_linen.Language(), rules, TOKENS, **options)


def of_nnx(rules, **options):
    return dj.convert(models_nnx.Language(rngs=nnx.Rngs(0)), rules, **options)


BOTH = pytest.mark.parametrize("convert", [linen, of_nnx])


@BOTH
def test_reports_are_printed_and_returned(convert, capsys):
    _, report = convert({"head": None, "**/attention/*": MX}, return_report=True)
    assert capsys.readouterr().out == f"{report}\n"
    rows = {m.name: m for m in report.modules}
    assert rows["head"].why == "the rule 'head' left it" and not rows["head"].converted
    assert (
        rows["embed"].why == "an embedding, whose attend stays in high precision"
        and rows["embed"].parameters == 96 * 64
    )
    assert rows["norm"].why == "vectors alone, no matrix" and rows[""].why == "no layer that convert knows"
    converted = [m for m in report.modules if m.converted]
    assert len(converted) == 8 and all("/attention/" in m.name and m.recipe == MX for m in converted)
    assert report.converted == 2 * 4 * (64 * 64 + 64)
    assert {m.why for m in report.modules if m.kind in ("Dense", "Linear")} == {rows["head"].why, "no rule matches it"}
    model = convert(MX, verbose=False)
    assert not isinstance(model, tuple) and capsys.readouterr().out == ""


@BOTH
@pytest.mark.parametrize(
    "rules, error, said",
    [
        ({}, ValueError, "the rules are empty"),
        ("mxfp8", TypeError, "rules must be a recipe, a mapping"),
        (dj.MXFP8BlockScaling, TypeError, "got the class MXFP8BlockScaling itself"),
        ({"tail": MX}, ValueError, "the rule 'tail' matches no module; near paths: "),
        ({"embed": MX}, ValueError, "matches only 'embed', which has no product"),
        ({"**": MX, "head": None}, ValueError, "never decides"),
    ],
)
def test_rules_are_checked(convert, rules, error, said):
    with pytest.raises(error, match=f"convert: .*{said}"):
        convert(rules)


@BOTH
@pytest.mark.parametrize("recipe", [dj.Float8CurrentScaling, dj.DelayedScaling, dj.NVFP4BlockScaling])
def test_recipes_that_reduce_amaxes_over_mesh_axes_are_tried_outside_of_them(convert, recipe):
    _, report = convert({"**/attention/*": recipe(amax_group="data,expert")}, verbose=False, return_report=True)
    assert len([m for m in report.modules if m.converted]) == 8


def test_layers_of_equal_plans_and_shapes_are_tried_once():
    tried = _misfit.cache_info().misses
    assert {misfit(MX, f"blocks.{i}.up", 48, 96) for i in range(5)} == {""}
    assert _misfit.cache_info().misses == tried + 1
    assert misfit(dj.NVFP4BlockScaling(), "blocks.0.up", 47, 96) and not misfit(MX, "blocks.0.up", 47, 96)


@BOTH
def test_switches_are_bools(convert):
    with pytest.raises(TypeError, match="verbose must be a bool, got int"):
        convert(MX, verbose=1)


@pytest.mark.parametrize("model", [3, {"kernel": 1}, nn.Dense, nnx.Linear, None])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"model must be a flax.linen.Module or a flax.nnx.Module, got "):
        dj.convert(model, MX)


@pytest.mark.parametrize("n, k, fits", [(16, 64, True), (10, 64, False), (64, 40, False)])
def test_extents_that_blocks_do_not_divide_are_found(n, k, fits):
    """Only NVFP4's packed elements need whole blocks; the real products agree."""
    recipe = dj.NVFP4BlockScaling(disable_stochastic_rounding=True)
    x, kernel = jnp.ones((32, k), jnp.bfloat16), jnp.ones((n, k), jnp.bfloat16)
    run = jax.grad(lambda kernel: dj.dense(x, kernel, recipe=recipe).sum())
    if fits:
        run(kernel)
    else:
        with pytest.raises(ValueError, match="multiple of 16"):
            run(kernel)
    why = misfit(recipe, "", n, k)
    assert (why == "") == fits and (fits or why.startswith("does not fit NVFP4BlockScaling: "))
    assert misfit(MX, "", n, k) == ""


def test_flax_is_not_imported_for_it():
    code = (
        "import sys, diptych.jax as dj\n"
        "try: dj.convert(3, dj.MXFP8BlockScaling())\n"
        "except TypeError: pass\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'flax']"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
