"""The interface between a bisection and a frontend.

The frontend runs a model forward, returns its modules' outputs and inputs, and replaces them by given values.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from diptych.lab.diff.result import DiffError
from diptych.lab.traces import Site, Tensor

How = Literal["torch", "linen", "object", "model"]
"""How a script calls a module: a torch module by its path; flax's linen modules while the model runs; nnx and equinox
modules by their paths; and the whole model."""


CODE_FAILS = (Exception, SystemExit)
"""What a person's code may raise. A SystemExit must not end the command, whose status says what a bisection found."""


class BisectError(DiffError):
    """A bisection that cannot be made; the message says why."""


class Inputs(NamedTuple):
    """A model's arguments."""

    args: tuple[np.ndarray, ...]
    kwargs: Mapping[str, np.ndarray]


class Slot(NamedTuple):
    """Stands for an array in the arguments of a module. `key`: of its value in `Forward.values`. `mapped`: how many
    `jax.vmap`s the module runs in that map over it, each over a leading axis of the value. `array`: the key of the
    first argument of the call that is the same tensor, since modules such as torch's `MultiheadAttention` ask whether
    their arguments are one; "" in JAX, where an array that is given twice is two under `jax.jit`."""

    key: str
    mapped: int = 0
    array: str = ""


@dataclasses.dataclass
class Unwritable:
    """Stands for a structure whose class cannot hold slots. `kind`: the class. `parts`: what it holds, with slots."""

    kind: str
    parts: list[Any]


class ModuleCall(NamedTuple):
    """One call of a module.

    `call`: how often its path has run before. `kind`: the class. `args`, `kwargs`: with a `Slot` for each array.
    `parent`: the position of the call that encloses it among a pass's calls, None if no recorded one does. `outputs`:
    the keys of what it returned. `repeats`: whether it stands for all iterations of a loop.
    """

    path: str
    call: int
    kind: str
    how: How
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parent: int | None = None
    outputs: tuple[str, ...] = ()
    repeats: bool = False


class Forward(NamedTuple):
    """One forward pass. `values`: outputs of all modules and inputs of some, by key, as they were computed, before they
    were replaced. `calls`: of the modules whose inputs were seen, in the order in which they began. `results`: of the
    framework's operations that were recognized, in the order of computation; `values` has these and their operands."""

    values: dict[str, Tensor]
    calls: list[ModuleCall]
    results: list[Site]


class Feeder(Protocol):
    """One model, in a framework."""

    def capture(self, inputs: Inputs, folder: pathlib.Path) -> list[str]:
        """Writes a trace of a forward pass, with whole values, in `folder`. Returns the module outputs that it cannot
        hold, such as "fft (complex64)"."""
        ...

    def __call__(
        self, inputs: Inputs, fed: Mapping[str, Tensor], inside: Collection[str] = (), ops: str | None = None
    ) -> Forward:
        """Runs the model, without gradients.

        **Arguments:** `fed`: what replaces the tensors with these keys, which have its dtype and shape, after they were
        computed. `inside`: paths of modules whose inputs are seen; the keys of these are the same in all passes with
        the same paths. `ops`: the path of a module whose operations are seen, with those
        of modules in it.
        """
        ...


def within(path: str, outer: str) -> bool:
    """Returns whether a module is another one, or in it. "" is the whole model."""
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}/"))
