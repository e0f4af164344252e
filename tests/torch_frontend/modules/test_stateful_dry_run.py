"""Which calls record in states: the rule of grad mode and training, dry runs, checkpoints, pipelines."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import types

import pytest
import torch
from torch import nn

import diptych.torch as dt
import oracle
from diptych.common import CustomRecipe, DelayedScaling, NVFP4BlockScaling, linear_plan
from diptych.torch.state.autocast import recording
from torch_frontend.tools import STAGES_OF_ONE_RANK, normal, same

SHORT = DelayedScaling(amax_history_len=4)
GARBAGE = 1e30


def _both(role):
    """Delayed scales and a random generator."""
    return NVFP4BlockScaling(disable_rht=True).quantizer(role) if role.gemm == "wgrad" else SHORT.quantizer(role)


BOTH = CustomRecipe(_both)
KINDS = {
    "Linear": lambda: dt.Linear(32, 32),
    "LayerNormLinear": lambda: dt.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: dt.LayerNormMLP(32, 64),
    "GroupedLinear": lambda: dt.GroupedLinear(2, 32, 32),
}


def _states(module):
    return {k: v.clone() for k, v in module.state_dict().items() if "scale_states" in k or "rng_state" in k}


def _same_states(module, before):
    after = _states(module)
    assert after.keys() == before.keys()
    for key, t in after.items():
        same(t, before[key], key)


def _model(kind, recipe=BOTH):
    torch.manual_seed(3)
    return dt.prepare(KINDS[kind](), recipe)


def _run(module, x, backward, recipe=BOTH, call=None):
    x, call = x.clone().requires_grad_(backward), module if call is None else call
    with dt.autocast(recipe=recipe):
        y = call(x, [16, 16]) if isinstance(module, dt.GroupedLinear) else call(x)
    if backward:
        y.backward(torch.full_like(y, 2.0))
    return y.detach()


@contextlib.contextmanager
def _evaluating(module):
    module.eval()
    yield
    module.train()


SILENT = {
    "no_grad": (lambda m: torch.no_grad(), False),
    "inference_mode": (lambda m: torch.inference_mode(), False),
    "eval": (_evaluating, True),
    "dry_run": (lambda m: dt.dry_run(), True),
}


def _slow(cases, sample):
    """Marks the cases outside of a sample as slow, since they compile."""
    return [case if case in sample else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


ALL = list(itertools.product(KINDS, SILENT))


@pytest.mark.parametrize(
    ("compiled", "kind", "how"),
    [(False, *case) for case in ALL] + _slow([(True, *case) for case in ALL], [(True, "Linear", "dry_run")]),
)
def test_a_silent_call_changes_no_state(kind, how, compiled):
    """Its scales are those of the step before; the next steps are those of a model that never made it."""
    module, x, garbage = _model(kind), normal("x", (32, 32)), torch.full((32, 32), GARBAGE)
    other, call = copy.deepcopy(module), None
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(module, backend="aot_eager", fullgraph=True)
    silent, backward = SILENT[how]
    for step in range(3):
        before = _states(module)
        with silent(module):
            _run(module, garbage, backward, call=call)
            got = _run(module, x, False, call=call)
        _same_states(module, before)
        assert got.isfinite().all() and got.abs().max() > 0
        same(_run(module, x * (step + 1), True, call=call), _run(other, x * (step + 1), True))
        _same_states(module, _states(other))
    assert all(t.any() for k, t in _states(module).items() if k.endswith("amax_history"))


def test_a_backward_follows_its_forward():
    """Where backward runs, and in which mode the module is by then, does not count."""
    module, x = _model("Linear"), normal("x", (32, 32)).requires_grad_()
    with dt.autocast(recipe=BOTH), dt.dry_run():
        y = module(x)
    before = _states(module)
    y.backward(torch.full_like(y, GARBAGE))
    _same_states(module, before)
    with dt.autocast(recipe=BOTH):
        y = module(x)
    module.eval()
    with dt.dry_run():
        y.backward(torch.full_like(y, 3.0))
    assert module.scale_states.grad_output_dgrad.amax_history[0].item() == 3.0


def test_a_region_without_recording_calls_is_no_step():
    module, x = _model("Linear", SHORT), normal("x", (32, 32))
    for factor in (1.0, 2.0):
        _run(module, x * factor, True, SHORT)
    before = _states(module)
    for _ in range(6):  # more than the history holds
        with torch.no_grad():
            _run(module, x, False, SHORT)
    _same_states(module, before)
    with dt.autocast(recipe=SHORT):  # silent and recording calls of one region use the same scales
        with torch.no_grad():
            _same_states(module, before)
            module(x * 100)
        module(x * 3)
        scale = module.scale_states.input.scale.clone()
        with torch.no_grad():
            module(x * 100)
    same(scale, torch.tensor([448.0]) / dt.amax(x * 2))
    same(module.scale_states.input.amax_history[0], dt.amax(x * 3)[0])


BOOLS = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize(
    ("compiled", "reentrant", "dry"),
    [(False, *case) for case in BOOLS] + _slow([(True, *case) for case in BOOLS], [(True, True, False)]),
)
def test_checkpoints_record_as_where_they_are_entered(reentrant, compiled, dry):
    """The reentrant kind's forward runs without grad mode, and its recomputation in it: recorded once."""
    module, x = _model("Linear"), normal("x", (32, 32))
    plain = copy.deepcopy(module)
    call = module
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(3):
        before = _states(module)
        xx = (x * (step + 1)).requires_grad_()
        with dt.autocast(recipe=BOTH), dt.dry_run() if dry else contextlib.nullcontext():
            y = dt.checkpoint(call, xx, use_reentrant=reentrant)
        y.backward(torch.full_like(y, 2.0))
        if dry:
            _same_states(module, before)
            continue
        same(y, _run(plain, x * (step + 1), True))
        _same_states(module, _states(plain))
        with torch.no_grad(), dt.autocast(recipe=BOTH):
            dt.checkpoint(call, x * GARBAGE, use_reentrant=reentrant)
        _same_states(module, _states(plain))


def test_nested_reentrant_checkpoints_record():
    module, x = _model("Linear"), normal("x", (32, 32))
    plain = copy.deepcopy(module)

    def inner(t):
        return dt.checkpoint(module, t, use_reentrant=True)

    for step in range(3):
        xx = (x * (step + 1)).requires_grad_()
        with dt.autocast(recipe=BOTH):
            y = dt.checkpoint(inner, xx, use_reentrant=True)
        y.backward(torch.full_like(y, 2.0))
        same(y, _run(plain, x * (step + 1), True))
        _same_states(module, _states(plain))


@pytest.mark.parametrize("grouped", (False, True))
def test_the_function_records_in_grad_mode(grouped):
    states = dt.ScaleStates(linear_plan(SHORT, "grouped_linear" if grouped else "linear"))
    x, w = normal("x", (32, 32)), normal("w", (1, 32, 32) if grouped else (32, 32)).requires_grad_()
    history = states.input.amax_history

    def call():
        if grouped:
            return dt.grouped_linear(x, w, None, torch.tensor([0, 32], dtype=torch.int32), SHORT, state=states)
        return dt.linear(x, w, None, SHORT, state=states)

    with torch.no_grad():
        call()
    with dt.dry_run():
        call().sum().backward()
    assert not any(t.any() for k, t in states.state_dict().items() if k.endswith("amax_history"))
    call().sum().backward()
    same(history[:1], dt.amax(x))
    assert states.grad_output.amax_history[0].item() == 1.0


def test_calibration_records_without_grad_mode_and_not_in_a_dry_run():
    module, x = _model("Linear", SHORT), normal("x", (32, 32))
    before = _states(module)
    with dt.dry_run(), dt.autocast(enabled=False, calibrating=True, recipe=SHORT):
        module(x).sum().backward()
    _same_states(module, before)
    with torch.no_grad(), dt.autocast(enabled=False, calibrating=True, recipe=SHORT):
        module(x)
    _run(module, x, True, SHORT)
    history, scale = oracle.scale_update(
        torch.tensor([[dt.amax(x).item(), 0, 0, 0]]).numpy(), torch.ones(1).numpy(), fp8_max=448.0
    )
    same(module.scale_states.input.scale, scale)
    same(module.scale_states.input.amax_history[1:], history[0, 1:])


def test_dry_run_decorates_and_nests():
    @dt.dry_run()
    def outer():
        with dt.dry_run():
            pass
        return recording()

    assert recording() and not outer() and recording()
    with pytest.raises(TypeError, match=r"^dry_run cannot decorate the generator or coroutine 'gen'"):

        @dt.dry_run()
        def gen():
            yield


@pytest.mark.parametrize("method", ("_shape_inference", "_forward_metadata_inference"))
def test_both_names_of_the_inference_are_known(monkeypatch, method):
    """torch's method under the name that it has in one version or another; wrapped once, whatever stage it is of."""
    seen = []
    inference = {method: lambda self, x: seen.append((x, recording()))}
    stages = types.SimpleNamespace(PipelineStage=type("PipelineStage", (), inference))
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining.stage", stages)
    dt.Linear(2, 2)
    wrapped = getattr(stages.PipelineStage, method)
    with dt.autocast(recipe=SHORT):
        getattr(stages.PipelineStage(), method)(3)
    assert seen == [(3, False)] and getattr(stages.PipelineStage, method) is wrapped


@STAGES_OF_ONE_RANK
@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_shape_inference_of_pipelines_leaves_no_trace(one_rank, compiled):
    """Two stages of one rank; what the schedule's inference runs the second one on is uninitialised memory."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    torch.manual_seed(0)
    model = dt.prepare(nn.Sequential(dt.Linear(32, 32), dt.Linear(32, 32)), SHORT)
    plain, x, target = copy.deepcopy(model), normal("x", (8, 32)), normal("t", (8, 32))
    ran = []
    torch._dynamo.reset()

    def stage(i):
        call = torch.compile(model[i], backend="aot_eager", fullgraph=True) if compiled else model[i]

        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.call = call

            def forward(self, t):
                ran.append(i)
                if len(ran) <= 2:
                    t = torch.full_like(t, GARBAGE).requires_grad_(t.requires_grad)
                with dt.autocast(recipe=SHORT):
                    return self.call(t)

        return pipelining.PipelineStage(Part(), i, 2, torch.device("cpu"))

    schedule = pipelining.ScheduleInterleaved1F1B([stage(0), stage(1)], 2, loss_fn=nn.functional.mse_loss)
    schedule.step(x, target=target)
    if len(ran) == 4 + 2:
        assert ran[:2] == [0, 1]  # the inference
    else:
        pytest.fail(f"the schedule ran its stages {len(ran)} times, not twice more than for its two microbatches")
    for part in model:
        part.state_dict()  # collects what graphs recorded
        for name in ("input", "weight", "grad_output"):
            history = part.scale_states.get_submodule(name).amax_history
            assert 0 < history.max() < GARBAGE, name
    with dt.autocast(recipe=SHORT):
        plain(x)
    same(model[0].scale_states.input.amax_history.max(), dt.amax(x)[0])
    assert "torch.distributed.pipelining.stage" in sys.modules
