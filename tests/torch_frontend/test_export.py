"""torch.export, AOTInductor and torch's compile caches: what works, and the errors of what does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diptych.torch as dt
from diptych.common import RECIPES
from torch_frontend.tools import normal, quantizer, same

pytestmark = pytest.mark.sampled


class Model(torch.nn.Module):
    """Its region is inside; `recipe` None: the caller's."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.recipe = recipe
        self.first, self.mlp = dt.Linear(64, 128), dt.LayerNormMLP(128, 256)

    def forward(self, x: Tensor) -> Tensor:
        if self.recipe is None:
            return self.mlp(self.first(x))
        with dt.autocast(recipe=self.recipe):
            return self.mlp(self.first(x))


class Verbs(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = dt.quantize(x, quantizer("fp8_e4m3_tensor"))
        return dt.gemm(q, q) + dt.dequantize(q).sum()


def inference(recipe: Any, inside: bool = True) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(recipe if inside else None).eval().bfloat16(), normal("export", (32, 64), "bfloat16")


CELLS = [(name, strict) for name in RECIPES for strict in ("strict", "non-strict")]


@pytest.mark.parametrize(
    ("recipe", "strict"),
    [c if i % 4 in (0, 3) else pytest.param(*c, marks=pytest.mark.slow) for i, c in enumerate(CELLS)],
)
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_exported_programs_give_the_same_bits(recipe, strict):
    model, x = inference(RECIPES[recipe])
    rows = torch.export.Dim("rows", min=2, max=64)
    torch._dynamo.reset()
    with torch.no_grad():
        want = model(x)  # makes the states of delayed scaling
        exported = torch.export.export(model, (x,), strict=strict == "strict", dynamic_shapes=({0: 16 * rows},))
        program = exported.module()
        same(program(x), want)
        other = normal("other", (48, 64), "bfloat16")
        same(program(other), model(other))
        same(model(x), want)
    ours = [str(n.target) for n in exported.graph.nodes if "diptych" in str(n.target) and n.op == "call_function"]
    assert [n for n in ours if "rng" not in n] == ["diptych.linear.default", "diptych.layernorm_mlp.default"]


@pytest.mark.parametrize("strict", (True, False), ids=("strict", "non-strict"))
def test_a_region_around(strict):
    model, x = inference(RECIPES["mxfp8"], inside=False)
    with torch.no_grad(), dt.autocast(recipe=RECIPES["mxfp8"]):
        want = model(x)
        exported = torch.export.export(model, (x,), strict=strict)
    with torch.no_grad():
        same(exported.module()(x), want)  # the recipe is the program's own now


@pytest.mark.parametrize("strict", (True, False), ids=("strict", "non-strict"))
def test_verbs(strict):
    x = normal("verbs", (32, 64))
    exported = torch.export.export(Verbs(), (x,), strict=strict)
    same(exported.module()(x), Verbs()(x))


# --- what torch does not serialize -----------------------------------------------------------------------------------


def test_exported_programs_are_not_saved(tmp_path):
    """2.11 says so on saving. 2.13 writes a file without the constants, and fails where they are missed."""
    exported = torch.export.export(Verbs(), (normal("verbs", (32, 64)),))
    with pytest.raises(Exception, match=r"Unsupported argument type|error when deserializing the saved file"):
        torch.export.save(exported, tmp_path / "verbs.pt2")
        torch.export.load(tmp_path / "verbs.pt2")


@pytest.mark.slow
def test_aot_inductor_takes_no_such_ops(tmp_path):
    """2.11 says so on compiling, 2.13 on loading: its runtime hands no Python object to an op."""
    exported = torch.export.export(Verbs(), (normal("verbs", (32, 64)),))
    with pytest.raises(Exception, match=r"Unsupported argument type|Unsupported input type as_custom_obj"):
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "aoti.pt2"))
        torch._inductor.aoti_load_package(path)


# --- caches ----------------------------------------------------------------------------------------------------------

PROGRAM = """
    import sys
    import torch
    import diptych.torch as dt
    from diptych.common import Float8CurrentScaling, Float8CurrentScalingQuantizer, MMParams, QParams

    for eps in map(float, sys.argv[1:]):
        torch.manual_seed(0)
        layer, w = dt.Linear(64, 128), torch.randn(16, 128)
        recipe = Float8CurrentScaling(fp8_quant_fwd_inp=QParams(amax_epsilon=eps))
        quantizer = Float8CurrentScalingQuantizer(amax_epsilon=eps)

        def fn(x):
            with dt.autocast(recipe=recipe):
                y = layer(x)
            return dt.gemm(dt.quantize(y, quantizer), dt.quantize(w, quantizer))

        torch._dynamo.reset()
        counted = torch._dynamo.utils.counters
        counted.clear()
        results = []
        for call in (fn, torch.compile(fn, fullgraph=True)):
            x = torch.linspace(-3, 3, 32 * 64).view(32, 64).requires_grad_()
            y = call(x)
            y.sum().backward()
            results += [y.detach(), x.grad]
        assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
        print("hits", counted["inductor"]["fxgraph_cache_hit"], "misses", counted["inductor"]["fxgraph_cache_miss"])
        print("joint bypasses", counted["aot_autograd"]["autograd_cache_bypass"])
"""


def cached(cache: Path, *eps: float) -> list[tuple[int, ...]]:
    """For each epsilon, one after the other in a process of their own, hits and misses of Inductor's cache, and how
    often AOTAutograd's was passed by."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *map(str, eps)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    numbers = [int(n) for n in re.findall(r"\d+", done.stdout)]
    return list(zip(*[iter(numbers)] * 3, strict=True))


@pytest.mark.slow
def test_compiled_graphs_are_found_by_another_process(tmp_path):
    """Graphs with recipes and quantizers in them: a hit where those are equal, and none where they are not."""
    # Torch knows no autograd.Function in AOTAutograd's cache: tracing happens anew, compiling does not.
    assert cached(tmp_path, 0.0) == [(0, 2, 1)]
    found, (hits, misses, _) = cached(tmp_path, 0.0, 0.5)
    assert found == (2, 0, 1)
    assert misses >= 1 and hits + misses == 2
