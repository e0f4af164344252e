"""Arguments of modules by TransformerEngine's names; `modules/test_te.py` of torch's tests passes them to modules."""

import dataclasses

import pytest

from diptych.common import ArgumentError, Float8CurrentScaling, UnsupportedError, te_arguments
from diptych.common.layer_options import COLUMN, NO_ORIGINALS, Originals, TensorParallel, WeightGradientOptions
from diptych.common.te_arguments import ModuleArguments, either, module_arguments, placed
from diptych.common.te_signatures import SIGNATURES

RECIPE = Float8CurrentScaling()
REST = {"originals": NO_ORIGINALS, "weight_gradients": WeightGradientOptions(), "init_method": None,
        "return_bias": False}  # fmt: skip


def test_arguments_become_values():
    given = {
        "originals": Originals(weight=True), "weight_gradients": WeightGradientOptions(True, False),
        "parallel": TensorParallel("group", 2, True, {"": COLUMN}), "init_method": print, "return_bias": True,
    }  # fmt: skip
    dtypes = placed("Linear", "meta", None, "float16")
    made = module_arguments("Linear", {"ub_name": None}, RECIPE, None, dtypes, **given)
    assert made == ModuleArguments(RECIPE, "", {"device": "meta", "dtype": "float16"}, *given.values())
    assert module_arguments("Linear", {}, None, "a", dtypes, **REST).parallel == TensorParallel()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    "others, recipe, more, error, words",
    [
        ({"ub_overlap_ag": True}, None, {}, UnsupportedError, "Linear: ub_overlap_ag must be False"),
        ({"x": 1}, None, {}, TypeError, r"Linear\(\) got an unexpected keyword argument 'x'"),
        ({}, "fp8", {}, ArgumentError, "Linear: recipe must be a diptych Recipe or None, got str"),
        ({}, None, {"size": 0}, ArgumentError, "Linear: tp_size must be a positive int, got 0"),
        ({}, None, {"size": True}, ArgumentError, "Linear: tp_size must be a positive int, got True"),
        ({}, None, {"sequence": 1}, ArgumentError, "Linear: sequence_parallel must be a bool, got 1"),
        ({}, None, {"modes": {"": "col"}}, ValueError, "Linear: parallel_mode must be 'column', 'row' or None"),
    ],
)
def test_wrong_arguments_are_named(others, recipe, more, error, words):
    with pytest.raises(error, match=words):
        module_arguments("Linear", others, recipe, "", {}, **REST, parallel=TensorParallel(**more))


def test_one_dtype():
    assert placed("Linear", None, "float32", "float32") == placed("Linear", None, "float32", None)
    with pytest.raises(ValueError, match="Linear: dtype=float32 and params_dtype=float16 name the same thing"):
        placed("Linear", None, "float32", "float16")


def test_every_reason_is_one_of_an_argument():
    known = {argument for signature in SIGNATURES.values() for argument in signature}
    assert te_arguments._WHY.keys() | te_arguments._WITHOUT_EFFECT.keys() <= known


def test_two_names_of_one_argument():
    assert either("f", "a", None, "b", 1) == either("f", "a", 1, "b", None) == either("f", "a", 1, "b", 1) == 1
    with pytest.raises(ValueError, match="f: a=1 and b=2 name the same thing"):
        either("f", "a", 1, "b", 2)
