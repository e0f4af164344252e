"""Helpers of the tests of partitioned programs: meshes of eight CPU devices, placed arguments, collectives in HLO."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from diptych.common.errors import ShapeError, UnsupportedError
from jax_frontend import tools

AXES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# What a sum runs whose parts have two bytes, where all devices need it whole.
WHOLE_SUM = {"all-to-all": 1, "all-gather": 1}
# What a cut that is refused raises: while tracing on Explicit axes, and from XLA's partitioner on Auto axes.
REFUSED = (ShapeError, UnsupportedError, jax.errors.JaxRuntimeError)


@contextlib.contextmanager
def mesh_of(kind: AxisType) -> Iterator[jax.sharding.Mesh]:
    """Four devices along "d" by two along "t"; the context's mesh if its axes are Explicit."""
    devices = jax.devices("cpu")
    assert len(devices) >= 8, "a backend started before conftest.py asked for eight CPU devices"
    mesh = jax.make_mesh((4, 2), ("d", "t"), axis_types=(kind, kind), devices=devices[:8])
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        yield mesh


def run(f: Any, kind: AxisType, specs: tuple[P, ...], *args: Any) -> tuple[Any, dict[str, int]]:
    """Returns f's results on arguments placed by `specs`, and the number of each kind of collective that it runs."""
    with mesh_of(kind) as mesh:
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        compiled = jax.jit(f).lower(*placed).compile()
        return compiled(*placed), counted(compiled.as_text())


def counted(text: str) -> dict[str, int]:
    """Returns how often each collective occurs in compiled HLO, without those that do not occur."""
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: n for name, n in found.items() if n}


def sent(text: str) -> float:
    """Returns the bytes that one device sends in the collectives of compiled HLO. All-reduces go around a ring."""
    total = 0.0
    for results, name, options in re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\((.*)", text):
        size, groups = _bytes(results), re.search(r"replica_groups=(mesh\[.*? \{.*?\}|\S+)", options)
        if groups is None:
            assert name == "collective-permute", options
            total += size
            continue
        n = _ranks(groups[1])
        of_result = {"all-reduce": 2 / n, "reduce-scatter": 1, "all-gather": 1 / n, "all-to-all": 1 / n}[name]
        total += of_result * (n - 1) * size
    return total


def _ranks(groups: str) -> int:
    """Returns the devices of a group, given as "{{0,1},{2,3}}", "[2,2]<=[4]" or "mesh['a'=2,'b'=2], ... {'b'}"."""
    if groups.startswith("{{"):
        return groups[2 : groups.index("}")].count(",") + 1
    if groups.startswith("["):
        return int(groups[1 : groups.index("]")].split(",")[1])
    sizes, axes = groups.rsplit("{", 1)
    return math.prod(int(n) for axis, n in re.findall(r"('\w+')=(\d+)", sizes) if axis in axes)


def _bytes(results: str) -> int:
    total = 0
    for kind, bits, shape in re.findall(r"\b([a-z]+)(\d+)\w*\[([\d,]*)\]", results):
        assert kind in ("f", "bf", "u", "s"), results
        total += int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)
    return total


def same(got: Any, want: Any, label: Any = "") -> None:
    """`tools.same_tree` for results that are sharded, of which one device's are `want`."""
    tools.same_tree(jax.tree.map(jax.device_get, got), jax.tree.map(jax.device_get, want), label)
