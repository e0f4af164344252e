"""A signal's handler runs during an op of the main thread, and an exception that it raises ends the op soon."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from core import runner
from core.signals import handler
from diptych import core
from diptych.common.quantizers import MXFP8Quantizer

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no interval timers on this platform")

MX = MXFP8Quantizer()
SMALL = core.quantize(np.random.default_rng(0).standard_normal((64, 256), np.float32), MX)
WANT = core.gemm(SMALL, SMALL)


class Stop(Exception):
    pass


def same() -> None:
    runner.same_bits(core.gemm(SMALL, SMALL), WANT, "a small product")


def operands(k: int, n: int) -> tuple[core.QuantizedArray, core.QuantizedArray]:
    """Returns the operands of a product that takes many seconds. They are zeros, which are quantized fast."""
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
