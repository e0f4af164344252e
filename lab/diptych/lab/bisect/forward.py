"""The interface between a bisection and a frontend.

The frontend runs a model forward, returns outputs and inputs of its modules, and replaces them by given values.
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
"""How a script calls a module: "torch", a torch module by its path; "linen", a linen module while its model runs;
"object", an nnx or equinox module by its path; "model", the whole model."""


CODE_FAILS = (Exception, SystemExit)
"""Exceptions that a user's code may raise. SystemExit must not end the command, whose status is the result."""


class BisectError(DiffError):
    """The error for a bisection that cannot be made. Its message says why.

    **Cause:** Models whose modules cannot be paired, inputs that one of them does not take, or a script that does not
    load.

    **Remedy:** The message names the module or file; docs/replay.md shows what a script must define.
    """


class Inputs(NamedTuple):
    """The arguments of a model."""

    args: tuple[np.ndarray, ...]
    kwargs: Mapping[str, np.ndarray]


class Slot(NamedTuple):
    """A placeholder for an array in a module's arguments. `key`: the key of its value in `Forward.values`. `mapped`:
    how many enclosing `jax.vmap`s map over the array, each over a leading axis of the value. `array`: the key of the
    call's first argument that is the same tensor, since modules such as torch's `MultiheadAttention` test whether
    arguments are identical; "" in JAX, where `jax.jit` makes two arrays of an array that is passed twice."""

    key: str
    mapped: int = 0
    array: str = ""


@dataclasses.dataclass
class Unwritable:
    """A placeholder for a structure whose class cannot hold slots. `kind`: its class. `parts`: its contents, with
    slots."""

    kind: str
    parts: list[Any]


class ModuleCall(NamedTuple):
    """One call of a module.

    `call`: the number of earlier calls of the path. `kind`: the class. `args`, `kwargs`: the arguments, with a `Slot`
    for each array. `parent`: the position of the enclosing call among the calls of the forward pass, None if no
    recorded call encloses it. `outputs`: the keys of its outputs. `repeats`: whether it stands for all iterations of a
    loop.
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
    """One forward pass. `values`: the outputs of all modules and the inputs of some by key, as computed, before any is
    replaced. `calls`: the calls of modules whose inputs were recorded, in the order in which they began. `results`: the
    results of the framework's recognized operations, in the order of computation; `values` has these and their
    operands."""

    values: dict[str, Tensor]
    calls: list[ModuleCall]
    results: list[Site]


class Feeder(Protocol):
    """A model in a framework, ready to run with replaced tensors."""

    def capture(self, inputs: Inputs, folder: pathlib.Path) -> list[str]:
        """Writes the trace of a forward pass, with whole values, in `folder`. Returns the module outputs that a trace
        cannot hold, such as "fft (complex64)"."""
        ...

    def __call__(
        self, inputs: Inputs, fed: Mapping[str, Tensor], inside: Collection[str] = (), ops: str | None = None
    ) -> Forward:
        """Runs the model, without gradients.

        **Arguments:** `fed`: the tensors that replace those with the same keys once these are computed; each has the
        dtype and shape of the tensor that it replaces. `inside`: the paths of modules whose inputs are recorded, under
        the same keys in every pass with the same paths. `ops`: the path of a module whose operations are recorded, with
        those of the modules in it.
        """
        ...


def within(path: str, outer: str) -> bool:
    """Returns whether the module `path` is `outer` or is inside of it. "" is the whole model."""
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}/"))
