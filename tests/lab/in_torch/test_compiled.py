"""diptych's ops in compiled code: the sites of eager code, and plain code as before."""

import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from diptych.lab.capture import CaptureWarning
from diptych.lab.cli import main
from diptych.lab.torch.compiled import in_compiled_code
from diptych.lab.traces import Trace
from diptych.torch import lab
from diptych.torch.graph.program import Programs
from in_torch.captured import observed

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("fresh")]
AOT = {"backend": "aot_eager", "fullgraph": True}  # the nodes of the graph as they stand: eager bits
FP8 = Float8CurrentScaling()
QUANTIZER = FP8.quantizer(QuantizerRole(module="linear", tensor="input"))
RECIPES = [FP8, DelayedScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


class Block(nn.Module):
    def __init__(self, kind=dt.LayerNormLinear):
        super().__init__()
        self.up = dt.Linear(32, 64)
        self.down = nn.Sequential(nn.GELU(), kind(64, 32) if kind is not dt.LayerNormMLP else nn.Linear(64, 32))
        self.mlp = dt.LayerNormMLP(32, 64) if kind is dt.LayerNormMLP else None

    def forward(self, x):
        x = x + self.down(self.up(x))
        return x if self.mlp is None else x + self.mlp(x)


class Product(nn.Module):
    """Calls ops before and after a module that may be checkpointed, and twice a layer that adds to `main_grad`."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.layer = dt.Linear(32, 32, fuse_wgrad_accumulation=True)
        self.layer.weight.main_grad = torch.zeros(32, 32)
        self.block, self.checkpointed = Block(), checkpointed

    def product(self, x):
        return dt.gemm(dt.quantize(x, QUANTIZER), dt.quantize(self.weight, QUANTIZER))

    def forward(self, x):
        x = self.layer(self.product(x)) + self.layer(2 * x)
        if self.checkpointed is None:
            return self.product(self.block(x))
        return self.product(checkpoint(self.block, x, use_reentrant=self.checkpointed))


def stacked(kind=dt.LayerNormLinear):
    return nn.Sequential(*[Block(kind) for _ in range(2)])


def run_step(run, x, recipe):
    with dt.autocast(recipe=recipe):
        loss = run(x).float().square().mean()
        loss.backward()
    return loss


def captured(folder, make, recipe=FP8, how=lambda model: model, steps=1, before=0, dtype=torch.float32, **options):
    """Records steps of a model that `how` compiles. Returns its observations by step, and the capture's warnings."""
    torch.manual_seed(3)
    model = make().to(dtype)
    x = torch.randn(16, 32).to(dtype).requires_grad_()
    run_step(model, x, recipe)  # states exist, and their random numbers
    run = how(model)
    for _ in range(before):
        run_step(run, x, recipe)
    with warnings.catch_warnings(record=True) as caught, lab.capture(model, out=folder, **options) as t:
        warnings.simplefilter("always")
        for _ in range(steps):
            model.zero_grad()
            run_step(run, x, recipe)
            t.step()
    warned = [str(w.message) for w in caught if issubclass(w.category, CaptureWarning)]
    return [observed(folder, i) for i in Trace.open(folder).ranks[0].steps], warned


def own(found):
    return {key: o for key, o in found.items() if o.site.kind in ("operand", "result")}


def assert_the_same(have, want, ordered=True):
    """Asserts that own ops have the same sites, operations, operands, bits and statistics. `ordered`: in one order,
    which compilers may change where one op does not depend on another."""
    have, want = own(have), own(want)
    assert have.keys() == want.keys() and want
    assert not ordered or list(have) == list(want)
    for key, o in want.items():
        assert have[key].site == o.site, key
        assert dataclasses.replace(have[key].record, site=0) == dataclasses.replace(o.record, site=0), key


def whole(model):
    return torch.compile(model, **AOT)


def blocks(model):
    for block in model:
        block.compile(**AOT)
    return model


def around(model):
    return torch.compile(lambda x: model(x), **AOT)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize(("how", "kind"), [(whole, dt.LayerNormLinear), (blocks, dt.Linear), (around, dt.LayerNormMLP)])
def test_sites_bits_and_statistics_are_those_of_eager_code(tmp_path, recipe, how, kind):
    options = {"recipe": recipe, "dtype": torch.bfloat16, "steps": 2}
    want, _ = captured(tmp_path / "eager", lambda: stacked(kind), **options)
    have, warned = captured(tmp_path / "compiled", lambda: stacked(kind), how=how, **options)
    assert not warned
    for one, other in zip(have, want, strict=True):
        assert_the_same(one, other)
    assert main(["diff", str(tmp_path / "eager"), str(tmp_path / "compiled")]) == 0
    quantized = {o.site.name for o in own(have[0]).values() if o.record.statistics.quantized}
    assert {"0.up/quantize.rowwise_data", "0.up/quantize.columnwise_data"} & quantized
    assert any(o.site.operation is not None for o in own(have[0]).values())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointed", [None, False])
def test_ops_that_modules_call_themselves_and_recomputation(tmp_path, backend, checkpointed):
    def compiled(model):
        return torch.compile(model, backend=backend, fullgraph=True)

    (want,), _ = captured(tmp_path / "eager", lambda: Product(None))
    (have,), warned = captured(tmp_path / "compiled", lambda: Product(checkpointed), how=compiled)
    assert not warned
    assert_the_same(have, want, ordered=False)
    names = {o.site.name for o in own(have).values()}
    assert {"(model)/dequantize.out", "layer/gemm.acc", "block.up/gemm.d"} <= names  # of backward passes, too


@pytest.mark.parametrize("checkpointed", [True, False])
def test_eager_checkpoints_around_compiled_blocks(tmp_path, checkpointed):
    def compiled(model):
        model.block.compile(**AOT)
        return model

    (want,), _ = captured(tmp_path / "eager", lambda: Product(checkpointed))
    (have,), _ = captured(tmp_path / "compiled", lambda: Product(checkpointed), how=compiled)
    assert_the_same(have, want, ordered=False)


def test_other_steps_run_plain_code_and_programs(tmp_path):
    graphs = []

    def counted(model):
        run = whole(model)

        def step(x):
            y = run(x)
            graphs.append(counters["stats"]["unique_graphs"])
            return y

        return step

    want, _ = captured(tmp_path / "eager", stacked, steps=1)
    # Earlier steps record programs, which would run the ops where no observer sees them.
    have, warned = captured(tmp_path / "compiled", stacked, how=counted, steps=5, before=3, every=2)
    assert not warned and len(have) == 3
    for one in have:
        assert_the_same(one, want[0])
    assert graphs == [1, 1, 1, 2, 2, 2, 2, 2]
    assert not torch.overrides._get_current_function_mode_stack()


def test_graph_breaks_and_patterns(tmp_path):
    class Broken(Product):
        def product(self, x):
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break()
            return super().product(x)

    def compiled(model):
        return torch.compile(model, backend="aot_eager")

    for name, options in (("all", {}), ("some", {"sites": "block.up/gemm.*", "statistics": False})):
        (want,), _ = captured(tmp_path / f"eager-{name}", Product, **options)
        (have,), warned = captured(tmp_path / f"compiled-{name}", Broken, how=compiled, **options)
        assert not warned
        assert_the_same(have, want, ordered=False)
    assert {o.site.name.partition(".d")[0] for o in have.values() if o.site.kind == "result"} == {"block.up/gemm"}


@pytest.mark.parametrize("how", [None, blocks])
def test_without_operations_the_other_sites_stay(tmp_path, how):
    both = {}
    for ops in ("none", "own"):
        options = {"recipe": RECIPES[0], "dtype": torch.bfloat16, "ops": ops} | ({"how": how} if how else {})
        (both[ops],), warned = captured(tmp_path / ops, lambda: stacked(dt.Linear), **options)
        assert not warned
    assert not own(both["none"]) and own(both["own"])
    assert {k: o.record.hash for k, o in both["none"].items()} == {
        k: o.record.hash for k, o in both["own"].items() if k not in own(both["own"])
    }


@pytest.mark.parametrize("ops", ["none", "own"])
def test_a_model_with_the_same_code_that_runs_meanwhile_takes_no_taps_away(tmp_path, ops):
    model, other = (blocks(stacked(dt.Linear)) for _ in range(2))
    x, counts = torch.randn(16, 32), []
    with lab.capture(model, out=tmp_path / "t", ops=ops) as t:
        for _ in range(3):
            with dt.autocast(recipe=RECIPES[0]):
                model(x).square().sum().backward()
            t.step()
            with dt.autocast(recipe=RECIPES[0]):
                other(x).square().sum().backward()
    counts = [len(observed(tmp_path / "t", i)) for i in range(3)]
    assert counts == counts[:1] * 3 and any("activation:0.up" in key for key in observed(tmp_path / "t", 2))


def test_ops_that_no_module_calls_are_a_warning(tmp_path):
    class Alone(Product):
        def __init__(self):
            super().__init__()
            self.twice = torch.compile(
                lambda x, w: dt.gemm(dt.quantize(x, QUANTIZER), dt.quantize(w, QUANTIZER)), **AOT
            )

        def product(self, x):
            return self.twice(x, self.weight)

    (want,), _ = captured(tmp_path / "eager", Product)
    (have,), warned = captured(tmp_path / "t", Alone)
    assert len(warned) == 1 and "no module of the model calls" in warned[0]
    names = {o.site.name.partition("/")[0] for o in own(have).values()}
    assert names == {o.site.name.partition("/")[0] for o in own(want).values()} - {"(model)"}


def test_arithmetic_on_quantized_tensors_is_a_warning(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            with dt.quantized_model_init(recipe=FP8):
                self.layer = dt.Linear(32, 32)

        def forward(self, x):
            return self.layer(x) @ (self.layer.weight.detach() * 2)

    (want,), _ = captured(tmp_path / "eager", Scaled)
    (have,), warned = captured(tmp_path / "t", Scaled, how=whole)
    missing = {key for key in own(want) if key not in own(have)}
    assert missing and missing == {key for key in own(want) if ":(model)/" in key}
    assert any("arithmetic on quantized tensors" in message for message in warned)


def test_results_that_nothing_uses_are_a_warning(tmp_path):
    class Unused(Product):
        def forward(self, x):
            dt.quantize(x.detach(), QUANTIZER)
            return self.layer(x)

    (have,), warned = captured(tmp_path / "t", Unused, how=whole)
    assert not any("(model)/" in key for key in own(have)) and any("layer/" in key for key in own(have))
    assert len(warned) == 1 and "leaves out ops of (model)" in warned[0]


@pytest.mark.kept
def test_code_of_any_compiler_is_compiled_code():
    """Code that Inductor wrote lies in files of its own, whose functions AOTAutograd calls."""
    from torch._functorch.aot_autograd import aot_function

    seen = []

    def compiler(graph, _):
        def run(*args):
            seen.append(in_compiled_code())
            return graph(*args)

        return run

    aot_function(torch.sin, compiler)(torch.ones(2))
    assert seen == [True] and not in_compiled_code()


@pytest.mark.parametrize("ops", ["own", "all"])
def test_functions_in_compiled_code_are_a_warning_if_they_are_asked_for(tmp_path, ops):
    (have,), warned = captured(tmp_path / "t", Product, how=whole, ops=ops)
    assert [message for message in warned if "functions of torch are not recorded" in message] == warned
    assert len(warned) == (ops == "all") and "result:block.up/gemm.d" in have


def test_recorded_operations_of_compiled_code_replay_in_jax(tmp_path):
    have, _ = captured(tmp_path / "t", Product, how=whole, values="full", statistics=False)
    sites = [
        "result:block.up/gemm.d",
        "result:block.up/gemm.d#1",
        "result:(model)/quantize.rowwise_data",
        "result:layer/gemm.d#2",
    ]
    for site in sites:
        assert have[0][site].site.operation is not None
        assert main(["replay", str(tmp_path / "t"), site, "--framework", "jax"]) == 0


@pytest.mark.slow  # test_capture_compiled.py captures Inductor's code in less time
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor(tmp_path, recipe, dtype):
    """Code of Inductor fuses what is between ops, so that later operands differ by rounding."""
    if isinstance(recipe, NVFP4BlockScaling) and dtype == torch.float32:
        recipe = NVFP4BlockScaling(disable_rht=True)
    options = {"recipe": recipe, "dtype": dtype, "values": "full", "steps": 2}
    want, _ = captured(tmp_path / "eager", Product, **options)
    have, warned = captured(tmp_path / "t", Product, how=lambda m: torch.compile(m, fullgraph=True), **options)
    assert not warned
    for one, other in zip(have, want, strict=True):
        one, other = own(one), own(other)
        assert one.keys() == other.keys()
        for key, o in other.items():
            assert one[key].site.operation == o.site.operation and one[key].site.inputs == o.site.inputs, key
    assert main(["replay", str(tmp_path / "t"), "result:block.up/gemm.d", "--framework", "jax"]) == 0


def test_inductor_leaves_plain_code_as_it_was(tmp_path):
    torch.manual_seed(0)
    model, x = stacked(), torch.randn(16, 32)
    for block in model:
        block.compile(fullgraph=True)
    run_step(model, x, FP8)
    model.zero_grad()
    want = [run_step(model, x, FP8), *[p.grad.clone() for p in model.parameters()]]
    before = counters["stats"]["unique_graphs"]
    with lab.capture(model, out=tmp_path / "t") as t:
        same = t.check(lambda: run_step(model, x, FP8))
        run_step(model, x, FP8)
        t.step()
    found = observed(tmp_path / "t")
    assert {f"activation_grad:{i}.up" for i in range(2)} <= set(found)
    assert Trace.open(tmp_path / "t").meta.plain_bits is same
    after = counters["stats"]["unique_graphs"]
    model.zero_grad()
    have = [run_step(model, x, FP8), *[p.grad for p in model.parameters()]]
    assert all(map(torch.equal, want, have))
    assert after > before and counters["stats"]["unique_graphs"] == after


@pytest.mark.parametrize("how", [lambda model: model, whole], ids=["eager", "compiled"])
def test_captures_at_once_record_what_each_records_alone(tmp_path, how):
    """Two models, such as a teacher and a student, are captured while their steps alternate; the capture that began
    first ends first."""

    def made(seed):
        torch.manual_seed(seed)
        model, x = stacked(), torch.randn(16, 32)
        run_step(model, x, FP8)
        return model, how(model), x

    def state():
        return (
            Programs.run,
            torch._dynamo.config.skip_nnmodule_hook_guards,
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def stepped(run, x, capture):
        capture._model.zero_grad()
        run_step(run, x, FP8)
        capture.step()

    before = state()
    for seed in (0, 1):
        model, run, x = made(seed)
        with lab.capture(model, out=tmp_path / f"alone{seed}") as t:
            for _ in range(2 + seed):
                stepped(run, x, t)
    models, runs, xs = zip(*[made(seed) for seed in (0, 1)], strict=True)
    captures = [lab.capture(model, out=tmp_path / f"both{i}") for i, model in enumerate(models)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        for capture in captures:
            capture.__enter__()
        for _ in range(2):
            for i in (0, 1):
                stepped(runs[i], xs[i], captures[i])
        captures[0].__exit__(None, None, None)
        stepped(runs[1], xs[1], captures[1])
        captures[1].__exit__(None, None, None)
    assert state() == before
    for seed in (0, 1):
        for step in range(2 + seed):
            alone, both = (observed(tmp_path / f"{name}{seed}", step) for name in ("alone", "both"))
            assert_the_same(both, alone, ordered=how is not whole)
