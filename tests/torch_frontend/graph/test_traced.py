"""Every differentiable op under what intercepts a call: checkpoints, dispatch and function modes, hooks on saved
tensors and tensors of another class leave the bits of outputs and gradients as they are."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as selective
from torch.utils.flop_counter import FlopCounterMode

import diptych.torch as dt
from diptych.common import RECIPES, MXFP8Quantizer, QuantizerRole, Recipe
from diptych.common.ops.activation import ACTIVATIONS
from diptych.common.ops.norm import norm_options
from diptych.torch.functional.activation import activate
from diptych.torch.functional.norm import layernorm
from torch_frontend.graph.test_custom_op import arguments, toy
from torch_frontend.layer_cases import SEED, STATELESS, packed
from torch_frontend.tools import normal, rng_for

ROWS, K, N = 32, 64, 96
OFFSETS = torch.tensor([0, 16, 16, 32], dtype=torch.int32)
IDS = torch.arange(2 * ROWS).view(ROWS, 2) % 3
ROW_MAP = dt.moe_map(IDS, 3, map_type="index")


def of(shape: tuple[int, ...], name: str = "x") -> Tensor:
    return normal(name, shape, "bfloat16")


def module(make: Callable[[], Any], **call: Any) -> Any:
    """Returns a case of a module and its parameters; states and random bits are those of a first call."""

    def case(recipe: Recipe) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        made = make().bfloat16()
        dt.prepare(made, recipe)
        dt.seed_rng(made, SEED)

        def run(x: Tensor, *_: Tensor) -> Any:
            with dt.autocast(recipe=recipe):
                return made(x, **call)

        return run, [of((ROWS, K)), *made.parameters()]

    return case


def verb(run: Any, *tensors: Tensor) -> Any:
    return lambda recipe: (run, [t.clone() for t in tensors])


def quantizer(recipe: Recipe, tensor: str) -> Any:
    return recipe.quantizer(QuantizerRole(tensor=tensor))


def quantized(recipe: Recipe) -> tuple[Any, list[Tensor]]:
    """quantize, dequantize and gemm, all differentiated."""
    each = [quantizer(recipe, "input"), quantizer(recipe, "weight")]
    given = [{"scale": torch.ones(1) if q.needs_scale else None, "rng": rng_for(q)} for q in each]

    def run(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        qx, qw = [dt.quantize(t, q, **more) for t, q, more in zip((x, w), each, given, strict=True)]
        return dt.gemm(qx, qw, bias=bias), qx.dequantize()

    return run, [of((ROWS, K)), of((N, K), "w"), of((N,), "bias")]


def own(x: Tensor, w: Tensor, bias: Tensor) -> Any:
    """A user's op that keeps an argument, a list and tensors of its own, and one whose input is quantized."""
    q, _ = toy(arguments(x, w, bias, torch.full((1,), 0.5), [], MXFP8Quantizer()))
    return toy(arguments(q, w, bias, torch.full((1,), 0.5), [], None))[0]


PROBS = of((ROWS, 2), "probs").float().abs()
OF_A_RECIPE: dict[str, Any] = {
    "Linear": module(lambda: dt.Linear(K, N)),
    "Linear, original": module(lambda: dt.Linear(K, N, save_original_input=True)),
    "LayerNormLinear": module(lambda: dt.LayerNormLinear(K, N)),
    "LayerNormMLP": module(lambda: dt.LayerNormMLP(K, N, activation="swiglu")),
    "GroupedLinear": module(lambda: dt.GroupedLinear(3, K, N), m_splits=[16, 0, 16]),
    "GroupedLinear, row map": module(
        lambda: dt.GroupedLinear(3, K, N), row_map=dt.moe_map(IDS, 3, map_type="index", align_size=16), align=16
    ),
    "quantize, gemm": quantized,
}
OTHERS: dict[str, Any] = {
    "moe_permute": verb(lambda x: dt.moe_permute(x, ROW_MAP)[0], of((ROWS, K))),
    "moe_permute_with_probs": verb(
        lambda x, p: dt.moe_permute_with_probs(x, p, torch.ones(ROWS, 2, dtype=torch.bool))[:2], of((ROWS, K)), PROBS
    ),
    "moe_unpermute": verb(lambda x, p: dt.moe_unpermute(x, ROW_MAP, p), of((2 * ROWS, K)), PROBS),
    "moe_sort_chunks": verb(
        lambda x, p: dt.moe_sort_chunks_by_index_with_probs(x, p, [20, 12], [1, 0]), of((ROWS, K)), PROBS[:, 0]
    ),
    "moe_sort_chunks, tensors": verb(
        lambda x: dt.moe_sort_chunks_by_index(x, torch.tensor([20, 12]), torch.tensor([1, 0])), of((ROWS, K))
    ),
    "moe_permute_and_quantize": verb(
        lambda x: dt.moe_permute_and_quantize(x, ROW_MAP, MXFP8Quantizer()).dequantize(), of((ROWS, K))
    ),
    "norm": verb(
        lambda x, g, b: layernorm(x, g, b, norm_options("norm", "LayerNorm", 1e-5, False)),
        of((ROWS, K)),
        of((K,), "g"),
        of((K,), "b"),
    ),
    "activation": verb(lambda x: activate(x, ACTIVATIONS["swiglu"]), of((ROWS, K))),
    "a user's op": verb(own, *[of(s, n).float() for s, n in (((ROWS, 32), "x"), ((32, 32), "w"), ((32,), "bias"))]),
}


class Log(TorchDispatchMode):
    """Sees every op and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Sub(Tensor):
    """A class that adds nothing; torch's functions return it where they are given it."""


def every_second() -> Any:
    """Saves the result of every second op of diptych: torch refuses saved results that are written to later."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not op.namespace.startswith("diptych"):
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def torchs(run: Any, *xs: Tensor, **how: Any) -> Any:
    return checkpoint(run, *xs, use_reentrant=False, **how)


def saving(how: Any, policy: Any) -> Any:
    return lambda run, *xs: how(run, *xs, context_fn=functools.partial(selective, policy()))


def direct(run: Any, *xs: Tensor) -> Any:
    return run(*xs)


def of_a_subclass(run: Any, *xs: Tensor) -> Any:
    return run(*[xs[0].as_subclass(Sub), *xs[1:]])


def nothing() -> Any:
    return []


MODES: dict[str, tuple[Any, Any]] = {  # what a step runs in, and how it calls its function
    "torch's selective checkpoint": (contextlib.nullcontext, saving(torchs, nothing)),
    "torch's selective checkpoint, every second": (contextlib.nullcontext, saving(torchs, every_second)),
    "selective checkpoint": (contextlib.nullcontext, saving(dt.checkpoint, nothing)),
    "selective checkpoint, every second": (contextlib.nullcontext, saving(dt.checkpoint, every_second)),
    "FLOP counter": (lambda: FlopCounterMode(display=False), direct),
    "FLOP counter around torch's checkpoint": (lambda: FlopCounterMode(display=False), torchs),
    "FLOP counter around a checkpoint": (lambda: FlopCounterMode(display=False), dt.checkpoint),
    "FLOP counter around a reentrant checkpoint": (
        lambda: FlopCounterMode(display=False), functools.partial(dt.checkpoint, use_reentrant=True),
    ),
    "dispatch mode": (Log, direct),
    "dispatch mode around a selective checkpoint": (Log, saving(dt.checkpoint, every_second)),
    "function mode": (Functions, direct),
    "function mode around a checkpoint": (Functions, dt.checkpoint),
    "hooks on saved tensors": (lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()), direct),
    "saved on the CPU": (save_on_cpu, direct),
    "subclass": (contextlib.nullcontext, of_a_subclass),
    "subclass in a selective checkpoint": (
        contextlib.nullcontext, lambda run, *xs: saving(dt.checkpoint, nothing)(run, xs[0].as_subclass(Sub), *xs[1:]),
    ),
}  # fmt: skip
CASES = [(op, None, mode) for op in OTHERS for mode in MODES]
for (i, op), (j, mode) in itertools.product(enumerate(OF_A_RECIPE), enumerate(MODES)):
    # torch's own checkpoint plays back neither scales nor random bits
    possible = [n for n in RECIPES if "torch's" not in mode or (n in STATELESS and not packed(n))]
    for k, recipe in enumerate(possible):
        now = k == (i + j) % len(possible)
        CASES.append((op, recipe, mode) if now else pytest.param(op, recipe, mode, marks=pytest.mark.slow))  # type: ignore[arg-type]


def step(case: Any, recipe: str | None, context: Any, call: Any) -> list[Tensor]:
    """Returns the outputs and the gradients of one step of a fresh case."""
    run, tensors = case(None if recipe is None else RECIPES[recipe])
    leaves = [t.detach().requires_grad_() if t.is_leaf and not t.requires_grad else t for t in tensors]
    with context():
        made = call(run, *leaves)
        outputs = [t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad]
        grads = [of(tuple(y.shape), "dy").to(y.dtype) for y in outputs]
        torch.autograd.backward(outputs, grads)
    return [*[y.detach().as_subclass(Tensor) for y in outputs], *[t.grad for t in leaves]]  # type: ignore[list-item]


@pytest.mark.parametrize(("op", "recipe", "mode"), CASES)
def test_the_bits_of_a_plain_run(op, recipe, mode):
    case = OF_A_RECIPE.get(op) or OTHERS[op]
    want = step(case, recipe, contextlib.nullcontext, direct)
    got = step(case, recipe, *MODES[mode])
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a is not None and torch.equal(a, b), (op, mode, i)
