"""The oracle of what ranks compute together, against numbers computed by hand and against each rank's own part."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cases
import oracle
from oracle import parallel

f32 = np.float32
BF16 = oracle.BF16
SIZES = (1, 2, 4)
# The formats and, where amaxes are of squares, rows or rotated columns, their variants.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"fmt": name} for name in oracle.FORMATS},
    "mxfp8 32x32": {"fmt": "mxfp8_e4m3", "square": True},
    "nvfp4 16x16": {"fmt": "nvfp4", "square": True},
    "nvfp4 rows": {"fmt": "nvfp4", "row_amax": True},
    "nvfp4 rotated": {"fmt": "nvfp4", "rht": True, "rht_signs": True},
    "fp8 pow2": {"fmt": "fp8_e4m3_tensor", "pow2": True, "eps": 0.5},
}
SQUARE = [k for k in KINDS if "x32" in k or "x16" in k or "tensor" in k or "128x128" in k]


def tensor(name: str, rows: int, cols: int) -> np.ndarray:
    """bfloat16 whose blocks, rows and shards have unlike amaxes."""
    rng = cases.rng_for(name)
    return (rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-6, 7, (rows, 1)))).astype(BF16)


def same(got: Any, want: Any) -> None:
    if dataclasses.is_dataclass(want):
        for field in dataclasses.fields(want):
            same(getattr(got, field.name), getattr(want, field.name))
    elif isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()
    else:
        assert got == want


# --- A tensor that is cut over ranks ---


def test_per_tensor_scale_is_the_whole_tensors():
    """448 needs the scale 1; rank 0's own amax would give 448 / 2."""
    ranks = parallel.quantize_cut([np.array([[1, -2]], f32), np.array([[448, 0.5]], f32)], "fp8_e4m3_tensor")
    for part, row in zip(ranks, ([0x38, 0xC0], [0x7E, 0x30]), strict=True):
        assert part.rowwise_data.tolist() == [row] and part.columnwise_data.tolist() == [[row[0]], [row[1]]]
        assert part.amax == 448 and part.rowwise_scale_inv == part.columnwise_scale_inv == 1
    whole = parallel.join([part.copy(columnwise=True) for part in ranks])
    assert whole.data.tolist() == [[0x38, 0x7E], [0xC0, 0x30]]  # concatenated along axis 1, not as bytes lie


def test_blocks_of_four_ranks():
    """MXFP8: rank r holds 32 rows of 7 * 2^r, whose scale is 2^(r - 6): 448 / 2^6 = 7, so its bytes are 448."""
    shards = [np.full((32, 64), 7 * 2.0**r, f32) for r in range(4)]
    for r, part in enumerate(parallel.quantize_cut(shards, "mxfp8_e4m3")):
        same(part.rowwise_data, np.full((32, 64), 0x7E, np.uint8))
        same(part.rowwise_scale_inv, np.full((32, 2), 127 - 6 + r, np.uint8))
        same(part.columnwise_data, np.full((32, 64), 0x7E, np.uint8))
        same(part.columnwise_scale_inv, np.full((1, 64), 127 - 6 + r, np.uint8))


def test_two_level_scales_are_relative_to_the_whole_tensor():
    """amax 2688 makes S = 1, so a block's scale is amax / 6: 1 where all is 6. Rank 0 alone would store 448."""
    shards = [np.full((16, 16), 6, f32), np.full((16, 16), 2688, f32)]
    for part, scale in zip(parallel.quantize_cut(shards, "nvfp4"), (0x38, 0x7E), strict=True):
        same(part.rowwise_data, np.full((16, 8), 0x77, np.uint8))
        same(part.rowwise_scale_inv, np.full((16, 1), scale, np.uint8))
        same(part.columnwise_scale_inv, np.full((16, 1), scale, np.uint8))
        assert part.amax == part.columnwise_amax == 2688


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_what_its_rank_quantizes_with_the_amaxes_of_all(kind, dim):
    options = dict(KINDS[kind])
    fmt = oracle.FORMATS[options.pop("fmt")]
    unit = fmt.block_cols or 6
    for size in SIZES:
        shape = (size * unit, 2 * unit) if dim == 0 else (unit, size * unit)
        x = tensor(f"{kind} {dim} {size}", *shape)
        whole, shards = oracle.quantize(x, fmt, **options), np.split(x, size, dim)
        given = {}
        if fmt.one_scale:
            given["amax"] = max(oracle.amax(s) for s in shards)
        elif fmt.rule == "two_level":
            rotated = {k: v for k, v in options.items() if "rht" in k}
            given["columnwise_amax"] = max(oracle.columnwise_amax(s, **rotated) for s in shards)
            given["amax"] = max(oracle.amax(s) for s in shards)
        ranks = parallel.quantize_cut(shards, fmt, dim, **options)
        for rank, (part, shard) in enumerate(zip(ranks, shards, strict=True)):
            if "row_amax" in options:
                rows = [oracle.amax(s, row_amax=True) for s in shards]
                given["amax"] = rows[rank] if dim == 0 else np.max(rows, axis=0)
            same(part, oracle.quantize(shard, fmt, **options, **given))
        for columnwise in (False, True):
            same(parallel.join([part.copy(columnwise) for part in ranks], dim), whole.copy(columnwise))


def test_noise_counts_the_whole_tensors_elements():
    x, rng = tensor("noise", 64, 32), oracle.rng_words(5, 9)
    whole, own = oracle.quantize(x, "nvfp4", rng=rng), oracle.quantize(x[32:], "nvfp4", rng=rng)
    part = parallel.quantize_cut([x[:32], x[32:]], "nvfp4", rng=rng)[1]
    same(part.rowwise_data, whole.rowwise_data[32:])
    same(part.columnwise_data, np.ascontiguousarray(whole.columnwise_data[:, 16:]))
    assert not np.array_equal(part.rowwise_data, own.rowwise_data)


@pytest.mark.parametrize(
    "kind, shape, dim, columnwise, fits",
    [
        ("fp8_e4m3_tensor", (6, 5), 0, True, True),
        ("fp8_e4m3_tensor", (5, 6), 0, True, False),
        ("fp8_e4m3_1x128", (2, 128), 0, False, True),  # rows are no axis of its blocks ..
        ("fp8_e4m3_1x128", (128, 128), 0, True, False),  # .. but of the columnwise copy's
        ("fp8_e4m3_1x128", (128, 128), 1, False, False),
        ("fp8_e4m3_128x128", (128, 128), 0, False, False),
        ("fp8_e4m3_128x128", (256, 100), 0, True, True),  # ragged, but not along the cut
        ("mxfp8_e4m3", (32, 32), 0, True, False),
        ("mxfp8_e4m3", (2, 32), 0, False, True),
        ("mxfp8 32x32", (2, 32), 0, False, False),  # its rows share scales
        ("mxfp8 32x32", (64, 32), 0, True, True),
        ("nvfp4", (16, 16), 0, True, False),
        ("nvfp4", (2, 16), 0, False, True),
        ("nvfp4 16x16", (16, 16), 0, False, False),
        ("nvfp4", (16, 48), 1, False, False),
    ],
)
def test_a_block_is_never_cut(kind, shape, dim, columnwise, fits):
    shards = np.array_split(tensor(kind, *shape), 2, dim)
    if fits:
        assert len(parallel.quantize_cut(shards, dim=dim, columnwise=columnwise, **KINDS[kind])) == 2
    else:
        with pytest.raises(ValueError, match="not 2 times whole blocks"):
            parallel.quantize_cut(shards, dim=dim, columnwise=columnwise, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_one_gathered_copy_gives_the_other_where_they_share_amaxes(kind):
    options = dict(KINDS[kind])
    fmt, square = oracle.FORMATS[options["fmt"]], options.get("square", False)
    unit = fmt.block_cols or 6
    q = oracle.quantize(tensor(kind, 2 * unit, 4 * unit), **options)
    assert parallel.one_copy_is_gathered(fmt, square) == (kind in SQUARE or kind == "fp8 pow2")
    if parallel.one_copy_is_gathered(fmt, square):
        same(parallel.columnwise_of(q.copy(), square=square), q.copy(columnwise=True))
    else:
        with pytest.raises(AssertionError, match="never made from the other"):
            parallel.columnwise_of(q.copy(), square=square)


# --- Sums over ranks ---


def test_partials_are_added_in_rank_order_and_rounded_once():
    one, small = np.ones(1, f32), np.full(1, 2.0**-24, f32)
    assert parallel.sum_partials([one, small, small]) == 1  # each tie goes to the even 1
    assert parallel.sum_partials([small, small, one]) == 1 + 2.0**-23
    assert np.signbit(parallel.sum_partials([np.full(1, -0.0, f32)] * 2))  # nothing is added to rank 0's
    # bfloat16 has 8 bits. 1 + 2^-8 would tie to 1, and 1 + 2^-8 again; in float32 both stay.
    one, small = np.ones(1, BF16), np.full(1, 2.0**-8, BF16)
    assert parallel.sum_partials([one, small], bias=small).astype(f32) == 1 + 2.0**-7


def test_gradients_of_microbatches():
    """bfloat16: 256 + 1 ties to 256 twice, while 1 + 1 + 256 = 258 is kept."""
    large, one = np.full(1, 256, BF16), np.ones(1, BF16)
    assert parallel.sum_gradients([large, one, one], average=False) == large
    assert parallel.sum_gradients([one, one, large], average=False).astype(f32) == 258
    assert parallel.sum_gradients([one, np.full(1, 512, BF16)]).astype(f32) == 256  # 513 ties to 512
    same(parallel.sum_gradients([one]), one)


@pytest.mark.parametrize("dtype", [f32, BF16])
@pytest.mark.parametrize("average", [False, True])
def test_gradients_in_any_order_keep_the_bound(dtype, average):
    gradients = [tensor(f"gradient {r}", 32, 32).astype(dtype) * np.asarray(1.37, dtype) for r in range(4)]
    exact, bound = parallel.sum_gradients_tolerance(gradients, average=average)
    results = [parallel.sum_gradients(order, average=average) for order in itertools.permutations(gradients)]
    pairs = [parallel.sum_gradients(gradients[i : i + 2], average=average) for i in (0, 2)]
    results.append(parallel.sum_gradients(pairs, average=average))  # a tree
    worst = max((np.abs(r.astype(np.float64) - exact) / bound).max() for r in results)
    assert 0.2 < worst <= 1
    assert len({r.tobytes() for r in results}) > 1
    same(*(parallel.sum_gradients(g, average=average) for g in (gradients[:2], gradients[1::-1])))


# --- Linear layers ---


def test_a_row_parallel_product_by_hand():
    """Each rank's 15 * 15 + 15 * 15 + 1 = 451 is a tie of bfloat16 that goes to 452; 904 - 1 = 903 goes to 904. At once
    it would be 902 - 1 = 901, which goes to 900."""
    row = np.array([[15, 15, 1] * 2], f32)
    x, w = (oracle.quantize(row, "fp8_e4m3_tensor", scale=1.0).copy() for _ in range(2))
    bias = np.full(1, -1, BF16)
    assert parallel.row_forward(x, w, 2, bias, BF16).astype(f32) == 904
    assert parallel.row_forward(x, w, 1, bias, BF16).astype(f32) == 900


def test_a_column_parallel_layer_by_hand():
    """w = (2, 3), a row on each rank, x = 4: y = (8 + 1, 12 - 1); dy = (1, 5): dx = 2 + 15, dw = (4, 20)."""
    x, w, dy = (oracle.quantize(np.array(v, f32), "fp8_e4m3_tensor", scale=1.0) for v in ([[4]], [[2], [3]], [[1, 5]]))
    assert [y.tolist() for y in parallel.column_forward(x.copy(), w.copy(), 2, np.array([1, -1], f32))] == [
        [[9]],
        [[11]],
    ]
    dx, dw = parallel.column_backward(dy, x.copy(columnwise=True), w.copy(columnwise=True), 2)
    assert dx.tolist() == [[17]] and [d.tolist() for d in dw] == [[[4]], [[20]]]


@dataclasses.dataclass
class Layer:
    """The operands of a linear layer, quantized as whole tensors, and each rank's own parts of them."""

    kind: str
    size: int
    shape: tuple[int, int, int]  # M, N, K
    dtype: Any

    def __post_init__(self) -> None:
        m, n, k = self.shape
        shapes = {"x": (m, k), "w": (n, k), "dy": (m, n)}
        self.values = {t: tensor(f"{self.kind} {self.size} {t}", *s) for t, s in shapes.items()}
        self.whole = {t: oracle.quantize(v, **KINDS[self.kind]) for t, v in self.values.items()}
        self.bias = tensor("bias", 1, n)[0]

    def parts(self, name: str, dim: int) -> list[oracle.Quantized]:
        return parallel.quantize_cut(np.split(self.values[name], self.size, dim), dim=dim, **KINDS[self.kind])

    def product(self, a: Any, b: Any, columnwise: tuple[bool, bool], bias: Any = None) -> np.ndarray:
        return oracle.gemm_cpu(a.copy(columnwise[0]), b.copy(columnwise[1]), bias=bias, out_dtype=self.dtype)

    def holds(self, got: np.ndarray, of: str, columnwise: tuple[bool, bool], dim: int, bias: Any = None) -> None:
        """Holds a product over a cut K to each rank's, added here, and to one process's product of the same K."""
        a, b = of.split()
        partials = [
            self.product(p, q, columnwise) for p, q in zip(self.parts(a, 1), self.parts(b, dim), strict=True)
        ]  # fmt: skip
        total = partials[0].astype(f32)
        for rank in range(1, self.size):
            total += partials[rank].astype(f32)
        if bias is not None:
            total += bias.astype(f32)
        same(got, total.astype(self.dtype))
        copies = self.whole[a].copy(columnwise[0]), self.whole[b].copy(columnwise[1])
        bound = oracle.gemm_tolerance(*copies, bias=bias, out_dtype=self.dtype)
        for p in partials:  # their roundings, and those of sums that are not larger than all of them together
            bound += 2 * self.size * np.abs(p.astype(np.float64)) * float(ml_dtypes.finfo(self.dtype).eps)
        assert (np.abs(got.astype(np.float64) - oracle.gemm_float64(*copies, bias=bias)) <= bound).all()


LAYERS = [k for k in KINDS if k not in ("nvfp4 rows", "fp8 pow2") and "e5m2" not in k]
FPROP, DGRAD, WGRAD = (False, False), (False, True), (True, True)


@pytest.mark.parametrize("dtype", [f32, BF16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", LAYERS)
def test_column_parallel_layers(kind, size, dtype):
    """y and dw have one device's bits, and one rank's dx too."""
    unit = oracle.FORMATS[KINDS[kind]["fmt"]].block_cols or 6
    layer = Layer(kind, size, (unit, size * unit, unit), dtype)
    x, w, dy = (layer.whole[t] for t in ("x", "w", "dy"))
    y = parallel.column_forward(x.copy(), w.copy(), size, layer.bias, dtype)
    dx, dw = parallel.column_backward(dy, x.copy(columnwise=True), w.copy(columnwise=True), size, dtype, dtype)
    same(np.concatenate(y, 1), layer.product(x, w, FPROP, layer.bias))
    same(np.concatenate(dw), layer.product(dy, x, WGRAD))
    layer.holds(dx, "dy w", DGRAD, 0)
    if size == 1:
        same(dx, layer.product(dy, w, DGRAD))


@pytest.mark.parametrize("dtype", [f32, BF16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", LAYERS)
def test_row_parallel_layers(kind, size, dtype):
    """dx and dw have one device's bits, and one rank's y too."""
    unit = oracle.FORMATS[KINDS[kind]["fmt"]].block_cols or 6
    layer = Layer(kind, size, (unit, unit, size * unit), dtype)
    x, w, dy = (layer.whole[t] for t in ("x", "w", "dy"))
    y = parallel.row_forward(x.copy(), w.copy(), size, layer.bias, dtype)
    dx, dw = parallel.row_backward(dy, x.copy(columnwise=True), w.copy(columnwise=True), size, dtype, dtype)
    same(np.concatenate(dx, 1), layer.product(dy, w, DGRAD))
    same(np.concatenate(dw, 1), layer.product(dy, x, WGRAD))
    if size == 1:
        same(y, layer.product(x, w, FPROP, layer.bias))
    else:
        layer.holds(y, "x w", FPROP, 1, layer.bias)


def test_sequence_parallel_input_has_the_amax_of_all_rows():
    """Rows of four ranks, gathered as bytes and scales, are the product's operand as one process quantizes it."""
    shards, w = [tensor(f"rows {r}", 2, 8) for r in range(4)], oracle.quantize(tensor("w", 8, 8), "fp8_e4m3_tensor")
    gathered = parallel.join([part.copy() for part in parallel.quantize_cut(shards, "fp8_e4m3_tensor")])
    want = oracle.quantize(np.concatenate(shards), "fp8_e4m3_tensor").copy()
    same(*(np.concatenate(parallel.column_forward(x, w.copy(), 2), 1) for x in (gathered, want)))
    with pytest.raises(AssertionError, match="scales of their own"):
        parallel.join([oracle.quantize(s, "fp8_e4m3_tensor").copy() for s in shards])
