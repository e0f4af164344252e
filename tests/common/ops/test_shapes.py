"""The shape rules against what the core and the oracle really produce, and on sizes that cannot be compared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cases
import oracle
from diptych import core
from diptych.common.errors import ShapeError
from diptych.common.formats import FORMATS
from diptych.common.ops import shapes
from diptych.common.ops.permute import require_movable
from diptych.common.quantizers import (
    ROW_AMAX,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from quantizers import InventedQuantizer

QUANTIZERS = tuple(
    make(fp8_dtype=element)
    for make in (
        Float8CurrentScalingQuantizer,
        Float8BlockQuantizer,
        lambda fp8_dtype: Float8BlockQuantizer(fp8_dtype=fp8_dtype, block_scaling_dim=2),
        MXFP8Quantizer,
    )
    for element in ("float8_e4m3fn", "float8_e5m2")
) + (NVFP4Quantizer(), NVFP4Quantizer(row_scaled_nvfp4=True))
USAGES = ((True, True), (True, False), (False, True))


class Size:
    """An unbacked symbolic size: it adds, multiplies and floor-divides, and that is all."""

    def __init__(self, text: str):
        self.text = text

    def _binary(self, other, operator, swap=False):
        a, b = (str(other), self.text) if swap else (self.text, str(other))
        return Size(f"({a} {operator} {b})")

    def __add__(self, other):
        return self._binary(other, "+")

    def __radd__(self, other):
        return self._binary(other, "+", True)

    def __sub__(self, other):
        return self._binary(other, "-")

    def __mul__(self, other):
        return self._binary(other, "*")

    def __rmul__(self, other):
        return self._binary(other, "*", True)

    def __floordiv__(self, other):
        return self._binary(other, "//")

    def _refuse(self, *_):
        raise AssertionError(f"a rule looked into the size {self.text}")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __index__ = __int__ = _refuse
    __len__ = __float__ = __mod__ = __rmod__ = __neg__ = __abs__ = __divmod__ = __truediv__ = __pow__ = _refuse

    def __str__(self):
        return self.text

    def value(self, **sizes: int) -> int:
        return eval(self.text, {}, sizes)


def takes(quantizer, shape) -> bool:
    """Whether the format holds this shape: packed ones take whole blocks only."""
    try:
        shapes.check(shapes.quantize_constraints(shape, quantizer))
    except ShapeError:
        return False
    return True


def shapes_of(quantizer) -> list[tuple[int, ...]]:
    blocks = [(16, 16), (2, 24, 32), (0, 48), (32, 0)] if quantizer.format.pack > 1 else []
    return [s for s in (*cases.SHAPES, *blocks) if takes(quantizer, s)]


def concrete(shape, **sizes):
    return tuple(s.value(**sizes) if isinstance(s, Size) else s for s in shape)


def test_the_dummy_size_refuses():
    for look in (bool, hash, int, lambda s: s == 1, lambda s: s < 1, lambda s: s % 2, lambda s: max(s, 1)):
        with pytest.raises(AssertionError, match="looked into"):
            look(Size("m"))


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.format.name)
def test_buffers_are_what_the_oracle_makes(quantizer):
    for shape, (rowwise, columnwise) in itertools.product(shapes_of(quantizer), USAGES):
        q = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        options = {"row_amax": True} if q.spec.flags & ROW_AMAX else {}
        usage = {"rowwise": rowwise, "columnwise": columnwise}
        want = oracle.quantize(np.zeros(shape, np.float32), q.format.name, **usage, **options)
        buffers = {b.name: b for b in shapes.quantize_buffers(shape, q)}
        names = [n for n in vars(want) if n != "fmt" and getattr(want, n) is not None]
        assert list(buffers) == names, f"{q} {shape}: the order is fixed"
        for name, b in buffers.items():
            real = getattr(want, name)
            folded = shapes.rows_cols(b.shape) if name.endswith("data") else b.shape
            assert tuple(folded) == real.shape, f"{q} {shape} {name}"
        if rowwise:
            assert buffers["rowwise_data"].shape == (*shape[:-1], shape[-1] // q.format.pack), "the tensor's own shape"
        data, scale = q.format.data, q.format.scale
        for name, b in buffers.items():
            assert b.dtype == ("float32" if name.endswith("amax") else data if name.endswith("data") else scale)
            if name.endswith("data"):
                columnwise_data = name.startswith("columnwise")
                assert shapes.copy_extents(q.format, columnwise_data, b.shape) == shapes.rows_cols(shape)


@pytest.mark.parametrize("block", [(1, 0), (0, 1), (5, 0), (0, 0)])
def test_blocks_of_whole_extents(block):
    """They are counted even where an extent is 0, and on symbolic sizes."""
    invented = InventedQuantizer(block=block)
    for m, k in ((3, 5), (0, 5), (5, 0)):
        want = oracle.quantize(np.zeros((m, k), np.float32), oracle.Fmt("e4m3", "float32", *block, "divide", True))
        for columnwise, made in ((False, want.rowwise_scale_inv), (True, want.columnwise_scale_inv)):
            assert shapes.scale_shape(invented.format, columnwise, m, k) == made.shape, (m, k, columnwise)
            symbolic = shapes.scale_shape(invented.format, columnwise, Size("m"), Size("k"))
            assert concrete(symbolic, m=m, k=k) == made.shape
    assert invented.copies_agree() == (block == (0, 0)) == invented.format.one_scale == invented.format.tensor_amax
    assert ("amax" in invented.buffer_names()) == invented.format.tensor_amax


def test_rows_move_if_no_scale_is_that_of_several():
    whole_row, whole_column = (InventedQuantizer(block=block).format for block in ((1, 0), (0, 1)))
    require_movable("permute", whole_row, True, False)
    with pytest.raises(ValueError, match=r"columnwise copy .* run along all tokens, which part"):
        require_movable("permute", whole_row, True, True)
    with pytest.raises(ValueError, match="span all rows, which part"):
        require_movable("permute", whole_column, True, False)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.format.name)
def test_buffers_are_what_the_core_takes(quantizer):
    """The NumPy face allocates by the rules; the core checks every extent on its own."""
    for shape in shapes_of(quantizer):
        q = core.quantize(np.zeros(shape, np.float32), quantizer)
        for b in shapes.quantize_buffers(shape, quantizer):
            assert getattr(q, b.name).shape == b.shape


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: q.format.name)
def test_symbolic_sizes(quantizer):
    """Sizes known only by name give the concrete rules' results once they are known."""
    for rowwise, columnwise in USAGES:
        q = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        symbolic = shapes.quantize_buffers((Size("b"), Size("s"), Size("k")), q)
        for b, s, k in ((2, 3, 96), (1, 1, 1), (0, 5, 7), (130, 1, 257), (4, 8, 0)):
            for got, want in zip(symbolic, shapes.quantize_buffers((b, s, k), q), strict=True):
                assert (got.name, got.dtype) == (want.name, want.dtype)
                assert concrete(got.shape, b=b, s=s, k=k) == tuple(want.shape)
    fmt = quantizer.format
    for a_columnwise, b_columnwise in itertools.product((False, True), repeat=2):
        got = shapes.gemm_shape(fmt, a_columnwise, (Size("i"), Size("j")), fmt, b_columnwise, (Size("p"), Size("q")))
        want = shapes.gemm_shape(fmt, a_columnwise, (5, 7), fmt, b_columnwise, (11, 13))
        values = {"i": 5, "j": 7, "p": 11, "q": 13}
        assert concrete(got[:3], **values) == want[:3]
        (constraint,), (known,) = got.constraints, want.constraints
        assert concrete(constraint[:2], **values) == known[:2] and fmt.name in constraint.message
    for trans_a in (False, True):
        out = shapes.gemm_out_shape((Size("b"), Size("s"), Size("k")), Size("m"), Size("n"), trans_a)
        assert [str(s) for s in out] == (["m", "n"] if trans_a else ["b", "s", "n"])


def test_gemm_copies_and_extents_of_the_three_products():
    """fprop, dgrad and wgrad: which copies, and the extents that their data gives."""
    m, n, k = 96, 80, 48
    x, w, dy = (np.zeros(s, np.float32) for s in ((2, 48, k), (n, k), (2, 48, n)))
    products = (
        (x, w, False, True, (False, False), (m, n, k), (2, 48, n)),
        (dy, w, False, False, (False, True), (m, k, n), (2, 48, k)),
        (dy, x, True, False, (True, True), (n, k, m), (n, k)),
    )
    for quantizer in QUANTIZERS:
        fmt = quantizer.format
        for a, b, trans_a, trans_b, copies, extents, out in products:
            assert shapes.gemm_copies(trans_a, trans_b) == copies
            qa, qb = core.quantize(a, quantizer), core.quantize(b, quantizer)
            data = qa.copy_of(copies[0])[0].shape, qb.copy_of(copies[1])[0].shape
            got = shapes.gemm_shape(fmt, copies[0], data[0], fmt, copies[1], data[1])
            assert got[:3] == extents
            shapes.check(got.constraints)
            assert shapes.gemm_out_shape(a.shape, got.m, got.n, trans_a) == out
            assert core.gemm(qa, qb, trans_a=trans_a, trans_b=trans_b).shape == out
    assert shapes.gemm_copies(True, True) == (True, False)


def test_packed_formats_take_whole_blocks():
    row, both = NVFP4Quantizer(columnwise=False), NVFP4Quantizer()
    assert takes(row, (3, 16)) and not takes(row, (3, 24)) and not takes(both, (3, 16)) and takes(both, (4, 4, 32))
    assert not takes(NVFP4Quantizer(with_2d_quantization=True, columnwise=False), (3, 16)), "squares span rows"
    with pytest.raises(ShapeError, match=r"quantize \(nvfp4\): the last extent of a \[3, 24\] tensor"):
        shapes.check(shapes.quantize_constraints((3, 24), row))
    for q in QUANTIZERS:
        assert q.format.pack > 1 or shapes.quantize_constraints((Size("m"), Size("k")), q) == ()
    symbolic = shapes.quantize_constraints((Size("m"), Size("k")), both)
    assert [concrete(c[:2], m=33, k=48) for c in symbolic] == [(48, 48), (32, 33)]


def test_constraints_are_data():
    fmt = FORMATS[2]
    shape = shapes.gemm_shape(fmt, False, (4, 40), fmt, False, (5, 41))
    assert isinstance(shape.constraints[0], shapes.Constraint) and shape[:3] == (4, 5, 40)
    with pytest.raises(ShapeError, match=rf"gemm: a \({fmt.name}\) reduces over 40 elements, b \({fmt.name}\) over 41"):
        shapes.check(shape.constraints)
    shapes.check(())


def test_scalars_are_refused():
    for call in (shapes.rows_cols, lambda s: shapes.quantize_buffers(s, MXFP8Quantizer())):
        with pytest.raises(ShapeError, match="scalar"):
            call(())
