"""The MoE permutation under torch.compile(fullgraph=True): the eager bits, one graph for all sizes, retained graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from core.permute.test_permute import CHUNKS
from torch._dynamo.utils import counters

import diptych.torch as dt

pytestmark = pytest.mark.sampled

E, H = 5, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (-1, 4, pytest.param(0, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow))
slow = pytest.mark.slow
BACKENDS = ("aot_eager", pytest.param("inductor", marks=slow))


class Inputs:
    """The inputs of the functions, as tensors of a region's own, equal for equal sizes."""

    def __init__(self, tokens: int, dtype: torch.dtype, device: str) -> None:
        g = torch.Generator().manual_seed(tokens)
        self.x = torch.randn(tokens, H, generator=g).to(device, dtype).requires_grad_()
        self.probs = torch.rand(tokens, E, generator=g).to(device).requires_grad_()
        self.line = torch.rand(tokens, generator=g).to(device).requires_grad_()
        self.mask = (torch.rand(tokens, E, generator=g) < 0.4).to(device)
        self.ids = torch.randint(-1, E, (tokens, 2), generator=g).to(device)
        self.map = dt.moe_map(self.mask)
        self.rows = torch.randn(tokens * E, H, generator=g).to(device, dtype).requires_grad_()
        self.counts = self.mask.sum(0)
        self.offsets = torch.arange(E, device=device)
        self.sizes = torch.tensor([tokens - 3, 0, 3], device=device)
        self.order = torch.tensor([2, 0, 1], device=device)

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.probs, self.line, self.rows]


FUNCTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "map": (("mask",), lambda m: tuple(dt.moe_map(m, align_size=4))),
    "permute": (("x", "mask"), dt.moe_permute),
    "permute by ids": (("x", "ids"), lambda x, i: dt.moe_permute(x, i, map_type="index", num_experts=E)),
    "permute by a map": (("x", "map"), dt.moe_permute),
    "with probs": (("x", "probs", "mask"), dt.moe_permute_with_probs),
    "zero is padding": (
        ("x", "probs", "mask"),
        lambda x, p, m: dt.moe_permute_with_probs(x, p, m, zero_prob_is_padding=True),
    ),
    "pad": (("x", "probs", "mask"), lambda x, p, m: dt.moe_permute_and_pad_with_probs(x, p, m, align_size=4)),
    "pad by counts": (
        ("x", "probs", "mask", "counts"),
        lambda x, p, m, c: dt.moe_permute_and_pad_with_probs(x, p, m, c, 4, num_out_tokens=90),
    ),
    "pad by numbers": (
        ("x", "probs", "mask"),
        lambda x, p, m: dt.moe_permute_and_pad_with_probs(x, p, m, [64, 61, 66, 63, 65], 4),
    ),
    "unpermute": (("rows", "map"), lambda y, m: dt.moe_unpermute(y, m.row_id_map)),
    "unpermute by a map": (("rows", "map"), dt.moe_unpermute),
    "merge": (("rows", "map", "probs"), lambda y, m, p: dt.moe_unpermute(y, m.row_id_map, p)),
    "merge by a map": (("rows", "map", "probs"), dt.moe_unpermute),
    "merge padded": (
        ("rows", "map", "probs", "offsets"),
        lambda y, m, p, o: dt.moe_unpermute(y, m.row_id_map, p, pad_offsets=o, restore_shape=(1, len(p), H)),
    ),
    "chunks": (("x", "sizes", "order"), dt.moe_sort_chunks_by_index),
    "chunks by numbers": (("x",), lambda x: dt.moe_sort_chunks_by_index(x, [x.shape[0] - 3, 0, 3], [2, 0, 1])),
    "chunks with probs": (("x", "line", "sizes", "order"), dt.moe_sort_chunks_by_index_with_probs),
}
TAKES_COUNT = {"map", "permute", "permute by ids", "with probs", "zero is padding", "pad"}


def results(fn: Callable[..., Any], names: tuple[str, ...], inputs: Inputs) -> list[torch.Tensor]:
    """Outputs, and the gradients of two backwards of one graph."""
    args = [getattr(inputs, n) for n in names]
    out = fn(*args)
    outs = [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]
    wanted = [t for t in outs if t.requires_grad]
    grads = [torch.linspace(-1, 1, t.numel(), device=t.device).view(t.shape).to(t.dtype) for t in wanted]
    for t in inputs.leaves():
        t.grad = None
    for turn in range(2 if wanted else 0):
        torch.autograd.backward(wanted, grads, retain_graph=turn == 0)
    return [t.detach() for t in outs] + [t.grad for t in inputs.leaves() if t.grad is not None]


def same_results(name: str, fn: Any, compiled: Any, inputs: Inputs) -> None:
    names = FUNCTIONS[name][0]
    eager, traced = results(fn, names, inputs), results(compiled, names, inputs)
    assert len(eager) == len(traced) > 0
    for a, b in zip(eager, traced, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert torch.equal(a, b), name


def compile_anew(fn: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(fn, fullgraph=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_graph_for_all_sizes(name, backend, device):
    fn = FUNCTIONS[name][1]
    compiled = compile_anew(fn, backend=backend, dynamic=True)
    for tokens in (6, 9, 32):
        same_results(name, fn, compiled, Inputs(tokens, torch.float32, device))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["merge", "chunks with probs"])
def test_inductor(name):
    """A few of what the slow tests sweep."""
    fn = FUNCTIONS[name][1]
    same_results(name, fn, compile_anew(fn, backend="inductor"), Inputs(9, torch.bfloat16, "cpu"))


@slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_dtype(name, dtype, backend, device):
    fn = FUNCTIONS[name][1]
    compiled = compile_anew(fn, backend=backend)
    for tokens in (6, 9):
        same_results(name, fn, compiled, Inputs(tokens, dtype, device))


def counted(name: str, count: int | None) -> Callable[..., Any]:
    calls: dict[str, Callable[..., Any]] = {
        "map": lambda m: tuple(dt.moe_map(m, num_out_tokens=count)),
        "permute": lambda x, m: dt.moe_permute(x, m, count),
        "permute by ids": lambda x, i: dt.moe_permute(x, i, count, map_type="index", num_experts=E),
        "with probs": lambda x, p, m: dt.moe_permute_with_probs(x, p, m, count),
        "zero is padding": lambda x, p, m: dt.moe_permute_with_probs(x, p, m, count, zero_prob_is_padding=True),
        "pad": lambda x, p, m: dt.moe_permute_and_pad_with_probs(x, p, m, None, 4, num_out_tokens=count),
    }
    return calls[name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", sorted(TAKES_COUNT))
def test_every_meaning_of_num_out_tokens(name, count, backend):
    """Beside None, which the other tests have: TransformerEngine's, too few rows, and too many."""
    fn = counted(name, count)
    same_results(name, fn, compile_anew(fn, backend=backend), Inputs(9, torch.float32, "cpu"))


@pytest.mark.parametrize("name", ["in order", "below zero", "out of range", "named twice"])
def test_chunks_that_are_wrong(name):
    sizes, order, tokens = CHUNKS[name]
    x = torch.randn(tokens, H)
    args = x, torch.tensor(sizes), torch.tensor(order)
    compiled = compile_anew(dt.moe_sort_chunks_by_index, backend="aot_eager")
    assert torch.equal(compiled(*args), dt.moe_sort_chunks_by_index(*args))


def test_a_count_that_is_an_argument():
    """Also one that the program reads from the device itself."""
    inputs = Inputs(9, torch.float32, "cpu")
    compiled = compile_anew(dt.moe_permute, backend="aot_eager", dynamic=True)
    for count in (7, 9, 30, 11):
        want = dt.moe_permute(inputs.x, inputs.mask, count)
        for a, b in zip(compiled(inputs.x, inputs.mask, count), want, strict=True):
            assert torch.equal(a, b)
    assert counters["stats"]["unique_graphs"] == 1
    for sentinel in (None, -1, 0):
        assert torch.equal(compiled(inputs.x, inputs.mask, sentinel)[0], dt.moe_permute(inputs.x, inputs.mask)[0])

    def reads(x, mask):
        return dt.moe_permute(x, mask, mask.sum().item())[0]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = compile_anew(reads, backend="aot_eager")
        assert torch.equal(compiled(inputs.x, inputs.mask), reads(inputs.x, inputs.mask))
        with pytest.raises(RuntimeError, match="assertion failed"):  # 0 would mean something else
            compiled(inputs.x, inputs.mask & False)


def test_limits_make_no_guards():
    """Sizes that only the running program knows stay below limits of the kernels without a question."""

    def chunks(x, kept, sizes, order):
        return dt.moe_sort_chunks_by_index(x[kept], sizes, order)

    def mapped(mask, kept):
        return dt.moe_map(mask[kept], num_out_tokens=32).row_id_map

    x, mask = torch.randn(8, 4), torch.ones(8, 3, dtype=torch.bool)
    kept = torch.tensor([True, False] * 4)
    sizes, order = torch.tensor([1, 3]), torch.tensor([1, 0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for call, arguments in ((chunks, (x, kept, sizes, order)), (mapped, (mask, kept))):
            compiled = compile_anew(call, backend="aot_eager", dynamic=True)
            assert torch.equal(compiled(*arguments), call(*arguments))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer(backend, device):
    """Map, rows to experts, something of each expert's, and back: one graph; a RowMap leaves it whole."""

    def layer(x, mask, probs):
        row_map = dt.moe_map(mask, align_size=8)
        rows, moved, _ = dt.moe_permute_with_probs(x, probs, row_map)
        return dt.moe_unpermute(rows * 2 + moved[:, None].to(rows.dtype), row_map, probs), row_map

    compiled = compile_anew(layer, backend=backend, dynamic=True)
    for tokens in (6, 9, 32):
        inputs = Inputs(tokens, torch.float32, device)
        grads = []
        for fn in (layer, compiled):
            y, row_map = fn(inputs.x, inputs.mask, inputs.probs)
            assert isinstance(row_map, dt.RowMap)
            grads.append([y, *row_map, *torch.autograd.grad(y.sum(), (inputs.x, inputs.probs))])
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_nodes():
    """A map is one node, what moves by it another, and so is its backward."""
    names: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        names.append([c.removeprefix("diptych.") for c in calls if c.startswith("diptych")])
        return graph.forward

    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    inputs = Inputs(9, torch.float32, "cpu")
    compile_anew(dt.moe_permute, backend=backend)(inputs.x, inputs.mask)[0].sum().backward()
    assert names == [["permute_map.default", "moe_permute.default"], ["moe_permute_backward.default"]]


def test_no_setting_of_torch_is_changed():
    import torch._functorch.config as config

    before = config.donated_buffer
    fn = FUNCTIONS["merge"][1]
    same_results("merge", fn, compile_anew(fn, backend="aot_eager"), Inputs(6, torch.float32, "cpu"))
    assert config.donated_buffer == before


def test_warnings_and_errors_of_traced_code():
    inputs = Inputs(6, torch.float32, "cpu")
    old = compile_anew(lambda y, m, p: dt.moe_unpermute(y, m, probs=p), backend="aot_eager")
    with pytest.warns(UserWarning, match="probs is deprecated, use merging_probs"):
        y = old(inputs.rows, inputs.map, inputs.probs)
    assert torch.equal(y, dt.moe_unpermute(inputs.rows, inputs.map, inputs.probs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        old(inputs.rows, inputs.map, inputs.probs)  # once, while tracing
    for call, words in (
        (lambda x, m: dt.moe_permute(x[:3], m), "must have a row for each of routing_map's tokens"),
        (lambda x, m: dt.moe_permute(x, m.float()), "routing_map .a mask. must be bool"),
        (lambda x, m: dt.moe_permute(x, m, -2), "num_out_tokens must be at least -1"),
        (lambda x, m: dt.moe_unpermute(x, m), "row_id_map must be int32"),
    ):
        with pytest.raises(Exception, match=words):
            compile_anew(call, backend="aot_eager")(inputs.x, inputs.mask)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x, mask, probs):
            rows, moved, row_id_map = dt.moe_permute_with_probs(x, probs, mask)
            return dt.moe_unpermute(rows * moved[:, None], row_id_map)

    def given(tokens):
        inputs = Inputs(tokens, torch.float32, "cpu")
        return inputs.x.detach(), inputs.mask, inputs.probs.detach()

    rows = torch.export.Dim("tokens")
    program = torch.export.export(Model(), given(6), dynamic_shapes=[{0: rows}] * 3).module()
    assert torch.equal(program(*given(11)), Model()(*given(11)))


def test_ops_have_one_layout_fake_and_real():
    from torch.library import opcheck

    ops, inputs = torch.ops.diptych, Inputs(6, torch.float32, "cpu")
    x, rows, probs, m = inputs.x.detach(), inputs.rows.detach(), inputs.probs.detach(), inputs.map
    size, order = torch.tensor([2, 4], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    for op, args in (
        (ops.permute_map, (inputs.mask, True, E, 30, 4)),
        (ops.permute_map, (inputs.ids, False, E, 30, 1)),
        (ops.chunk_map, (size, order, 6)),
        (ops.invert_map, (m.row_id_map, 30)),
        (ops.permute, ([x, x[:, 0]], [0, 0], m.row_id_map, m.row_source, probs, True)),
        (ops.permute_columns, (x.t().contiguous().to(torch.uint8), m.row_source, E)),
        (ops.unpermute, (rows, m.row_id_map, probs, rows[:, 0])),
        (ops.unpermute_grad, (x, m.row_id_map, m.row_source, probs, rows)),
    ):
        opcheck(op.default, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
