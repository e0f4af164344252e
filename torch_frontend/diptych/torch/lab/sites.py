"""The tensors of a step while it runs, and from which others each is computed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diptych.lab import capture as rules
from diptych.lab.traces import Site
from diptych.lab.traces.schema import Kind


@dataclasses.dataclass(eq=False)
class Seen:
    """A tensor of the present step, as far as the device has it.

    `origin`: the tickets and parameters that it is computed from, None if that is unknown. `inputs`: or their keys.
    """

    kind: Kind
    name: str
    call: int
    shape: tuple[int, ...]
    dtype: str
    hash: Tensor
    row: Tensor | None
    values: Tensor | None
    origin: tuple[list[int], list[Tensor]] | None = None
    inputs: tuple[str, ...] | None = None

    @property
    def site(self) -> Site:
        return Site(rules.printable(self.name), self.kind, self.call, self.shape, self.dtype, self.inputs)

    @property
    def key(self) -> str:
        return self.site.key


def connect(every: list[Seen], by_ticket: Mapping[Any, Seen], names: Mapping[int, str]) -> None:
    """Fills in the keys of each site's inputs, where autograd knows them.

    **Arguments:** `every`: in the order of computation. `by_ticket`: outputs of modules. `names`: of parameters, by id.
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
    """A gradient is computed from those of the sites that its tensor enters, and from what these are made of."""
    keys: dict[str, None] = {}
    for consumer in consumers[of.key]:
        keys[dataclasses.replace(consumer, kind="activation_grad").key] = None
        keys |= dict.fromkeys(consumer.inputs or ())
    keys |= {of.key: None}
    return tuple([key for key in keys if key in before])


def moved(tensors: list[Any]) -> list[np.ndarray]:
    """Returns equally shaped tensors in the host's memory, by one transfer from each device."""
    found: list[Any] = [None] * len(tensors)
    for device in {t.device for t in tensors}:
        places = [i for i, t in enumerate(tensors) if t.device == device]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # hooks of a backward pass may run on other streams
        moved = torch.stack([tensors[i] for i in places]).cpu().numpy()
        for i, row in zip(places, moved, strict=True):
            found[i] = row
    return found
