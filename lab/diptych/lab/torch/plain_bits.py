"""Checks whether taps change a step's bits: a step runs twice, and all its changes are undone each time.

A step does more than write values: it replaces tensors, and diptych's modules create their states in the first step. So
the attributes of modules and parameters are restored, and the contents of the containers and tensors in them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from diptych.lab.diff.names import few
from diptych.lab.torch import statistics, structures, taps
from diptych.torch.state.autocast import STATE

_CONTAINERS = (*structures.WRITABLE, set)


def bits(model: nn.Module, run: Callable[[], Any]) -> dict[str, bytes]:
    """Returns the bits of a step's loss, gradients and buffers, and restores the model.

    **Arguments:** `run`: computes loss and gradients, updates nothing, and returns the loss or None.
    """
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    with set_back(model), torch.random.fork_rng(devices=[d.index or 0 for d in devices]):
        for p in model.parameters():
            p.grad = None
        loss = run()
        found = {"loss": loss} | {f"buffer:{n}": b for n, b in model.named_buffers()}
        for name, p in model.named_parameters():
            found |= {f"grad:{name}": p.grad, f"main_grad:{name}": getattr(p, "main_grad", None)}
        return {k: statistics.bits(taps.local(t.detach())) for k, t in found.items() if isinstance(t, Tensor)}


@contextlib.contextmanager
def set_back(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of modules and parameters, and gradients, at the end of the context; values of parameters
    are not restored.

    **Raises** RuntimeError if the values of a parameter have changed.
    """
    before: dict[int, tuple[Any, Any]] = {}
    for held in (*model.modules(), *model.parameters()):
        _note(_attributes(held), before)
    grads = [(p, p.grad) for p in model.parameters()]
    known = {n: p for n, p in model.named_parameters() if type(p) is nn.Parameter and not p.is_inference()}
    versions = {n: p._version for n, p in known.items()}
    steps = {device: step.item() for device, step in STATE.steps.items()}  # delayed scales keep copies of these
    try:
        yield
    finally:
        with torch.inference_mode():  # inference mode may also write to tensors that were made in it
            for device, step in STATE.steps.items():
                step.fill_(steps.get(device, 0))
            for held, kept in before.values():
                _put_back(held, kept)
        for p, grad in grads:
            p.grad = grad
    written = [name for name, p in known.items() if p._version != versions[name]]
    if written:
        raise RuntimeError(f"capture: the run that check() is given must update nothing, and changed {few(written)}")


def _attributes(held: Any) -> dict[str, Any]:
    """Returns the attributes in which a step may leave something. For torch's own modules these are the buffers alone,
    since other attributes, such as those of DistributedDataParallel, depend on objects outside of the module."""
    own = type(held).__module__.startswith("torch.") and type(held) is not nn.Parameter
    return getattr(held, "_buffers", {}) if own else vars(held)


def _note(held: Any, found: dict[int, tuple[Any, Any]]) -> None:
    """Notes the contents of a tensor or container, and those of the containers in it."""
    if id(held) in found:
        return
    if type(held) in _CONTAINERS:
        found[id(held)] = held, copy.copy(held)
        for value in held.values() if isinstance(held, dict) else held:
            _note(value, found)
    elif type(taps.local(held)) is Tensor and not (isinstance(held, nn.Parameter) or held.is_meta or held.is_nested):
        found[id(held)] = held, held.detach().clone()


def _put_back(held: Any, kept: Any) -> None:
    if isinstance(held, Tensor):
        if statistics.bits(taps.local(held.detach())) != statistics.bits(taps.local(kept)):
            held.detach().copy_(kept)
        return
    held.clear()
    if isinstance(held, (list, collections.deque)):
        held.extend(kept)
    else:
        held.update(kept)
