"""Values and gradients of every module's output, by means that owe nothing to the lab: hooks and interceptors."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import torch

from .models import Pair, canonical

Sites = dict[str, np.ndarray]


def torch_sites(pair: Pair, model: torch.nn.Module, reduction: str = "mean") -> tuple[float, Sites, Sites, Sites]:
    """Returns the loss, outputs in the order of computation, their gradients, and the parameters' gradients."""
    values: dict[str, torch.Tensor] = {}
    images: set[str] = set()  # with channels first, which Flax has last
    handles = []
    for path, module in model.named_modules():

        def hook(module: Any, args: Any, y: Any, path: str = path) -> None:
            for name, x in _leaves(path, y):
                if x.requires_grad:
                    x.retain_grad()
                values.setdefault(canonical(name), x)
                if isinstance(module, torch.nn.Conv2d):
                    images.add(canonical(name))

        handles.append(module.register_forward_hook(hook))
    loss = pair.torch_loss(model, reduction)
    for handle in handles:
        handle.remove()
    loss.backward()

    def array(name: str, x: torch.Tensor) -> np.ndarray:
        return _array(x).transpose(0, 2, 3, 1) if name in images else _array(x)

    grads = {name: array(name, x.grad) for name, x in values.items() if x.grad is not None}
    by_parameter = {
        pair.places[name][0]: _array(torch.zeros_like(p) if p.grad is None else p.grad).transpose(pair.places[name][1])
        for name, p in model.named_parameters()
    }
    return loss.item(), {name: array(name, x) for name, x in values.items()}, grads, by_parameter


def flax_sites(
    pair: Pair, model: Any, params: Any, reduction: str = "mean", backward: bool = True
) -> tuple[float, Sites, Sites, Sites]:
    """The same of Flax's model. Gradients of outputs are those of zeros that are added to them; empty without
    `backward`, which takes most of the time."""
    order: list[str] = []

    def traced(params: Any, zeros: Any) -> Any:
        values: dict[str, Any] = {}

        def tap(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            y = call(*args, **kwargs)
            if context.method_name != "__call__":
                return y
            flat, tree = jax.tree_util.tree_flatten(y)
            path = "/".join(context.module.path)
            if not path and not isinstance(y, tuple | dict):
                return y  # a module without a place, which another module applies by itself
            for i, x in enumerate(flat):
                name = canonical(f"{path}[{i}]" if i else path)
                values.setdefault(name, x)
                flat[i] = x + zeros[name] if name in zeros else x
            return tree.unflatten(flat)

        with nn.intercept_methods(tap):
            loss = pair.flax_loss(model, reduction)(params)
        order[:] = values
        return loss, values

    if not backward:
        loss, values = jax.jit(traced)(params, {})
        return float(loss), {name: np.asarray(values[name]) for name in order}, {}, {}
    shapes = jax.eval_shape(lambda p: traced(p, {})[1], params)
    zeros = {name: jax.numpy.zeros(s.shape, s.dtype) for name, s in shapes.items()}
    step = jax.jit(jax.value_and_grad(traced, argnums=(0, 1), has_aux=True))
    (loss, values), (by_parameter, grads) = step(params, zeros)
    flat = jax.tree_util.tree_flatten_with_path(by_parameter)[0]
    return (
        float(loss),
        {name: np.asarray(values[name]) for name in order},
        {name: np.asarray(grads[name]) for name in order},
        {"/".join(k.key for k in path): np.asarray(x) for path, x in flat},
    )


def common(a: Sites, b: Sites) -> list[str]:
    """Names that both have, in A's order."""
    return [name for name in a if name in b and a[name].shape == b[name].shape]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """rms(b - a) / rms(a). Zeros that are zeros in both differ by 0."""
    error, size = (float(np.sqrt(np.mean(np.square(x.astype(np.float64))))) for x in (b - a, a))
    return error / size if size else float(error != 0) * np.inf if error else 0.0


def first(a: Sites, b: Sites, bound: float = 1e-10, backward: bool = False) -> str | None:
    """Returns the first common site, in the order of computation, that differs by more than the bound."""
    names = common(a, b)
    return next((n for n in (reversed(names) if backward else names) if relative(a[n], b[n]) > bound), None)


def _leaves(path: str, y: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(y, torch.Tensor):
        return [(path, y)]
    items = y.items() if isinstance(y, dict) else enumerate(y) if isinstance(y, tuple | list) else ()
    return [(f"{path}[{i}]" if n else path, x) for n, (i, x) in enumerate(items) if isinstance(x, torch.Tensor)]


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(torch.float64).numpy()
