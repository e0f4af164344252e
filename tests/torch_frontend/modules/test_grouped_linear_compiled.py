"""Grouped layers and verbs in graphs: one node forward and one backward, eager's bits, nothing compiled again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych import core
from diptych.common import CustomRecipe, MXFP8BlockScaling, MXFP8Quantizer, QuantizerRole
from diptych.torch.tensors.quantized import BUFFERS
from torch_frontend.graph.test_custom_op import nodes
from torch_frontend.grouped import GROUPS, K, N, input_for, layer, offsets_of, recipe_for, run
from torch_frontend.layer_cases import NAMED, dtype_of, same_step
from torch_frontend.tools import RECIPE_NAMES, normal, same, to_numpy

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
SPLITS = ((32, 16, 48, 32), (0, 128, 0, 0), (16, 16, 16, 16))  # of 128 rows, the last with rows in no group


def compiled(fn: Any, **kw: Any) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(fn, fullgraph=True, **{"backend": "aot_eager", **kw})


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def steps(fn: Any, model: Any, name: str, device: str = "cpu", sizes: Any = SPLITS, rows: Any = None) -> dict[str, Any]:
    """Some training steps with other sizes of groups each."""
    model.reset_scale_states()
    made = {}
    for i, splits in enumerate(sizes):
        r = 128 if rows is None else rows[i]
        x, dy = input_for(name, r, device=device) * (i + 1), normal(f"dy{i}", (r, N), dtype_of(name), device)
        groups = {"m_splits": torch.tensor(splits, device=device), "align": 16}
        made |= {f"{i} {k}": t for k, t in run(fn, model, x, recipe_for(name), dy, **groups).items()}
    return made | {k: t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k}


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_compiled_is_eager(name, device):
    model = layer(device=device)
    want = steps(model, model, name, device)
    same_step(steps(compiled(model), model, name, device), want)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_under_inductor(name, device):
    model = layer(device=device)
    want = steps(model, model, name, device)
    same_step(steps(compiled(model, backend="inductor"), model, name, device), want)


@pytest.mark.parametrize("name", (None, "fp8-delayed", "nvfp4"))
def test_forward_and_backward_are_one_node_each(name):
    model, offsets = layer(), offsets_of(GROUPS["even"][1])
    x = input_for(name or "mxfp8", 128).requires_grad_()
    with dt.autocast(enabled=name is not None, recipe=None if name is None else NAMED[name]):
        forward, backward = [
            [op.removeprefix("diptych.").partition(".")[0] for op in graph]
            for graph in nodes(lambda v, o: model(v, offsets=o, align=32), x, offsets)
        ]
    assert [op for op in forward if op not in ("update_scales", "rng_take")] == ["grouped_linear"]
    assert [op.rstrip("_") for op in backward] == ["grouped_linear_backward"]


@pytest.mark.parametrize(
    "name", ("fp8-delayed", *[pytest.param(n, marks=pytest.mark.slow) for n in (None, "fp8-block")])
)
def test_dynamic_shapes(name):
    eager, model = layer(), layer()
    fn, recipe = compiled(model, dynamic=True), None if name is None else NAMED[name]
    for rows, where in ((288, "one huge"), (160, "later"), (224, "even")):  # of more than a block of 128 each
        offsets = GROUPS[where][1]
        x, dy, groups = input_for("mxfp8", rows), normal("dy", (rows, N)), {"offsets": offsets_of(offsets), "align": 16}
        same_step(run(fn, model, x, recipe, dy, **groups), run(eager, eager, x, recipe, dy, **groups))
    assert graphs() == 1


def _mixed(role: Any) -> Any:
    return None if role.tensor == "weight" else MXFP8Quantizer()


@pytest.mark.parametrize(
    "recipe",
    (None, CustomRecipe(_mixed), MX.replace(backward_override="dequantized")),
    ids=("outside", "mixed", "dequantized"),
)
def test_high_precision(recipe):
    model, (rows, offsets, _) = layer(), GROUPS["unaligned"]
    x, dy = normal("x", (rows, K)), normal("dy", (rows, N))
    want = run(model, model, x, recipe, dy, offsets=offsets_of(offsets))
    same_step(run(compiled(model), model, x, recipe, dy, offsets=offsets_of(offsets)), want)


def test_gradients_into_main_grad():
    model = layer(fuse_wgrad_accumulation=True)
    model.weight.main_grad = torch.zeros(model.weight.shape)
    want = steps(model, model, "mxfp8")
    total = model.weight.main_grad.clone()
    model.weight.main_grad.zero_()
    same_step(steps(compiled(model), model, "mxfp8"), want)
    same(model.weight.main_grad, total)


@pytest.mark.parametrize("name", ("fp8-delayed", pytest.param("nvfp4", marks=pytest.mark.slow)))
def test_checkpoint_inside(name):
    model = layer()
    want = steps(model, model, name)

    def checkpointed(v: torch.Tensor, m_splits: torch.Tensor, align: int) -> torch.Tensor:
        return dt.checkpoint(lambda u: model(u, m_splits, align=align), v, use_reentrant=False)

    same_step(steps(compiled(checkpointed), model, name), want)


def test_sizes_as_ints():
    """They are constants of a graph."""
    model, x = layer(), normal("x", (128, K))
    fn = compiled(model)
    for splits in SPLITS[:2]:
        with dt.autocast(recipe=MX), torch.no_grad():
            same(fn(x, list(splits)), model(x, torch.tensor(splits)))


def test_a_promise_that_is_missing_is_dynamos_error():
    model, x = layer(), input_for("nvfp4", 128)
    with dt.autocast(recipe=NAMED["nvfp4"]), pytest.raises(Exception, match="rotates 16 rows"):
        compiled(model)(x, torch.tensor(SPLITS[0]))


# --- the verbs -------------------------------------------------------------------------------------------------------


def _role(name: str, tensor: str) -> Any:
    q = recipe_for(name).quantizer(QuantizerRole("grouped_linear", tensor))
    return q if not q.needs_rng else q.replace(stochastic_rounding=False)


def _verbs(name: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor, offsets: Any) -> Any:
    """All that a layer is made of, and what the stack stands for."""
    given = {"scale": torch.full((1,), 3.0)} if _role(name, "input").needs_scale else {}
    each = {k: t.expand(len(w)).contiguous() for k, t in given.items()}
    qx, qdy = dt.quantize(x, _role(name, "input"), **given), dt.quantize(dy, _role(name, "grad_output"), **given)
    qw = dt.quantize_stack(w, _role(name, "weight"), **each)
    y = dt.grouped_gemm(qx, qw, offsets, bias=bias, alpha=0.5, align=16)
    dx = dt.grouped_gemm(qdy, qw, offsets, trans_b=False, out_dtype=torch.bfloat16, align=32)
    dw = dt.grouped_gemm(qdy, qx, offsets, trans_a=True, trans_b=False, out_dtype=torch.float32, align=48)
    return y, dx, dw, dt.grouped_bias_grad(dy, offsets), qw.dequantize()


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_verbs(name):
    """The bits of the NumPy face, in graphs too."""
    x, dy, w = input_for(name, 128), normal("dy", (128, N), dtype_of(name)), normal("w", (4, N, K)) * 2
    bias, offsets = normal("b", (4, N)), offsets_of(GROUPS["even"][1])
    got = _verbs(name, x, w, dy, bias, offsets)
    for a, b in zip(compiled(_verbs)(name, x, w, dy, bias, offsets), got, strict=True):
        same(a, b)
    quantizer = _role(name, "weight")
    given = {"scale": torch.full((1,), 3.0)} if quantizer.needs_scale else {}
    stack = dt.quantize_stack(w, quantizer, **{k: t.repeat(4) for k, t in given.items()})
    for g in range(4):
        alone = dt.quantize(w[g], quantizer, **given)
        for part in BUFFERS:
            one, other = getattr(stack[g], part), getattr(alone, part)
            assert (one is None) == (other is None)
            assert one is None or same(one, other, part) is None
        same(got[4][g], alone.dequantize())
    on_numpy = {k: t.numpy() for k, t in given.items()}
    every = {k: t.repeat(4) for k, t in on_numpy.items()}
    qx, qdy = [core.quantize(to_numpy(t), _role(name, r), **on_numpy) for t, r in ((x, "input"), (dy, "grad_output"))]
    qw, at = core.quantize_stack(to_numpy(w), quantizer, **every), offsets.numpy()
    y = core.grouped_gemm(qx, qw, at, bias=to_numpy(bias), alpha=0.5, align=16, out_dtype=to_numpy(x).dtype)
    same(got[0], y)
    dw = core.grouped_gemm(qdy, qx, at, trans_a=True, trans_b=False, align=16)
    same(got[2], dw)
    same(got[3], core.grouped_bias_grad(to_numpy(dy), at))


def test_a_stack_leaves_a_graph():
    w = normal("w", (4, N, K))
    stack, want = [fn(w, MXFP8Quantizer()) for fn in (compiled(dt.quantize_stack), dt.quantize_stack)]
    same(stack.dequantize(), want.dequantize())
    assert (stack.quantizer, stack.shape, stack.dtype) == (want.quantizer, want.shape, want.dtype)


def test_verbs_refuse():
    x, w, offsets = normal("x", (64, K)), normal("w", (4, N, K)), offsets_of((0, 16, 32, 48, 64))
    q = MXFP8Quantizer()
    qx, qw = dt.quantize(x, q), dt.quantize_stack(w, q)
    assert len(qw) == 4 and len(list(qw)) == 4
    nv = dt.quantize(x.bfloat16(), _role("nvfp4", "input"))
    plain = dt.quantize(x.bfloat16(), _role("nvfp4", "input").replace(with_rht=False, with_random_sign_mask=False))
    depth = {"trans_a": True, "trans_b": False}
    cases: tuple[tuple[Any, type[Exception], str], ...] = (
        (lambda: dt.grouped_gemm(x, qw, offsets), TypeError, "a must be a QuantizedTensor"),  # type: ignore[arg-type]
        (lambda: dt.grouped_gemm(qx, qx, offsets), TypeError, "b must be a QuantizedStack"),
        (lambda: dt.grouped_gemm(qx, qw, offsets, **depth), TypeError, "b must be a QuantizedTensor"),
        (lambda: dt.grouped_gemm(qx, qw, offsets[1:]), ValueError, "3 groups"),
        (lambda: dt.grouped_gemm(qx, qw, offsets.long()), TypeError, "offsets must be int32"),
        (lambda: dt.grouped_gemm(qx, qw, offsets + 16), ValueError, "outside of the tensor's 64 rows"),
        (lambda: dt.grouped_gemm(qx, qw, offsets, align=128), ValueError, "no multiple of align"),
        (lambda: dt.grouped_gemm(qx, qw, offsets, align=-1), ValueError, "at least 1"),
        (lambda: dt.grouped_gemm(qx, qw, offsets, bias=x[:4]), ValueError, "bias"),
        (lambda: dt.grouped_gemm(qx, qw, offsets, fast_accum=True), ValueError, "fast_accum|per-tensor"),
        (lambda: dt.grouped_gemm(nv, plain, offsets, **depth), ValueError, "do not rotate alike"),
        (lambda: dt.grouped_gemm(nv, nv, offsets, **depth), ValueError, "align must be 16"),
        (lambda: dt.grouped_gemm(qx, qw, offsets, bias=w[:, :, 0].requires_grad_()), NotImplementedError, "grad"),
        (lambda: dt.quantize_stack(w.clone().requires_grad_(), q), NotImplementedError, "grad"),
        (lambda: dt.quantize_stack(w[0, 0], q), ValueError, "stack"),
        (lambda: dt.quantize_stack(w, _role("fp8-delayed", "weight")), TypeError, "scale"),
        (lambda: dt.quantize_stack(w, _role("fp8-delayed", "weight"), scale=torch.ones(3)), ValueError, "each tensor"),
        (lambda: dt.grouped_bias_grad(x[0, 0], offsets), ValueError, "at least one dimension"),
        (lambda: dt.grouped_bias_grad(x.double(), offsets), TypeError, "dy"),
        (lambda: qw[4], IndexError, "index 4"),
    )
    for fn, error, match in cases:
        with pytest.raises(error, match=match):
            fn()
            pytest.fail(match)
    bad = torch.compile(lambda o: dt.grouped_gemm(qx, qw, o), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="3 groups"):
        bad(offsets[1:])


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", (None, *RECIPE_NAMES))
def test_nobody_waits_for_the_device(name, cuda):
    model, recipe = layer(device=cuda), recipe_for(name or "fp8-current")
    dy = normal("dy", (128, N), dtype_of(recipe), cuda)
    x = input_for(name or "mxfp8", 128, device=cuda).requires_grad_()
    sizes = [torch.tensor(s, device=cuda) for s in SPLITS]

    def step(m_splits: torch.Tensor) -> None:
        with dt.autocast(recipe=recipe, enabled=name is not None):
            y = model(x, m_splits, align=16)
        y.backward(dy)

    step(sizes[0])  # makes states
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for m_splits in sizes:
            step(m_splits)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("name", (None, *RECIPE_NAMES))
def test_sizes_that_lie_count_as_far_as_they_go(name, cuda):
    model, x = layer(device=cuda).eval(), input_for(name or "mxfp8", 128, device=cuda)
    with torch.no_grad(), dt.autocast(recipe=recipe_for(name or "mxfp8"), enabled=name is not None):
        for lie, honest in (((64, 4096, 16, 16), [64, 64, 0, 0]), ((32, -16, 64, 16), [32, 0, 48, 16])):
            same(model(x, torch.tensor(lie, device=cuda), align=16), model(x, honest, align=16))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_high_precision_on_cuda(dtype, cuda):
    """Where torch's grouped product runs, and where each group masks its own."""
    for k, n in ((64, 32), (60, 36)):
        model = layer(k, n, device=cuda, dtype=getattr(torch, dtype))
        for rows, offsets, _ in GROUPS.values():
            x, dy = normal("x", (rows, k), dtype, cuda), normal("dy", (rows, n), dtype, cuda)
            x[: offsets[0]], dy[offsets[-1] :] = float("nan"), float("inf")  # in no group
            got = run(model, model, x, None, dy, offsets=offsets_of(offsets, cuda))
            on_cpu = layer(k, n, dtype=getattr(torch, dtype))
            want = run(on_cpu, on_cpu, x.cpu(), None, dy.cpu(), offsets=offsets_of(offsets))
            for key in want:
                close = {"rtol": 2e-2, "atol": 0.5} if dtype == "bfloat16" else {"rtol": 1e-3, "atol": 5e-2}
                torch.testing.assert_close(got[key].cpu(), want[key], **close)
