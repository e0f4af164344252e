"""A signal's handler runs while an op of the main thread does, and what it raises ends the op soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from core import runner
from diptych import core
from diptych.common.quantizers import MXFP8Quantizer

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this platform")

MX = MXFP8Quantizer()
SMALL = core.quantize(np.random.default_rng(0).standard_normal((64, 256), np.float32), MX)
WANT = core.gemm(SMALL, SMALL)


class Stop(Exception):
    pass


@contextmanager
def handler(action: Callable[[], None], after: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: action())
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def same() -> None:
    runner.same_bits(core.gemm(SMALL, SMALL), WANT, "a small product")


def operands(k: int, n: int) -> tuple[core.QuantizedArray, core.QuantizedArray]:
    """Of a product that takes many seconds; zeros are quantized fast."""
    a, b = np.zeros((n, k), np.float32), np.zeros((n, k), np.float32)
    return core.quantize(a, MX), core.quantize(b, MX)


def stop() -> None:
    same()  # a handler may call ops: they take other working memory, and do not stop
    raise Stop


@pytest.mark.parametrize("threads", (1, 2, 4))
def test_a_long_product(threads):
    a, b = operands(8192, 6144)
    with runner.setting(threads=threads):
        start = time.perf_counter()
        with handler(stop, 0.2), pytest.raises(Stop):
            core.gemm(a, b)
        took = time.perf_counter() - start
        same()
    assert took < 1.0, f"stopped after {took:.2f} s, asked to at 0.2"


@pytest.mark.parametrize("threads", (1, 2))
def test_a_handler_that_lets_the_op_go_on(threads):
    rng, ran = np.random.default_rng(1), []
    q = core.quantize(rng.standard_normal((1536, 2048), np.float32), MX)
    with runner.setting(threads=threads):
        want = core.gemm(q, q)
        with handler(lambda: (same(), ran.append(True)), 0.02):
            got = core.gemm(q, q)
            while not ran:
                got = core.gemm(q, q)
    runner.same_bits(got, want, "a product during which a handler ran")


def test_deep_products_and_tall_sums_stop():
    # Few tasks, each long: what asks between tasks alone would not stop.
    a, b = operands(1 << 20, 64)
    tall = np.zeros((1 << 20, 64), np.float32)

    def until_stopped(call: Callable[[], object]) -> None:
        start = time.perf_counter()
        with handler(stop, 0.15), pytest.raises(Stop):
            while True:
                call()
        assert time.perf_counter() - start < 1.0

    with runner.setting(threads=1):
        until_stopped(lambda: core.gemm(a, b))
        until_stopped(lambda: core.bias_grad(tall))
        until_stopped(lambda: core.quantize(tall, MX))


def test_other_threads_are_not_asked():
    """Python runs handlers on the main thread alone: an op of another one ends whole."""
    rng, results = np.random.default_rng(2), []
    q = core.quantize(rng.standard_normal((1024, 1024), np.float32), MX)
    want = core.gemm(q, q)

    def work() -> None:
        results.extend(core.gemm(q, q) for _ in range(20))

    ran = []
    thread = threading.Thread(target=work)
    with handler(lambda: ran.append(True), 0.03):
        thread.start()
        while thread.is_alive() or not ran:
            thread.join(0.01)
            same()
    assert len(results) == 20
    for got in results:
        runner.same_bits(got, want, "a product on another thread")


CTRL_C = """
import os, signal, threading, time
import torch, diptych.torch as dt
from diptych.common import MXFP8BlockScaling

layer, x = dt.Linear(4096, 4096), torch.zeros(8192, 4096, requires_grad=True)
small = torch.randn(32, 4096)
with dt.autocast(recipe=MXFP8BlockScaling()):
    want = layer(small)
start = time.perf_counter()
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    while True:
        with dt.autocast(recipe=MXFP8BlockScaling()):
            y = layer(x)
        y.backward(torch.zeros_like(y))
except KeyboardInterrupt:
    took = time.perf_counter() - start
with dt.autocast(recipe=MXFP8BlockScaling()):
    assert torch.equal(layer(small), want)
print(took)
"""


@pytest.mark.slow  # one signal: where Python drops its exception, as in a weak reference's callback, nothing stops
def test_ctrl_c_while_a_layer_trains():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert 0.5 <= float(done.stdout) < 1.5, done.stdout
