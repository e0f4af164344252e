"""The tensors of a step as sites: the numbering of calls, and the inputs from which each tensor is computed."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import UnsupportedError
from diptych.lab import capture as rules
from diptych.lab.traces import Site
from diptych.lab.traces.schema import Kind, Operation


@dataclasses.dataclass(eq=False)
class Seen:
    """A recorded tensor of the present step. Its hash, statistics and values may still be on the device.

    `origin`: the tickets and parameters that it is computed from, None if they are unknown. `inputs`: the keys of its
    inputs, if these are known instead. `operands`: the operands of a result's operation, whose keys replace `inputs`.
    `operation`: the result's operation, if it can be computed again. `ticket`: the ticket of an operand's or result's
    call. `happens`: whether it is computed at all, if the device decides. `errors`: a quantized payload's errors, see
    `statistics`.
    """

    kind: Kind
    name: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    hash: Tensor
    row: Tensor | None
    values: Tensor | None
    errors: Tensor | None = None
    origin: tuple[list[int], list[Tensor]] | None = None
    inputs: tuple[str, ...] | None = None
    operands: list[Seen] | None = None
    operation: Operation | None = None
    ticket: int = -1
    happens: Tensor | None = None

    @property
    def site(self) -> Site:
        inputs = self.inputs if self.operands is None else tuple([operand.key for operand in self.operands])
        return _site(self.name, self.kind, self.call, self.shape, self.dtype, inputs, self.operation)

    @property
    def key(self) -> str:
        return _site(self.name, self.kind, self.call, self.shape, self.dtype, None, None).key


@functools.lru_cache(2**16)  # all steps have the same sites, and checking a site takes longer than this look-up
def _site(name: str, kind: Kind, call: int, shape: Any, dtype: str, inputs: Any, operation: Any) -> Site:
    return Site(rules.printable(name), kind, call, shape, dtype, inputs, operation)


def number_calls(every: Iterable[Seen]) -> None:
    """Numbers the calls of operations by their tickets, since compiled code may run a module's calls in any order."""
    by_name: dict[Any, list[Seen]] = collections.defaultdict(list)
    for seen in every:
        if seen.ticket != -1:
            by_name[seen.kind, seen.name].append(seen)
    for calls in by_name.values():
        for call, seen in enumerate(sorted(calls, key=lambda seen: seen.ticket)):
            seen.call = call


def match_recomputed(again: dict[int, Seen], seen: dict[Any, Seen]) -> None:
    """Matches gradients of recomputed activations with calls: those whose activations have the same bits. After several
    backward passes through a call, the last pass's gradient is kept.

    **Arguments:** `again`: recomputed activations by ticket. `seen`: other activations by ticket, and gradients by
    ("gradient", ticket). **Raises** UnsupportedError if no call has the same bits.
    """
    kept = {k[1] for k in seen if isinstance(k, tuple) and k[0] == "gradient" and k[1] in seen}
    found: dict[int, int] = {}  # the recomputation's ticket by the call's ticket
    for ticket in [t for t in again if ("gradient", t) in seen]:
        name = again[ticket].name
        calls = [t for t, s in seen.items() if isinstance(t, int) and s.name == name and t not in kept]
        if len(calls) > 1:
            calls = [t for t in calls if torch.equal(seen[t].hash, again[ticket].hash)]
        if not calls:
            raise UnsupportedError(
                f"capture: gradients of {name} match no call, since its checkpoint recomputed it with other bits; make "
                "the recomputation repeat the forward, for instance by preserve_rng_state=True"
            )
        for call in calls if all(call in found for call in calls) else ():  # an earlier backward pass took all calls
            del seen["gradient", found.pop(call)]
        call = [call for call in calls if call not in found][-1]  # backward recomputes calls from the last to the first
        found[call], seen["gradient", ticket].call = ticket, seen[call].call


def connect(every: list[Seen], by_ticket: Mapping[Any, Seen], names: Mapping[int, str]) -> None:
    """Sets the keys of each site's inputs, as far as autograd knows them.

    **Arguments:** `every`: all sites in the order of computation. `by_ticket`: outputs of modules. `names`: the names
    of parameters by id.
    """
    parameters = {s.name: s for s in every if s.kind == "parameter"}
    consumers: dict[str, list[Seen]] = collections.defaultdict(list)
    by_key = {s.key: s for s in every}
    for seen in every:
        if seen.origin is not None:
            tickets, leaves = seen.origin
            found = [by_ticket[t] for t in tickets]
            found += [parameters[n] for p in leaves if (n := names.get(id(p))) in parameters]  # type: ignore[index]
            seen.inputs = tuple([s.key for s in found])
            for key in seen.inputs:
                consumers[key].append(seen)
    before: set[str] = set()
    for seen in every:
        if seen.kind in ("activation_grad", "parameter_grad"):
            kind: Any = seen.kind.removesuffix("_grad")
            of = by_key.get(dataclasses.replace(seen, kind=kind).key)
            if of is not None and (of.kind == "parameter" or of.inputs is not None):
                seen.inputs = _inputs_of_gradient(of, consumers, before)
        before.add(seen.key)


def _inputs_of_gradient(of: Seen, consumers: dict[str, list[Seen]], before: set[str]) -> tuple[str, ...]:
    """Returns the keys of a gradient's inputs: the gradients of the sites that are computed from its tensor, the other
    inputs of these sites, and the tensor itself, as far as they are recorded before."""
    keys: dict[str, None] = {}
    for consumer in consumers[of.key]:
        keys[dataclasses.replace(consumer, kind="activation_grad").key] = None
        keys |= dict.fromkeys(consumer.inputs or ())
    keys |= {of.key: None}
    return tuple([key for key in keys if key in before])
