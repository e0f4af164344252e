"""statistics: the oracle's bits for any dtype and layout, fake tensors, graphs, and no derivative."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core.statistics.test_statistics import rounding
from torch._subclasses.fake_tensor import FakeTensorMode

from diptych.common import DTypeError, ShapeError, UnsupportedError
from diptych.common.ops import statistics as rules
from diptych.torch.primitives.statistics import errors, statistics
from oracle import statistics as oracle
from torch_frontend.primitives.test_hash import check_graph, drawn


def same(got, x):
    assert got.dtype == torch.float64 and got.shape == (7,) and got.device == x.device
    bits, name = x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), str(x.dtype).removeprefix("torch.")
    want = oracle.statistics(bits, name)
    assert got.cpu().numpy().tobytes() == want.tobytes(), f"{x.dtype}{list(x.shape)} {got} {want}"


@pytest.mark.parametrize("dtype", rules.NUMBERS)
def test_any_dtype_and_shape(dtype, device):
    dtype = getattr(torch, dtype)
    for shape in ((1,), (0,), (5, 7), (2, 0, 3), (1, 2, 1, 2, 1, 2, 1, 2, 3), (40, 130)):
        x = drawn(shape, dtype, device)
        same(statistics(x), x)
        same(torch.ops.diptych.statistics(x), x)
    same(statistics(x[3, 5]), x[3, 5])
    same(statistics(x.view(-1)[::5200]), x.view(-1)[:1])
    same(statistics(torch.empty_strided((0,), (0,), dtype=dtype, device=device)), x.view(-1)[:0])
    same(statistics(x.view(-1)[1:]), x.view(-1)[1:])  # the start is aligned to the element alone
    for v in (x.t(), x[::2, 1:3]):
        same(statistics(v), v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_of_rounding(dtype, device):
    for n in (0, 1, 9000):
        x, result, largest, beyond = rounding(n, dtype)
        given = torch.from_numpy(x.view(np.uint8)).to(device).view(getattr(torch, dtype))
        rounded = [torch.from_numpy(v).to(device) for v in (result, largest)]
        want = oracle.errors(x, dtype, result, largest, beyond)
        for call in (errors, torch.ops.diptych.rounding_errors):
            assert call(given, *rounded, beyond).cpu().numpy().tobytes() == want.tobytes()
            strided = [torch.stack([t, t], 1)[:, 0] for t in (given, *rounded)]
            assert call(*strided, beyond).cpu().numpy().tobytes() == want.tobytes()


def test_negated_views(device):
    x = torch._neg_view(torch.arange(-2.0, 5.0, device=device))
    assert x.is_neg()
    same(statistics(x), x.clone().resolve_neg())


def test_fake_tensors():
    with FakeTensorMode() as mode:
        made = statistics(mode.from_tensor(torch.ones(3, 5)))
        with pytest.raises(DTypeError, match="statistics: x must be one of"):
            statistics(mode.from_tensor(torch.ones(3, dtype=torch.complex64)))
        with pytest.raises(ShapeError, match=r"statistics: result must be \[3\], got float32\[5\]"):
            errors(*(mode.from_tensor(torch.ones(n)) for n in (3, 5, 3)), 1.0)
    assert made.shape == (7,) and made.dtype == torch.float64
    assert torch.ops.diptych.statistics(torch.ones(3, 5, device="meta")).shape == (7,)


def test_traced():
    fn = torch.compile(lambda x: statistics(x * 2), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 7):
        x = torch.arange(n, dtype=torch.float32)
        same(fn(x), x * 2)


def test_torchs_own_check():
    x = torch.arange(12.0).reshape(3, 4)
    torch.library.opcheck(torch.ops.diptych.statistics.default, (x,))
    torch.library.opcheck(torch.ops.diptych.rounding_errors.default, (x, x, x, 1.5))


@pytest.mark.cuda
def test_a_captured_graph_measures_what_is_there(cuda):
    for n, dtype in ((1000, torch.float32), (100_000, torch.bfloat16), (100_000, torch.float64)):
        check_graph(statistics, torch.ones(n, dtype=dtype, device="cuda"), same)


def test_no_derivative():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"diptych::statistics has no derivative.*detach"):
        statistics(x)
    with torch.no_grad():
        same(statistics(x), x)


def test_errors():
    for x in (torch.ones(2, dtype=torch.complex64), torch.ones(2).to(torch.float8_e4m3fnuz)):
        with pytest.raises(DTypeError, match="statistics: x must be one of float64"):
            statistics(x)
    x, half = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(DTypeError, match="statistics: x must be float32, bfloat16 or float16, got int64"):
        errors(torch.ones(2, dtype=torch.int64), x, x, 1.0)
    with pytest.raises(DTypeError, match="statistics: largest must be float32, got bfloat16"):
        errors(x, x, half, 1.0)
    with pytest.raises(ShapeError, match=r"statistics: result must be \[2\], got float32\[3\]"):
        errors(x, torch.ones(3), x, 1.0)
