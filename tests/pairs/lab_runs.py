"""Traces of the pairs, made by the lab's capture: in float32, and in float64 as references."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import torch

from diptych.jax import lab as jax_lab
from diptych.lab.traces import Trace
from diptych.torch import lab as torch_lab

from .faults import Fault
from .models import Pair
from .wide import wide


def trace(
    pair: Pair, framework: str, dtype: str, folder: pathlib.Path, fault: Fault | None = None, ops: str = "own"
) -> Trace:
    """Records one step's loss and gradients, all values whole. float64 is the models' definition, see `wide`."""
    exact = dtype == "float64"
    with jax.enable_x64(exact), wide() if exact else contextlib.nullcontext():
        record = _torch if framework == "torch" else _flax
        record(pair, dtype, folder, fault or Fault("", pair.name, framework, "", ()), ops)
    return Trace.open(folder)


def _torch(pair: Pair, dtype: str, folder: pathlib.Path, fault: Fault, ops: str) -> None:
    model = pair.torch(getattr(torch, dtype))
    with (
        fault.plant(model),
        torch_lab.capture(model, out=folder, values="full", statistics=False, ops=ops) as t,
    ):
        pair.torch_loss(model, fault.reduction).backward()
        t.step()


def _flax(pair: Pair, dtype: str, folder: pathlib.Path, fault: Fault, ops: str) -> None:
    model, params = pair.flax(jnp.dtype(dtype))

    def loss(params: Any) -> Any:
        return pair.flax_loss(model, fault.reduction)(params)

    with (
        fault.plant(None),
        jax_lab.capture(jax.value_and_grad(loss), folder, values="full", statistics=False, check=False, ops=ops) as run,
    ):
        run(fault.changed(params))
