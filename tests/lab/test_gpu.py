"""The lab on a GPU: traces of both frameworks, operations that are computed again on it and on the CPU, bisection."""

import pathlib

import jax
import numpy as np
import pytest
import torch
from lab_tools import TINY, job, same_bits
from sweeps import others_slow

import diptych.torch as dt
from diptych.common import RECIPES
from diptych.lab import cli, first_steps
from diptych.lab.frontend import require
from diptych.lab.job import initial_weights
from diptych.lab.replay.judge import judged
from diptych.lab.replay.recorded import operations
from diptych.lab.replay.table import TABLE
from diptych.lab.traces import Trace
from diptych.torch import lab as torch_lab

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu")]
PAIR = ("torch", "jax")


@pytest.fixture
def gpu(cuda):
    with jax.default_device(jax.devices(cuda)[0]):
        yield


@pytest.mark.parametrize("recipe", others_slow(RECIPES, ("fp8-current", "fp8-delayed", "mxfp8", "nvfp4")))
def test_first_steps_of_both_frameworks(tmp_path, recipe):
    """Both frameworks compute each operation of a trace again, on the GPU and on the CPU, and agree with it."""
    pair = tuple(require(name, "cuda") for name in PAIR)
    trainers = tuple(f.trainer(job(recipe, device="cuda"), initial_weights(TINY, 0)) for f in pair)
    gen = np.random.default_rng(3)
    batches = [gen.integers(0, 256, (4, 17)).astype(np.int32) for _ in range(2)]
    found = first_steps.first_steps(pair, trainers, batches, TINY, "cuda", tmp_path, True)
    assert found.missing == []
    assert found.replayed and not any(d.differing for d in found.replayed)
    for name in PAIR:
        trace = Trace.open(tmp_path / name)
        assert trace.meta.device == "cuda"
        for op in (r.op for r in operations(trace.ranks[0].step(1))):
            if name == "jax" and not TABLE[op.kind].own:
                continue  # XLA may add a product that it never rounded, which no operand shows
            for other in pair:
                for device in ("cuda", "cpu"):
                    assert_agrees(op, other.replay(op, device), device == "cuda", (name, other.name, device))


def assert_agrees(op, again, same_device, what):
    for outcome in judged(op, again, same_device):
        # XLA rounds operands of products in float32 to TF32 where nothing else is asked for.
        tf32 = not TABLE[op.kind].own and "TF32" in outcome.why
        assert outcome.agrees or tf32, (*what, op.kind, op.options, outcome)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.first, self.second = dt.Linear(64, 128), dt.LayerNormMLP(128, 256)

    def forward(self, x):
        return self.second(self.first(self.norm(x)))


@pytest.mark.parametrize("recipe", others_slow(RECIPES, ("fp8-current", "mxfp8")))
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_has_the_sites_of_eager_code(tmp_path, recipe, backend):
    traces = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = Layers().cuda().bfloat16(), torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
        run = torch.compile(model, backend=backend) if compiled else model
        folder = tmp_path / str(compiled)
        with torch_lab.capture(run, out=folder, values="full") as t:
            with dt.autocast(recipe=RECIPES[recipe]):
                run(x).float().square().mean().backward()
            t.step()
        kinds = ("activation", "activation_grad", "parameter", "parameter_grad")
        observations = Trace.open(folder).ranks[0].step(0)
        traces.append({o.site.key: o for o in observations if o.site.kind in kinds})
    eager, compiled = traces
    assert eager.keys() == compiled.keys()
    if backend == "aot_eager":
        assert {k: o.record.hash for k, o in eager.items()} == {k: o.record.hash for k, o in compiled.items()}


@pytest.mark.parametrize(
    ("fault", "site"), [("right", None), ("gelu", "result:act/gelu.out"), ("epsilon", "result:norm/layer_norm.out")]
)
def test_a_fault_is_found_by_bisection(tmp_path, monkeypatch, capsys, fault, site):
    monkeypatch.chdir(pathlib.Path(__file__).parent)
    np.savez(tmp_path / "x.npz", arg0=np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32))
    sides = ["--a", "gpu_models:right", "--b", f"gpu_models:{fault}"]
    status = cli.main(["bisect", *sides, "--inputs", str(tmp_path / "x.npz"), "--device", "cuda"])
    output = capsys.readouterr().out
    assert status == (0 if site is None else 1), output
    assert site is None or site in output


def test_the_command_computes_on_the_cpu_what_a_gpu_recorded(tmp_path, capsys):
    model, x = Layers().cuda(), torch.randn(32, 64, device="cuda")
    with torch_lab.capture(model, out=tmp_path / "t", values="full", ops="all") as t:
        with dt.autocast(recipe=RECIPES["fp8-block"]):
            model(x).sum().backward()
        t.step()
    for device in ("cuda", "cpu"):
        for site in ("norm/layer_norm.out", "result:first/gemm.d"):
            assert cli.main(["replay", str(tmp_path / "t"), site, "--device", device]) == 0, capsys.readouterr().out
    (op,) = [r.op for r in operations(Trace.open(tmp_path / "t").ranks[0].step(0)) if r.op.kind == "layer_norm"]
    assert same_bits(op.outputs["out"], require("torch", "cuda").replay(op, "cuda")["out"])
