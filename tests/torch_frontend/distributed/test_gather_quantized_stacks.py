"""Stacks of weights (`GroupedLinear`) that FSDP2 gathers quantized: each rank holds some of the weights, whole."""

from __future__ import annotations

import pytest

from torch_frontend.distributed.gather_cases import RECIPES, TRAIN, Case, check
from torch_frontend.ranks import needs_gloo

pytestmark = [needs_gloo, pytest.mark.sampled]
CASES = {
    **{name: Case(name, experts=True) for name in RECIPES},
    "mxfp8, kept, compiled": Case("mxfp8", experts=True, reshard=False, compiled=True),
    "nvfp4-1d, compiled": Case("nvfp4-1d", experts=True, compiled=True),
    "fp8-current, compiled": Case("fp8-current", experts=True, compiled=True),
    "fp8-current, held with masters": Case("fp8-current", experts=True, held="master"),
    "fp8-block, checkpointed": Case("fp8-block", experts=True, how="checkpoint"),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_process(name, on, pool, tmp_path):
    check(CASES[name], pool.run(TRAIN, CASES[name], into=tmp_path / "made", device=on), on)
