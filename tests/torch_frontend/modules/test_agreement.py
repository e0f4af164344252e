"""Ranks that share a cut layer compare what it runs by at its first call: one that differs is an error on all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    QuantizerRole,
)
from diptych.common.errors import RankMismatchError
from diptych.torch.modules import agreement
from diptych.torch.modules.agreement import described
from torch_frontend.cut_layers import DRAWN, EVERY
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal

D = 256
CURRENT = Float8CurrentScaling()
KINDS = {
    "Linear": lambda **kw: dt.Linear(D, D, parallel_mode="column", **kw),
    "row": lambda **kw: dt.Linear(D, D, parallel_mode="row", **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(D, D, parallel_mode="column", **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(D, D, set_parallel_mode=True, **kw),
}


def module(kind: str, group: Any, sequence: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": here(), "tp_group": group, "sequence_parallel": sequence, **options}
    return KINDS[kind](**options)


def of(kind: str, dtype: str = "bfloat16") -> torch.Tensor:
    return normal("x", (128, D // 2 if kind == "row" else D), dtype, here())


def said_by(net: Any, recipe: Any, *inputs: Any) -> str:
    """Returns the error that a step raises. `recipe`: None for high precision."""
    try:
        with dt.autocast(recipe=recipe, enabled=recipe is not None):
            net(*inputs).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def made_by(named: str) -> Any:
    """A factory whose quantizers its name does not tell."""

    def factory(role: QuantizerRole) -> Any:
        return MXFP8Quantizer() if named == role.tensor else Float8CurrentScalingQuantizer()

    return CustomRecipe(factory)


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    group, said = groups["data"], {}
    names = list(EVERY)
    for i, name in enumerate(names):
        kind = list(KINDS)[i % len(KINDS)]
        net = module(kind, group)
        dt.seed_rng(net, 3)
        said[name] = said_by(net, EVERY[names[(i + rank) % len(names)]], of(kind))
    for kind in KINDS:
        said[f"region of {kind}"] = said_by(module(kind, group), None if rank else CURRENT, of(kind))
        said[f"alike {kind}"] = said_by(module(kind, group), CURRENT, of(kind))
    own = module("row", group, recipe=Float8BlockScaling() if rank else None)
    said["own recipe"] = said_by(own, CURRENT, of("row"))
    for tensor in ("input", "weight", "grad_output"):
        said[tensor] = said_by(module("row", group), made_by(tensor if rank else ""), of("row"))
    said["sequence"] = said_by(module("Linear", group, rank == 1), CURRENT, of("Linear"))
    kind, dtype = ("row", "float32") if rank else ("Linear", "bfloat16")
    said["mode"] = said_by(module(kind, group), CURRENT, of(kind))
    said["dtype"] = said_by(module("row", group, dtype=getattr(torch, dtype)), CURRENT, of("row", dtype))
    drawn = module("row", group)
    dt.seed_rng(drawn, rank)
    said["seed"] = said_by(drawn, DRAWN["nvfp4 drawn"], of("row"))
    said["recomputed"] = said_by(dt.checkpoint, None if rank else CURRENT, module("row", group), of("row"))
    return {"said": said, "once": exchanged(group), "alone": alone(rank, group)}


def alone(rank: int, group: Any) -> list[int]:
    """The shape of what one rank computes without the others: fake tensors have nothing to send."""
    if rank:
        return []
    with FakeTensorMode(), comparisons() as seen, dt.autocast(recipe=CURRENT):
        y = module("row", group)(torch.zeros(128, D // 2, dtype=torch.bfloat16))
    assert not seen
    return list(y.shape)


@contextlib.contextmanager
def comparisons() -> Iterator[list[Any]]:
    """The digests that are gathered."""
    seen, gathered = [], agreement._gathered
    agreement._gathered = lambda t, groups: seen.append(t) or gathered(t, groups)
    try:
        yield seen
    finally:
        agreement._gathered = gathered


def exchanged(group: Any) -> list[int]:
    """How many comparisons each of three steps has, the last with an equal recipe that is another object."""
    net, counts = module("LayerNormMLP", group), []
    for recipe in (CURRENT, CURRENT, Float8CurrentScaling()):
        with comparisons() as seen:
            said_by(net, recipe, of("LayerNormMLP"))
        counts.append(len(seen))
    return counts


SAID = {
    **dict.fromkeys(EVERY, "the recipe: "),
    **{f"region of {kind}": "the recipe: Float8CurrentScaling(" for kind in KINDS},
    "own recipe": "the recipe: Float8CurrentScaling(",
    "input": "the format of the input: (Float8CurrentScalingQuantizer(",
    "weight": "the format of the weight: (Float8CurrentScalingQuantizer(",
    "grad_output": "the format of the output's gradient: (Float8CurrentScalingQuantizer(",
    "sequence": "sequence_parallel: False (rank 0), True (rank 1)",
    "mode": "parallel_mode: column (rank 0), row (rank 1)",
    "dtype": "the dtype: torch.bfloat16 (rank 0), torch.float32 (rank 1)",
    "seed": "the random state (ranks that share a layer call diptych.torch.seed_rng alike): [0, 0, ",
    "recomputed": "the recipe: Float8CurrentScaling(",
}


@needs_gloo
@pytest.mark.parametrize("case", SAID)
def test_what_differs_is_an_error_on_every_rank(ranks, case):
    for made in ranks:
        said = made["said"][case]
        assert said.startswith("RankMismatchError: ") and f": ranks differ in {SAID[case]}" in said, said
        assert "(rank 0)" in said and "(rank 1)" in said
        assert "none: high precision (rank 1)" in said or not case.startswith(("region", "recomputed"))


@needs_gloo
def test_ranks_that_are_alike(ranks):
    assert all(made["said"][f"alike {kind}"] == "ran" for made in ranks for kind in KINDS)


@needs_gloo
def test_ranks_are_compared_once(ranks):
    for made in ranks:
        assert made["once"] == [2, 0, 0]  # fc1 and fc2


@needs_gloo
def test_fake_tensors_are_not_compared(ranks):
    assert [made["alone"] for made in ranks] == [[128, D], []]


# --- compiled ---


def compiled(rank: int, groups: Any) -> dict[str, Any]:
    """Two blocks that share a graph, of which the second differs between the ranks; and steps of one that does not."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    blocks = [module("row", groups["data"], recipe=Float8BlockScaling() if rank and i == 1 else None) for i in range(3)]
    x, run = of("row"), torch.compile(lambda block, x: block(x), backend=backend, fullgraph=True)
    said, counts = [], []
    for i in (0, 0, 2, 2, 1):
        with comparisons() as seen:
            said.append(said_by(run, CURRENT, blocks[i], x))
        counts.append(len(seen))
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return {"said": said, "counts": counts, "nodes": nodes, "graphs": len(graphs)}


@needs_gloo
def test_compiled_calls(pool, tmp_path):
    """They are compared where they are traced, and where another module meets the graph; the graph holds none of it."""
    for made in pool.run(f"{__name__}:compiled", into=tmp_path / "made", seconds=40):
        assert made["said"][:4] == ["ran"] * 4 and made["graphs"] == 1, made
        assert "RankMismatchError: Linear: ranks differ in the recipe: Float8CurrentScaling(" in made["said"][4], made
        assert made["counts"][:4] == [1, 0, 1, 0]
        assert not [name for name in made["nodes"] if "c10d" in name]


# --- what is compared ---


def drawn(role: QuantizerRole) -> None:
    return None


def test_a_users_own_function_is_named():
    """By its module, without an address, which each process has of its own."""
    assert described(CustomRecipe(drawn)).endswith(f" by {__name__}.drawn")
    assert "0x" not in described(CustomRecipe(drawn)) and "0x" not in described(made_by("input"))
    assert " by " not in described(CURRENT)


@dataclasses.dataclass(frozen=True)
class Skipping(Float8CurrentScaling):
    layers: frozenset[int] = frozenset()


def test_the_order_of_a_set_is_no_difference():
    """Strings in a set have another order in each process; numbers that collide have that in which they were added."""
    one, other = Skipping(layers=frozenset([0, 8])), Skipping(layers=frozenset([8, 0]))
    assert one == other and repr(one) != repr(other)
    assert described(one) == described(other) != described(Skipping(layers=frozenset([0, 9])))


def test_the_error_is_one_that_callers_catch():
    assert issubclass(RankMismatchError, ValueError)
