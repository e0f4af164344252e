"""A scale of one layer is wrong in one step of forty: its site and step are the first where two runs part."""

from types import SimpleNamespace

import numpy as np
import pytest

from diptych.common import Float8CurrentScaling
from diptych.lab import cli
from diptych.lab.diff import differ
from diptych.lab.job import Corruption
from diptych.lab.traces import Trace

STEPS, AT = 40, 16
LAYERS = ("first", "second", "third")
FAULTY = "second"
X = np.random.default_rng(7).standard_normal((32, 32)).astype(np.float32)
WEIGHTS = {n: np.random.default_rng(i).standard_normal((32, 32)).astype(np.float32) / 6 for i, n in enumerate(LAYERS)}


def recipe(fault: SimpleNamespace, spoil):
    """The recipe of the faulty layer, whose weight's scale is twice what it should be while `fault.on`."""
    return Corruption(FAULTY, 2.0).recipe(Float8CurrentScaling(), lambda q, f: spoil(q, f) if fault.on else q)


def torch_run(folder, at):
    import torch

    import diptych.torch as dt
    from diptych.lab.torch.adapter import _spoil
    from diptych.torch import lab

    fault = SimpleNamespace(on=False)
    recipes = {name: recipe(fault, _spoil) if name == FAULTY else Float8CurrentScaling() for name in LAYERS}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in LAYERS:
                setattr(self, name, dt.Linear(32, 32, bias=False, recipe=recipes[name]))

        def forward(self, x):
            return self.third(torch.relu(self.second(torch.relu(self.first(x)))))

    model, x = Model(), torch.from_numpy(X)
    model.load_state_dict({f"{n}.weight": torch.from_numpy(w.copy()) for n, w in WEIGHTS.items()})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with lab.capture(model, out=folder, statistics=False) as t:
        for step in range(STEPS):
            fault.on = step == at
            optimizer.zero_grad()
            with dt.autocast(enabled=True, recipe=Float8CurrentScaling()):
                y = model(x)
            (y - x).square().mean().backward()
            optimizer.step()
            t.step()
    return Trace.open(folder)


def jax_run(folder, at):
    import jax
    import jax.numpy as jnp

    import diptych.jax as dj
    from diptych.jax import lab
    from diptych.lab.jax.adapter import _spoil

    fault = SimpleNamespace(on=False)
    recipes = {name: recipe(fault, _spoil) if name == FAULTY else Float8CurrentScaling() for name in LAYERS}

    def loss(weights, x):
        h = x
        for name in LAYERS:
            with jax.named_scope(name):
                h = dj.dense(h, weights[name], recipe=recipes[name])
            h = h if name == "third" else jax.nn.relu(h)
        return jnp.square(h - x).mean()

    @jax.jit
    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return value, jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads)

    @jax.jit
    def faulty(weights, x):
        return step.__wrapped__(weights, x)

    weights = jax.tree.map(jnp.asarray, WEIGHTS)

    def either(weights, x, wrong):
        return (faulty if wrong else step)(weights, x)

    with lab.capture(either, out=folder, statistics=False, check=False) as run:
        for i in range(STEPS):
            fault.on = i == at
            _, weights = run(weights, X, fault.on)
    return Trace.open(folder)


@pytest.mark.parametrize("run", [torch_run, jax_run], ids=["torch", "jax"])
def test_it_is_found_at_its_site_and_step(run, tmp_path, capsys):
    whole, wrong = run(tmp_path / "whole", None), run(tmp_path / "wrong", AT)
    assert whole.ranks[0].steps == wrong.ranks[0].steps == list(range(STEPS))
    result = differ.diff(whole, wrong)
    rows = [(result.rows[f.row], f.step) for f in result.first]
    assert {step for _, step in rows} == {AT}
    assert rows[0][0].a == f"operand:{FAULTY}/gemm.b_scale_inv"
    # torch's autograd, which tells what a module's output is computed from, does not see operands.
    assert {row.a for row, _ in rows[1:]} <= {f"activation:{FAULTY}"}
    before = [c.verdict for row in result.rows for c in row.cells if c.step < AT]
    after = [c.verdict for row in result.rows for c in row.cells if c.step > AT]
    assert set(before) == {"same"} and "differs" in after
    assert cli.main(["diff", str(whole.folder), str(wrong.folder)]) == 1
    assert f"step {AT}" in capsys.readouterr().out
