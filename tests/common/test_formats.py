"""The format table equals the core's, field by field, and look-ups find its rows."""

from __future__ import annotations

import dataclasses

import pytest

import oracle
from diptych import core
from diptych.common.formats import FORMATS, FormatRow, find_format, format_by_name


def test_twin_tables_are_equal():
    rows = core.format_table()
    assert [row["name"] for row in rows] == [row.name for row in FORMATS]
    for theirs, ours in zip(rows, FORMATS, strict=True):
        assert theirs == dataclasses.asdict(ours)


def test_the_oracle_describes_the_same_formats():
    assert list(oracle.FORMATS) == [row.name for row in FORMATS]
    for row in FORMATS:
        fmt = oracle.FORMATS[row.name]
        assert row.element.removeprefix("float8_").removeprefix("float4_").removesuffix("fn") == fmt.element
        assert row.scale == {"float32": "float32", "e8m0": "float8_e8m0fnu", "e4m3": "float8_e4m3fn"}[fmt.scale]
        assert (row.block_rows, row.block_cols, row.rule) == (fmt.block_rows, fmt.block_cols, fmt.rule)
        assert row.one_scale == fmt.one_scale
        assert row.columnwise == ("transposed" if fmt.columnwise_transposed else "row_major")


def test_position_is_the_id():
    assert [row.id for row in FORMATS] == list(range(len(FORMATS)))


def test_tolerance_is_half_an_ulp():
    for row in FORMATS:
        assert row.tolerance == 2.0 ** -({"float8_e4m3fn": 3, "float8_e5m2": 2, "float4_e2m1fn": 1}[row.element] + 1)


def test_lookups():
    for row in FORMATS:
        assert format_by_name(row.name) is row
        assert find_format(row.element, row.scale, (row.block_rows, row.block_cols)) is row
    with pytest.raises(ValueError, match=r"unknown format 'fp9'; known: fp8_e4m3_tensor, .*nvfp4"):
        format_by_name("fp9")
    with pytest.raises(ValueError, match=r"no format with element float4, .*nearest: mxfp8_e4m3, mxfp8_e5m2"):
        find_format("float4", "float8_e8m0fnu", (1, 32))
    with pytest.raises(ValueError, match=r"block \(3, 5\); nearest: fp8_e4m3_tensor, .*nvfp4"):
        find_format("float8_e4m3fn", "float32", (3, 5))


def test_rows_are_frozen_and_unique():
    assert len({row.name for row in FORMATS}) == len({dataclasses.astuple(row)[1:] for row in FORMATS}) == len(FORMATS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FORMATS[0].name = "x"
    with pytest.raises(KeyError):
        FormatRow("new", "e", "s", 1, 2, "r", "c", 0.0).id  # noqa: B018
