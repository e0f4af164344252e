"""Transforms of torch.func, and batched gradients, over every differentiable op: the bits of separate calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, jacrev
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import RECIPES, MXFP8Quantizer
from torch_frontend.graph.test_custom_op import arguments, toy
from torch_frontend.graph.test_engine import products
from torch_frontend.graph.test_traced import IDS, OF_A_RECIPE, OTHERS, ROWS, K, Log, N, of
from torch_frontend.layer_cases import SEED, STATELESS
from torch_frontend.modules.test_convert_experts import Experts, routing

grad: Any = torch.func.grad
vjp: Any = torch.func.vjp
vmap: Any = torch.func.vmap
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: dt.Linear(K, N, **kw),
    "Linear, original": lambda **kw: dt.Linear(K, N, save_original_input=True, save_original_weight=True, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(K, N, **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(K, N, activation="swiglu", **kw),
    "GroupedLinear": lambda **kw: dt.GroupedLinear(3, K, N, **kw),
    "GroupedLinear, row map": lambda **kw: dt.GroupedLinear(3, K, N, **kw),
}
GROUPS: dict[str, Any] = {
    "GroupedLinear": {"m_splits": [16, 0, 16]},
    "GroupedLinear, row map": {"row_map": dt.moe_map(IDS, 3, map_type="index", align_size=16), "align": 16},
}
TOYS = {"a user's op": lambda x, w, b: toy(arguments(x, w, b, torch.full((1,), 0.5), [], None))[0]}
VERBS = {
    **{name: case for name, case in OTHERS.items() if "quantize" not in name and "user" not in name},
    "a user's op": lambda _: (
        TOYS["a user's op"],
        [of(s, n).float() for s, n in (((ROWS, 32), "x"), ((32, 32), "w"), ((32,), "bias"))],
    ),
}
CASES = [(kind, name) for kind in MODULES for name in RECIPES] + [(verb, None) for verb in VERBS]
every_case = pytest.mark.parametrize(("kind", "name"), CASES)


class Called:
    """A module or verb as a function of its tensors alone, x first, from the same state each time it is made."""

    def __init__(self, kind: str, name: str | None, **how: Any) -> None:
        self.model: Any = None
        if kind in VERBS:
            self.run, self.tensors = VERBS[kind](None)
            return
        torch.manual_seed(0)
        recipe = RECIPES[name]  # type: ignore[index]
        model = self.model = dt.prepare(MODULES[kind](**how).bfloat16(), recipe)
        dt.seed_rng(model, SEED)
        names = [n for n, _ in model.named_parameters()]
        self.tensors = [of((ROWS, K)), *[p.detach().clone() for p in model.parameters()]]

        def run(x: Tensor, *parameters: Tensor) -> Any:
            with dt.autocast(recipe=recipe):
                return functional_call(model, dict(zip(names, parameters, strict=True)), (x,), GROUPS.get(kind))

        self.run = run

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        made = self.run(*tensors)
        return tuple([y for y in (made if isinstance(made, tuple) else (made,)) if y.is_floating_point()])

    def leaves(self) -> list[Tensor]:
        return [t.detach().clone().requires_grad_() for t in self.tensors]

    def states(self) -> list[Tensor]:
        """Returns the states after another region has updated them."""
        if self.model is None:
            return []
        self.run(*self.tensors)
        return [t for n, t in self.model.state_dict().items() if "states" in n or "rng" in n]


def equal(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b), i


def gradients_of(outputs: Any, name: str = "dy") -> list[Tensor]:
    return [of(tuple(y.shape), f"{name}{i}").to(y.dtype) for i, y in enumerate(outputs)]


def one_step(kind: str, name: str | None) -> Any:
    """Returns outputs, gradients and states of torch.autograd."""
    plain = Called(kind, name)
    leaves = plain.leaves()
    outputs = plain(*leaves)
    made = torch.autograd.grad(outputs, leaves, gradients_of(outputs))
    return [y.detach() for y in outputs], made, plain.states()


@every_case
def test_vjp(kind, name):
    outputs, made, states = one_step(kind, name)
    call = Called(kind, name)
    got, back = vjp(call, *call.tensors)
    equal(got, outputs)
    equal(back(tuple(gradients_of(outputs))), made)
    equal(call.states(), states)


@every_case
def test_grad_and_value(kind, name):
    """`grad_and_value` alone, and `grad` inside of another `grad`, which differentiates by none of its tensors."""
    plain, call, other = [Called(kind, name) for _ in range(3)]

    def loss(run: Any, *tensors: Tensor) -> Tensor:
        return torch.stack([y.float().square().sum() for y in run(*tensors)]).sum()

    leaves = plain.leaves()
    value = loss(plain, *leaves)
    want = torch.autograd.grad(value, leaves)
    places = tuple(range(1, 1 + len(leaves)))
    made, got = grad_and_value(loss, argnums=places)(call, *call.tensors)
    assert torch.equal(got, value)
    equal(made, want)
    equal(call.states(), plain.states())
    made = grad(lambda s: grad(loss, argnums=places)(other, *other.tensors)[0].float().sum() * 0 + s)(torch.ones(()))
    assert made == 1


@every_case
def test_batched_gradients(kind, name):
    """jacrev's vmap over a backward, `is_grads_batched`, and torch.func.vmap around `autograd.grad`: each gradient has
    the bits of a backward of its own, random bits included, which a backward takes from its forward."""
    call, other = Called(kind, name), Called(kind, name)
    leaves = call.leaves()
    outputs = call(*leaves)
    each = [gradients_of(outputs, f"dy{i} ") for i in range(3)]
    want = [torch.autograd.grad(outputs, leaves, dy, retain_graph=True) for dy in each]
    stacks = [torch.stack(dys) for dys in zip(*each, strict=True)]
    stacked = [torch.stack(ts) for ts in zip(*want, strict=True)]
    got = torch.autograd.grad(outputs, leaves, stacks, is_grads_batched=True, retain_graph=True)
    equal(got, stacked)
    (one,) = torch.autograd.grad(outputs, leaves[0], stacks, is_grads_batched=True, retain_graph=True)
    equal([one], stacked[:1])
    equal(vmap(lambda *dys: torch.autograd.grad(outputs, leaves, dys, retain_graph=True))(*stacks), stacked)
    _, back = vjp(other, *other.tensors)
    equal(vmap(back)(tuple(stacks)), stacked)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_jacrev(kind, name):
    plain, call = Called(kind, name), Called(kind, name)
    x, *others = plain.tensors
    leaf = x.clone().requires_grad_()
    y = plain(leaf, *others)[0]
    rows = [torch.autograd.grad(y[r, r + 1], leaf, retain_graph=True)[0] for r in range(3)]
    got = jacrev(lambda x: torch.stack([(y := call(x, *others)[0])[0, 1], y[1, 2], y[2, 3]]))(x)
    equal([got], [torch.stack(rows)])


def separate(call: Called, batch: Tensor, run: Any) -> list[Any]:
    """Returns run of each example, in one step."""
    if call.model is None:
        return [run(x) for x in batch]
    with dt.autocast(recipe=RECIPES["mxfp8"]):  # regions inside of it are no steps of their own
        return [run(x) for x in batch]


def batched(call: Called, run: Any, *batches: Tensor) -> Any:
    with dt.autocast(recipe=RECIPES["mxfp8"]):
        return vmap(run, randomness="different")(*batches)


@every_case
def test_vmap(kind, name):
    """Under vmap a call is one step: its examples share scales, record the largest amax, and draw one after another."""
    plain, call = Called(kind, name), Called(kind, name)
    x, *others = plain.tensors
    batch = torch.stack([x, x * 2, x - 1])
    want = separate(plain, batch, lambda x: plain(x, *others))
    got = batched(call, lambda x: call(x, *others), batch)
    equal(got, [torch.stack(each) for each in zip(*want, strict=True)])
    equal(call.states(), plain.states())


@every_case
def test_gradients_of_each_example(kind, name):
    plain, call = Called(kind, name), Called(kind, name)
    x, *others = plain.tensors
    batch = torch.stack([x, x * 2, x - 1])

    def loss(run: Any, x: Tensor, *others: Tensor) -> Tensor:
        return torch.stack([y.float().square().sum() for y in run(x, *others)]).sum()

    def one(x: Tensor) -> Any:
        leaves = [x.clone().requires_grad_(), *[t.clone().requires_grad_() for t in others]]
        return torch.autograd.grad(loss(plain, *leaves), leaves)

    want = separate(plain, batch, one)
    places = tuple(range(len(plain.tensors)))
    got = batched(call, lambda x: grad(lambda *t: loss(call, *t), argnums=places)(x, *others), batch)
    equal(got, [torch.stack(each) for each in zip(*want, strict=True)])
    equal(call.states(), plain.states())


@pytest.mark.parametrize("name", RECIPES)
def test_routed_experts(name):
    """Maps of rows, two grouped layers and weighted sums, by vjp and for each example of a batch, ids included."""

    def made() -> Any:
        module: Any = Experts()
        module.act_fn = torch.nn.Tanh()  # torch's SiLU has another backward where it may be differentiated again
        dt.convert(torch.nn.ModuleDict({"moe": module}), verbose=False)
        module.bfloat16()
        dt.seed_rng(module, SEED)
        return module

    plain, module, other, separately = made(), made(), made(), made()
    x, ids, weights = routing(32)
    x, parameters = x.bfloat16(), {n: p.detach() for n, p in module.named_parameters()}

    def run(of: Any, x: Tensor, ids: Tensor, weights: Tensor, parameters: Any) -> Tensor:
        return functional_call(of, parameters, (x, ids, weights))

    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    with dt.autocast(recipe=RECIPES[name]):
        y = plain(leaves[0], ids, leaves[1])
        dy = of(tuple(y.shape), "dy").to(y.dtype)
        want = torch.autograd.grad(y, [*leaves, *plain.parameters()], dy)
        got, back = vjp(lambda x, w, p: run(module, x, ids, w, p), x, weights, parameters)
        dx, dw, dp = back(dy)
        equal([got, dx, dw, *[dp[n] for n in parameters]], [y.detach(), *want])
        batch = torch.stack([x, x * 2]), torch.stack([ids, ids.flip(0)]), torch.stack([weights, weights * 0.5])
        made_at_once = vmap(lambda x, i, w: run(other, x, i, w, parameters), randomness="different")(*batch)
        for got, each in zip(made_at_once, zip(*batch, strict=True), strict=True):
            equal([got], [run(separately, each[0], each[1], each[2], parameters)])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_checkpoints_around_a_map(kind, name):
    """The recomputation finds the scales and the random bits of its forward, as without a checkpoint."""
    made = []
    for around in (None, False, True):
        call = Called(kind, name)
        leaf = torch.stack([call.tensors[0], call.tensors[0] * 2]).requires_grad_()
        run: Any = vmap(call.model, randomness="different")
        with dt.autocast(recipe=RECIPES[name]):
            y = run(leaf) if around is None else checkpoint(run, leaf, use_reentrant=around)
        y.backward(of(tuple(y.shape), "dy"))
        made.append([y.detach(), leaf.grad, *[p.grad for p in call.model.parameters()], *call.states()])
    equal(made[1], made[0])
    equal(made[2], made[0])


@pytest.mark.parametrize("name", RECIPES)
def test_nested_maps(name):
    plain, call = Called("Linear", name), Called("Linear", name)
    x, *others = plain.tensors
    batch = torch.stack([x + i for i in range(4)])
    want = separate(plain, batch, lambda x: plain(x, *others)[0])
    inner = vmap(lambda x: call(x, *others)[0], randomness="different")
    got = batched(call, inner, batch.unflatten(0, (2, 2)))
    equal([got.flatten(0, 1)], [torch.stack(want)])
    equal(call.states(), plain.states())


@pytest.mark.parametrize("evaluation", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_calls_that_draw_nothing_need_no_randomness(kind, evaluation):
    """Evaluations, which round all calls alike, and forwards without stochastic rounding."""
    call = Called(kind, "nvfp4")
    x, *others = call.tensors
    batch = torch.stack([x, x - 1])
    if evaluation:
        call.model.eval()

        def run(x: Tensor) -> Any:
            return vjp(lambda *t: call(*t)[0], x, *others)[1](of((ROWS, K if kind == "LayerNormMLP" else N), "dy"))
    else:

        def run(x: Tensor) -> Any:
            with torch.no_grad():
                return call(x, *others)

    want = [run(x) for x in batch]
    before = call.model.rng_state.clone()
    equal(vmap(run)(batch), [torch.stack(each) for each in zip(*want, strict=True)])
    assert torch.equal(call.model.rng_state, before)


@pytest.mark.parametrize("name", [n for n in STATELESS if "nvfp4" not in n])
@pytest.mark.parametrize("kind", MODULES)
def test_ensembles_and_backward_below_transforms(kind, name):
    """Stacked parameters, each for an example of its own; then a `backward()` of torch's below the vmap."""
    models = [Called(kind, name) for _ in range(2)]
    for i, call in enumerate(models):
        call.tensors = [t + i * 0.5 for t in call.tensors]
    stacks = [torch.stack(each).requires_grad_() for each in zip(*[c.tensors for c in models], strict=True)]
    (y,) = vmap(models[0])(*stacks)
    dy = of(tuple(y.shape), "dy").to(y.dtype)
    y.backward(dy)
    for i, call in enumerate(models):
        leaves = call.leaves()
        (want,) = call(*leaves)
        equal([y[i]], [want])
        equal([t.grad[i] for t in stacks], torch.autograd.grad(want, leaves, dy[i]))  # type: ignore[index]


@pytest.mark.parametrize(
    ("kind", "name"), [("a user's op", None), ("moe_unpermute", None), *[("quantize, gemm", n) for n in RECIPES]]
)
def test_batched_gradients_of_nodes_and_of_quantized_tensors(kind, name):
    """A verb that ran under a dispatch mode is a node, whose backward gets batched gradients likewise."""
    if name is None:
        call = Called(kind, None)
        leaves = call.leaves()
        with Log():
            outputs = call(*leaves)
    else:
        run, tensors = OF_A_RECIPE[kind](RECIPES[name])
        leaves = [t.requires_grad_() for t in tensors]
        outputs = run(*leaves)
    each = [gradients_of(outputs, f"dy{i} ") for i in range(3)]
    want = [torch.autograd.grad(outputs, leaves, dy, retain_graph=True) for dy in each]
    stacks = [torch.stack(dys) for dys in zip(*each, strict=True)]
    stacked = [torch.stack(ts) for ts in zip(*want, strict=True)]
    equal(torch.autograd.grad(outputs, leaves, stacks, is_grads_batched=True, retain_graph=True), stacked)
    equal(vmap(lambda *dys: torch.autograd.grad(outputs, leaves, dys, retain_graph=True))(*stacks), stacked)


# --- what modules keep -----------------------------------------------------------------------------------------------


def test_gradients_by_x_alone_run_one_product():
    """Parameters that require grad below the transform get none from it."""
    model, x = dt.Linear(K, N).bfloat16(), of((ROWS, K))
    with dt.autocast(recipe=RECIPES["fp8-current"]):
        before = products()
        dx = grad(lambda x: model(x).float().sum())(x)
        assert products() - before == 2
        leaf = x.clone().requires_grad_()
        model(leaf).float().sum().backward()
    assert torch.equal(dx.detach(), leaf.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_held_weights_are_operands(kind, name):
    """Their gradients are plain tensors, as those of torch's own backward."""

    def made() -> Called:
        with dt.quantized_model_init(recipe=RECIPES[name]):
            return Called(kind, name)

    held, call, other = made(), made(), made()
    names = [n for n, _ in held.model.named_parameters()]
    x, groups = held.tensors[0], GROUPS.get(kind)

    def run(of: Called, x: Tensor, parameters: Any) -> Tensor:
        with dt.autocast(recipe=RECIPES[name]):
            return functional_call(of.model, parameters, (x,), groups)

    leaf = x.clone().requires_grad_()
    y = run(held, leaf, dict(held.model.named_parameters()))
    dy = of(tuple(y.shape), "dy")
    want = torch.autograd.grad(y, [leaf, *held.model.parameters()], dy)
    got, back = vjp(lambda x, p: run(call, x, p), x, dict(call.model.named_parameters()))
    dx, dp = back(dy)
    equal([got.detach(), dx.detach(), *[dp[n].detach() for n in names]], [y.detach(), *want])
    with dt.autocast(recipe=RECIPES["mxfp8"]):  # one step
        again = vmap(lambda x: run(other, x, {}), randomness="different")(torch.stack([x, x]))
    equal([again[0].detach()], [y.detach()])


def test_prepared_weights_are_left_alone():
    recipe, x = RECIPES["mxfp8"], of((2, ROWS, K))
    model = dt.Linear(K, N).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    prepared = dt.prepare_weights(model, optimizer, max_bytes=1 << 20)
    with dt.autocast(recipe=recipe):
        model(x).float().square().sum().backward()
        optimizer.step()
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        got = vmap(lambda x: functional_call(model, parameters, (x,)))(x)
        made = grad(lambda p: functional_call(model, p, (x[0],)).float().square().sum())(parameters)
        optimizer.zero_grad()
        y = model(x[0])  # by the prepared copies
        y.float().square().sum().backward()
    equal([got[0]], [y.detach()])
    equal([made[n] for n, _ in model.named_parameters()], [p.grad for p in model.parameters()])
    prepared.remove()


def test_constants_are_quantized_as_outside():
    x, q = of((ROWS, K)), MXFP8Quantizer()
    want = dt.gemm(dt.quantize(x, q), dt.quantize(x, q))
    got = grad(lambda s: (s * dt.gemm(dt.quantize(x, q), dt.quantize(x, q)).float()).sum())(torch.ones(()))
    assert torch.equal(got, want.float().sum())


def test_verbs_without_derivative_run_for_each_example():
    x = of((3, ROWS, K))
    equal([vmap(dt.amax)(x)], [torch.stack([dt.amax(t) for t in x])])
    equal([vmap(dt.bias_grad, in_dims=1)(x.transpose(0, 1))], [torch.stack([dt.bias_grad(t) for t in x])])
    ids = torch.arange(3 * 2 * ROWS).view(3, ROWS, 2) % 3
    made = vmap(lambda i: dt.moe_map(i, 3, map_type="index").row_id_map)(ids)
    equal([made], [torch.stack([dt.moe_map(i, 3, map_type="index").row_id_map for i in ids])])


def test_vectorized_jacobians():
    call = Called("Linear", "mxfp8")
    x, *others = call.tensors
    run = lambda x: call(x, *others)[0][0, :4]  # noqa: E731
    jacobian = torch.autograd.functional.jacobian
    equal([jacobian(run, x, vectorize=True)], [jacobian(run, x)])


# --- names of torch --------------------------------------------------------------------------------------------------
