"""`convert`: makes layers of an existing flax model quantize by rules, and reports those that it left."""

from __future__ import annotations

import sys
from typing import Any

from diptych.common.arguments import require_switches
from diptych.common.conversion import Rules
from diptych.common.errors import ArgumentError


def convert(
    model: Any, rules: Any, *inputs: Any, verbose: bool = True, return_report: bool = False, **keywords: Any
) -> Any:
    """Makes layers of a flax model quantize, each by the recipe that the rules give to its path.

        model = dj.convert(model, {"head": None, "blocks/**": dj.MXFP8BlockScaling()})            # nnx
        model = dj.convert(model, {"**/Dense_*": dj.MXFP8BlockScaling()}, tokens, train=False)    # linen

    Converted are products with a parameter: nnx.Linear, LinearGeneral and Einsum; linen's Dense, DenseGeneral and
    Einsum; those inside of attention, LoRALinear, recurrent cells and modules of the user's own alike. The layers stay
    flax's, which add biases and cast operands; only the product is replaced by one with the bits of `dense`.
    Parameters keep their objects, paths, values and initial values. A layer's path, with dots, is its role's name, so
    that a `CustomRecipe` may choose by it.

    An nnx model is changed in place. What a recipe keeps between steps are variables `ScaleStates` and `RandomState` of
    the layers. A linen model stays as it is; the one that is returned has the same methods, and
    keeps states in the collection `_overwrite_with_gradient` and draws random bits from rngs. A submodule that is taken
    from a bound linen model is flax's own again.

    Other modules are left: those that a rule gives None or no rule matches, and, with a `ConvertWarning`, those whose
    product does not run through flax's, or has extents that the recipe's blocks do not divide. Embeddings,
    convolutions, norms and low-rank products (nnx.LoRA) are no layers that rules can convert.

    **Arguments:**
    - `model`: an instance of flax.linen.Module or flax.nnx.Module.
    - `rules`: a mapping, or a sequence of pairs, of path patterns to recipes, or to None for layers that stay as they
      are; the first rule that matches a path decides. A path is "blocks/0/attention/query" in nnx, and linen's
      `Module.path`, "Block_0/Dense_1", in linen; layers under nn.scan have one path. `*`, `?` and `[ab]` match inside
      of one part of a path, `**` any number of parts. A recipe alone converts every layer.
    - `inputs`, `keywords`: of linen's `model.init`, after its rngs: arrays, or `jax.ShapeDtypeStruct`. The model is
      traced once with them, which finds its layers. nnx models take none but `rngs`, an nnx.Rngs from which random
      bits of stochastic rounding are drawn, nnx.Rngs(0) by default.
    - `verbose`: print the report. `return_report`: return it too.

    **Returns:** the model; with `return_report` (model, `ConversionReport`).

    **Raises:** TypeError (ArgumentError) for arguments of other kinds; ValueError for empty rules, a rule that matches
    nothing or decides on nothing, which lists near paths, and layers that are converted already. The model is unchanged
    then.
    """
    made = Rules.of("convert", rules)
    require_switches("convert", verbose=verbose, return_report=return_report)
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(model, linen.Module):
        from diptych.jax.modules.convert_linen import convert_linen

        model, report = convert_linen(model, made, inputs, keywords, verbose)
    elif nnx is not None and isinstance(model, nnx.Module):
        from diptych.jax.modules.convert_nnx import convert_nnx

        rngs = keywords.pop("rngs", None)
        if inputs or keywords:
            raise ArgumentError("convert: an nnx model has its layers already; it takes rngs and no inputs")
        report = convert_nnx(model, made, rngs, verbose)
    else:
        kind = f"the class {model.__name__} itself" if isinstance(model, type) else type(model).__name__
        raise ArgumentError(f"convert: model must be a flax.linen.Module or a flax.nnx.Module, got {kind}")
    return (model, report) if return_report else model
