"""TransformerEngine's names and arguments in torch: what they mean here, and what is refused by name."""

import dataclasses
import enum
import functools
import inspect
import io
import pickle
import sys
import types
import typing
import warnings

import pytest
import torch

import diptych.torch as dt
from diptych.common import RECIPES, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, QuantizerRole, te_arguments
from diptych.common.errors import CheckpointError, IgnoredArgumentWarning, UnsupportedError
from diptych.common.te_signatures import REQUIRED, SIGNATURES

MODULES = {
    "Linear": (dt.Linear, (64, 32), ()),
    "LayerNormLinear": (dt.LayerNormLinear, (64, 32), ()),
    "LayerNormMLP": (dt.LayerNormMLP, (64, 32), ()),
    "GroupedLinear": (dt.GroupedLinear, (2, 64, 32), ([16, 16],)),
}
each_module = pytest.mark.parametrize("name", MODULES)


def fill(weight):
    torch.nn.init.constant_(weight, 0.5)


def weights_of(module):
    return [p for n, p in module.named_parameters() if n.endswith("weight") and "norm" not in n]


@each_module
def test_constructor_arguments(name):
    cls, sizes, splits = MODULES[name]
    nothing = {
        "tp_group": None,
        "tp_size": 1,
        "sequence_parallel": False,
        "parallel_mode": None,
        "ub_bulk_dgrad": False,
    }
    nothing = {argument: value for argument, value in nothing.items() if argument in SIGNATURES[name]}
    m = cls(*sizes, params_dtype=torch.bfloat16, init_method=fill, return_bias=True, name=None, **nothing)
    assert {p.dtype for p in m.parameters()} == {torch.bfloat16} and m.name == ""
    first = weights_of(m)[0]
    assert (first == 0.5).all() and all((p == 0).all() for n, p in m.named_parameters() if n in ("bias", "fc1_bias"))
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    plain = cls(*sizes, dtype=torch.bfloat16)
    plain.load_state_dict(m.state_dict())
    bias, none = (module.fc2_bias if name == "LayerNormMLP" else module.bias for module in (m, plain))
    with torch.no_grad():
        bias.normal_()
        none.zero_()
    with dt.autocast(recipe=MXFP8BlockScaling()):
        y, returned = m(x, *splits)
        want = plain(x, *splits)
    assert returned is bias and torch.equal(y, want), "nothing is added to the result"


@each_module
@pytest.mark.parametrize(
    "argument, error, words",
    [
        ({"parameters_split": ("q", "k")}, UnsupportedError, "a weight is one parameter"),
        ({"get_rng_state_tracker": print}, UnsupportedError, "use init_method"),
        ({"ub_overlap_ag": True}, UnsupportedError, "does not overlap"),
        ({"no_such_argument": 1}, TypeError, r"\(\) got an unexpected keyword argument 'no_such_argument'"),
        ({"dtype": torch.float16, "params_dtype": torch.float32}, ValueError, "name the same thing"),
    ],
)
def test_constructors_refuse(name, argument, error, words):
    cls, sizes, _ = MODULES[name]
    if error is UnsupportedError and not argument.keys() <= SIGNATURES[name].keys():
        error, words = TypeError, "unexpected keyword argument"
    with pytest.raises(error, match=f"{name}.*{words}"):
        cls(*sizes, **argument)


def test_modules_without_tensor_parallelism_refuse_it():
    cls, sizes, _ = MODULES["GroupedLinear"]
    for argument in ({"tp_size": 2}, {"sequence_parallel": True}):
        with pytest.raises(UnsupportedError, match=r"GroupedLinear: .* must be .*not cut over a tensor-parallel group"):
            cls(*sizes, **argument)


@each_module
def test_what_is_positional_there_is_not_read_as_something_else(name):
    cls, sizes, _ = MODULES[name]
    with pytest.raises(TypeError):  # sequence_parallel=False
        cls(*sizes, *((1e-5,) if "Norm" in name else ()), False)


def test_what_has_no_effect_says_so_once(monkeypatch):
    monkeypatch.setattr(te_arguments, "_said", set())
    with pytest.warns(IgnoredArgumentWarning, match="Linear: ub_name='qkv' has no effect") as said:
        dt.Linear(16, 16, ub_name="qkv")
    assert said[0].filename == __file__, "the warning points to the line that makes the module"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dt.Linear(16, 16, ub_name="proj")
        dt.Linear(16, 16, ub_name=None)


class Other:
    """A value that no argument has."""


@each_module
def test_what_constructors_do_not_have_is_taken_with_its_default_only(name):
    cls, sizes, _ = MODULES[name]
    own, theirs = inspect.signature(cls).parameters, SIGNATURES[name]
    others = {a: v for a, v in theirs.items() if a not in own}
    assert others and REQUIRED not in others.values()
    given = {a: v for a, v in theirs.items() if v is not REQUIRED and a != "device"}
    assert not cls(*sizes, **given).return_bias, "all defaults together are accepted"
    for argument, default in others.items():
        if argument in te_arguments._WITHOUT_EFFECT:
            continue
        wrong = not default if isinstance(default, bool) else Other()
        with pytest.raises(UnsupportedError, match=f"{name}: {argument} must be {default}, got .*: .*[a-z]"):
            cls(*sizes, **{argument: wrong})


@each_module
def test_forwards_take_the_arguments_there(name):
    cls, sizes, splits = MODULES[name]
    module, x = cls(*sizes), torch.randn(32, 64)
    given = {a: v for a, v in SIGNATURES[f"{name}.forward"].items() if v is not REQUIRED}
    want = module(x, *splits)
    assert torch.equal(module(x, *splits, **given), want)
    assert torch.equal(module(x, *splits, *list(given.values())[: 1 if splits else None]), want), "by position"
    if name == "LayerNormLinear":
        with pytest.raises(UnsupportedError, match="LayerNormLinear: fp8_grad must be False"):
            module(x, fp8_grad=True)


def test_inputs_by_both_names():
    x = torch.randn(32, 64)
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP"):
        cls, sizes, _ = MODULES[name]
        m = cls(*sizes)
        assert torch.equal(m(x), m(inp=x)) and torch.equal(m(x), m(input=x))
        for wrong in ((), (x,)):
            with pytest.raises(TypeError, match=f"{name}: give the input once"):
                m(*wrong, **({"inp": x} if wrong else {}))
    grouped = dt.GroupedLinear(2, 64, 32)
    with pytest.raises(UnsupportedError, match="GroupedLinear: out must be None"):
        grouped(x, [16, 16], out=x)


def test_layernorm_linear_returns_in_order():
    x = torch.randn(32, 64)
    m = dt.LayerNormLinear(64, 32, return_bias=True, return_layernorm_output=True)
    with dt.autocast(recipe=MXFP8BlockScaling()):
        y, bias, z = m(x)
    assert y.shape == (32, 32) and bias is m.bias and torch.equal(z, m(x)[2])


@pytest.mark.parametrize("recipe", [r for n, r in RECIPES.items() if n != "fp8-delayed"], ids=lambda r: r.fingerprint)
def test_quantized_outputs_and_gradients(recipe):
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    plain, m = dt.Linear(64, 64, dtype=torch.bfloat16), dt.Linear(64, 64, dtype=torch.bfloat16)
    m.load_state_dict(plain.state_dict())
    for module in (plain, m):
        dt.seed_rng(module, 1)
    with dt.autocast(recipe=recipe):
        y = m(x, fp8_output=True)
        want = plain(x)
        assert isinstance(y, dt.QuantizedTensor) and y.quantizer.format == recipe.quantizer(QuantizerRole()).format
        assert torch.equal(y.dequantize(), dt.quantize(want.detach(), y.quantizer).dequantize())
        (grad,) = torch.autograd.grad(m(x, fp8_grad=True).float().square().sum(), x)
        (exact,) = torch.autograd.grad(m(x).float().square().sum(), x)
    assert not torch.equal(grad, exact) and (grad - exact).norm() < 0.3 * exact.norm()
    assert type(m(x, fp8_output=True, fp8_grad=True)) is torch.Tensor, "outside of regions nothing is quantized"


def test_a_result_has_no_delayed_scale():
    with dt.autocast(recipe=DelayedScaling()), pytest.raises(UnsupportedError, match="no delayed scale for a module's"):
        dt.Linear(32, 32)(torch.randn(32, 32), fp8_output=True)


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"])
def test_layernorm_mlp_recomputes(recipe):
    torch.manual_seed(0)
    m, plain = dt.LayerNormMLP(64, 32, checkpoint=True), dt.LayerNormMLP(64, 32)
    plain.load_state_dict(m.state_dict())
    for _ in range(2):
        x = torch.randn(32, 64, requires_grad=True)
        grads = []
        for module in (m, plain):
            module.zero_grad()
            with dt.autocast(recipe=recipe):
                y = module(x)
            grads.append([y, *torch.autograd.grad(y.square().mean(), [x, *module.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Tracker:
    """Random states by name, as Megatron keeps them."""

    def __init__(self):
        self.states = {"model": torch.Generator().manual_seed(3).get_state()}

    def get_states(self):
        return {k: v.clone() for k, v in self.states.items()}

    def set_states(self, states):
        self.states = states

    def draw(self):
        generator = torch.Generator()
        generator.set_state(self.states["model"])
        out = torch.rand(4, generator=generator)
        self.states["model"] = generator.get_state()
        return out


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_arguments(use_reentrant):
    tracker, seen = Tracker(), []

    def function(x):
        seen.append(tracker.draw())
        return (x * seen[-1]).sin()

    x = torch.randn(4, requires_grad=True)
    given = {"tp_group": None, "distribute_saved_activations": False, "get_rng_state_tracker": lambda: tracker}
    y = dt.checkpoint(function, x, use_reentrant=use_reentrant, **given)
    after = tracker.get_states()["model"]
    y.sum().backward()
    assert len(seen) == 2 and torch.equal(*seen) and torch.equal(after, tracker.states["model"])
    with pytest.raises(UnsupportedError, match="checkpoint: distribute_saved_activations must be False"):
        dt.checkpoint(function, x, distribute_saved_activations=True)


def test_functions_by_their_names_there():
    assert dt.get_default_recipe() == Float8CurrentScaling()
    with dt.fp8_autocast(True, False, MXFP8BlockScaling()):
        assert dt.get_autocast_recipe() == MXFP8BlockScaling()
    with dt.fp8_model_init(recipe=MXFP8BlockScaling()):
        assert isinstance(dt.Linear(32, 32).weight, dt.QuantizedTensor)
    for ask in (dt.is_fp8_available, dt.is_fp8_block_scaling_available, dt.is_mxfp8_available, dt.is_nvfp4_available):
        available, reason = ask(return_reason=True)
        assert available is ask() and bool(reason) is not available
        assert torch.cuda.is_available() or available, "the CPU runs every recipe natively"
    assert dt.is_bf16_available(return_reason=True) == (True, "")


@pytest.mark.cuda
def test_what_is_emulated_says_so(cuda):
    if torch.cuda.get_device_capability() < (10, 0):
        assert dt.is_mxfp8_available(return_reason=True) == (
            False, "MXFP8BlockScaling on cuda: fprop is emulated, dgrad is emulated, wgrad is emulated",
        )  # fmt: skip


# --- state dicts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(monkeypatch):
    """A module with the names, kinds and fields of TransformerEngine's recipes."""
    path = "transformer_engine.common.recipe"
    module = types.ModuleType(path)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, path, module)

    class helper(typing.NamedTuple):
        max_fwd: float
        max_bwd: float

    kinds = enum.Enum("Format", {"E4M3": helper(448, 448), "HYBRID": helper(448, 57344)})
    fields = [("margin", int, 0), ("fp8_format", object, kinds.HYBRID), ("amax_history_len", int, 1024)]
    recipe = dataclasses.make_dataclass("DelayedScaling", fields)
    helper.__name__ = helper.__qualname__ = "_FormatHelper"
    for cls in (helper, kinds, recipe):
        cls.__module__ = path
        setattr(module, cls.__name__, cls)
    return module


def extra_state(theirs, products, length=8):
    def positive(*shape):
        return torch.rand(*shape) + 0.5

    return {
        "scale_fwd": positive(3 * products),
        "amax_history_fwd": positive(length, 3 * products),
        "scale_bwd": positive(2 * products),
        "amax_history_bwd": positive(length, 2 * products),
        "recipe": theirs.DelayedScaling(amax_history_len=length),
        "extra_fp8_variables": {"num_gemms": products, "fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0},
    }


def as_bytes(state):
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


@each_module
@pytest.mark.parametrize("saved", ["pickle", "torch.save"])
def test_scales_are_loaded_and_written_back(name, saved, theirs):
    cls, sizes, splits = MODULES[name]
    layers = ("fc1.", "fc2.") if name == "LayerNormMLP" else ("",)
    products = 2 if name in ("LayerNormMLP", "GroupedLinear") else 1
    state = extra_state(theirs, products)
    if saved == "pickle":
        held = as_bytes(state)
    else:
        held = io.BytesIO()
        torch.save({k: v for k, v in state.items() if k != "recipe"}, held)
    m = torch.nn.Sequential(cls(*sizes))
    m.load_state_dict({**m.state_dict(), "0._extra_state": held})
    at = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}
    made = m.state_dict()
    for i, layer in enumerate(layers):
        for slot, (way, column) in at.items():
            width = {"fwd": 3, "bwd": 2}[way]
            columns = [g * width + column for g in (range(products) if name == "GroupedLinear" else (i,))]
            key = f"0.scale_states.{layer}{slot}"
            assert torch.equal(made[f"{key}.scale"], state[f"scale_{way}"][columns].amin().view(1))
            assert torch.equal(made[f"{key}.amax_history"], state[f"amax_history_{way}"][:, columns].amax(1))
    with dt.autocast(recipe=DelayedScaling(amax_history_len=8)):
        m[0](torch.randn(32, 64), *splits).sum().backward()
    written = dt.te_state_dict(m)
    assert not [k for k in written if "scale_states" in k]
    if name == "GroupedLinear":
        assert {"0.weight0", "0.weight1", "0.bias0", "0.bias1"} <= written.keys() and "0.weight" not in written
    back = pickle.loads(written["0._extra_state"].numpy().tobytes())
    assert isinstance(back["recipe"], theirs.DelayedScaling) and back["recipe"].fp8_format is theirs.Format.HYBRID
    assert back["extra_fp8_variables"] == {"num_gemms": products, "fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0}
    again = torch.nn.Sequential(cls(*sizes))
    again.load_state_dict(written)
    want = m.state_dict()
    assert again.state_dict().keys() == want.keys()
    assert all(torch.equal(v, want[k]) for k, v in again.state_dict().items())


def test_states_without_scales(theirs):
    m = dt.Linear(32, 32)
    for held in (
        torch.empty(0, dtype=torch.uint8),
        None,
        as_bytes(None),
        as_bytes({"recipe": theirs.DelayedScaling()}),
    ):
        m.load_state_dict({**m.state_dict(), "_extra_state": held})
        assert not [k for k in m.state_dict() if "scale_states" in k]
    assert dt.te_state_dict(m)["_extra_state"].numel() == 0


def amaxes(history, last):
    raise AssertionError("a function of a checkpoint ran")


class Factory:
    def __init__(self, options):
        self.options = options

    def __call__(self, role):
        raise AssertionError("a factory of a checkpoint ran")


@pytest.mark.parametrize("own", [amaxes, Factory({"a": 1}), functools.partial(amaxes, last=Factory(2))])
def test_a_users_functions_and_factories_in_a_recipe_are_not_read(theirs, own):
    m = dt.Linear(32, 32)
    recipe = theirs.DelayedScaling(amax_history_len=8)
    recipe.amax_compute_algo = recipe.qfactory = own
    without = {"recipe": recipe, "extra_fp8_variables": {"num_gemms": 1}}
    m.load_state_dict({**m.state_dict(), "_extra_state": as_bytes(without)})
    assert not [k for k in m.state_dict() if "scale_states" in k]
    state = extra_state(theirs, 1) | {"recipe": recipe}
    m.load_state_dict({**m.state_dict(), "_extra_state": as_bytes(state)})
    assert torch.equal(m.state_dict()["scale_states.input.scale"], state["scale_fwd"][:1])


class Dangerous:
    def __reduce__(self):
        return print, ("ran",)


def test_damaged_states_are_refused(theirs, capsys):
    m = dt.Linear(32, 32)
    whole = as_bytes(extra_state(theirs, 1))
    other = {**extra_state(theirs, 1), "amax_history_fwd": torch.ones(8)}
    for held, words in (
        (as_bytes(Dangerous()), "holds _StandIn"),
        (as_bytes({**extra_state(theirs, 1), "scale_fwd": Dangerous()}), "holds no tensor scale_fwd"),
        (whole[: whole.numel() // 2], "can be read"),
        (as_bytes([1]), "holds list"),
        (torch.zeros(3), "no uint8 tensor"),
        (as_bytes(extra_state(theirs, 2)), "Linear has 1 products with 3 each"),
        (as_bytes(other), "Linear has 1 products with 3 each"),
    ):
        with pytest.raises(CheckpointError, match=f"_extra_state .*{words}"):
            m.load_state_dict({**m.state_dict(), "_extra_state": held})
    assert "ran" not in capsys.readouterr().out
