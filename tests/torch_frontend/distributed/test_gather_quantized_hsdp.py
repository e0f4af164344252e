"""Quantized gathers on four ranks: over all of them, and over two with two replicas (HSDP)."""

from __future__ import annotations

import pytest

from torch_frontend.distributed.gather_cases import TRAIN, Case, check
from torch_frontend.ranks import needs_gloo

pytestmark = [needs_gloo, pytest.mark.sampled]
MESHES = {1: (4, 1), 2: (2, 2), 4: (4,)}  # (replicas, parts), by the number of parts
CASES = {
    "four parts, fp8-current": Case("fp8-current", parts=4),
    "four parts, fp8-block": Case("fp8-block", parts=4, reshard=False),
    "four parts, mxfp8": Case("mxfp8", parts=4, mixed=True),
    "two replicas, delayed": Case("fp8-delayed"),
    "two replicas, fp8-current": Case("fp8-current", mixed=True, microbatches=2),
    "two replicas, nvfp4": Case("nvfp4", compiled=True),
    "four replicas, fp8-block": Case("fp8-block", parts=1, experts=True),
}


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_process(name, pool, tmp_path):
    case = CASES[name]
    check(case, pool.run(TRAIN, case, MESHES[case.parts], size=4, into=tmp_path / "made"))
