"""The command `diptych replay`: traces of both frameworks, in both; exit codes, files and wrong arguments."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from op_tools import entries, op, trace

from diptych.common import MXFP8BlockScaling
from diptych.lab import cli
from diptych.lab.replay.table import TABLE
from diptych.lab.traces import Trace


def run(capsys, *argv):
    """Returns (exit status, stdout, stderr)."""
    try:
        status = cli.main(["replay", *map(str, argv)])
    except SystemExit as e:
        status = e.code
    return status, *capsys.readouterr()


def torch_trace(folder):
    import torch

    import diptych.torch as dt
    from diptych.torch import lab

    torch.manual_seed(0)
    model = torch.nn.Sequential(dt.Linear(32, 48), torch.nn.GELU(), torch.nn.LayerNorm(48), torch.nn.Linear(48, 4))
    with lab.capture(model, out=folder, values="full", ops="all") as t:
        with dt.autocast(enabled=True, recipe=MXFP8BlockScaling()):
            y = model(torch.randn(64, 32))
        torch.nn.functional.cross_entropy(y, torch.arange(64) % 4).backward()
        t.step()
    return folder


def jax_trace(folder):
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    import diptych.jax as dj
    from diptych.jax import lab

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (48, 32))
            x = nn.gelu(dj.dense(x, kernel, recipe=MXFP8BlockScaling()))
            return nn.softmax(nn.Dense(4, name="head")(nn.LayerNorm(name="norm")(x)))

    model, x = Model(), jax.random.normal(jax.random.key(0), (64, 32))
    variables = model.init(jax.random.key(1), x)
    step = jax.jit(jax.grad(lambda v: jnp.square(model.apply(v, x)).sum()))
    with lab.capture(step, folder, values="full", ops="all", check=False) as captured:
        captured(variables)
    return folder


@pytest.fixture(scope="module", params=[torch_trace, jax_trace], ids=["torch", "jax"])
def recorded(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("recorded") / "trace")


@pytest.mark.parametrize(
    ("recorded", "framework"),
    [
        pytest.param(torch_trace, "jax", id="torch-jax"),
        pytest.param(jax_trace, "torch", id="jax-torch"),
        pytest.param(torch_trace, "torch", id="torch-torch", marks=pytest.mark.slow),
        pytest.param(jax_trace, "jax", id="jax-jax", marks=pytest.mark.slow),
    ],
    indirect=["recorded"],
)
def test_every_operation_agrees(recorded, framework, capsys, tmp_path):
    sites = [o.site for o in Trace.open(recorded).ranks[0].step(0)]
    keys = [s.key for s in sites if s.operation is not None]
    kinds = {s.operation.name for s in sites if s.operation is not None}
    assert {"quantize", "gemm", "gelu", "layer_norm"} <= kinds and kinds & {"softmax", "cross_entropy"}
    for key in keys:
        status, out, err = run(capsys, recorded, key, "--framework", framework, "--json", tmp_path / "f.json")
        assert (status, err) == (0, ""), (key, out, err)
        assert "The operation agrees" in out and f"computed in {framework} on cpu" in out
        found = json.loads((tmp_path / "f.json").read_text())
        assert found["agrees"] and key in [r["result"] for r in found["results"]]
        assert found["framework"] == framework and set(found["operands"].values()) <= {s.key for s in sites}


@pytest.fixture
def made(tmp_path):
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    right = op("add", {"a": x, "b": x}, x + x)
    wrong = op("mul", {"a": x, "b": x}, x * x + 1)
    misfit = op("add", {"a": x, "b": x[:2]}, x)
    return trace(tmp_path / "made", [[*entries(right), *entries(wrong), *entries(misfit, "bad")]])


def test_another_framework_is_the_default(made, capsys):
    status, out, _ = run(capsys, made, "h.0/add.out")
    assert status == 0 and "add of step 0, recorded in torch on cpu, computed in jax on cpu" in out


def test_a_wrong_result_differs(made, capsys, tmp_path):
    status, out, _ = run(capsys, made, "h.0/mul.out", "--json", tmp_path / "f.json")
    assert status == 1 and "DIFFERS: the recorded result is further from the exact one than rounding leads" in out
    assert "The operation differs: equal operands give other results." in out
    assert json.loads((tmp_path / "f.json").read_text())["agrees"] is False
    _, out, err = run(capsys, made, "h.0/mul.out", "--json", "-")
    assert json.loads(out) == json.loads((tmp_path / "f.json").read_text()) and "DIFFERS" in err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["nowhere", "x"], "nowhere/meta.json"),
        (["MADE", "zzz"], "'zzz': the step has no such site"),
        (["MADE", "operand:h.0/add.a"], "no operation that computed it was recorded"),
        (["MADE", "bad/add.out"], "add cannot be computed from the recorded operands"),
        (["MADE", "h.0/add.out", "--step", "3"], "has no step 3; it has 0"),
        (["MADE", "h.0/add.out", "--step", "-1"], "--step"),
        (["MADE", "h.0/add.out", "--rank", "1"], "has no rank 1"),
        (["MADE", "h.0/add.out", "--framework", "numpy"], "invalid choice: 'numpy'"),
        (["MADE", "h.0/add.out", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["MADE", "h.0/add.out", "--json", "MADE/x.json"], "--json .*x.json: is inside of a trace"),
        (["MADE", "h.0/add.out", "--json", "MADE"], "is a folder, where a file is to be written"),
        (["MADE"], "the following arguments are required: SITE"),
    ],
)
def test_wrong_arguments_exit_with_two_and_one_line(made, argv, why, capsys):
    status, out, err = run(capsys, *(a.replace("MADE", str(made)) for a in argv))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert re.search(why, err), err


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_device_that_is_not_there(made, framework, capsys):
    status, _, err = run(capsys, made, "h.0/add.out", "--framework", framework, "--device", "cuda")
    assert status == 2 and "cuda" in err.lower()


def test_the_page_of_the_documentation_runs():
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/replay.md", "exec"), {})


def test_the_page_has_every_operation():
    page = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    assert {name for name in TABLE if f"`{name}`" not in page} == set()
