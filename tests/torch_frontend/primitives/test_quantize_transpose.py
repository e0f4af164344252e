"""transpose of bytes: torch's own transposition, fake tensors, and no derivative."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diptych.torch.primitives.quantize import transpose, transpose_into

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
SHAPES = ((5, 7), (0, 3), (3, 0), (2, 130, 48), (2, 3, 16, 33))


def drawn(shape, dtype, device="cpu"):
    made = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(len(shape)))
    return made.to(device).view(dtype)


def bits(t):
    return t.contiguous().view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes(dtype, device):
    for shape in SHAPES:
        x = drawn(shape, dtype, device)
        made, want = transpose(x), bits(x).transpose(-2, -1)
        assert made.dtype == dtype and made.is_contiguous() and torch.equal(bits(made), want)
        assert torch.equal(bits(torch.ops.diptych.transpose(x)), want)
        out = torch.empty(want.shape, dtype=torch.uint8, device=device).view(dtype)
        transpose_into(x, out)
        assert torch.equal(bits(out), want)


def test_a_view_is_made_dense(device):
    x = drawn((8, 6), torch.uint8, device)
    assert torch.equal(bits(transpose(x[:, 1:4])), bits(x)[:, 1:4].t())


def test_fake_tensors():
    x = drawn((2, 5, 7), torch.float8_e4m3fn)
    with FakeTensorMode() as mode:
        made = transpose(mode.from_tensor(x))
    assert made.shape == (2, 7, 5) and made.dtype == x.dtype and made.stride() == transpose(x).stride()


def test_traced():
    fn = torch.compile(transpose, backend="aot_eager", fullgraph=True)
    x = drawn((5, 7), torch.uint8)
    assert torch.equal(fn(x), x.t())


def test_errors():
    with pytest.raises(TypeError, match="one byte"):
        transpose(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="two dimensions"):
        torch.ops.diptych.transpose(torch.zeros(2, dtype=torch.uint8)[None][0])
