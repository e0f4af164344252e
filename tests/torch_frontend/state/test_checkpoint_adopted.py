"""torch's own checkpoints and backward passes carry regions: what runs again has the bits of the plain run, whatever
was called in between, and a function that nobody recorded is refused by name."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import diptych.torch as dt
from diptych.common import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, UnsupportedError
from diptych.torch.private.checkpointing import GENERATOR
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED
from torch_frontend.tools import normal, same

OTHER = DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3)


def _selective(fn: Any, x: torch.Tensor) -> torch.Tensor:
    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(fn, x, use_reentrant=False, context_fn=contexts)


class _Calls(torch.nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.__dict__["fn"] = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def _wrapper(kind: Any, fn: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_wrapper(_Calls(fn), checkpoint_impl=kind)(x)


KINDS: dict[str, Any] = {
    "reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
    "non-reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "selective": _selective,
    "composable": lambda fn, x: composable(_Calls(fn))(x),
    "wrapped": functools.partial(_wrapper, CheckpointImpl.NO_REENTRANT),
    "wrapped reentrant": functools.partial(_wrapper, CheckpointImpl.REENTRANT),
    "diptych's": dt.checkpoint,
    "diptych's reentrant": functools.partial(dt.checkpoint, use_reentrant=True),
    "nested": lambda fn, x: checkpoint(lambda a: checkpoint(fn, a, use_reentrant=False), x, use_reentrant=False),
    "nested reentrant": lambda fn, x: checkpoint(
        lambda a: checkpoint(fn, a, use_reentrant=True), x, use_reentrant=True
    ),
    "mixed": lambda fn, x: dt.checkpoint(lambda a: checkpoint(fn, a, use_reentrant=False), x, use_reentrant=True),
}
BETWEEN = ("nothing", "evaluation", "another recipe", "no_grad")
AROUND: dict[str, Any] = {"nothing": None, "a region": MXFP8BlockScaling(), "a disabled region": False}


def _call(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def train(
    recipe: Any, run: Any, between: str, around: Any, device: str = "cpu", call: Any = _call
) -> dict[str, torch.Tensor]:
    """Three steps of a block that runs in high precision in between, and the states at the end. `call`: calls it."""
    model = layers.gelu_model().to(device, getattr(torch, layers.dtype_of(recipe)))
    dt.prepare(model, recipe)
    dt.seed_rng(model, layers.SEED)

    def block(x: torch.Tensor) -> torch.Tensor:
        h = call(model, x)
        with dt.autocast(enabled=False):
            return h + model[2](x)

    out: dict[str, Any] = {}
    for i in range(3):
        x = (normal(f"x{i}", (16, 96), layers.dtype_of(recipe), device) * (i + 1)).requires_grad_()
        with dt.autocast(recipe=recipe):
            y = run(block, x)
        if between == "evaluation":
            with torch.no_grad():
                call(model.eval(), x)
            model.train()
        elif between == "no_grad":
            with torch.no_grad():
                call(model, x)
        elif between == "another recipe":
            with torch.no_grad(), dt.autocast(recipe=OTHER):
                call(model.eval(), x)
            model.train()
        loss = y.square().sum()
        if around is None:
            loss.backward()
        else:
            with dt.autocast(enabled=around is not False, recipe=around or None):
                loss.backward()
        out |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
    out |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return out | {name: t.clone() for name, t in model.state_dict().items()}


CELLS = list(itertools.product(KINDS, NAMED, BETWEEN, AROUND))
ALWAYS = {
    (kind, name, BETWEEN[(i + j) % len(BETWEEN)], tuple(AROUND)[(i + 2 * j) % len(AROUND)])
    for i, kind in enumerate(KINDS)
    for j, name in enumerate(NAMED)
    if (i + j) % 4 == 0 or name == "fp8-delayed"
}


@pytest.mark.parametrize(("kind", "name", "between", "around"), [c if c in ALWAYS else layers.slow(*c) for c in CELLS])
def test_a_recomputation_runs_in_its_forwards_region(kind, name, between, around):
    recipe = NAMED[name]
    got = train(recipe, KINDS[kind], between, AROUND[around])
    want = train(recipe, lambda fn, x: fn(x), "nothing", None)
    for key in want:  # an evaluation by a recipe with states may have made some
        same(got[key], want[key], key)


COMPILED = list(itertools.product(KINDS, NAMED))


@pytest.mark.parametrize(
    ("kind", "name"), [c if c == ("reentrant", "fp8-delayed") else layers.slow(*c) for c in COMPILED]
)
def test_around_compiled_code(kind, name):
    """Equal models share their graphs, so that the cells of one recipe compile once: those of training, of evaluation
    and of the other recipe."""
    torch._dynamo.reset()
    # torch's selective contexts take no ops that write in place as aot_eager runs them, inside of a higher-order op.
    # Inductor's GELU has bits of its own.
    backend = "inductor" if kind == "selective" else "aot_eager"
    call, recipe = torch.compile(_call, backend=backend, fullgraph=True), NAMED[name]
    want = train(recipe, lambda fn, x: fn(x), "nothing", None, call=call if kind == "selective" else _call)
    for between, around in itertools.product(BETWEEN, AROUND):
        got = train(recipe, KINDS[kind], between, AROUND[around], call=call)
        for key in want:
            same(got[key], want[key], f"{key} with {between} between, {around} around")


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("kind", KINDS)
def test_in_backwards_threads(cuda, kind, name):
    """A GPU's backward runs in threads of its own, which see none of the caller's regions."""
    for between, around in (("evaluation", None), ("another recipe", MXFP8BlockScaling())):
        got = train(NAMED[name], KINDS[kind], between, around, cuda)
        want = train(NAMED[name], lambda fn, x: fn(x), "nothing", None, cuda)
        for key in want:
            same(got[key], want[key], key)


@pytest.mark.parametrize("reentrant", (False, True))
def test_a_block_outside_of_regions_stays_outside(reentrant):
    """A layer that runs outside of regions in a checkpoint, and quantized after it, has the plain run's bits. So has a
    fused module that checkpoints itself, alone and inside of torch's checkpoint."""
    for recipe in (Float8CurrentScaling(), layers.DELAYED):
        found = []
        torchs = functools.partial(checkpoint, use_reentrant=reentrant)
        for run, own in ((lambda fn, x: fn(x), False), (lambda fn, x: fn(x), True), (torchs, False), (torchs, True)):
            torch.manual_seed(0)
            layer = dt.prepare(dt.LayerNormMLP(96, 64, checkpoint=own), recipe)
            x = normal("x", (16, 96)).requires_grad_()
            h = run(layer, x)
            with dt.autocast(recipe=recipe):
                y = layer(h)
            y.square().mean().backward()
            found.append([x.grad, *[p.grad for p in layer.parameters()]])
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                same(a, b)


class Again(torch.autograd.Function):
    """A user's own function that runs `fn` again in backward. `region`: entered around the second run."""

    @staticmethod
    def forward(ctx: Any, fn: Any, region: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.fn, ctx.region = fn, region
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            if ctx.region is None:
                y = ctx.fn(x)
            else:
                with ctx.region:
                    y = ctx.fn(x)
        y.backward(dy)
        return None, None, x.grad


@pytest.mark.parametrize(
    ("compiled", "around"),
    [(False, a) for a in AROUND] + [(True, a) if a == "a region" else layers.slow(True, a) for a in AROUND],
)
def test_a_function_that_nobody_recorded(device, around, compiled):
    """It is refused by name if its module ran quantized, whatever region stands around backward; a region that it
    enters wins; a module that never ran quantized runs."""
    recipe, x = Float8CurrentScaling(), normal("x", (16, 96), device=device)

    def grad(region: Any, quantized: bool = True) -> torch.Tensor:
        torch._dynamo.reset()
        layer, a = layers.layer(device=device), x.clone().requires_grad_()
        fn = torch.compile(layer, backend="aot_eager") if compiled else layer
        with dt.autocast(enabled=quantized, recipe=recipe):
            y = Again.apply(fn, region, a)
        with torch.no_grad():
            fn(x)  # an evaluation outside of regions leaves a graph in high precision
        given = AROUND[around]
        with dt.autocast(enabled=bool(given), recipe=given or None):
            y.sum().backward()
        assert a.grad is not None
        return a.grad

    with pytest.raises(Exception if compiled else UnsupportedError, match="no autocast region was recorded"):
        grad(None)
    plain = layers.layer(device=device)
    for region, enabled in ((dt.autocast(recipe=recipe), True), (dt.autocast(enabled=False), False)):
        a = x.clone().requires_grad_()
        with dt.autocast(enabled=enabled, recipe=recipe):
            plain(a).sum().backward()
        same(grad(region), a.grad)
    same(grad(None, quantized=False), a.grad)


def test_contexts_of_a_functions_own():
    """`checkpoint_contexts` serve a function of the user's own, with every recipe."""
    for recipe in NAMED.values():
        found = []
        for again in (False, True):
            model = layers.gelu_model().to(getattr(torch, layers.dtype_of(recipe)))
            dt.prepare(model, recipe)
            dt.seed_rng(model, layers.SEED)
            taping, playing = dt.checkpoint_contexts()
            ran: list[int] = []

            def fn(a, model=model, taping=taping, playing=playing, ran=ran):
                ran.append(1)
                with taping if len(ran) == 1 else playing:
                    return model(a)

            x = normal("x", (16, 96), layers.dtype_of(recipe)).requires_grad_()
            with dt.autocast(recipe=recipe):
                y = Again.apply(fn, None, x) if again else model(x)
            y.sum().backward()
            found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()]])
        for a, b in zip(*found, strict=True):
            same(a, b)


def test_the_names_of_torch_are_there():
    """Without one of them a kind of checkpoint would be refused by name, so a new torch must be looked at."""
    import torch.distributed._composable.checkpoint_activation as activation

    names: list[Any] = [getattr(module, GENERATOR) for module in (torch.utils.checkpoint, activation)]
    names.append(torch.autograd._engine_run_backward)
    names += [torch.autograd.graph._engine_run_backward, torch.utils.checkpoint.CheckpointFunction.apply]
    assert all(hasattr(name, "wrapped_by_diptych") for name in names)


def test_debugged_checkpoints_keep_torchs_contexts():
    x = normal("x", (16, 96)).requires_grad_()
    checkpoint(layers.layer(), x, use_reentrant=False, debug=True).sum().backward()
    assert x.grad is not None
