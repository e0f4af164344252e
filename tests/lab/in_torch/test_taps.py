"""Taps of eager modules leave gradients as they are, and know whose they are."""

import collections
import contextlib
import copy
import dataclasses
import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import Float8CurrentScaling
from diptych.lab.capture import CaptureWarning
from diptych.torch import lab
from in_torch.captured import observed


class Calls(nn.Module):
    """A model that runs a function of its parts."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


class Of(nn.Module):
    """A module that runs a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def backward_and_step(model, x, folder, **options):
    with lab.capture(model, out=folder, **options) as t:
        model(x).sum().backward()
        t.step()
    return observed(folder)


@pytest.mark.parametrize("part", [nn.Identity(), nn.Flatten(), Of(lambda x: x[:1]), Of(lambda x: x[:1].view(-1))])
@pytest.mark.parametrize("named", [False, True])
def test_a_write_to_a_modules_result_that_is_its_input_has_a_gradient(tmp_path, part, named):
    def tripled(m, x):
        h = x * 1.0
        y = m.part(**{"x" if isinstance(part, Of) else "input": h}) if named else m.part(h)
        y.mul_(3)
        return h

    model = Calls(tripled, part=part)
    x, want = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
    model(want).sum().backward()
    backward_and_step(model, x, tmp_path / "t")
    assert want.grad.max() == 3 and torch.equal(x.grad, want.grad)


def test_the_gradient_of_an_input_that_is_returned(tmp_path):
    model, x = Calls(lambda m, x: m.part(x * 1.0) * 2, part=nn.Identity()), torch.ones(3, requires_grad=True)
    found = backward_and_step(model, x, tmp_path / "t")
    assert found["activation_grad:part"].record.statistics.mean == 2
    assert found["activation:(model)"].site.inputs == ("activation:part",)


def plus(m, x):
    h = m.part(m.linear(x))
    h += x.flatten()[0]
    return h.tanh()


def plus_after_a_use(m, x):
    h = m.part(m.linear(x))
    first = 5 * h
    h += 1
    return h.tanh() + first


def scaled_twice(m, x):
    h = m.part(m.linear(x))
    h.mul_(3)
    return h[:1].mul_(2).sum() + h.sum()


def plus_its_input(m, x):
    h = m.linear(x)
    y = m.part(h)
    h += 1
    return y.tanh()


@pytest.mark.parametrize("function", [plus, plus_after_a_use, scaled_twice, plus_its_input])
@pytest.mark.parametrize("part", [nn.Dropout().eval(), nn.Flatten(0), Of(lambda x: x.T), Of(lambda x: x[1:, 2:])])
def test_the_gradient_of_a_result_that_is_written_in_place(tmp_path, function, part):
    """It is that of the values before the write."""
    model, x, want = Calls(function, linear=nn.Linear(4, 4), part=part), torch.randn(4, 4), []
    handle = part.register_forward_hook(lambda m, given, out: given[0].register_hook(want.append) and None)
    model(x).sum().backward()
    handle.remove()
    found = backward_and_step(model, x, tmp_path / "t", values="full")
    bits = found["activation_grad:part"].values.tensor.bits
    assert torch.equal(torch.from_numpy(bits.copy()).view(torch.float32), part(want[0]))


def test_a_write_that_no_later_module_sees(tmp_path):
    model = Calls(plus, linear=nn.Linear(4, 4), part=nn.Identity())
    with lab.capture(model, out=tmp_path / "t", sites="part") as t:
        model(torch.randn(3, 4)).sum().backward()
        t.step()
    assert "activation_grad:part" in observed(tmp_path / "t")


def test_forward_mode(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()).eval()
    x, direction = torch.randn(2, 4), torch.randn(2, 4)

    def tangent():
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, direction))
            y.mul_(2)
            return forward_ad.unpack_dual(y).tangent

    want = tangent()
    with lab.capture(model, out=tmp_path / "t") as t:
        assert torch.equal(tangent(), want)
        t.step()


def test_copies_of_a_model_are_not_recorded(tmp_path):
    model, file = nn.Sequential(nn.Linear(2, 2)), io.BytesIO()
    with lab.capture(model, out=tmp_path / "t") as t:
        average = copy.deepcopy(model)
        torch.save(model, file)
        model(torch.ones(1, 2)).sum().backward()
        average(torch.ones(1, 2)).sum().backward()
        t.step()
    assert [key for key in observed(tmp_path / "t") if "#" in key] == []
    file.seek(0)
    for i, made in enumerate((average, torch.load(file, weights_only=False))):
        for _ in range(2):  # copies can be captured, and run afterwards
            made(torch.ones(1, 2)).sum().backward()
            if not (tmp_path / str(i)).exists():
                keys = backward_and_step(made, torch.ones(1, 2, requires_grad=True), tmp_path / str(i))
                assert sorted(k for k in keys if k.startswith("activation:")) == ["activation:(model)", "activation:0"]


def test_ops_after_an_exception_that_the_caller_handles(tmp_path):
    def fails_once(m, x):
        h = m.linear(x)
        with contextlib.suppress(MemoryError):
            m.part(h)
        m.part.function = torch.square
        return m.part(h).square()

    def raises(x):
        raise MemoryError

    model = nn.Sequential(Calls(fails_once, linear=dt.Linear(32, 32), part=Of(raises)))
    with dt.autocast(recipe=Float8CurrentScaling()):
        found = backward_and_step(model, torch.randn(16, 32), tmp_path / "t")
    assert {"result:0.linear/gemm.d", "result:0.linear/gemm.d#1"} <= set(found)
    model[0].part.function = raises
    model[0].function = lambda m, x: m.part(m.linear(x)).square()
    with lab.capture(model, out=tmp_path / "u") as t, dt.autocast(recipe=Float8CurrentScaling()):
        with pytest.raises(MemoryError):
            model(torch.randn(16, 32))
        model[0].part.function = torch.square
        model(torch.randn(16, 32)).sum().backward()
        t.step()
    assert "result:0.linear/gemm.d#2" in observed(tmp_path / "u")


def test_ops_of_another_models_backward_pass_are_not_recorded(tmp_path):
    captured, other, x = dt.Linear(32, 32), dt.Linear(32, 32), torch.randn(16, 32)
    with lab.capture(captured, out=tmp_path / "t") as t, dt.autocast(recipe=Float8CurrentScaling()):
        captured(x).square().sum().backward()
        other(x).square().sum().backward()
        t.step()
    gemms = [key for key in observed(tmp_path / "t") if "result" in key and "gemm.d" in key]
    assert gemms == ["result:(model)/gemm.d", "result:(model)/gemm.d#1"]


def test_gradients_of_recomputed_calls_with_equal_bits(tmp_path):
    def twice(m, x):
        return sum(scale * checkpoint(m.linear, x, use_reentrant=True) for scale in (1, 10))

    found = backward_and_step(
        Calls(twice, linear=nn.Linear(2, 2)), torch.ones(1, 2, requires_grad=True), tmp_path / "t"
    )
    amax = [found[f"activation_grad:linear{call}"].record.statistics.amax for call in ("", "#1")]
    assert amax == [1, 10]


def test_a_default_device_and_inference_mode_do_not_matter(tmp_path):
    model = nn.Linear(2, 2)
    torch.set_default_device("meta")
    try:
        assert "activation_grad:(model)" in backward_and_step(model, torch.ones(1, 2, device="cpu"), tmp_path / "t")
    finally:
        torch.set_default_device(None)


def test_a_dataclass_with_a_field_that_is_not_set(tmp_path):
    @dataclasses.dataclass
    class Partial:
        left: torch.Tensor
        right: torch.Tensor = dataclasses.field(init=False)

    model = Calls(lambda m, x: m.part(x).left, part=Of(lambda x: Partial(x * 2)))
    assert 'activation:part["left"]' in backward_and_step(model, torch.ones(2, requires_grad=True), tmp_path / "t")


def test_names_of_places(tmp_path):
    class Unknown:
        def __init__(self, x):
            self.x = x

    both = collections.namedtuple("Both", "left right")
    model = Of(lambda x: (both(x, {1: x, "a\n": x, "a\t": x}), Unknown(x), Unknown(x)))
    with (
        lab.capture(model, out=tmp_path / "t") as t,
        pytest.warns(CaptureWarning, match=r"in \(model\)\[1\] are not recorded: Unknown") as warned,
    ):
        model(torch.ones(2))
        t.step()
    assert len(warned) == 1
    left, right = 'activation:(model)[0]["left"]', 'activation:(model)[0]["right"]'
    assert list(observed(tmp_path / "t")) == [left, f"{right}[1]", f'{right}["a?"]', f'{right}["a?"]#1']


def test_a_model_whose_result_is_unknown_runs(tmp_path):
    model = Calls(lambda m, x: type("Unknown", (), {})(), linear=nn.Linear(2, 2))
    with (
        lab.capture(model, out=tmp_path / "t") as t,
        pytest.warns(CaptureWarning, match=r"in \(model\) are not recorded"),
    ):
        model(torch.ones(2))
        t.step()
    assert set(observed(tmp_path / "t")) == {"parameter:linear.weight", "parameter:linear.bias"}


def test_transforms_of_functions_and_lazy_modules_are_refused(tmp_path):
    model = nn.Linear(2, 2)

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (torch.ones(1, 2),)).sum()

    with lab.capture(model, out=tmp_path / "t"), pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(loss)(dict(model.named_parameters()))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(NotImplementedError, match="'0' has parameters that"), lab.capture(lazy, out=tmp_path / "u"):
        pass


def test_gradients_are_recorded_before_hooks_that_change_them(tmp_path):
    """Hooks that were there before the capture may scale a gradient, or step an optimizer and remove it."""
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    model(x).sum().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    seen = []

    def step(p):
        seen.append(p.grad.clone())
        p.grad.mul_(100)
        torch.optim.SGD([p], 1e-3).step()
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    found = backward_and_step(model, x, tmp_path / "trace", values="full")
    assert len(seen) == 2 and all(p.grad is None for p in model.parameters())
    for name, gradient in want.items():
        bits = found[f"parameter_grad:{name}"].values.tensor.bits
        assert torch.equal(torch.from_numpy(bits.copy()).view(torch.float32), gradient)
    assert [list(p._post_accumulate_grad_hooks.values()) for p in model.parameters()] == [[step], [step]]
    for handle in handles:
        handle.remove()


def test_sizes_that_a_module_returns_stay_sizes(tmp_path):
    model = Calls(lambda m, x: m.part(x)[0] / m.part(x)[1].numel(), part=Of(lambda x: (x * 2, x.shape)))
    assert "activation:part[0]" in backward_and_step(model, torch.randn(2, 4, requires_grad=True), tmp_path / "trace")


def test_nested_tensors_are_named_and_left_alone(tmp_path):
    padded = lambda x: torch.nested.to_padded_tensor(x, 0.0)  # noqa: E731
    x = torch.randn(2, 3, 4)
    nested = lambda: torch.nested.nested_tensor([x[0], x[1, :2]])  # noqa: E731
    model = Calls(lambda m, _: padded(m.linear(nested())), linear=nn.Linear(4, 4))
    with pytest.warns(CaptureWarning, match="activation linear is not recorded: traces cannot hold a nested tensor"):
        found = backward_and_step(model, x, tmp_path / "trace")
    assert {"activation:(model)", "parameter_grad:linear.weight"} <= set(found) and "activation:linear" not in found
