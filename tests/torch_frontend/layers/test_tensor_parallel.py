"""Linear layers cut over ranks have the bits of the oracle's whole tensors, and send bytes that are quantized."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diptych.torch as dt
import oracle
from oracle import parallel
from torch_frontend.cut_layers import (
    DRAWN,
    EVERY,
    RECIPES,
    Case,
    Reference,
    collectives,
    dtypes_of,
    expected,
    linear,
    profiled,
    step,
)
from torch_frontend.ranks import Pool, needs_gloo
from torch_frontend.tools import same, to_numpy, to_torch

pytestmark = needs_gloo
PLACES = tuple(itertools.product(("column", "row"), (False, True)))
VALUES = ("zero_blocks", "subnormal_input", "powers_of_two", "outlier", "inf_nan_mix", "huge")


def _cells() -> list[Any]:
    """Each recipe cut in every way, with dtypes in turn; a long sweep runs the others."""
    cells = []
    for row, recipe in enumerate(RECIPES):
        for column, (mode, sequence) in enumerate(PLACES):
            for turn, dtypes in enumerate(dtypes_of(recipe)):
                case = Case(recipe, mode, sequence, dtypes, steps=3 if recipe == "delayed" else 1)
                runs = turn == (row + column) % len(dtypes_of(recipe))
                cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    return cells


def require_oracles_bits(case: Case, pool: Pool, into: Path, compiled: bool = False) -> None:
    ranks = pool.run("torch_frontend.cut_layers:steps", case, compiled, size=case.size, into=into / "made")
    reference = Reference(EVERY[case.recipe])
    for i in range(case.steps):
        for rank, want in enumerate(expected(case, reference, i)):
            got = ranks[rank][i]
            assert got.keys() == want.keys()
            for name in want:
                same(got[name], want[name], f"{case}, step {i}, rank {rank}: {name}")


@pytest.mark.parametrize("case", _cells())
def test_oracles_bits(case, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path)


def _adversarial() -> list[Any]:
    cells = []
    for row, recipe in enumerate(RECIPES):
        for column, values in enumerate(VALUES):
            for turn, (mode, sequence) in enumerate(PLACES):
                dtypes = dtypes_of(recipe)[(row + column + turn) % len(dtypes_of(recipe))]
                case = Case(recipe, mode, sequence, dtypes, values, steps=2)
                runs = (row + column) % 3 == 0 and turn == (row + column) // 3 % 4
                cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    return cells


@pytest.mark.parametrize("case", _adversarial())
def test_zeros_subnormals_and_wide_ranges(case, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path)


def _four() -> list[Any]:
    """In float32 where that goes: sums of bfloat16 are mostly exact in float32, in any order."""
    cells = []
    for recipe, (column, (mode, sequence)) in itertools.product(RECIPES, enumerate(PLACES)):
        case = Case(recipe, mode, sequence, dtypes_of(recipe)[0], size=4, steps=2)
        runs = (recipe, column) in (("current", 0), ("nvfp4 2d", 3))
        cells.append(pytest.param(case, id=str(case), marks=() if runs else pytest.mark.slow))
    return cells


@pytest.mark.parametrize("case", _four())
def test_four_ranks(case, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path)


def _drawn() -> list[Any]:
    cells = []
    for recipe, (mode, sequence), size in itertools.product(DRAWN, PLACES, (2, 4)):
        case = Case(recipe, mode, sequence, size=size, steps=2)
        cells.append(pytest.param(case, id=str(case), marks=() if size == 2 else pytest.mark.slow))
    return cells


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", _drawn())
def test_stochastic_rounding_has_the_whole_tensors_random_bits(case, compiled, pool, tmp_path):
    require_oracles_bits(case, pool, tmp_path, compiled)


# --- what is sent ---


def sent(rank: int, groups: Any, case: Case) -> list[tuple[str, str, int]]:
    layer = linear(case, groups["data"], bias=False)
    with profiled() as of_profiler, collectives() as seen:
        step(case, layer, rank, 0)
    elements = [size // getattr(torch, dtype.removeprefix("torch.")).itemsize for _, dtype, size in seen]
    elements.append(32)  # bytes by which ranks compare the first call; no mode sees them
    assert sorted(elements) == sorted(of_profiler), (seen, of_profiler)
    return [(name, dtype, size) for name, dtype, size in seen if name != "all_reduce"]


def copies_bytes(case: Case, tensor: str, value: np.ndarray) -> list[tuple[str, int]]:
    """(dtype, bytes) of the parts of both copies of a rank's tokens, without scales that every rank has. A gradient
    with one scale travels once."""
    q = Reference(RECIPES[case.recipe]).quantized(tensor, value)
    parts = [(q.rowwise_data, q.rowwise_scale_inv), (q.columnwise_data, q.columnwise_scale_inv)]
    parts = parts[:1] if tensor == "grad_output" and q.fmt.one_scale else parts
    flat = [a for data, scale in parts for a in ((data,) if q.fmt.one_scale else (data, scale))]
    return [("torch.float32" if a.dtype == np.float32 else "torch.uint8", a.nbytes) for a in flat]


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathers_carry_quantized_bytes(recipe, mode, pool, tmp_path):
    """One byte an element, or half of one, and the blocks' scales; partial products travel once, in their dtype."""
    case = Case(recipe, mode, True)
    whole = case.tensors(0)
    tensor, name, total = ("input", "x", "dx") if mode == "column" else ("grad_output", "dy", "y")
    for seen in pool.run(f"{__name__}:sent", case, into=tmp_path / "made"):
        gathered = [(dtype, size) for op, dtype, size in seen if op == "allgather_base"]
        assert sorted(gathered) == sorted(copies_bytes(case, tensor, case.part(name, whole[name], 0)))
        partial = whole["x" if total == "dx" else "dy"]
        assert [s for s in seen if s[0] != "allgather_base"] == [("alltoall_base", "torch.bfloat16", partial.nbytes)]


@pytest.mark.parametrize("mode", ["column", "row"])
def test_without_sequence_parallelism_sums_are_sent_as_an_all_reduce_sends_them(mode, pool, tmp_path):
    case = Case("mxfp8", mode)
    shape = case.tensors(0)["x" if mode == "column" else "dy"].shape
    rows = shape[0] + shape[0] % 2
    want = [
        ("alltoall_base", "torch.bfloat16", 2 * rows * shape[1]),
        ("allgather_base", "torch.bfloat16", rows * shape[1]),
    ]
    assert pool.run(f"{__name__}:sent", case, into=tmp_path / "made") == [want] * 2


# --- blocks of rows that no copy needs, and results that are quantized ---


def forward(rank: int, groups: Any, case: Case, lead: tuple[int, ...], fp8_output: bool) -> Any:
    layer, whole = linear(case, groups["data"]), inference(case, lead)
    with torch.no_grad(), dt.autocast(recipe=RECIPES[case.recipe]):
        for name, p in (("w", layer.weight), ("b", layer.bias)):
            p.copy_(case.part(name, to_torch(whole[name]), rank))
        y = layer(case.part("x", to_torch(whole["x"]), rank), fp8_output=fp8_output)
    return {"y": y} if not fp8_output else {k: getattr(y, k) for k in y.quantizer.buffer_names()}


def inference(case: Case, lead: tuple[int, ...]) -> dict[str, np.ndarray]:
    n, k = case.nk
    shapes = {"x": (*lead, k), "w": (n, k), "b": (n,)}
    return {name: case.draw(name, 0, shape, "bfloat16") for name, shape in shapes.items()}


def whole_output(case: Case, lead: tuple[int, ...]) -> np.ndarray:
    whole, reference = inference(case, lead), Reference(RECIPES[case.recipe])
    qx, qw = reference.quantized("input", whole["x"]), reference.quantized("weight", whole["w"])
    if case.mode == "row":
        y = parallel.row_forward(qx.copy(), qw.copy(), 2, whole["b"], oracle.BF16)
    else:
        y = np.concatenate(parallel.column_forward(qx.copy(), qw.copy(), 2, whole["b"], oracle.BF16), 1)
    return y.reshape(*lead, -1)


@pytest.mark.parametrize("recipe", ["mxfp8", "block"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_rowwise_copies_alone_take_any_number_of_tokens(recipe, mode, pool, tmp_path):
    case, lead = Case(recipe, mode, True), (6, 3)
    y = whole_output(case, lead)
    for rank, made in enumerate(pool.run(f"{__name__}:forward", case, lead, False, into=tmp_path / "made")):
        same(made["y"], case.part("y", y, rank), rank)


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4 2d"])
@pytest.mark.parametrize(("mode", "sequence"), PLACES)
def test_an_output_that_is_quantized_has_the_whole_tensors_scales(recipe, mode, sequence, pool, tmp_path):
    case = Case(recipe, mode, sequence)
    lead = case.lead if sequence else (32,)
    y = whole_output(case, lead)
    axis = 1 if mode == "column" else 0
    q = Reference(RECIPES[recipe]).quantized("input", y)
    for rank, made in enumerate(pool.run(f"{__name__}:forward", case, lead, True, into=tmp_path / "made")):
        for columnwise in (False, True):
            name = "columnwise" if columnwise else "rowwise"
            copy = q.copy(columnwise)
            cut = parallel.cut(copy, 2, axis)[rank] if mode == "column" or sequence else copy
            got = to_numpy(made[f"{name}_data"])
            same(got.reshape(cut.data.shape), cut.data, f"{case} {name}")
            same(to_numpy(made[f"{name}_scale_inv"]), cut.scale_inv, f"{case} {name}")
