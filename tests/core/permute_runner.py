"""Calls the ops that move rows between token order and expert order, as `runner` calls the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from core import runner
from diptych.core import _core
from oracle.permute import Map

TABLE = _core.moe_table()
KINDS = TABLE["routing_map"]


def put(be: Any, x: np.ndarray | None, offset: int = 0, dtype: str | None = None) -> Any:
    return None if x is None else be.put(x, dtype or x.dtype.name, offset)


def row_map(
    be: Any, routing: np.ndarray, experts: int, rows: int, align: int = 1, *, offset: int = 0,
    poison: int = runner.POISON,
) -> Map:  # fmt: skip
    out, mask = runner.Outputs(be, poison, offset), routing.dtype.kind != "i"
    kind, items = KINDS["mask" if mask else "index"], len(routing) if mask else routing.size
    shapes = {"row_id_map": routing.shape, "tokens_per_expert": (experts,), "expert_offsets": (experts + 1,)}
    shapes["row_source"] = (rows,)
    _core.permute_map(
        put(be, routing.view(np.uint8) if mask else routing, offset),
        kind=kind,
        align=align,
        **{name: out.new(name, shape, "int32") for name, shape in shapes.items()},
        workspace=out.workspace(_core.permute_map_workspace_bytes(kind, items, experts)),
    )
    read = out.read()
    return Map(*(read[name] for name in Map._fields))


def chunk_map(be: Any, sizes: np.ndarray, order: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    out = runner.Outputs(be)
    made = out.new("row_id_map", (tokens, 1), "int32"), out.new("row_source", (tokens,), "int32")
    _core.chunk_map(put(be, sizes), put(be, order), *made)
    read = out.read()
    return read["row_id_map"], read["row_source"]


def permute(
    be: Any, planes: list[tuple[np.ndarray, int]], m: Map, probs: np.ndarray | None = None, *,
    zero_prob_is_padding: bool = False, offset: int = 0, probs_offset: int | None = None,
    poison: int = runner.POISON,
) -> tuple[list[np.ndarray], np.ndarray | None]:  # fmt: skip
    """Permutes each plane. `planes`: pairs of its rows and the four bytes that fill absent rows."""
    out, given = runner.Outputs(be, poison, offset), []
    for i, (x, fill) in enumerate(planes):
        given.append((put(be, x, offset), out.new(str(i), (m.rows, *x.shape[1:]), x.dtype.name), fill))
    permuted = None if probs is None else out.new("probs", (m.rows,), probs.dtype.name)
    maps = put(be, m.row_id_map), put(be, m.row_source)
    probs = put(be, probs, offset if probs_offset is None else probs_offset)
    _core.permute(given, *maps, probs, permuted, zero_prob_is_padding)
    read = out.read()
    return [read[str(i)] for i in range(len(planes))], read.get("probs")


def permute_columns(be: Any, x: np.ndarray, m: Map, offset: int = 0) -> np.ndarray:
    out = runner.Outputs(be, offset=offset)
    made = out.new("out", (len(x), m.rows), "uint8")
    _core.permute_columns(put(be, x, offset), made, put(be, m.row_source), max(1, m.row_id_map.shape[1]))
    return out.read()["out"]


def unpermute(
    be: Any, x: np.ndarray, m: Map, probs: np.ndarray | None = None, permuted_dprobs: np.ndarray | None = None, *,
    offset: int = 0, poison: int = runner.POISON,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    out, shape = runner.Outputs(be, poison, offset), m.row_id_map.shape
    y = out.new("y", (shape[0], x.shape[1]), x.dtype.name)
    grads = None if permuted_dprobs is None else out.new("dprobs", shape, permuted_dprobs.dtype.name)
    _core.unpermute(
        put(be, x, offset), put(be, m.row_id_map), put(be, probs, offset), y, put(be, permuted_dprobs, offset), grads
    )
    read = out.read()
    return read["y"], read.get("dprobs")


def unpermute_grad(
    be: Any, dy: np.ndarray, m: Map, probs: np.ndarray, x: np.ndarray | None, *, offset: int = 0,
    poison: int = runner.POISON,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """dx and, where x is given, dprobs."""
    out = runner.Outputs(be, poison, offset)
    dx = out.new("dx", (m.rows, dy.shape[1]), dy.dtype.name)
    dprobs = None if x is None else out.new("dprobs", probs.shape, probs.dtype.name)
    maps = put(be, m.row_id_map), put(be, m.row_source)
    _core.unpermute_grad(put(be, dy, offset), *maps, put(be, probs, offset), dx, put(be, x, offset), dprobs)
    read = out.read()
    return read["dx"], read.get("dprobs")
