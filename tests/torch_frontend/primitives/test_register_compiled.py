"""The ops in compiled graphs: one graph for all sizes, state that is written in place, sizes known at run time only."""

from __future__ import annotations

import pytest
import torch

from diptych.common import Float8Quantizer
from diptych.common.gemm_options import DEFAULTS
from diptych.torch.primitives import gemm as gemm_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.primitives import scale_update as scale_update_ops
from torch_frontend import tools
from torch_frontend.tools import ALL, delayed, named, normal, same


def _one_graph(step, arguments):
    """Bit-equal to eager for all sizes, from one graph.

    Torch tells sizes of 1 from others, so a number of blocks that becomes 1 is a second graph: rows stay above 128.
    """
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for args in arguments:
        for got, want in zip(compiled(*args), step(*args), strict=True):
            same(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ("fp8_e4m3_1x128", "mxfp8_e4m3 square", "nvfp4", ALL[-1]))
def test_ops_compile_with_dynamic_shapes(name):
    quant = named(name)
    rng = tools.rng_for(quant)

    def step(x, w, acc):
        a, b = (quantize_ops.copies(quant, quantize_ops.quantize(t, quant, rng=rng)) for t in (x, w))
        acc = acc.clone()
        gemm_ops.gemm_into(acc, a[0], b[0], None, 1.0, 1.0, DEFAULTS)
        wgrad = gemm_ops.gemm(a[1], a[1], None, 1.0, torch.float32, DEFAULTS)
        return acc, wgrad, *(quantize_ops.dequantize(copy, torch.float32) for copy in a)

    sizes = ((160, 144, 256), (144, 176, 144), (208, 160, 304)) if "nvfp4" in name else (
        (160, 136, 256), (133, 165, 137), (135, 133, 300)
    )  # fmt: skip
    _one_graph(
        step,
        [
            (normal("dx", (m, k), "bfloat16"), normal("dw", (n, k), "bfloat16"), normal("dacc", (m, n)))
            for m, n, k in sizes
        ],
    )


def test_delayed_scaling_compiles_with_dynamic_shapes():
    """Writes to the state are part of the graph, in the order of the calls."""
    quant = Float8Quantizer(amax_history_len=3)

    def step(x):
        scale, history = delayed()
        first = quantize_ops.quantize_delayed(x, quant, scale, history)
        scale_update_ops.scale_update(history, scale, None, None, 448.0, 0, False)
        second = quantize_ops.quantize_delayed(x * 2, quant, scale, history)
        return *first, *second, scale, history

    _one_graph(step, [(normal("delayed", shape),) for shape in ((160, 256), (133, 137))])


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_state_of_a_module_is_written_in_place(backend):
    module = torch.nn.Module()
    scale, history = delayed()
    module.register_buffer("scale", scale)
    module.register_buffer("history", history)

    def step(x):
        scale_update_ops.scale_update(module.history, module.scale, None, None, 448.0, 0, False)
        return quantize_ops.quantize_delayed(x, Float8Quantizer(), module.scale, module.history)

    torch._dynamo.reset()
    x = normal("state", (16, 64))
    got = torch.compile(step, fullgraph=True, backend=backend)(x)
    found, (module.scale, module.history) = (scale, history), delayed()
    for left, right in zip(got, step(x), strict=True):
        same(left, right)
    same(found[0], module.scale)
    same(found[1], module.history)


@pytest.mark.parametrize("name", ("fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4", "nvfp4 square", ALL[-1]))
def test_unbacked_sizes(name):
    """Sizes that are known at run time only: what packed formats ask of them is checked there."""
    quant = named(name)
    rng = tools.rng_for(quant)

    def step(x, keep):
        kept = x[torch.nonzero(keep).squeeze(1)]
        a, b = quantize_ops.copies(quant, quantize_ops.quantize(kept, quant, rng=rng))
        wgrad = gemm_ops.gemm(b, b, None, 1.0, torch.float32, DEFAULTS)
        return wgrad, quantize_ops.dequantize(a, torch.float32), quantize_ops.dequantize(b, torch.float32)

    torch._dynamo.reset()
    x = normal("unbacked", (96, 64), "bfloat16")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for rows in (96, 48, 32):
            keep = torch.arange(96) < rows
            for got, want in zip(compiled(x, keep), step(x, keep), strict=True):
                same(got, want)
        if "nvfp4" in name:
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                compiled(x, torch.arange(96) < 40)
