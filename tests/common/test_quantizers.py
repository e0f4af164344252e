"""Quantizers are values that name a format row and the options of its scale rule."""

from __future__ import annotations

import dataclasses

import pytest

from common import values
from diptych.common.formats import FORMATS, format_by_name
from diptych.common.quantizers import (
    FROM_ROWS,
    POW2,
    RHT,
    RHT_SIGNS,
    ROW_AMAX,
    SQUARE,
    STOCHASTIC,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    QuantSpec,
)

E5M2 = "float8_e5m2"


def newest(history, last):
    """A user's algorithm."""
    return last


ALL = (
    Float8Quantizer(),
    Float8Quantizer(fp8_dtype=E5M2, margin=-2, amax_history_len=1, amax_compute_algo=newest, columnwise=False),
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(fp8_dtype=E5M2, force_pow_2_scales=True, amax_epsilon=1e-12, columnwise=False),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, fp8_dtype=E5M2, rowwise=False),
    Float8BlockQuantizer(force_pow_2_scales=False, amax_epsilon=2.0**-10),
    Float8BlockQuantizer(columnwise_from_rows=True, fp8_dtype=E5M2),
    MXFP8Quantizer(),
    MXFP8Quantizer(fp8_dtype=E5M2, rowwise=False),
    MXFP8Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True, with_random_sign_mask=False, stochastic_rounding=True),
)
ROLES = (
    *(QuantizerRole(module="linear", tensor=t) for t in QuantizerRole.OPERANDS + QuantizerRole.RESULTS),
    *(QuantizerRole("mlp", t, gemm, "layers.0") for gemm, tensors in QuantizerRole.GEMMS.items() for t in tensors),
)


@pytest.mark.parametrize("quantizer", [*ALL, *ROLES], ids=lambda v: type(v).__name__)
def test_value(quantizer):
    values.check_value(quantizer)
    assert values.scalars_only(quantizer)


def test_every_field_matters():
    usage = {"rowwise": False, "columnwise": False}
    scale = {"fp8_dtype": E5M2, "force_pow_2_scales": True, "amax_epsilon": 0.5}
    values.check_fields_matter(Float8CurrentScalingQuantizer(), {**usage, **scale})
    square = {"columnwise_from_rows": True}
    values.check_fields_matter(
        Float8BlockQuantizer(),
        {**usage, **scale, "force_pow_2_scales": False, "block_scaling_dim": 2, **square},
    )
    values.check_fields_matter(MXFP8Quantizer(), {**usage, "fp8_dtype": E5M2, "with_2d_quantization": True})
    history = {"margin": 1, "amax_history_len": 2, "amax_compute_algo": newest}
    values.check_fields_matter(Float8Quantizer(), {**usage, "fp8_dtype": E5M2, **history})
    options = ("with_2d_quantization", "row_scaled_nvfp4", "with_rht", "stochastic_rounding")
    values.check_fields_matter(
        NVFP4Quantizer(), {**usage, **dict.fromkeys(options, True), "with_random_sign_mask": False}
    )
    values.check_fields_matter(QuantizerRole(), {"module": "x", "tensor": "weight", "gemm": "fprop", "name": "y"})


def test_fingerprints_in_other_processes():
    values.check_other_processes([*(q for q in ALL if getattr(q, "amax_compute_algo", None) is not newest), *ROLES])


def test_equal_values_have_one_fingerprint():
    """Python says 1 == 1.0 and 0.0 == -0.0, so their expressions must not differ."""
    make = Float8CurrentScalingQuantizer
    for a, b in (
        (make(amax_epsilon=1), make(amax_epsilon=1.0)),
        (make(amax_epsilon=-0.0), make(amax_epsilon=0)),
    ):
        assert a == b and hash(a) == hash(b) and a.fingerprint == b.fingerprint
        assert a.__fx_repr__()[0] == b.__fx_repr__()[0]


def test_different_kinds_are_never_equal():
    plain = [
        Float8Quantizer(),
        Float8CurrentScalingQuantizer(),
        Float8BlockQuantizer(),
        MXFP8Quantizer(),
        NVFP4Quantizer(),
    ]
    assert len(set(plain)) == 5 and len({q.fingerprint for q in plain}) == 5


@pytest.mark.parametrize(
    "quantizer, name, flags, eps",
    [
        (Float8CurrentScalingQuantizer(), "fp8_e4m3_tensor", 0, 0.0),
        (
            Float8CurrentScalingQuantizer(fp8_dtype=E5M2, force_pow_2_scales=True, amax_epsilon=1),
            "fp8_e5m2_tensor",
            POW2,
            1.0,
        ),
        (Float8BlockQuantizer(), "fp8_e4m3_1x128", POW2, 0.0),
        (Float8BlockQuantizer(block_scaling_dim=2, force_pow_2_scales=False), "fp8_e4m3_128x128", 0, 0.0),
        (Float8BlockQuantizer(fp8_dtype=E5M2, amax_epsilon=0.25), "fp8_e5m2_1x128", POW2, 0.25),
        (Float8BlockQuantizer(fp8_dtype=E5M2, block_scaling_dim=2), "fp8_e5m2_128x128", POW2, 0.0),
        (Float8BlockQuantizer(columnwise_from_rows=True), "fp8_e4m3_1x128", POW2 | FROM_ROWS, 0.0),
        (Float8BlockQuantizer(columnwise_from_rows=True, columnwise=False), "fp8_e4m3_1x128", POW2, 0.0),
        (MXFP8Quantizer(), "mxfp8_e4m3", 0, 0.0),
        (MXFP8Quantizer(fp8_dtype=E5M2, with_2d_quantization=True), "mxfp8_e5m2", SQUARE, 0.0),
        (Float8Quantizer(fp8_dtype=E5M2, margin=3), "fp8_e5m2_tensor", 0, 0.0),
        (NVFP4Quantizer(), "nvfp4", 0, 0.0),
        (NVFP4Quantizer(with_2d_quantization=True), "nvfp4", SQUARE, 0.0),
        (NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True), "nvfp4", ROW_AMAX + STOCHASTIC, 0.0),
        (NVFP4Quantizer(with_rht=True), "nvfp4", RHT + RHT_SIGNS, 0.0),
        (NVFP4Quantizer(with_rht=True, with_random_sign_mask=False), "nvfp4", RHT, 0.0),
        (NVFP4Quantizer(with_rht=True, columnwise=False), "nvfp4", 0, 0.0),  # only that copy is rotated
        (NVFP4Quantizer(row_scaled_nvfp4=True, rowwise=False), "nvfp4", 0, 0.0),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_format_and_spec(quantizer, name, flags, eps):
    assert quantizer.format is format_by_name(name)
    assert quantizer.spec == QuantSpec(FORMATS.index(quantizer.format), flags, eps)
    assert [type(v) for v in quantizer.spec] == [int, int, float]
    assert quantizer.needs_rng == bool(flags & STOCHASTIC) and not quantizer.custom
    assert quantizer.needs_scale == isinstance(quantizer, Float8Quantizer)


def test_with_usage_makes_another_object():
    for q in ALL:
        both = q.with_usage(rowwise=True, columnwise=True)
        assert both.rowwise and both.columnwise and type(both) is type(q)
        assert both == dataclasses.replace(q, rowwise=True, columnwise=True) and both.spec.eps == q.spec.eps
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
        (lambda: QuantizerRole(tensor="outputs"), ["QuantizerRole.tensor", "grad_output", "'outputs'"]),
        (lambda: QuantizerRole(tensor="input", gemm="dgrad"), ["'input' is no tensor of the product 'dgrad'"]),
        (lambda: QuantizerRole(gemm="forward"), ["'forward'", "fprop"]),
        (lambda: Float8Quantizer(amax_history_len=0), ["amax_history_len", "0"]),
        (lambda: Float8Quantizer(margin=100), ["margin", "100"]),
        (lambda: Float8Quantizer(amax_compute_algo="min"), ["amax_compute_algo", "most_recent", "'min'"]),
        (lambda: NVFP4Quantizer(with_2d_quantization=True, with_rht=True), ["with_2d_quantization", "with_rht"]),
        (lambda: NVFP4Quantizer(with_2d_quantization=True, row_scaled_nvfp4=True), ["row_scaled_nvfp4"]),
        (lambda: NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True), ["stochastic_rounding"]),
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

    assert Mine().spec == (format_by_name("mxfp8_e5m2").id, 0, 0.0)
    assert Mine().with_usage(columnwise=False) != Mine()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Float8BlockQuantizer(force_pow_2_scales="no"), "force_pow_2_scales must be bool, got 'no'"),
        (lambda: Float8BlockQuantizer(force_pow_2_scales=1), "force_pow_2_scales must be bool, got 1"),
        (lambda: Float8BlockQuantizer(block_scaling_dim=True), "block_scaling_dim must be int, got True"),
        (lambda: Float8CurrentScalingQuantizer(rowwise=None), "rowwise must be bool, got None"),
        (lambda: Float8Quantizer(margin=0.5), "margin must be int, got 0.5"),
        (lambda: QuantizerRole(module=3), "module must be str, got 3"),
    ],
)
def test_wrong_types_raise(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_only_a_columnwise_copy_from_rows_has_a_format_of_its_own():
    square = Float8BlockQuantizer(columnwise_from_rows=True, fp8_dtype=E5M2)
    assert [square.copy_format(c).name for c in (False, True)] == ["fp8_e5m2_1x128", "fp8_e5m2_128x128"]
    for quantizer in ALL:
        if not quantizer.spec.flags & FROM_ROWS:
            assert quantizer.copy_format(True) is quantizer.copy_format(False) is quantizer.format
