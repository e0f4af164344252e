"""Rows quantized as they move: the bits of moving them first, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.permute.test_permute import top_k
from core.permute.test_permute_misuse import lie
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import cases
import diptych.torch as dt
from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from diptych.core import reset_calls
from diptych.torch.tensors.quantized import BUFFERS, QuantizedTensor
from torch_frontend.functional.test_permute_quantized import in_mode
from torch_frontend.graph.test_custom_op import nodes
from torch_frontend.layer_cases import slow
from torch_frontend.tools import ALL, USAGES, calls, named, normal, oracle_of, rng_for, same, same_quantized

pytestmark = pytest.mark.sampled

T, E, K = 37, 5, 144  # no whole blocks of tokens, and of columns in most formats
MODES = ("eager", "compiled", slow("inductor"))
NAMES = [
    pytest.param(n, mode, marks=[pytest.mark.slow] if mode == "inductor" or (mode == "compiled" and " " in n) else [])
    for n in ALL
    for mode in ("eager", "compiled", "inductor")
]


def map_for(name: str, device: str = "cpu", rows: int | None = None, tokens: int = T) -> dt.RowMap:
    """Each expert's region a multiple of 16, with absent rows in all and behind the last. `rows`: too few drop some."""
    ids = torch.from_numpy(top_k(cases.rng_for(f"map-{name}"), tokens, E, 2)).to(device)
    return dt.moe_map(ids, E, map_type="index", num_out_tokens=rows, align_size=16)


def given_for(quantizer: Quantizer, device: str = "cpu") -> dict[str, torch.Tensor]:
    scale = torch.full((1,), 2.0, device=device) if quantizer.needs_scale else None
    given = {"scale": scale, "rng": rng_for(quantizer, device)}
    return {k: t for k, t in given.items() if t is not None}


def same_buffers(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert isinstance(got, QuantizedTensor) and got.quantizer == want.quantizer
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    for part in BUFFERS:
        a, b = getattr(got, part), getattr(want, part)
        assert (a is None) == (b is None), part
        assert a is None or same(a, b, part) is None


def two_steps(x: torch.Tensor, row_map: dt.RowMap, quantizer: Quantizer, **given: Any) -> QuantizedTensor:
    return dt.quantize(dt.moe_permute(x, row_map)[0], quantizer, **given)


@pytest.mark.parametrize("name, mode", NAMES)
def test_bits_and_gradients(name, mode, device):
    """Every format with every option; both copies, or one of them, in turns."""
    quantizer = named(name)
    fn = in_mode(dt.moe_permute_and_quantize, mode)
    for turn, rows in enumerate((None, 48)):
        x, m = normal(name, (T, K), "bfloat16", device), map_for(name, device, rows)
        rowwise, columnwise = USAGES[(turn + len(name)) % 3] if turn else USAGES[0]
        q, given = quantizer.with_usage(rowwise=rowwise, columnwise=columnwise), given_for(quantizer, device)
        results = []
        for call in (two_steps, fn):
            v = x.clone().requires_grad_()
            out = call(v, m, q, **given)
            dy = normal("dy", (len(m.row_source), K), "bfloat16", device)
            out.backward(dy)
            results.append((out.detach(), v.grad))
        (want, dx), (got, grad) = results
        same_buffers(got, want)
        assert type(grad) is torch.Tensor
        same(grad, dx, "gradient")
        if mode == "eager" and device == "cpu":
            same_quantized(got, oracle_of(q, dt.moe_permute(x, m)[0], **given))


@pytest.mark.cuda
@pytest.mark.parametrize("rows, width", ((65392, 2056), (65536, 2048), (4096, 1152), (66048, 896)))
@pytest.mark.parametrize("block", (Float8BlockQuantizer(), Float8BlockQuantizer(block_scaling_dim=2), MXFP8Quantizer()))
def test_many_tiles_of_rows(block, rows, width, cuda):
    """More tiles than run at once, in whole vectors of scales or the last of them cut; some hold NaN."""
    ids = torch.rand(2000, 64, device=cuda).topk(32, 1).indices.int()
    m = dt.moe_map(ids, 64, map_type="index", num_out_tokens=rows, align_size=16)
    x = normal("walk", (2000, width), "bfloat16", cuda)
    x[::7, ::5] = torch.nan
    x[1 : len(x) // 2, :] = normal("finite", (len(x) // 2 - 1, width), "bfloat16", cuda)
    for rowwise, columnwise in USAGES:
        q = block.with_usage(rowwise=rowwise, columnwise=columnwise)
        same_buffers(dt.moe_permute_and_quantize(x, m, q), two_steps(x, m, q))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_given_amaxes_and_dtypes(dtype):
    x, m, rows = (
        normal("x", (3, 20, K), dtype),
        map_for("given", tokens=60),
        map_for("given", tokens=60).row_source.numel(),
    )
    one, each = torch.full((1,), 7.0), torch.rand(rows) + 3
    for quantizer, given in (
        (Float8CurrentScalingQuantizer(), {"amax": one}),
        (NVFP4Quantizer(), {"amax": one, "columnwise_amax": one * 2}),
        (NVFP4Quantizer(row_scaled_nvfp4=True), {"amax": each, "columnwise_amax": one}),
        (Float8Quantizer(), {"scale": one}),
    ):
        same_buffers(dt.moe_permute_and_quantize(x, m, quantizer, **given), two_steps(x, m, quantizer, **given))


@pytest.mark.parametrize("mode", MODES)
def test_probabilities_move_beside(mode, device):
    x, m = normal("x", (T, K), "bfloat16", device), map_for("probs", device, 64)
    probs = torch.rand(T, 2, device=device)
    dy, dp = normal("dy", (64, K), "bfloat16", device), torch.rand(64, device=device)

    def fused(x: torch.Tensor, probs: torch.Tensor) -> Any:
        return dt.moe_permute_and_quantize(x, m, MXFP8Quantizer(), probs=probs)

    def composed(x: torch.Tensor, probs: torch.Tensor) -> Any:
        out, moved, _ = dt.moe_permute_with_probs(x, probs, m)
        return dt.quantize(out, MXFP8Quantizer()), moved

    for wanted in ((True, True), (False, True), (True, False)):
        results = []
        for fn in (composed, in_mode(fused, mode)):
            v, p = [t.clone().requires_grad_(want) for t, want in zip((x, probs), wanted, strict=True)]
            q, moved = fn(v, p)
            outs = [t for t, want in zip((q, moved), wanted, strict=True) if want]
            torch.autograd.backward(outs, [t for t, want in zip((dy, dp), wanted, strict=True) if want])
            results.append((q.detach(), moved.detach(), v.grad, p.grad))
        same_buffers(results[1][0], results[0][0])
        for got, want in zip(results[1][1:], results[0][1:], strict=True):
            assert (got is None) == (want is None)
            assert got is None or same(got, want) is None


def test_permuted_rows_are_never_stored():
    x, m = normal("x", (T, K)).requires_grad_(), map_for("calls")
    reset_calls()
    q = dt.moe_permute_and_quantize(x, m, MXFP8Quantizer())
    assert (calls("quantize"), calls("permute")) == (1, 0)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dt.moe_permute_and_quantize(x, m, MXFP8Quantizer())
    assert [t.data_ptr() for t in saved] == [m.row_id_map.data_ptr()]
    q.backward(torch.ones(q.shape))
    assert calls("unpermute") == 1


def test_one_node_each():
    m, probs = map_for("nodes"), torch.rand(T, 2)
    for more in ({}, {"probs": probs}):

        def fn(x: torch.Tensor, m: dt.RowMap, more: Any = more) -> torch.Tensor:
            q = dt.moe_permute_and_quantize(x, m, MXFP8Quantizer(), **more)
            return (q[0] if more else q).dequantize()

        forward, backward = [
            [op.removeprefix("diptych.").partition(".")[0] for op in graph]
            for graph in nodes(fn, normal("x", (T, K)).requires_grad_(), m)
        ]
        assert forward == ["moe_permute_quantize", "dequantize"] and backward == ["moe_permute_quantize_backward"]


def test_one_graph_for_all_sizes():
    torch._dynamo.reset()
    counters.clear()
    fn = torch.compile(dt.moe_permute_and_quantize, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (24, 37, 60):
        x, m = normal("x", (tokens, K)), map_for("dynamic", tokens=tokens)
        same_buffers(fn(x, m, MXFP8Quantizer()), two_steps(x, m, MXFP8Quantizer()))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", [n for n in ALL if " " not in n])
def test_fake_tensors(name):
    """Shapes and dtypes of all buffers, and what is refused, without memory."""
    quantizer, m, x = named(name), map_for("fake"), normal("x", (T, K), "bfloat16")
    given = given_for(quantizer)
    want = two_steps(x, m, quantizer, **given)
    with FakeTensorMode() as mode:
        faked: Any = [mode.from_tensor(t) for t in m]
        there = {k: mode.from_tensor(t) for k, t in given.items()}
        q = dt.moe_permute_and_quantize(mode.from_tensor(x), dt.RowMap(*faked), quantizer, **there)
        for part in BUFFERS:
            a, b = getattr(q, part), getattr(want, part)
            assert (a is None) == (b is None)
            assert a is None or (a.shape, a.dtype) == (b.shape, b.dtype)
        with pytest.raises(ValueError, match="a row for each of row_map's tokens"):
            dt.moe_permute_and_quantize(mode.from_tensor(x)[1:], dt.RowMap(*faked), quantizer, **there)


class Own(MXFP8Quantizer):
    def quantize_impl(self, x: Any, quantize: Any) -> Any:
        return quantize(x * 2, MXFP8Quantizer())


def test_a_quantizer_of_the_users_own():
    x, m, probs = normal("x", (T, K)).requires_grad_(), map_for("own"), torch.rand(T, 2)
    got, moved = dt.moe_permute_and_quantize(x, m, Own(), probs=probs)
    same(got.detach().dequantize(), two_steps(x.detach() * 2, m, MXFP8Quantizer()).dequantize())
    same(moved, dt.moe_permute_with_probs(x.detach(), probs, m)[1])
    got.backward(torch.ones(got.shape))
    same(x.grad, 2 * dt.moe_unpermute(torch.ones(got.shape), m))


@pytest.mark.parametrize("name", [n for n in ALL if " " not in n])
def test_maps_that_lie(name, device):
    """Entries that name no row or no token are absent; where both halves contradict each other, nothing breaks."""
    quantizer, x = named(name), normal("x", (T, K), "bfloat16", device)
    given, m = given_for(quantizer, device), map_for("wild", device, 48)
    wild = torch.tensor([-7, 48, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    to = torch.where(m.row_id_map < 0, wild[torch.arange(T * 2, device=device).view(T, 2) % 4], m.row_id_map)
    assert not torch.equal(to, m.row_id_map)
    want = two_steps(x, m, quantizer, **given)
    same_buffers(dt.moe_permute_and_quantize(x, m._replace(row_id_map=to), quantizer, **given), want)
    for turn in range(4):
        liar = lie(f"torch-{turn}", tokens=T, slots=(3, 1, 40, 300)[turn], rows=48)
        maps = [torch.from_numpy(t).to(device) for t in (liar.row_id_map, liar.row_source)]
        both = m._replace(row_id_map=maps[0], row_source=maps[1])
        v = x.clone().requires_grad_()
        out = dt.moe_permute_and_quantize(v, both, quantizer, **given)
        assert out.shape == (48, K)
        dy = normal("dy", (48, K), "bfloat16", device)
        out.backward(dy)
        same(v.grad, dt.moe_unpermute(dy, maps[0]))


@pytest.mark.parametrize("tokens, rows, width", ((0, 16, 32), (5, 16, 0), (16, 16, 32)))
def test_nothing_to_move(tokens, rows, width):
    ids = torch.full((tokens, 2), -1, dtype=torch.int32)
    m, x = dt.moe_map(ids, E, map_type="index", num_out_tokens=rows), normal("x", (tokens, width))
    for quantizer in (MXFP8Quantizer(), Float8CurrentScalingQuantizer(), NVFP4Quantizer()):
        v = x.clone().requires_grad_()
        out = dt.moe_permute_and_quantize(v, m, quantizer)
        same_buffers(out.detach(), dt.quantize(torch.zeros(rows, width), quantizer))
        out.backward(torch.ones(rows, width))
        same(v.grad, torch.zeros(tokens, width))


X, MAP, MX = torch.ones(T, K), map_for("misuse"), MXFP8Quantizer()
verb: Callable[..., Any] = dt.moe_permute_and_quantize


def test_bad_calls():
    rht, bad = NVFP4Quantizer(with_rht=True), MAP._replace(row_source=MAP.row_source.long())
    odd = dt.moe_map(torch.ones(T, 1, dtype=torch.bool))
    doubles = MAP.row_source.to(torch.float64)
    misuse: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
        (lambda: verb(3, MAP, MX), TypeError, "moe_permute_and_quantize: inp must be a torch.Tensor, got int"),
        (lambda: verb(X, MAP, 3), TypeError, "moe_permute_and_quantize: quantizer must be"),
        (lambda: verb(X, MAP.row_id_map, MX), TypeError, "row_map must be a RowMap, got Tensor"),
        (lambda: verb(X, MAP._replace(row_id_map=doubles), MX), TypeError, "row_id_map must be int32, got float64"),
        (lambda: verb(X, bad, MX), TypeError, "row_source must be int32, got int64"),
        (lambda: verb(X, MAP._replace(row_source=MAP.row_id_map), MX), ValueError, r"row_source must be \[rows\]"),
        (lambda: verb(X[1:], MAP, MX), ValueError, "inp must have a row for each of row_map's tokens, 37"),
        (lambda: verb(X[0], MAP, MX), ValueError, r"inp must be \[\.\.\., H\]"),
        (lambda: verb(X.double(), MAP, MX), TypeError, "inp must be float32, bfloat16 or float16"),
        (lambda: verb(X.to("meta"), MAP, MX), ValueError, "row_id_map is on cpu"),
        (lambda: verb(dt.quantize(X, MX), MAP, MX), TypeError, "inp is quantized; moe_permute moves it"),
        (lambda: verb(X, MAP, Float8Quantizer()), TypeError, "pass scale="),
        (lambda: verb(X, MAP, MX, rng=dt.rng_state(0)), ValueError, "rng is for stochastic rounding"),
        (lambda: verb(X, MAP, MX, amax=X[0, :1]), ValueError, "takes one per block"),
        (lambda: verb(X, MAP, NVFP4Quantizer(), amax=X[0, :1]), ValueError, "columnwise_amax .* is missing"),
        (lambda: verb(X, MAP, rht), TypeError, "takes bfloat16 alone"),
        (lambda: verb(X.bfloat16(), odd, rht), ValueError, "number of rows .* must be a multiple of 16"),
        (lambda: verb(X[:, :40], MAP, NVFP4Quantizer()), ValueError, "16"),
        (lambda: verb(X, MAP, MX, probs=X), ValueError, r"probs must be \[37, 2\]"),
        (lambda: verb(X, MAP, MX, probs=MAP.row_id_map), TypeError, "probs must be float32"),
        (
            lambda: verb(X, MAP, Float8Quantizer(), scale=torch.ones(1, requires_grad=True)),
            NotImplementedError,
            "its amaxes and scale",
        ),
    )
    reset_calls()
    for call, error, match in misuse:
        with pytest.raises(error, match=match):
            call()
            pytest.fail(match)
    assert calls("permute") == 0
    x = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(verb(x, MAP, MX).dequantize().sum(), x, create_graph=True)


@pytest.mark.cuda
def test_nobody_waits_for_the_device(cuda):
    x, m = normal("x", (T, K), "bfloat16", cuda).requires_grad_(), map_for("wait", cuda)
    for name in ALL:
        quantizer = named(name)
        given = given_for(quantizer, cuda)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = dt.moe_permute_and_quantize(x, m, quantizer, **given)
            out.backward(torch.ones(out.shape, dtype=x.dtype, device=cuda))
        finally:
            torch.cuda.set_sync_debug_mode("default")
