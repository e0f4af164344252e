"""The first steps of one job in two frameworks, captured as traces: operations of the first framework are computed
again in the second one, and the bits of both frameworks' tensors are compared.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from diptych.lab.frontend import Frontend, Trainer
from diptych.lab.job import ModelConfig
from diptych.lab.progress import SILENT, Progress
from diptych.lab.replay.op import Bits, Op
from diptych.lab.replay.recorded import Recorded, operations
from diptych.lab.replay.table import TABLE
from diptych.lab.traces import Distance, Observation, Trace, distances, tensor_distance
from diptych.lab.traces.reader import rank_name, step_name

# --- the operations of a linear layer ---

_OPERANDS = {
    "fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input"),
}  # fmt: skip
"""The two operands of each training product."""
ROLES = ("input", "weight", "fprop", "grad_output", "dgrad", "wgrad", "bias_grad")


class Labelled(NamedTuple):
    """An operation of a linear layer. `role`: one of `ROLES`."""

    linear: str
    role: str
    recorded: Recorded


def product(op: Op) -> str:
    """Returns the training product that a gemm computes: "fprop", "dgrad" or "wgrad"."""
    sides = (op.options["a"][1], op.options["b"][1])
    return {(False, False): "fprop", (False, True): "dgrad", (True, True): "wgrad"}.get(sides, "gemm")


def labelled(found: Iterable[Recorded], model: ModelConfig) -> list[Labelled]:
    """Returns the operations of the model's linear layers with their roles, in order; other operations are left out.

    The role of a quantized tensor is that of its payload in the layer's products. If several payloads have equal bits,
    it is the first role, in the order of `ROLES`, that no earlier tensor has.
    """
    of_linears: dict[str, list[Recorded]] = {name: [] for name in model.linears}
    order = []
    for recorded in found:
        linear = next(iter(recorded.results.values())).site.name.rpartition("/")[0]
        if linear in of_linears:
            of_linears[linear].append(recorded)
            order.append((linear, recorded))
    roles = {id(recorded): role for own in of_linears.values() for recorded, role in _roles(own)}
    return [Labelled(linear, roles[id(r)], r) for linear, r in order if id(r) in roles]


def _roles(of_linear: list[Recorded]) -> Iterator[tuple[Recorded, str]]:
    users: dict[str | None, set[str]] = collections.defaultdict(set)  # roles by the hash of a payload
    for recorded in of_linear:
        if recorded.op.kind == "gemm" and (what := product(recorded.op)) in _OPERANDS:
            yield recorded, what
            for side, role in zip("ab", _OPERANDS[what], strict=True):
                users[recorded.operands[f"{side}_data"].record.hash].add(role)
    taken: set[str] = set()
    for recorded in of_linear:
        if recorded.op.kind == "bias_grad":
            yield recorded, "bias_grad"
        elif recorded.op.kind == "quantize":
            payloads = [o for name, o in recorded.results.items() if name.endswith("_data")]
            possible = sorted(set[str]().union(*(users[o.record.hash] for o in payloads)), key=ROLES.index)
            if possible:
                role = next((r for r in possible if r not in taken), possible[0])
                taken.add(role)
                yield recorded, role


def missing_products(found: Iterable[Labelled], model: ModelConfig) -> list[str]:
    """Returns the products of the model's linear layers that no quantized gemm of the step computed."""
    seen = {(item.linear, item.role) for item in found}
    return [f"{name} {what}" for name in model.linears for what in _OPERANDS if (name, what) not in seen]


def activation_order(model: ModelConfig) -> list[tuple[str, str]]:
    """Returns every activation in forward order, except the loss, as (site, kind of the operation that computes it)."""
    order = [("embed", "embedding"), ("embedded", "add")]
    linear = "quantized linear"
    for i in range(model.layers):
        inner = [
            ("norm1", "layer norm"), ("qkv", linear), ("scores", "matmul"), ("softmax", "softmax"),
            ("attention", "matmul"), ("proj", linear), ("residual", "add"), ("norm2", "layer norm"), ("up", linear),
            ("gelu", "gelu"), ("down", linear),
        ]  # fmt: skip
        order += [(f"blocks.{i}.{name}", kind) for name, kind in inner] + [(f"blocks.{i}", "add")]
    return [*order, ("norm", "layer norm"), ("head", "linear")]


# --- comparison ---


class FirstSteps(NamedTuple):
    """The comparison of the first steps of a job in two frameworks.

    `data`: the report's tables as plain data. `missing`: products that no quantized gemm computed. `replayed`: the
    distances of all replayed results of diptych's own operations.
    """

    data: dict[str, Any]
    missing: list[str]
    replayed: list[Distance]


def first_steps(
    pair: tuple[Frontend, Frontend],
    trainers: tuple[Trainer, Trainer],
    batches: list[np.ndarray],
    model: ModelConfig,
    device: str,
    folder: pathlib.Path,
    keep: bool,
    progress: Progress = SILENT,
) -> FirstSteps:
    """Trains both frameworks on `batches` and compares their tensors step by step.

    **Arguments:** `trainers`: the trainers of `pair`, in equal states. `device`: where operations are computed again.
    `folder`: the folder for one trace of each framework, named after it. `keep`: whether values stay there; otherwise
    those of a step are deleted after its comparison.

    **Raises** TraceError if `folder` has traces already, OSError if it cannot be written.
    """
    found = _Tables(pair, model, device)
    folders = [folder / frontend.name for frontend in pair]
    with contextlib.ExitStack() as stack:
        run = [stack.enter_context(trainer.captured(where)) for trainer, where in zip(trainers, folders, strict=True)]
        stage = stack.enter_context(progress.stage("first steps", len(batches)))
        for number, batch in enumerate(batches):
            losses = [step(batch) for step in run]
            found.add(number, losses, [Trace.open(where).ranks[0].step(number) for where in folders])
            if not keep:
                for where in folders:
                    (where / rank_name(0) / step_name(number)).unlink()
            stage.advance()
    return found.result()


class _Tables:
    """The report's tables, to which steps are added."""

    def __init__(self, pair: tuple[Frontend, Frontend], model: ModelConfig, device: str) -> None:
        self._pair, self._model, self._device = pair, model, device
        self._steps: list[dict[str, Any]] = []
        self._drift: list[dict[str, Any]] = []
        self._again: dict[str, list[Distance]] = {}  # by the operation's kind
        self._missing: list[str] = []

    def add(self, number: int, losses: list[float], sides: list[list[Observation]]) -> None:
        """Compares one step. `sides`: the observations of each framework."""
        ops = [list(operations(side)) for side in sides]
        for recorded in ops[0]:
            again = self._pair[1].replay(recorded.op, self._device)
            parts = [
                _of_bits(bits, again[name], f"{recorded.op.kind} {name}") for name, bits in recorded.op.outputs.items()
            ]
            self._again.setdefault(recorded.op.kind, []).extend(parts)
        items = [labelled(of_side, self._model) for of_side in ops]
        for frontend, found in zip(self._pair, items, strict=True):
            self._missing += [f"{frontend.name} step {number}: {p}" for p in missing_products(found, self._model)]
        by_key, loss = [{o.site.key: o for o in side} for side in sides], loss_distance(*losses)
        of_loss = _drift_row("loss", "cross entropy", loss)
        self._drift.append({"activations": [*self._activations(*by_key), of_loss]})
        rows = _rows([*_of_linears(*items), *_gradients(*by_key)])
        self._steps.append({"step": number, "losses": losses, "loss_ulp": loss.max_ulp, "rows": rows})

    def _activations(self, a: dict[str, Observation], b: dict[str, Observation]) -> Iterator[dict[str, Any]]:
        order = activation_order(self._model)
        keys = [f"activation:{name}" for name, _ in order]
        for (name, kind), d in zip(order, _distances((a[k], b[k]) for k in keys), strict=True):
            yield _drift_row(name, kind, d)

    def result(self) -> FirstSteps:
        first, by_kind = None, {}
        for step, of_step in enumerate(self._drift):
            for row in of_step["activations"]:
                if row["differing"]:
                    here = {"step": step, **{k: row[k] for k in ("name", "kind", "max_ulp")}}
                    first = first or here
                    by_kind.setdefault(row["kind"], here)
        own = {kind: parts for kind, parts in self._again.items() if TABLE[kind].own}
        others = {kind.replace("_", " "): p for kind, p in self._again.items() if kind not in own}
        data = {
            "trace": self._steps,
            "replay": [{"op": kind, **_counts(parts)} for kind, parts in own.items()],
            "framework_ops": [{"kind": k, **_counts(parts), "parts": by_kind.get(k)} for k, parts in others.items()],
            "first_parting": first,
            "drift": self._drift,
        }
        return FirstSteps(data, self._missing, [d for parts in own.values() for d in parts])


def loss_distance(x: float, y: float) -> Distance:
    """Returns the distance of two losses in float32."""
    a, b = (Bits.of(np.array([v], np.float32)) for v in (x, y))
    return _of_bits(a, b, "loss")


def _drift_row(name: str, kind: str, d: Distance) -> dict[str, Any]:
    counts = {"differing": d.differing, "elements": d.elements, "max_ulp": d.max_ulp, "relative": d.relative}
    return {"name": name, "kind": kind, **counts}


_PARTS = {"data": "payload", "inv": "scale", "amax": "amax"}
_WHAT = {"input": "quantized input", "weight": "quantized weight", "grad_output": "quantized output gradient"}
_GRADIENTS = "parameter gradients"


class _Part(NamedTuple):
    """A tensor in a row of a step's table. `place`: the layer's or parameter's name."""

    what: str
    place: str
    distance: Distance


def _of_linears(ours: list[Labelled], theirs: list[Labelled]) -> list[_Part]:
    others: dict[tuple[str, str], list[Recorded]] = collections.defaultdict(list)
    for item in theirs:
        others[item.linear, item.role].append(item.recorded)
    named, pairs = [], []
    for item in sorted(ours, key=lambda i: ROLES.index(i.role)):
        if not others[item.linear, item.role]:
            raise ValueError(f"{item.linear} {item.role} was recorded in one framework only")
        other = others[item.linear, item.role].pop(0)
        for name, o in item.recorded.results.items():
            part = _PARTS.get(name.rsplit("_", 1)[-1])
            named.append((f"{_WHAT[item.role]}: {part}" if item.role in _WHAT else f"{item.role} result", item.linear))
            pairs.append((o, other.results[name]))
    return [_Part(what, place, d) for (what, place), d in zip(named, _distances(pairs), strict=True)]


def _gradients(a: dict[str, Observation], b: dict[str, Observation]) -> list[_Part]:
    keys = [key for key, o in a.items() if o.site.kind == "parameter_grad"]
    found = zip(keys, _distances((a[key], b[key]) for key in keys), strict=True)
    return [_Part(_GRADIENTS, a[key].site.name, d) for key, d in found]


def _rows(found: list[_Part]) -> list[dict[str, Any]]:
    """Returns a step's table. For each kind of tensor it has the number of elements that differ, the first place with a
    difference, and the distance."""
    by_what: dict[str, list[_Part]] = {}
    for part in found:
        by_what.setdefault(part.what, []).append(part)
    rows = []
    for what, parts in by_what.items():
        apart = [p.distance for p in parts]
        measured = what.endswith("result") or what == _GRADIENTS
        far = max(d.relative or 0.0 for d in apart) if measured else None
        first = next((p.place for p in parts if p.distance.differing), None)
        rows.append({"what": what, **_counts(apart), "first": first, "relative": far})
    return rows


def _counts(parts: list[Distance]) -> dict[str, Any]:
    return {
        "tensors": len(parts),
        "tensors_differing": sum(bool(d.differing) for d in parts),
        "elements": sum(d.elements for d in parts),
        "differing": sum(d.differing or 0 for d in parts),
        "max_ulp": max((d.max_ulp or 0 for d in parts), default=0),
    }


def _distances(pairs: Iterable[tuple[Observation, Observation]]) -> Iterator[Distance]:
    pairs = list(pairs)
    for a, b in pairs:
        _require_one_dtype(a.site.dtype, b.site.dtype, a.site.key)
    return distances(pairs)


def _of_bits(a: Bits, b: Bits, what: str) -> Distance:
    _require_one_dtype(a.dtype, b.dtype, what)
    return tensor_distance(a.tensor, b.tensor)


def _require_one_dtype(a: str, b: str, what: str) -> None:
    if a != b:
        raise ValueError(f"{what} is {a} in one framework and {b} in the other")
