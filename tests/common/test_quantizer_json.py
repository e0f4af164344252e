"""Quantizers in files."""

from __future__ import annotations

import dataclasses
import json

import pytest

from diptych.common import ArgumentError, CheckpointError, Float8Quantizer, MXFP8Quantizer, Quantizer, QuantizerRole
from diptych.common.quantizer_json import from_json, to_json
from diptych.common.recipes import RECIPES


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Mine(MXFP8Quantizer):
    bits: int = 3

    def __post_init__(self):
        super().__post_init__()
        if self.bits > 8:
            raise ValueError("too many bits")


class ByIdentity(Quantizer):
    format = MXFP8Quantizer().format


@pytest.mark.parametrize("tensor", QuantizerRole.OPERANDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_built_in_quantizers_come_back(recipe, tensor):
    quantizer = recipe.quantizer(QuantizerRole(tensor=tensor))
    assert from_json(json.loads(json.dumps(to_json(quantizer)))) == quantizer


def test_a_quantizer_of_ones_own_is_named_with_its_module():
    record = to_json(Mine(bits=5, columnwise=False))
    assert record["class"] == f"{__name__}:Mine"
    assert from_json(record) == Mine(bits=5, columnwise=False)
    with pytest.raises(CheckpointError, match="too many bits"):
        from_json(record | {"fields": {"bits": 9}})


def test_what_cannot_be_written_is_named():
    with pytest.raises(ArgumentError, match="ByIdentity is compared by identity"):
        to_json(ByIdentity())
    with pytest.raises(ArgumentError, match="amax_compute_algo is"):
        to_json(Float8Quantizer(amax_compute_algo=max))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "must be written as its class"),
        ({"class": "MXFP8Quantizer"}, "must be written as its class"),
        ({"class": "os:system", "fields": {}}, "which this process does not have"),
        ({"class": "MXFP8Quantizer", "fields": {"nonsense": 1}}, "MXFP8Quantizer is refused"),
        ({"class": "MXFP8Quantizer", "fields": {"rowwise": 1}}, "rowwise must be bool"),
    ],
)
def test_anything_else_is_refused(record, words):
    with pytest.raises(CheckpointError, match=words):
        from_json(record)
