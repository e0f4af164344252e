"""Results of comparisons of any size, made up by a seed: for tests of what shows them."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import numpy as np

from diptych.lab.diff.result import GREEN, Ambiguous, Cell, First, Matched, Result, Row, Side
from diptych.lab.traces.schema import Kind

PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "attn", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj", "mlp")


def sides(references: bool = True) -> tuple[Side, ...]:
    """A torch run and a JAX run, and their float64 references."""
    roles = ("A", "B", "H_A", "H_B") if references else ("A", "B")
    made = []
    for i, role in enumerate(roles):
        framework, versions = (("torch", {"torch": "2.13.0"}), ("jax", {"jax": "0.10.2", "jaxlib": "0.10.2"}))[i % 2]
        folder = f"/runs/2026-11-27/gpt2-small/{role.lower()}-{framework}"
        made.append(Side(role, folder, framework, versions, "cpu", "mxfp8" if i < 2 else None, True, True, 1, 100))
    return tuple(made)


def result(
    layers: int = 2,
    steps: int = 3,
    sites: int = 20,
    *,
    references: bool = True,
    fault: tuple[int, int] | None = (1, 1),
    seed: int = 0,
) -> Result:
    """A result with the sites of a GPT.

    **Arguments:** `sites`: how many each layer has, of all kinds. `fault`: the layer and the position of the step at
    which a layer's `mlp.c_fc` begins to differ by definition (with references; else beyond what is usual), or None for
    a green result. Without references a green result has equal bits.
    """
    rng = np.random.default_rng(seed)
    numbers = tuple(range(0, steps))
    names = _names(layers, sites)
    begun = fault[1] if fault else steps
    depth: dict[str, int] = dict.fromkeys(get_args(Kind), 0)
    broken: dict[int, bool] = {}
    rows = []
    for kind, name in names:
        depth[kind] += 1
        layer = int(name.split(".")[1]) if name.startswith("h.") else (layers if name == "(model)" else -1)
        hit = fault is not None and _hit(kind, name, layer, fault[0])
        size = (4, 128, 256) if "activation" in kind else (256, 256)
        cells = []
        for step in numbers:
            level = 1e-7 * (1 + 0.15 * depth[kind]) * (1 + step) * math.exp(0.3 * rng.standard_normal())
            bad = step > begun or (step == begun and hit)
            cells.append(_cell(step, level, bad, hit, references, fault is None, math.prod(size), rng))
        broken[len(rows)] = any(c.verdict not in GREEN for c in cells)
        key = f"{kind}:{name}"
        other = f"{kind}:" + name.replace(".weight", ".kernel").replace(".", "/")
        inputs = (len(rows) - 1,) if rows and "activation" in kind else None
        matched: Matched = "bits" if kind == "parameter" else "table"
        dtypes = ("bfloat16", "bfloat16") if kind == "activation" else ("float32", "float32")
        rows.append(Row(key, other, 0, kind, name, 0, size, *dtypes, matched, False, inputs, (), tuple(cells)))
    return Result(
        sides(references),
        numbers,
        tuple(rows),
        "differs" if any(broken.values()) else "green",
        _firsts(rows),
        ("activation:drop",),
        (),
        (Ambiguous(("parameter:h.0.attn.c_proj.weight",), ("parameter:h/0/attn/c_proj/kernel",), "A square kernel."),),
        ("Steps that only one trace has were left out.",),
    )


def changed(made: Result, row: int, **fields) -> Result:
    """The result with other fields in one row."""
    rows = list(made.rows)
    rows[row] = dataclasses.replace(rows[row], **fields)
    return dataclasses.replace(made, rows=tuple(rows))


def _names(layers: int, sites: int) -> list[tuple[Kind, str]]:
    count = max(1, sites // 4)
    parts = [PARTS[i % len(PARTS)] + (f".{i // len(PARTS)}" if i >= len(PARTS) else "") for i in range(count)]
    forward = [f"h.{i}.{part}" for i in range(layers) for part in parts]
    inner = ["wte", *forward, "ln_f", "(model)"]
    parameters = ["wte.weight", *(f"{name}.weight" for name in forward)]
    order: tuple[tuple[Kind, list[str]], ...] = (
        ("parameter", parameters),
        ("activation", inner),
        ("activation_grad", inner[::-1]),
        ("parameter_grad", parameters),
    )
    return [(kind, name) for kind, names in order for name in names]


def _hit(kind: str, name: str, layer: int, broken: int) -> bool:
    """Whether the fault reaches a site in its own step: what is computed from it, forward and backward."""
    if kind == "activation":
        return layer > broken or name == "ln_f" or (layer == broken and "mlp" in name)
    return kind != "parameter"


def _cell(step, level, bad, hit, references, green, size, rng) -> Cell:
    level = min(3.0, level * (1e4 if bad else 1))
    differing = min(size, int(size * min(1.0, level * 4e6) * rng.uniform(0.5, 1)))
    ulp = max(1, int(level * 2**24 * 8))
    if not references:
        if green or differing == 0:
            return Cell(step, "same", 0.0, 0, 0, size)
        return Cell(step, "differs", level, ulp, differing, size)
    noise = float(rng.uniform(0.8, 1.5) * (300 if bad else 1))
    if bad and hit:
        return Cell(step, "definition", level, ulp, differing, size, noise, level)
    return Cell(step, "beyond" if bad else "rounding", level, ulp, differing, size, noise, 2e-16 * (1 + step))


def _firsts(rows: list[Row]) -> tuple[First, ...]:
    found = []
    for kind in ("activation", "activation_grad"):
        for i, row in enumerate(rows):
            at = [c for c in row.cells if c.verdict not in GREEN]
            if row.kind == kind and at:
                found.append((kind, at[0].step, i, First(i, at[0].step, at[0].verdict)))
    firsts = {kind: first for kind, _, _, first in sorted(found, key=lambda item: item[:3], reverse=True)}
    return tuple(firsts[kind] for kind in ("activation", "activation_grad") if kind in firsts)
