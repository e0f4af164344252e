"""Captures' statistics of payloads (clipped, flushed, SQNR) equal those that NumPy computes from the kept values."""

import numpy as np
import pytest
from lab.quantized_cases import ELEMENT, same

import oracle
from diptych.common import RECIPES
from diptych.lab.replay.recorded import recorded
from diptych.lab.traces import Trace, quantization

SHAPE = (128, 128)
OPERANDS = [np.random.default_rng(i).standard_normal(SHAPE).astype(np.float32) / (1, 11)[i] for i in range(2)]
OPERANDS[0][0, :8] = [1e4, 1e-9, 0, -0.0, 3e-7, -1e4, 77, 5e-5]  # what is clipped in small blocks and what is flushed


def torch_step(folder, recipe, device):
    import torch

    import diptych.torch as dt
    from diptych.torch import lab

    layer = dt.Linear(*SHAPE, bias=False).bfloat16().to(device)
    x, weight = (torch.from_numpy(v).bfloat16().to(device) for v in OPERANDS)
    with torch.no_grad():
        layer.weight.copy_(weight)
    with lab.capture(layer, out=folder, values="full") as t:
        with dt.autocast(enabled=True, recipe=recipe):
            layer(x).float().square().sum().backward()
        t.step()


def jax_step(folder, recipe, device):
    import jax
    import jax.numpy as jnp

    import diptych.jax as dj
    from diptych.common import linear_plan
    from diptych.jax import lab

    on = jax.devices(device)[0]
    x, weight = (jax.device_put(jnp.asarray(v).astype(jnp.bfloat16), on) for v in OPERANDS)
    plan = linear_plan(recipe)
    given = {"rng": dj.rng_state(5)} if plan.needs_rng else {}

    def loss(weight, state=None):
        return jnp.square(dj.dense(x, weight, recipe=recipe, state=state, **given).astype(jnp.float32)).sum()

    args = (weight, dj.init_state(recipe)) if plan.states else (weight,)
    args = jax.device_put(args, on)
    step = dj.value_and_grad_with_state(loss) if plan.states else jax.grad(loss)
    with lab.capture(jax.jit(step), folder, values="full", check=False) as run:
        run(*args)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("step", [torch_step, jax_step], ids=["torch", "jax"])
def test_payloads_are_measured_as_numpy_does(step, name, tmp_path, device):
    step(tmp_path / "t", RECIPES[name], device)
    trace, seen = Trace.open(tmp_path / "t"), 0
    for o in trace.ranks[0].step(0):
        measured = o.record.statistics.quantized
        payload = o.site.kind == "result" and o.site.name.endswith("_data")
        assert payload or measured is None, o.site.key
        if not payload:
            continue
        op = recorded(trace, o.site.key).op
        side = o.site.name.rpartition(".")[2].removesuffix("_data")
        quantizer = op.options["quantizer"]
        if side == "columnwise" and getattr(quantizer, "with_rht", False):
            assert measured is None
            continue
        bits = op.outputs | op.inputs
        fmt, two_level = oracle.FORMATS[quantizer.format.name], quantizer.format.two_level
        amax = bits["amax" if side == "rowwise" else "columnwise_amax"].floats if two_level else None
        data, scale = (op.outputs[f"{side}_{part}"].data for part in ("data", "scale_inv"))
        scale = scale if scale.dtype == np.uint8 else scale.view(np.float32)
        copy = oracle.Copy(fmt, side == "columnwise", data, scale, amax)
        result = oracle.dequantize(copy)
        codes = oracle.unpack(copy.data) if fmt.pack == 2 else copy.data
        codes = codes.T if copy.transposed else codes
        x = op.inputs["x"]
        with np.errstate(all="ignore"):
            want = quantization(x.data.reshape(result.shape), codes, ELEMENT[fmt.element], result, dtype=x.dtype)
        same(measured, want)
        seen += 1
    assert seen >= 2
