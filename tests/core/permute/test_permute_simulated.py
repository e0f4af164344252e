"""The kernel that permutes rows through shared memory and registers, without its hardware: a row that takes a place
before the one that was there has been written shows as wrong bytes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import cases
from core import runner, simulation
from core.permute.test_permute import as_mask, rows_of, top_k
from core.simulation import Tensor
from oracle import permute as oracle

pytestmark = pytest.mark.simulated
SOURCE, SLICES = "permute_slices.cpp", "cuda/permute/slices.cu"
SIMULATED_SMS = 2
SM_BYTES = (226 + 128) << 10  # of shared memory and of registers
# The planes' (width, dtype, fill)
PLANES = (
    ((4096, "bfloat16", 0x40A00000),),
    ((7168, "bfloat16", 0),),
    ((72, "float16", 0x40A00000),),
    ((2048, "uint8", 0), (16, "float32", 0x3F800000)),
    ((20, "float32", 0x3F800000), (3072, "uint8", 0), (96, "uint8", 0x7F7F7F7F)),
    ((1024, "uint8", 1), (1024, "uint8", 2), (1024, "uint8", 3), (1024, "uint8", 4)),
)


class Call(ctypes.Structure):
    _fields_ = (
        ("inputs", Tensor * 4),
        ("outputs", Tensor * 4),
        *((name, Tensor) for name in ("row_id_map", "row_source", "probs", "permuted_probs")),
        ("fill", ctypes.c_uint32 * 4),
        *((name, ctypes.c_int32) for name in ("planes", "sm_count", "seed")),
    )


def check(library: ctypes.CDLL, planes: tuple[tuple[int, str, int], ...], fullness: float, turn: int) -> int:
    """Tokens that fill all SMs so many times; returns the launches."""
    name = f"simulated-{planes}-{fullness}-{turn}"
    rng, be, call = cases.rng_for(name), runner.Numpy(), Call()
    token = sum(width * runner.NUMPY[dtype].itemsize for width, dtype, _ in planes)
    tokens = max(1, int(fullness * SIMULATED_SMS * SM_BYTES / token))  # one: the other SM has none
    experts, k, align = int(rng.integers(2, 40)), int(rng.integers(1, 3)), (1, 16)[turn % 2]
    ids = top_k(rng, tokens, experts, k)
    routing = as_mask(ids, experts) if turn % 2 else ids
    need = oracle.rows_needed(routing, experts, align)
    rows = need + int(rng.integers(-min(40, need // 4), 40))
    m = oracle.row_map(routing, experts, rows, align)
    probs = rows_of(rng, *m.row_id_map.shape, ("float32", "bfloat16", "float64")[turn % 3]) if turn % 4 else None
    data = [rows_of(rng, tokens, width, dtype) for width, dtype, _ in planes]
    out = runner.Outputs(be)
    given = [be.put(x, x.dtype.name) for x in data]
    made = [out.new(str(i), (rows, *x.shape[1:]), x.dtype.name) for i, x in enumerate(data)]
    maps = [be.put(m.row_id_map, "int32"), be.put(m.row_source, "int32")]
    if probs is not None:
        maps += [be.put(probs, probs.dtype.name), out.new("probs", (rows,), probs.dtype.name)]
    for i, (_, _, fill) in enumerate(planes):
        call.inputs[i], call.outputs[i], call.fill[i] = Tensor.of(given[i]), Tensor.of(made[i]), fill
    for field, operand in zip(("row_id_map", "row_source", "probs", "permuted_probs"), maps, strict=False):
        setattr(call, field, Tensor.of(operand))
    call.planes, call.sm_count, call.seed = len(planes), SIMULATED_SMS, int(rng.integers(1 << 30))
    message, launches = ctypes.create_string_buffer(256), ctypes.c_int()
    result = library.simulate(ctypes.byref(call), ctypes.byref(launches), message, len(message))
    assert result == 0, f"{name}: {message.value.decode()} {cases.report_header()}"
    got = out.read()
    for i, (x, (_, _, fill)) in enumerate(zip(data, planes, strict=True)):
        absent = np.full(x[0].nbytes // 4, fill, np.uint32).view(x.dtype)
        runner.same_bits(got[str(i)], oracle.permute(x, m, absent), f"{name} plane {i} {cases.report_header()}")
    if probs is not None:
        runner.same_bits(got["probs"], oracle.permute_probs(probs, m), f"{name} {cases.report_header()}")
    return launches.value


@pytest.fixture(scope="module")
def library():
    return simulation.built(SOURCE)


@pytest.mark.parametrize("planes", PLANES, ids=lambda planes: "-".join(str(width) for width, *_ in planes))
def test_rows_move_as_bytes(planes, library):
    launches = [check(library, planes, full, turn) for turn, full in enumerate((0.3, 0, 0.8, 0.9, 1.1, 1.6, 2.2))]
    assert launches[0] == 1 < launches[-1], launches


BROKEN = {
    "rows overwritten before they are written": ("bulk_wait_read<1>()", "bulk_wait_read<2>()"),
    "rows sent before they are there": (
        "        ptx::bulk_sees_stores();\n        __syncthreads();\n",
        "        ptx::bulk_sees_stores();\n",
    ),
    "more rows than registers keep": ("int64_t{kVectors} * kThreads", "int64_t{kVectors + 4} * kThreads"),
    "an end ahead of the stores": ("    ptx::bulk_wait_read();\n", ""),
    "absent rows that nobody commits": (
        "    ptx::bulk_commit();\n    if (p.waits)",
        "    if (p.waits)",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_found(name):
    broken = simulation.built(SOURCE, patch=(SLICES, *BROKEN[name]))
    with pytest.raises(AssertionError, match=r"differ|ended before"):
        # One round of four runs misses the first fault in 2 % of draws.
        for turn, full in enumerate((0.9, 0, 1.05, 0.9) * 10):
            check(broken, PLANES[0], full, turn)
