"""Ctrl-C while a layer trains eagerly: the exception that a signal's handler raises reaches the caller.

Each test runs a whole step first. A first `backward()` imports several hundred modules of torch's and sympy's, and
Python drops what a handler raises inside of the callback with which the import system frees a module's lock.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from core.signals import handler
from torch import Tensor

import diptych.torch as dt
from diptych.common import DelayedScaling, MXFP8BlockScaling, Recipe

MX = MXFP8BlockScaling()


def ctrl_c() -> None:
    raise KeyboardInterrupt


def warmed(size: int, recipe: Recipe = MX) -> Callable[[Tensor], Tensor]:
    """A training step of a layer [size, size] that has run once; it returns the output."""
    layer = dt.Linear(size, size)

    def step(x: Tensor) -> Tensor:
        with dt.autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.zeros_like(y))
        return y.detach()

    step(torch.zeros(32, size, requires_grad=True))
    return step


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this platform")
def test_ctrl_c_while_a_layer_trains():
    step, x = warmed(4096), torch.zeros(8192, 4096, requires_grad=True)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), handler(ctrl_c, 0.3):
        while time.perf_counter() < start + 30:
            step(x)
    took = time.perf_counter() - start
    assert took < 2.3, f"stopped after {took:.2f} s, asked to at 0.3"
    assert not dt.is_autocast_enabled()


class Raising:
    """A trace function under which the function that is called as number `turn`, counted from 0, raises.

    Nothing helps a context manager that is interrupted where its `__exit__` begins: those do not count.
    """

    def __init__(self, turn: int) -> None:
        self.left, self.where = turn, ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_name == "__exit__":
            return
        self.left -= 1
        if self.left < 0:
            sys.settrace(None)
            self.where = f"{frame.f_code.co_qualname} in {frame.f_code.co_filename}"
            raise KeyboardInterrupt


@pytest.mark.parametrize("recipe", (MX, DelayedScaling()), ids=lambda r: type(r).__name__)
def test_no_function_of_a_step_drops_what_a_handler_raises(recipe):
    """Python runs handlers where a function begins, among other places: each function of a step raises in its turn."""
    step, x = warmed(128, recipe), torch.randn(64, 128, requires_grad=True)
    want, before, turn = step(x), sys.gettrace(), 0
    while True:
        raising = Raising(turn)
        sys.settrace(raising)
        try:
            step(x)
        except KeyboardInterrupt:
            arrived = True
        else:
            arrived = False
        finally:
            sys.settrace(before)
        if not raising.where:
            break
        assert arrived, f"what {raising.where} raised was dropped"
        assert not dt.is_autocast_enabled(), f"the region stays entered after an exception of {raising.where}"
        turn += 1
    assert turn > 100
    again = step(x)
    assert recipe != MX or torch.equal(again, want)
