"""Factors, and how shardings become cuts."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.formats import format_by_name
from diptych.jax.sharding import rule
from diptych.jax.sharding.quantize import COLUMNS, ROWS, blocks_of_copies
from diptych.jax.sharding.rule import Rule
from quantizers import InventedQuantizer

GEMM = Rule((("M", "K"), ("N", "K")), (("M", "N"),), {"M": (64, 1), "N": (64, 1), "K": (64, 32)})
SHAPES = [(64, 64), (64, 64)]


@pytest.mark.parametrize(
    ("shape", "want"), [((4, 5), ("r", None)), ((1, 5, 3), (None, "r", None)), ((1, 1), ("r", None)), ((), ())]
)
def test_the_first_dimension_longer_than_one_can_be_cut(shape, want):
    assert rule.row_factors(shape, "r") == want


def test_factors_of_copies_in_both_layouts():
    transposed, row_major = format_by_name("fp8_e4m3_1x128"), format_by_name("mxfp8_e4m3")
    assert rule.copy_factors(transposed, False, (2, 4, 8), "M", "K") == [("M", None, "K"), ("M", "K")]
    assert rule.copy_factors(transposed, True, (8, 8), "M", "K") == [("M", "K"), ("M", "K")]
    assert rule.copy_factors(row_major, True, (2, 4, 8), "M", "K") == [("K", None, "M"), ("K", "M")]
    assert rule.copy_factors(format_by_name("fp8_e4m3_tensor"), True, (8, 8), "M", "K") == [("M", "K"), (None,)]
    whole_row = InventedQuantizer(block=(1, 0))  # its scale serves all parts of the row
    assert rule.copy_factors(whole_row.format, False, (8, 8), "M", "K") == [("M", "K"), ("M", None)]
    assert rule.block_of(whole_row.format) == (1, 1)


def test_a_whole_row_is_not_quantized_in_parts():
    for columnwise, want in ((False, {ROWS: (6, 1), COLUMNS: (8, 8)}), (True, {ROWS: (6, 6), COLUMNS: (8, 8)})):
        quantizer = InventedQuantizer(block=(1, 0), columnwise=columnwise)
        assert blocks_of_copies(quantizer, (2, 3, 8)) == want


def test_an_axis_cuts_one_factor_and_operands_come_first():
    cuts = rule.cuts_of(GEMM, [P("d", None), P("d", "t")], [P("t", "d")])
    assert cuts == {"M": ("d",), "K": ("t",)}
    assert rule.cuts_of(GEMM, [P(None, None), P(None, None)], [P(("d", "t"), None)]) == {"M": ("d", "t")}
    assert rule.spec_of(("M", None, "K", "N"), cuts) == ["d", None, "t", None]
    assert rule.missing(cuts, ("M", "N")) == ("t",)


def test_what_enters_after_a_sum_may_be_cut_over_its_axes():
    factors = (("M", "K"), ("N", "K"), ("M", "N"))
    rule_of = Rule(factors, (("M", "N"),), GEMM.blocks, summed="K", shares=("M", "N"), before=2)
    cuts = rule.cuts_of(rule_of, [P(None, "d"), P(None, "d"), P("d", None)])
    assert cuts == {"K": ("d",), "M": ("d",)}
    assert rule.operand_specs(rule_of, cuts) == [[None, "d"], [None, "d"], ["d", None]]
    assert rule.cuts_of(rule_of, [P(None, "d"), P(None, "d"), P(None, None)]) == {"K": ("d",)}
    assert rule.cuts_of(rule_of, [P(None, "d"), P(None, None), P(None, None)], [P(None, "d")])["N"] == ("d",)
    some = rule.cuts_of(rule_of, [P(None, ("t", "d")), P(None, ("t", "d")), P(None, "d")])
    assert some == {"K": ("t", "d"), "N": ("d",)}
    assert rule.operand_specs(rule_of, some) == [[None, ("t", "d")], [None, ("t", "d")], [None, "d"]]
    mapped = rule_of.with_batch([(), (), ("batch0",)], ("batch0",))  # whose sum has all examples on each device
    assert rule.cuts_of(mapped, [P(None, "d"), P(None, "d"), P("d", None, None)], [P("d")]) == {"K": ("d",)}


def test_blocks_are_never_cut():
    rule.check_cuts("gemm", GEMM, {"K": ("t",)}, {"t": 2}, SHAPES)
    with pytest.raises(
        ShapeError, match=r"gemm: mesh axes \('d',\) cut 64 K into 4 shards.*multiple of 128.*shard_map"
    ):
        rule.check_cuts("gemm", GEMM, {"K": ("d",)}, {"d": 4}, SHAPES)
    with pytest.raises(ShapeError, match="3 M into 2 shards"):  # a leading dimension, though rows divide
        folded = Rule((("M", None, "K"),), (), {"M": (24, 1)})
        rule.check_cuts("amax", folded, {"M": ("t",)}, {"t": 2}, [(3, 8, 4)])
    with pytest.raises(UnsupportedError, match="cut the K, but reasons"):
        rule.check_cuts(
            "gemm", Rule(GEMM.operands, (), GEMM.blocks, whole={"K": "reasons"}), {"K": ("t",)}, {"t": 2}, SHAPES
        )
    rule.check_cuts(
        "gemm", Rule(GEMM.operands, (), GEMM.blocks, whole={"K": "reasons"}), {"K": ("t",)}, {"t": 1}, SHAPES
    )


def test_matrices_are_refused_and_vectors_gathered_where_a_dimension_is_needed_whole():
    norm = Rule((("r", None), (None,)), (("r", None),), {"r": (8, 1)})
    rule.check_whole("norm", norm, [P("d", None), P("d")], [0, 0], {"d": 2})
    with pytest.raises(UnsupportedError, match=r"norm: dimension 1 of operand 0 is cut over mesh axes \('t',\)"):
        rule.check_whole("norm", norm, [P("d", "t"), P(None)], [0, 0], {"d": 2, "t": 2})
