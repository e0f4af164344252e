"""Quantized gathers on four ranks: over all of them, and over two with two replicas (HSDP)."""

from __future__ import annotations

from typing import Any

import pytest

from torch_frontend.distributed.prepare_cases import Case, check, train_sharded
from torch_frontend.ranks import needs_gloo

pytestmark = needs_gloo
WORLD_SIZES = (4,)
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


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    made = {}
    for name, case in CASES.items():
        shape = MESHES[case.parts]
        names = ("replicate", "shard")[-len(shape) :]
        made[name] = train_sharded(init_device_mesh("cpu", shape, mesh_dim_names=names), rank, case)
    return made


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_one_process(ranks, name):
    check(CASES[name], [made[name] for made in ranks])
