"""Quantizers are values that name a format row and the options of its scale rule."""

from __future__ import annotations

import dataclasses

import pytest

from common import values
from diptych.common.formats import FORMATS, format_by_name
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
    QuantizerRole,
)

E5M2 = "float8_e5m2"
ALL = (
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(fp8_dtype=E5M2, force_pow_2_scales=True, amax_epsilon=1e-12, columnwise=False),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, fp8_dtype=E5M2, rowwise=False),
    Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=2.0**-10),
    MXFP8Quantizer(),
    MXFP8Quantizer(fp8_dtype=E5M2, rowwise=False),
)
ROLES = tuple(QuantizerRole(module="linear", tensor=t) for t in QuantizerRole.TENSORS)


@pytest.mark.parametrize("quantizer", [*ALL, *ROLES], ids=lambda v: type(v).__name__)
def test_value(quantizer):
    values.check_value(quantizer)
    assert values.scalars_only(quantizer)


def test_every_field_matters():
    usage = {"rowwise": False, "columnwise": False}
    scale = {"fp8_dtype": E5M2, "force_pow_2_scales": True, "amax_epsilon": 0.5}
    values.check_fields_matter(Float8CurrentScalingQuantizer(), {**usage, **scale})
    values.check_fields_matter(
        Float8BlockQuantizer(), {**usage, **scale, "force_pow_2_scales": False, "block_scaling_dim": 2}
    )
    values.check_fields_matter(MXFP8Quantizer(), {**usage, "fp8_dtype": E5M2})
    values.check_fields_matter(QuantizerRole(), {"module": "x", "tensor": "weight"})


def test_fingerprints_in_other_processes():
    values.check_other_processes([*ALL, *ROLES])


def test_equal_values_have_one_fingerprint():
    """Python says 1 == 1.0 == True and 0.0 == -0.0, so their expressions must not differ."""
    make = Float8CurrentScalingQuantizer
    for a, b in (
        (make(amax_epsilon=1), make(amax_epsilon=1.0)),
        (make(amax_epsilon=-0.0), make(amax_epsilon=0)),
        (make(force_pow_2_scales=1), make(force_pow_2_scales=True)),
    ):
        assert a == b and hash(a) == hash(b) and a.fingerprint == b.fingerprint
        assert a.__fx_repr__()[0] == b.__fx_repr__()[0]


def test_different_kinds_are_never_equal():
    plain = [Float8CurrentScalingQuantizer(), Float8BlockQuantizer(), MXFP8Quantizer()]
    assert len(set(plain)) == 3 and len({q.fingerprint for q in plain}) == 3


@pytest.mark.parametrize(
    "quantizer, name, pow2, eps",
    [
        (Float8CurrentScalingQuantizer(), "fp8_e4m3_tensor", False, 0.0),
        (
            Float8CurrentScalingQuantizer(fp8_dtype=E5M2, force_pow_2_scales=True, amax_epsilon=1),
            "fp8_e5m2_tensor",
            True,
            1.0,
        ),
        (Float8BlockQuantizer(), "fp8_e4m3_1x128", True, 0.0),
        (Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False), "fp8_e4m3_128x128", False, 0.0),
        (Float8BlockQuantizer(fp8_dtype=E5M2, amax_epsilon=0.25), "fp8_e5m2_1x128", True, 0.25),
        (Float8BlockQuantizer(fp8_dtype=E5M2, block_scaling_dim=2), "fp8_e5m2_128x128", True, 0.0),
        (MXFP8Quantizer(), "mxfp8_e4m3", False, 0.0),
        (MXFP8Quantizer(fp8_dtype=E5M2), "mxfp8_e5m2", False, 0.0),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_format_and_spec(quantizer, name, pow2, eps):
    assert quantizer.format is format_by_name(name)
    assert quantizer.spec == (FORMATS.index(quantizer.format), pow2, eps)
    assert [type(v) for v in quantizer.spec] == [int, bool, float]


def test_with_usage_makes_another_object():
    for q in ALL:
        both = q.with_usage(rowwise=True, columnwise=True)
        assert both.rowwise and both.columnwise and both.spec == q.spec and type(both) is type(q)
        row = both.with_usage(columnwise=False)
        assert row.rowwise and not row.columnwise and both.columnwise, "nothing is mutated"
        assert row.with_usage() is row and row.with_usage(rowwise=True) is row
        with pytest.raises(ValueError, match="at least one of rowwise and columnwise"):
            row.with_usage(rowwise=False)


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: Float8CurrentScalingQuantizer(fp8_dtype="float8_e4m3"),
            ["fp8_dtype", "float8_e4m3fn", "'float8_e4m3'"],
        ),
        (lambda: Float8BlockQuantizer(fp8_dtype="e5m2"), ["Float8BlockQuantizer", "float8_e5m2"]),
        (lambda: MXFP8Quantizer(fp8_dtype="float4_e2m1fn"), ["MXFP8Quantizer.fp8_dtype"]),
        (lambda: Float8BlockQuantizer(block_scaling_dim=3), ["block_scaling_dim", "1 or 2", "3"]),
        (lambda: Float8CurrentScalingQuantizer(amax_epsilon=-1.0), ["amax_epsilon", "-1.0"]),
        (lambda: Float8CurrentScalingQuantizer(amax_epsilon=float("nan")), ["amax_epsilon", "nan"]),
        (lambda: Float8BlockQuantizer(amax_epsilon=float("inf")), ["amax_epsilon", "inf"]),
        (lambda: MXFP8Quantizer(rowwise=False, columnwise=False), ["at least one"]),
        (lambda: QuantizerRole(tensor="output"), ["QuantizerRole.tensor", "grad_output", "'output'"]),
    ],
)
def test_bad_values_raise(make, words):
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), caught.value


def test_fields_are_keywords():
    with pytest.raises(TypeError):
        Float8BlockQuantizer(True, True)


def test_a_base_names_no_format():
    with pytest.raises(NotImplementedError, match="must define `format`"):
        Quantizer()


def test_a_users_quantizer_needs_only_a_format():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Quantizer):
        format = format_by_name("mxfp8_e5m2")

    assert Mine().spec == (format_by_name("mxfp8_e5m2").id, False, 0.0)
    assert Mine().with_usage(columnwise=False) != Mine()
