"""Layers in high precision, whose amaxes delayed scaling records: calibration."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from diptych.jax.functional import quantize as quantize_verbs
from diptych.jax.layers.held import high_precision
from diptych.jax.layers.options import Amaxes, CallState, Options, States
from diptych.jax.layers.products import Needs, Saved, check_transport, perturbed, primals, recorded, state_gradients
from diptych.jax.primitives.register import defvjp
from diptych.jax.tensors.copies import add_bias, matmul

Array = jax.Array


def plain(x: Array, kernel: Any, bias: Array | None) -> Array:
    """Returns the layer's product in x's dtype."""
    y = matmul(x, high_precision(kernel, x.dtype).astype(x.dtype), trans_b=True)
    return y if bias is None else add_bias(y, bias)


def calibrated(options: Options, x: Array, kernel: Any, bias: Any, states: States) -> tuple[Array, States]:
    """Returns the product in x's dtype, with the operands' amaxes recorded in the states of their names."""
    kernel = high_precision(kernel, x.dtype)
    return observed(options, plain(x, kernel, bias), x, kernel, states)


def observed(options: Options, y: Array, x: Array, kernel: Array, states: States) -> tuple[Array, States]:
    """Returns a high-precision result, with the operands' amaxes recorded in the states of their names."""
    amaxes: Amaxes = {}
    for name in states:
        tensor = {"input": x, "weight": kernel}.get(name.partition(".")[0])
        if tensor is not None:
            amaxes[name] = [quantize_verbs.amax(jax.lax.stop_gradient(tensor))]
    return _observe(options, y, states, amaxes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(options: Options, y: Array, states: States, amaxes: Amaxes) -> tuple[Array, States]:
    return y, recorded(states, amaxes, options)


def _observe_forward(options: Options, *args: Any) -> tuple[tuple[Array, States], Saved]:
    wanted = tuple(name for name, state in args[1].items() if perturbed(state))
    y, states, amaxes = primals(args)
    check_transport(options, wanted, amaxes, [n for n in states if n.startswith("grad_output")])
    saved = Saved(None, None, CallState(states), amaxes, options, Needs(False, False, "", None, wanted))
    return (y, recorded(states, amaxes, options)), saved


def _observe_backward(options: Options, saved: Saved, grads: tuple[Any, States]) -> tuple[Any, ...]:
    dy, later = grads
    if isinstance(dy, SymbolicZero):
        return None, state_gradients(saved, {}, later), None
    amax = quantize_verbs.amax(dy)
    amaxes = {name: [amax] for name in saved.state.states if name.startswith("grad_output")}
    return dy, state_gradients(saved, amaxes, later), None


defvjp(_observe, _observe_forward, _observe_backward)
