"""Captures of eager models: what they record, what they refuse, and what they leave behind."""

import os
import signal
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import DelayedScaling, Float8CurrentScaling, QuantizerRole
from diptych.lab.capture import CaptureWarning
from diptych.lab.traces import Trace, TraceError, places
from diptych.torch import lab
from in_torch.captured import Block, Model, Plain, assert_is_of, hashes, model_and_step, observed
from oracle.hash import hash_bits


def captured(folder, step, model, steps=1, **options):
    with lab.capture(model, out=folder, **options) as t:
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            step()
            t.step()


def test_a_step_has_the_tensors_that_plain_hooks_see(tmp_path):
    model, step = model_and_step()
    captured(tmp_path / "t", step, model)
    found = observed(tmp_path / "t")
    grads = {f"parameter_grad:{n}": p.grad.clone() for n, p in model.named_parameters()}
    model, step = model_and_step()
    plain = Plain(model)
    step()
    del plain.values['activation_grad:(model)["states"][0]']  # the output itself is not used
    for key, x in (plain.values | grads).items():
        assert_is_of(found.pop(key), x)
    # A view that is modified in place loses its plain hooks.
    assert set(found) == {f"activation_grad:blocks.{i}" for i in ("0.up", "1.up", "1.up#1")}


def test_patterns_that_match_nothing_are_named(tmp_path):
    model, step = model_and_step()
    with pytest.warns(CaptureWarning, match=r"step 0 records nothing, since no site matches 'encoder\.\*\*'"):
        captured(tmp_path / "t", step, model, sites="encoder.**")
    with pytest.raises(TypeError, match="capture: out must be a path, got NoneType"):
        lab.capture(model, out=None)


def test_order_names_and_inputs(tmp_path):
    model, step = model_and_step()
    captured(tmp_path / "t", step, model)
    found = observed(tmp_path / "t")
    kinds = [o.site.kind for o in found.values()]
    assert kinds == sorted(kinds, key=["parameter", "activation", "activation_grad", "parameter_grad"].index)
    inputs = {key: o.site.inputs for key, o in found.items()}
    assert set(inputs["activation:blocks.1.norm#1"]) == {
        "activation:blocks.1", "parameter:blocks.1.norm.weight", "parameter:blocks.1.norm.bias"
    }  # fmt: skip
    assert inputs["activation:blocks.0.act"] == ("activation:blocks.0.up",)
    halves = {f'activation:split["{side}"]' for side in ("left", "right")}
    assert set(inputs["activation:head"]) == halves | {"parameter:embed.weight"}
    assert inputs['activation:(model)["states"][1]'] is None  # integers
    assert "activation_grad:blocks.1.norm#1" in inputs["activation_grad:blocks.1"]
    assert "activation_grad:blocks.0.up" in inputs["parameter_grad:blocks.0.up.bias"]


def test_a_capture_leaves_nothing_and_changes_no_bits(tmp_path):
    model, step = model_and_step()
    want = [step(), *[p.grad for p in model.parameters()]]
    before = [dict(m.__dict__) for m in model.modules()]
    model.zero_grad(set_to_none=True)
    with lab.capture(model, out=tmp_path / "t") as t:
        assert t.check(step)
        assert all(p.grad is None for p in model.parameters())
        have = [step(), *[p.grad for p in model.parameters()]]
        t.step()
    assert all(map(torch.equal, want, have))
    for module, held in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == held.keys() and not module._forward_hooks and not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert Trace.open(tmp_path / "t").meta.plain_bits is True


def test_check_finds_a_step_whose_bits_the_taps_change(tmp_path):
    model, step = model_and_step()

    def differs():
        loss = step()
        return loss * (2 if model.head._forward_hooks else 1)

    with lab.capture(model, out=tmp_path / "t") as t:
        assert not t.check(differs)
    assert Trace.open(tmp_path / "t").meta.plain_bits is False


def test_every_records_one_of_so_many_steps_and_taps_no_other(tmp_path):
    model, step = model_and_step()
    with lab.capture(model, out=tmp_path / "t", every=3, sites="head", statistics=False) as t:
        for i in range(5):
            assert bool(model.head._forward_hooks) == (i % 3 == 0)
            step()
            t.step()
    rank = Trace.open(tmp_path / "t").ranks[0]
    assert list(rank.steps) == [0, 3]
    found = observed(tmp_path / "t", 3)
    assert set(found) == {"activation:head", "activation_grad:head"}
    assert all(o.record.statistics is None for o in found.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_recorded_once(tmp_path, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, again):
            super().__init__()
            self.block, self.again = Block(8), again

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=reentrant) if self.again else self.block(x)
            return x

    for again in (False, True):
        torch.manual_seed(0)
        model, x = Checkpointed(again), torch.randn(3, 8, requires_grad=True)
        captured(tmp_path / str(again), lambda: model(x).square().sum().backward(), model)  # noqa: B023
    assert hashes(tmp_path / "True") == hashes(tmp_path / "False")


def test_microbatches_count_calls_and_the_last_accumulated_gradient(tmp_path):
    model, step = model_and_step()
    with lab.capture(model, out=tmp_path / "t") as t:
        step()
        step()
        t.step()
    found = observed(tmp_path / "t")
    assert {"activation:head#1", "activation_grad:head#1", "activation:blocks.1#3"} <= set(found)
    for name, p in model.named_parameters():
        assert_is_of(found[f"parameter_grad:{name}"], p.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_low_and_high_precision(tmp_path, dtype):
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    captured(tmp_path / "t", lambda: model(x).sum().backward(), model)
    found = observed(tmp_path / "t")
    assert_is_of(found["parameter:weight"], model.weight)
    assert_is_of(found["activation:(model)"], model(x))
    assert_is_of(found["parameter_grad:weight"], model.weight.grad)


@pytest.mark.parametrize("values", ["sample", "full"])
def test_values(tmp_path, values):
    class Doubled(nn.Module):
        def forward(self, x):
            return x * 2

    model, xs = Doubled(), [torch.randn(n) for n in (4000, 3000, 500)]
    budget = 2 * 4 * 4000  # half of it has room for the rest of the first tensor, and not for that of the second
    with lab.capture(model, out=tmp_path / "t", values=values, budget=budget) as t:
        for x in xs:
            model(x).zero_()  # the caller writes to it
        t.step()
    trace = Trace.open(tmp_path / "t")
    for i, x in enumerate(xs):
        o = trace.ranks[0].step(0)[i]
        kept, size = np.asarray(o.values.tensor.bits).view(np.float32), x.numel()
        whole = i == 2 or (values == "full" and i == 0)
        assert (o.record.values, o.record.cut) == ("whole" if whole else "sampled", values == "full" and not whole)
        want = (x * 2).numpy()
        np.testing.assert_array_equal(kept, want if whole else want[places(size, 1024)])


def test_ops_of_diptych_have_operands_and_results(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(dt.Linear(32, 64), nn.GELU(), dt.Linear(64, 32))
    x = torch.randn(16, 32)

    def step():
        with dt.autocast(recipe=Float8CurrentScaling()):
            y = model(x)
        y.square().sum().backward()

    captured(tmp_path / "t", step, model)
    found = observed(tmp_path / "t")
    assert_is_of(found["operand:0/quantize.x"], x)
    q = dt.quantize(x, Float8CurrentScaling().quantizer(QuantizerRole(module="linear", tensor="input")))
    have = found["result:0/quantize.rowwise_data"].record.hash
    assert have == hash_bits(q.rowwise_data.view(torch.uint8).numpy()).astype("<i4").tobytes().hex()
    gemms = [key for key in found if key.startswith("result:") and "/gemm.d" in key]
    assert gemms == [f"result:{n}/gemm.d{c}" for n, c in (("0", ""), ("2", ""), ("2", "#1"), ("2", "#2"), ("0", "#1"))]
    assert found["result:2/gemm.d#2"].record.hash == found["parameter_grad:2.weight"].record.hash
    assert "operand:2/gemm.a_data" in found["result:2/gemm.d"].site.inputs
    assert "Float8CurrentScaling" in Trace.open(tmp_path / "t").meta.recipe


def test_what_a_trace_cannot_hold_is_a_warning(tmp_path):
    class Complex(nn.Module):
        def forward(self, x):
            return torch.complex(x, x), x

    model = Complex()
    with lab.capture(model, out=tmp_path / "t") as t, pytest.warns(CaptureWarning, match="complex64"):
        model(torch.ones(3))
        t.step()
    assert set(observed(tmp_path / "t")) == {"activation:(model)[1]"}


def test_misuse(tmp_path):
    model, step = model_and_step()
    with pytest.raises(TypeError, match="model must be"):
        lab.capture(step, out=tmp_path)
    with pytest.raises(ValueError, match="every must be"):
        lab.capture(model, out=tmp_path, every=0)
    with pytest.raises(TypeError, match="statistics must be bool"):
        lab.capture(model, out=tmp_path, statistics=1)
    t = lab.capture(model, out=tmp_path / "t")
    with pytest.raises(RuntimeError, match="outside"):
        t.step()
    with t:
        with pytest.raises(NotImplementedError, match="another capture"), lab.capture(model.head, out=tmp_path / "u"):
            pass
        with pytest.raises(RuntimeError, match="no module of the model ran in step 0"):
            t.step()
    with pytest.raises(RuntimeError, match="outside"):
        t.step()
    with pytest.raises(RuntimeError, match="twice"), t:
        pass
    with pytest.raises(TraceError, match="is there"), lab.capture(model, out=tmp_path / "t"):
        pass
    scripted = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(NotImplementedError, match="'0' is TorchScript"), lab.capture(scripted, out=tmp_path / "v"):
        pass


def test_an_exception_takes_the_taps_away_and_leaves_the_steps(tmp_path):
    model, step = model_and_step()
    with pytest.raises(KeyError), lab.capture(model, out=tmp_path / "t") as t:
        step()
        t.step()
        step()
        raise KeyError
    assert not model.head._forward_hooks
    assert list(Trace.open(tmp_path / "t").ranks[0].steps) == [0]
    with lab.capture(model, out=tmp_path / "u") as t:
        step()
        t.step()


def test_a_killed_process_leaves_its_steps(tmp_path):
    code = f"""
        import os, signal, torch
        from diptych.torch import lab
        model = torch.nn.Linear(4, 4)
        with lab.capture(model, out={str(tmp_path / "t")!r}, values="full") as t:
            for i in range(3):
                if i == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.ones(2, 4)).sum().backward()
                t.step()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=os.environ, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(Trace.open(tmp_path / "t").ranks[0].steps) == [0, 1]


def test_a_model_that_is_a_type_of_its_own(tmp_path):
    model = Model()
    with lab.capture(model, out=tmp_path / "t", sites="blocks.*.up.*") as t, torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
        t.step()
    assert all(o.site.kind == "parameter" for o in observed(tmp_path / "t").values())


def test_check_within_a_step_is_refused_and_takes_tensors_of_any_kind(tmp_path):
    model = nn.Embedding(4, 2, sparse=True)
    model.register_buffer("complex", torch.ones(2, dtype=torch.complex128))
    with lab.capture(model, out=tmp_path / "t") as t, pytest.warns(CaptureWarning, match="sparse"):
        assert t.check(lambda: model(torch.tensor([1, 1])).sum().backward())
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(RuntimeError, match="within a step"):
            t.check(lambda: None)
        t.step()
    assert "activation_grad:(model)" in observed(tmp_path / "t")


def test_what_is_not_written_is_a_warning(tmp_path):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.warns(CaptureWarning, match=r"step\(\) was not called"), lab.capture(model, out=tmp_path / "t"):
        model(x)
    with lab.capture(model, out=tmp_path / "u") as t:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
        with pytest.warns(CaptureWarning, match="none of a parameter"):
            t.step()


def test_sparse_gradients_are_named_once(tmp_path):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Identity())
    with warnings.catch_warnings(record=True) as caught, lab.capture(model, out=tmp_path / "t") as t:
        warnings.simplefilter("always")
        model(torch.tensor([1, 1])).sum().backward()
        t.step()
    (said,) = [str(w.message) for w in caught]
    text = "capture: parameter_grad 0.weight is not recorded: traces cannot hold a Tensor, torch.sparse_coo"
    assert said == f"{text} (diptych explain CaptureWarning)"


def test_results_of_ops_that_write_to_operands(tmp_path):
    layer = dt.Linear(32, 32, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(32, 32)

    def step():
        with dt.autocast(recipe=Float8CurrentScaling()):
            layer(torch.ones(16, 32)).square().sum().backward()

    captured(tmp_path / "t", step, layer)
    found = observed(tmp_path / "t")
    assert_is_of(found["result:(model)/gemm.d#1"], layer.weight.main_grad)
    assert "operand:(model)/gemm.acc" in found["result:(model)/gemm.d#1"].site.inputs


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
def test_buffers_of_every_quantization_have_names(tmp_path, recipe):
    model = dt.LayerNormLinear(32, 32)

    def step():
        with dt.autocast(recipe=recipe):
            model(torch.ones(16, 32, requires_grad=True)).square().sum().backward()

    captured(tmp_path / "t", step, model)
    results = {key.split("/")[1].split("#")[0] for key in observed(tmp_path / "t") if key.startswith("result:")}
    names = {name for name in results if name.startswith(("quantize", "amax"))}
    assert {"quantize.rowwise_data", "quantize.columnwise_data"} <= names
    assert not any("fused" in name or "out[" in name for name in names)


@pytest.mark.parametrize("how", ["assign", "functional_call", "one"])
def test_replaced_parameters_are_named(tmp_path, how):
    """A parameter that another one replaces is named in a warning, and neither of the two is recorded in that step."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 4)
    with lab.capture(model, out=tmp_path / "trace") as t:
        model(x).sum().backward()
        t.step()
        doubled = {n: (2 * p.detach()).requires_grad_() for n, p in model.named_parameters()}
        with pytest.warns(CaptureWarning, match=r"parameters that others replace are not recorded.*: .*0\.weight"):
            if how == "functional_call":
                torch.func.functional_call(model, doubled, (x,)).sum().backward()
            elif how == "assign":
                model.load_state_dict(doubled, assign=True)
            else:
                model[0].weight = nn.Parameter(doubled["0.weight"].detach())
            if how != "functional_call":
                model(x).sum().backward()
            t.step()
    first, second = (({o.site.key for o in Trace.open(tmp_path / "trace").ranks[0].step(i)}) for i in range(2))
    gone = {f"{kind}:{name}" for kind in ("parameter", "parameter_grad") for name in doubled}
    assert gone <= first
    assert second & gone == (gone - {"parameter:0.weight", "parameter_grad:0.weight"} if how == "one" else set())


def test_modules_that_come_in_the_capture_are_named(tmp_path):
    """diptych's states and compiled forms of modules come, too, and are no modules of their own."""
    parts = dt.Linear(32, 32), nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32)
    model = nn.Sequential(*parts)

    def step(t):
        with dt.autocast(recipe=DelayedScaling()):
            model(torch.ones(16, 32)).sum().backward()
        t.step()

    with lab.capture(model, out=tmp_path / "t", sites="*") as t:
        with warnings.catch_warnings():
            warnings.simplefilter("error", CaptureWarning)
            step(t)
            model[3] = torch.compile(model[3], backend="eager")
            step(t)
        model[2] = nn.Sequential(nn.Tanh())
        model.append(nn.Tanh())
        with pytest.warns(CaptureWarning, match=r"modules that came after the capture began are not recorded: 2, 4 \("):
            step(t)
