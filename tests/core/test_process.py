"""Calls in forks, in many Python threads, and on side streams."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.quantizers import Float8BlockQuantizer
from diptych.core import _core

TESTS = Path(__file__).resolve().parents[1]

FORK = """
import os, sys, warnings
import cases, numpy as np, oracle
from core import runner
from diptych.core import _core

warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forking with threads: that is the point
_core.set_num_threads(4)
x = cases.draw("fork", "normal", (256, 512), "float32")
want = oracle.quantize(x, "fp8_e4m3_1x128")
copy = want.copy()
product = oracle.gemm_cpu(oracle.Copy(copy.fmt, False, copy.data[:64], copy.scale_inv[:64]), copy)

def check():
    for _ in range(5):
        runner.same_quantized(runner.quantize(runner.Numpy(), x, want, "fp8_e4m3_1x128"), want, "fork")
        small = oracle.Copy(copy.fmt, False, copy.data[:64], copy.scale_inv[:64])
        got = runner.gemm(runner.Numpy(), small, "fp8_e4m3_1x128", copy, "fp8_e4m3_1x128", (64, 256, 512))
        runner.same_bits(got, product, "fork")

check()                                     # the pool's workers exist now
children = []
for generation in range(3):
    pid = os.fork()
    if pid == 0:
        try:
            check()
            grandchild = os.fork()
            if grandchild == 0:
                check()
                os._exit(0)
            assert os.waitpid(grandchild, 0)[1] == 0
        except BaseException as e:
            print(e, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    children.append(pid)
    check()                                 # the parent's pool still works
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
print("forked")
"""


def test_after_fork():
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this platform")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", FORK], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "forked", done.stderr


def test_products_from_several_python_threads():
    x = cases.draw("threads", "normal", (192, 256), "float32")
    q = oracle.quantize(x, "mxfp8_e4m3")
    want = oracle.gemm_cpu(q.copy(), q.copy())

    def one(_):
        got = runner.gemm(runner.Numpy(), q.copy(), "mxfp8_e4m3", q.copy(), "mxfp8_e4m3", (192, 192, 256))
        runner.same_bits(got, want, "several threads")

    with runner.setting(threads=3), concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(48)))


def test_thread_count_may_change_while_others_work():
    x = cases.draw("threads-change", "normal", (256, 512), "float32")
    want = core.quantize(x, Float8BlockQuantizer())

    def one(i):
        if i % 2:
            _core.set_num_threads(1 + i % 5)
        got = core.quantize(x, Float8BlockQuantizer())
        runner.same_bits(got.columnwise_data, want.columnwise_data, "changing thread counts")

    with runner.setting(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(64)))


def test_threads_that_are_too_many_end():
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("counts threads in /proc/self/task")
    x = np.zeros((1 << 16, 64), np.float32)

    def count() -> int:
        return len(list(tasks.iterdir()))

    with runner.setting(threads=1):
        core.amax(x)
        before = count()
        with runner.setting(threads=40):
            core.quantize(x, Float8BlockQuantizer())
            assert count() > before  # of others' threads some may have ended
        patience = time.monotonic() + 10
        while count() > before and time.monotonic() < patience:
            time.sleep(0.01)
        assert count() <= before
    with runner.setting(threads=3):  # and new ones start
        runner.same_bits(core.amax(x + 2), np.float32([2]), "after threads have ended")


@pytest.mark.cuda
def test_side_stream(cuda):
    """Each op waits for what its caller's stream did before, and nothing else."""
    import torch

    x = cases.draw("stream", "normal", (256, 384), "float32")
    want = oracle.quantize(x, "fp8_e4m3_1x128")
    row = runner.ROWS["fp8_e4m3_1x128"]
    real, stream = torch.from_numpy(x).cuda(), torch.cuda.Stream()
    buffer = torch.zeros_like(real)
    data = torch.zeros(x.shape, dtype=getattr(torch, row["element"]), device="cuda")
    scale = torch.zeros(want.rowwise_scale_inv.shape, device="cuda")
    back, sums, top = torch.zeros_like(real), torch.zeros(384, device="cuda"), torch.zeros(1, device="cuda")
    product = torch.zeros((256, 256), device="cuda")
    ident = runner.IDS["fp8_e4m3_1x128"]
    space = [
        torch.empty(n, dtype=torch.uint8, device="cuda")
        for n in (
            _core.gemm_workspace_bytes(ident, ident, 256, 256, 384, False),
            _core.bias_grad_workspace_bytes(256, 384),
        )
    ]
    operand = (data, scale, None, ident, False)
    rolled, other = torch.zeros((1, 384), device="cuda"), torch.zeros_like(top)

    def every_op():
        _core.quantize(buffer, ident, 0, 0.0, runner.COMPUTE, None, None, None, None, data, scale, None, None)
        _core.dequantize(*operand, back)
        _core.amax(buffer, top, None, 0)
        _core.bias_grad(buffer, sums, space[1])
        _core.gemm(*operand, *operand, product, None, None, space[0], 1.0, 0.0, False)
        _core.scale_update(sums[None], top, None, None, rolled, other, 448.0, 0, False)

    every_op()  # libraries and modules load on first use, and may wait for the device then
    for out in (back, sums, top, product, rolled, other):
        out.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a kernel on another stream would read zeros
        buffer.copy_(real)
        every_op()
        queued = not stream.query()
    stream.synchronize()
    assert queued, "the calls waited for the stream instead of joining it"
    runner.same_bits(data.view(torch.uint8).cpu().numpy(), want.rowwise_data, "quantize on a side stream")
    runner.same_bits(back.cpu().numpy(), np.ascontiguousarray(oracle.dequantize(want.copy())), "dequantize")
    assert top.item() == oracle.amax(x)[0]
    exact, allowed = oracle.bias_grad_tolerance(x)
    assert (np.abs(sums.cpu().numpy() - exact) <= allowed).all()
    assert (np.abs(product.cpu().numpy()) > 0).any(), "gemm on a side stream read zeros"
    assert other.item() > 0 and rolled[0, -1] == sums[0], "scale_update on a side stream read zeros"


@pytest.mark.cuda
def test_two_streams_at_once(cuda):
    """No buffer is shared between calls: two streams interleave and keep their bits."""
    import torch

    be, streams = runner.Torch(), [torch.cuda.Stream() for _ in range(2)]
    work = []
    for i, fmt in enumerate(("nvfp4", "mxfp8_e5m2")):
        x = cases.draw(f"streams-{fmt}", "normal", (512, 768), "bfloat16")
        want = oracle.quantize(x, fmt)
        work.append((fmt, x, want, streams[i]))
    for _ in range(10):
        for fmt, x, want, stream in work:
            with torch.cuda.stream(stream):
                got = runner.quantize(be, x, want, fmt)
            runner.same_quantized(got, want, fmt)
