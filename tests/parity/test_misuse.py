"""Bad calls: the core's NumPy verbs, torch and JAX refuse each with the same error and message.

torch refuses it in a plain call, which leaves most to the core, and with fake tensors, as a graph's shapes are made.
JAX refuses it in a plain call and while it traces.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
import diptych.jax as dj
import diptych.torch as dt
from cases.layer_misuse import LAYERS
from cases.misuse import MISUSES, Misuse
from diptych import core


class Core:
    verbs = core

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        return np.ones(shape, cases.INPUT_DTYPES.get(dtype, dtype))

    def dtype(self, name: str) -> Any:
        return name

    def offsets(self, *numbers: int) -> Any:
        return np.array(numbers, np.int32)

    def linear(self, x: Any, weight: Any, bias: Any, recipe: Any) -> Any:
        raise NotImplementedError

    def grouped(self, x: Any, weight: Any, bias: Any, offsets: Any, recipe: Any, **options: Any) -> Any:
        raise NotImplementedError

    def run(self, case: Misuse) -> None:
        case.call(self)


class Torch:
    verbs = dt

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        return torch.ones(shape, dtype=getattr(torch, dtype))

    def dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def offsets(self, *numbers: int) -> Any:
        return torch.tensor(numbers, dtype=torch.int32)

    def linear(self, x: Any, weight: Any, bias: Any, recipe: Any) -> Any:
        return dt.linear(x, weight, bias, recipe)

    def grouped(self, x: Any, weight: Any, bias: Any, offsets: Any, recipe: Any, **options: Any) -> Any:
        return dt.grouped_linear(x, weight, bias, offsets, recipe, **options)

    def run(self, case: Misuse) -> None:
        case.call(self)


class FakeTorch(Torch):
    def run(self, case: Misuse) -> None:
        with FakeTensorMode():
            case.call(self)


class Jax:
    verbs = dj

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        return jnp.ones(shape, dtype)

    def dtype(self, name: str) -> Any:
        return jnp.dtype(name)

    def offsets(self, *numbers: int) -> Any:
        return jnp.array(numbers, jnp.int32)

    def linear(self, x: Any, weight: Any, bias: Any, recipe: Any) -> Any:
        return dj.dense(x, weight, bias, recipe=recipe)

    def grouped(self, x: Any, weight: Any, bias: Any, offsets: Any, recipe: Any, **options: Any) -> Any:
        return dj.grouped_dense(x, weight, bias, offsets, recipe=recipe, **options)

    def run(self, case: Misuse) -> None:
        case.call(self)


class TracedJax(Jax):
    def run(self, case: Misuse) -> None:
        jax.make_jaxpr(lambda: case.call(self))()


LIBRARIES = {"core": Core, "torch": Torch, "torch-fake": FakeTorch, "jax": Jax, "jax-traced": TracedJax}
CALLS = [
    pytest.param(case, library, id=f"{case.name.replace(' ', '-')}-{library}")
    for case in (*MISUSES, *LAYERS)
    for library in LIBRARIES
    if library != "core" or not case.panels
]


@pytest.mark.parametrize("case, library", CALLS)
def test_every_library_refuses_it_in_the_same_words(case, library):
    with pytest.raises(case.error) as caught:
        LIBRARIES[library]().run(case)
    message = str(caught.value)
    assert case.pattern().match(message), message


def test_names_are_unique():
    names = [case.name for case in (*MISUSES, *LAYERS)]
    assert len(set(names)) == len(names)
