"""Captures of compiled models: the sites of eager ones, and plain code as before."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import Float8CurrentScaling
from diptych.torch import lab
from in_torch.captured import Block, hashes, model_and_step, observed

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("fresh")]
AOT = {"backend": "aot_eager", "fullgraph": True}  # the nodes of the graph as they stand: eager bits


def graphs():
    return counters["stats"]["unique_graphs"]


def compiled(model, how):
    """Compiles a model in one way. Returns what runs it."""
    if how == "blocks":
        for block in model.blocks:
            block.compile(**AOT)
    elif how == "in place":
        model.compile(**AOT)
    elif how == "replaced":
        model.blocks[0] = torch.compile(model.blocks[0], **AOT)
    else:
        return torch.compile(model, **AOT) if how == "wrapped" else torch.compile(lambda x: model(x), **AOT)
    return model


@pytest.mark.parametrize("how", ["wrapped", "blocks", "in place", "replaced", "called"])
@pytest.mark.parametrize("when", ["before", "within"])
def test_sites_and_hashes_are_those_of_eager_code(tmp_path, how, when):
    model, step = model_and_step()
    with lab.capture(model, out=tmp_path / "eager") as t:
        step()
        t.step()
    want = hashes(tmp_path / "eager")
    model, step = model_and_step()
    run = compiled(model, how)
    if when == "before":
        step(run)
    with lab.capture(run if how == "wrapped" else model, out=tmp_path / "t", every=2) as t:
        for i in range(4):
            before = graphs()
            model.zero_grad(set_to_none=True)
            step(run)
            t.step()
            assert i < 2 or graphs() == before
    unused = 'activation_grad:(model)["states"][0]'  # zeros in compiled code, and none in eager code
    for number in (0, 2):
        assert hashes(tmp_path / "t", number) | {unused: None} == want | {unused: None}
    if how != "replaced":
        assert all(o.site.inputs is None for o in observed(tmp_path / "t", 2).values())
    before = graphs()
    step(run)
    assert graphs() == before  # plain code is there
    assert not any("diptych" in name for m in model.modules() for name in m.__dict__)


def test_blocks_share_one_graph_with_taps(tmp_path):
    model = nn.Sequential(*[Block(8) for _ in range(12)])  # more than dynamo would compile apart
    for block in model:
        block.compile(**AOT)
    model(torch.ones(2, 8)).sum().backward()
    before = graphs()
    with lab.capture(model, out=tmp_path / "t") as t:
        model(torch.ones(2, 8)).sum().backward()
        t.step()
    assert graphs() - before <= 3  # a block's, and those of hooks that torch calls outside of it
    assert {f"activation_grad:{i}.down.0" for i in range(12)} <= set(observed(tmp_path / "t"))


@pytest.mark.parametrize("passes", [1, 2])
def test_recomputation_in_a_graph_is_recorded_once(tmp_path, passes):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block(8)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.block, x, use_reentrant=False)
            return x

    found = []
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model, x = Checkpointed(), torch.randn(3, 8, requires_grad=True)
        run = torch.compile(model, **AOT) if name == "compiled" else model
        with lab.capture(model, out=tmp_path / name) as t:
            loss = run(x).square().sum()
            for scale in range(1, passes + 1):
                (scale * loss).backward(retain_graph=scale < passes)
            t.step()
        found.append(hashes(tmp_path / name))
    assert found[0] == found[1] and "activation_grad:block#1" in found[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.kept)])
def test_several_forward_passes_of_a_checkpoint_before_their_backward_passes(tmp_path, backend):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(dt.Linear(32, 32), nn.Tanh())

        def forward(self, x):
            return x + checkpoint(self.block, x, use_reentrant=False)

    found = []
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model, xs = Checkpointed(), torch.randn(3, 16, 32)
        run = torch.compile(model, backend=backend) if name == "compiled" else model
        with lab.capture(model, out=tmp_path / name) as t:
            for _ in range(2):
                model.zero_grad()
                with dt.autocast(recipe=Float8CurrentScaling()):
                    losses = [run(x).square().mean() for x in xs[:2]]
                    with torch.no_grad():
                        run(xs[2])
                sum(losses).backward()
                t.step()
        found.append(observed(tmp_path / name, 1))
    eager, compiled = ({k: o.record for k, o in one.items() if "_grad" in k} for one in found)
    assert found[0].keys() == found[1].keys() and "activation_grad:block.0#1" in eager
    for key, record in eager.items():
        assert compiled[key].statistics.rms == pytest.approx(record.statistics.rms, rel=1e-5)


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_algorithms(tmp_path, warn_only):
    model, step = model_and_step()
    run = compiled(model, "wrapped")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        step(run)
        with pytest.raises(NotImplementedError, match="deterministic"), lab.capture(run, out=tmp_path / "t"):
            pass
        with lab.capture(model, out=tmp_path / "u") as t:  # of the eager model
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
            step()
            t.step()
            step(run)  # code around the model
            with pytest.raises(RuntimeError, match=r"no module of the model ran|compiled models"):
                t.step()
        assert "activation_grad:blocks.0.act" in observed(tmp_path / "u")
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(False)


def test_parameters_alone_and_entry_in_inference_mode(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    run = torch.compile(model, **AOT)
    with torch.inference_mode():
        t = lab.capture(run, out=tmp_path / "t", sites="0.weight").__enter__()
    try:
        run(torch.ones(1, 2)).sum().backward()
        t.step()
    finally:
        t.__exit__()
    assert set(observed(tmp_path / "t")) == {"parameter:0.weight", "parameter_grad:0.weight"}
