"""Random sequences of what users do with a module, against `fuzz.reference`: bits of results, gradients and states.

A round is one sequence: steps, evaluations, checkpoints of every kind, regions, saving, loading, copying, casting,
preparing. A sequence that fails is made simpler as long as it fails in that way: operations are left out, and
their options get the simplest values.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_frontend.state.test_checkpoint_adopted import KINDS as CHECKPOINTS
from torch_frontend.tools import same

import diptych.torch as dt
from diptych.common import (
    CheckpointError,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    QuantizerRole,
)
from fuzz.draw import Draw
from fuzz.reference import Call, Reference, regions

SHRINK = 20.0
"""Seconds in which a failing sequence is made simpler."""
LR = 2.0**-6


def drawn(role: QuantizerRole) -> NVFP4Quantizer:
    """Every operand takes random bits; a function of this module, so that modules can be pickled."""
    return NVFP4Quantizer(stochastic_rounding=True)


RECIPES: tuple[Any, ...] = (
    Float8CurrentScaling(),
    DelayedScaling(amax_history_len=3),
    DelayedScaling(amax_history_len=5, amax_compute_algo="most_recent", margin=1),
    DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_rht=True),
    NVFP4BlockScaling(),  # the Hadamard transform takes bfloat16 alone
    CustomRecipe(drawn),
)
ROTATED = 7
REGIONS = ("on", "on", "on", "none", "off", "nested", "off in on", "on in off")
EVALUATIONS = ("eval", "eval no_grad", "eval inference", "no_grad", "inference", "dry run")


def _saving(fn: Any, x: Tensor) -> Tensor:
    """A selective checkpoint that keeps the products."""

    def policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        keep = "gemm" in str(op) or "linear" in str(op)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(fn, x, use_reentrant=False, context_fn=contexts)


KINDS: dict[str, Any] = {"plain": lambda fn, x: fn(x), **CHECKPOINTS, "selective, products kept": _saving}


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation. Its data come from its own seed, so that it stays the same where others are left out."""

    name: str
    seed: int
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


# --- the choice of a sequence ----------------------------------------------------------------------------------------


def config(d: Draw) -> dict[str, Any]:
    kind = d.choice(("Linear", "LayerNormLinear", "LayerNormMLP"))
    options: dict[str, Any] = {"bias": d.maybe(0.7)}
    if d.maybe(0.5):
        options |= {"save_original_input": d.maybe(0.5), "save_original_weight": d.maybe(0.5)}
    if kind != "Linear":
        options["normalization"] = d.choice(("LayerNorm", "RMSNorm"))
    if kind == "LayerNormMLP":
        options |= {"activation": d.choice(("gelu", "swiglu", "relu")), "checkpoint": d.maybe(0.2)}
    sizes = d.choice((16, 32, 48, 64)), d.choice((16, 32, 64))
    dtype = "bfloat16" if kind == "Linear" and d.maybe(0.5) else "float32"
    return {"kind": kind, "sizes": sizes, "dtype": dtype, "own": _own(d, dtype), **options}


def _recipe(d: Draw, dtype: str) -> int:
    return d.choice([i for i in range(len(RECIPES)) if i != ROTATED or dtype == "bfloat16"])


def _own(d: Draw, dtype: str) -> int | None:
    return _recipe(d, dtype) if d.maybe(0.25) else None


def sequence(d: Draw, dtype: str) -> list[Op]:
    """Mostly by few recipes, so that states grow old."""
    few = [_recipe(d, dtype) for _ in range(d.choice((1, 2, 2, 3)))]

    def region() -> tuple[Any, ...]:
        return d.choice(REGIONS), d.choice(few), d.choice(few)

    def evaluation() -> dict[str, Any]:
        kind = d.choice(list(KINDS)) if d.maybe(0.3) else "plain"
        first = d.choice((None, None, None, None, True, False))
        how = d.choice(EVALUATIONS)
        return {"region": region(), "how": how, "kind": kind, "first": first, "x_grad": d.maybe(0.7)}

    def train() -> dict[str, Any]:
        kind = d.choice(list(KINDS)) if d.maybe(0.6) else "plain"
        between = [evaluation() for _ in range(d.choice((0, 0, 1, 2)))]
        return {"region": region(), "kind": kind, "inside": d.maybe(0.3), "shared": d.maybe(0.5),
                "microbatches": d.choice((1, 1, 2, 3)), "cached": d.choice((None, None, None, "all", "later")),
                "between": between, "reverse": d.maybe(0.3), "around": d.choice((None, None, region())),
                "x_grad": d.maybe(0.8), "step": d.maybe(0.7)}  # fmt: skip

    def load() -> dict[str, Any]:
        saved, own = d.choice((None, None, 0, 1, 2)), _own(d, dtype)
        return {"saved": saved, "fresh": d.maybe(0.4), "alone": d.maybe(0.3), "file": d.maybe(0.2), "own": own}

    chosen: dict[str, Callable[[], dict[str, Any]]] = {
        "train": train,
        "evaluate": evaluation,
        "write": evaluation,
        "load": load,
        "save": dict,
        "copy": lambda: {"by": d.choice(("deepcopy", "pickle"))},
        "cast": lambda: {"to": d.choice(("float64", "cpu", "float32"))},
        "prepare": lambda: {"recipe": d.choice(few)},
        "recipe": lambda: {"recipe": d.choice((None, *few))},
        "seed": lambda: {"seed": d.getrandbits(64), "offset": d.getrandbits(40)},
        "reset": dict,
        "prepare_weights": lambda: {"bytes": d.choice((0, 1 << 12, 1 << 20))},
        "drop": dict,
        "remove": dict,
    }
    weights = {"train": 12, "evaluate": 6, "write": 1, "load": 3}
    names = d.choices(list(chosen), [weights.get(name, 1) for name in chosen], k=d.randrange(2, 13))
    return [Op(name, d.getrandbits(32), chosen[name]()) for name in names]


# --- what runs it ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def entered(region: tuple[Any, ...] | None) -> Iterator[None]:
    """Enters the regions of the library, as a user would."""
    shape, first, second = region or ("none", 0, 0)
    given = {
        "none": [],
        "on": [{"recipe": RECIPES[first]}],
        "off": [{"enabled": False}],
        "nested": [{"recipe": RECIPES[first]}, {"recipe": RECIPES[second]}],
        "off in on": [{"recipe": RECIPES[first]}, {"enabled": False}],
        "on in off": [{"enabled": False}, {"recipe": RECIPES[first]}],
    }[shape]
    with contextlib.ExitStack() as stack:
        for options in given:
            stack.enter_context(dt.autocast(**options))
        yield


class World:
    """A module and its reference, and what else a sequence has made."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = dict(given)
        self.dtype = getattr(torch, self.given["dtype"])
        self.seed = 0
        torch.manual_seed(1)
        self.take(*self.make(self.given["own"]))
        self.saved: list[tuple[dict[str, Tensor], Reference]] = []

    def make(self, own: int | None) -> tuple[Any, Reference]:
        """Returns a module and its reference, which takes over the random state that a constructor draws."""
        options = {k: v for k, v in self.given.items() if k not in ("kind", "sizes", "dtype", "own")}
        recipe = None if own is None else RECIPES[own]
        real = getattr(dt, self.given["kind"])(*self.given["sizes"], dtype=self.dtype, recipe=recipe, **options)
        with torch.no_grad():
            for i, p in enumerate(real.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * (0.3 if p.dim() > 1 else 1))
        model = Reference(real, lambda: words(real.rng_state))
        model.draw = self.draw
        return real, model

    def draw(self) -> list[int]:
        """The random state that a first call makes: from torch's generator, which each operation seeds."""
        generator = torch.Generator().manual_seed(self.seed)
        made = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int64, generator=generator)
        low, high = (int(n) & 0xFFFFFFFF for n in made)
        return [low | high << 32, 0]

    def take(self, real: Any, model: Reference) -> None:
        self.real, self.model, self.prepared = real, model, None
        self.optimizer = torch.optim.SGD(real.parameters(), lr=LR)

    def call(self, region: tuple[Any, ...], record: bool) -> Call:
        """Returns the settings of a call inside of a region."""
        shape, first, second = region
        own = self.model.recipe
        if shape in ("off", "off in on"):
            return Call(None, None, record)
        if shape == "none":
            return Call(own, None, record)
        recipe = RECIPES[second if shape == "nested" else first]
        return Call(recipe if own is None else own, next(regions), record)

    def first(self, wanted: bool | None) -> bool | None:
        """False asks for a weight that was kept; the library refuses it where none is."""
        kept = all(one.kept for one in self.model.layers.values())
        return wanted if wanted is not False or kept else None

    def data(self, number: int, columns: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + number)
        scale = 2.0 ** int(torch.randint(-6, 7, (1,), generator=generator))
        return (torch.randn(32, columns, generator=generator) * scale).to(self.dtype)

    def input(self, number: int, x_grad: bool) -> tuple[Tensor, Tensor]:
        x = self.data(number, self.given["sizes"][0])
        return x.clone().requires_grad_(x_grad), x.clone().requires_grad_(x_grad)

    def run(self, op: Op) -> None:
        self.seed = op.seed
        torch.manual_seed(op.seed)
        for p in (*self.real.parameters(), *self.model.parameters.values()):
            p.grad = None
        getattr(self, f"_{op.name}")(**op.options)
        self.compare(str(op))

    def compare(self, label: str) -> None:
        persistent = ("scale", "amax_history", "fp8_max", "rng_state")
        got = {k: t for k, t in self.real.named_buffers() if k.rpartition(".")[2] in persistent}
        want = self.model.states()
        assert got.keys() == want.keys(), f"{label}: states {sorted(got)}, must be {sorted(want)}"
        for key, t in (want | self.model.parameters).items():
            mine = got[key] if key in got else self.real.get_parameter(key)
            same(mine, t, f"{label} {key}")
            if t.grad is None or mine.grad is None:
                assert t.grad is mine.grad, f"{label}: the gradient of {key} is {mine.grad}, must be {t.grad}"
            else:
                same(mine.grad, t.grad, f"{label} gradient of {key}")

    # --- operations: each does to the module and to its reference what a user would do ---

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any] | None:
        """The results of two functions, or None where both raise that states are another recipe's."""
        found: list[Any] = []
        for fn in (real, model):
            try:
                found.append(fn())
            except CheckpointError as e:
                found.append(e)
        errors = [isinstance(one, CheckpointError) for one in found]
        assert errors[0] == errors[1], f"raises {found[0] if errors[0] else 'nothing'}, must raise {found[1]}"
        return None if errors[0] else (found[0], found[1])

    def backward(self, ys: tuple[Any, Any], xs: tuple[Tensor, Tensor], number: int) -> None:
        g = self.data(number, ys[0].shape[1]) * 2.0**-8
        for y in ys:
            y.backward(g)
        if xs[1].grad is not None or xs[0].grad is not None:
            same(xs[0].grad, xs[1].grad, "gradient of the input")

    def _train(
        self, region: Any, kind: str, inside: bool, shared: bool, microbatches: int, cached: str | None,
        between: list[dict[str, Any]], reverse: bool, around: Any, x_grad: bool, step: bool,
    ) -> None:  # fmt: skip
        self.real.train()
        self.model.training = True
        made: list[Any] = []
        call = self.call(region, True)
        outside = None if inside else region
        with entered(outside if shared else None):
            for i in range(microbatches):
                if i and (inside or not shared):
                    call = self.call(region, True)
                call.first = self.first(None if cached is None else cached == "all" and i == 0)
                xs = self.input(i, x_grad or kind != "plain")

                def run(x: Tensor, first: bool | None = call.first) -> Tensor:
                    with entered(region) if inside else contextlib.nullcontext():
                        return self.real(x, is_first_microbatch=first)

                def real(run: Any = run, x: Tensor = xs[0]) -> Tensor:
                    with entered(None if shared else outside):
                        return KINDS[kind](run, x)

                ys = self.both(real, functools.partial(self.model, xs[1], call))
                if ys is None:
                    return
                same(ys[0], ys[1], f"result {i}")
                made.append((ys, xs, 100 + i))
        for i, one in enumerate(between):
            self._evaluate(**one, number=1000 * (i + 1), backward=False)
        self.real.train()
        self.model.training = True
        with entered(around):
            for one in reversed(made) if reverse else made:
                self.backward(*one)
        if step:
            self.optimizer.step()
            self.model.step(LR)

    def _evaluate(
        self, region: Any, how: str, kind: str, first: bool | None, x_grad: bool, number: int = 0, backward: bool = True
    ) -> None:
        training = not how.startswith("eval")
        self.real.train(training)
        self.model.training = training
        off = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "dry run": dt.dry_run}
        graph = how in ("eval", "dry run")
        kind = kind if graph else "plain"
        xs = self.input(number, x_grad or (kind != "plain" and graph))
        call = self.call(region, False)
        call.first = self.first(first)

        def real() -> Tensor:
            with off.get(how.removeprefix("eval "), contextlib.nullcontext)(), entered(region):
                return KINDS[kind](lambda x: self.real(x, is_first_microbatch=call.first), xs[0])

        def model() -> Tensor:
            with contextlib.nullcontext() if graph else torch.no_grad():
                return self.model(xs[1], call)

        ys = self.both(real, model)
        if ys is None:
            return
        same(ys[0], ys[1], f"result of {how}")
        if graph and backward:
            self.backward(ys, xs, number + 100)

    def _write(self, **evaluation: Any) -> None:
        """An average of weights that is swapped in for an evaluation."""
        for factor in (2.0, 0.5):
            for p in (*self.real.parameters(), *self.model.parameters.values()):
                p.data.mul_(factor)
            if factor == 2:
                self._evaluate(**(evaluation | {"how": "eval no_grad", "first": None}))

    def _save(self) -> None:
        state = {k: t.clone() for k, t in self.real.state_dict().items()}
        self.saved.append((state, self.model.saved()))

    def _load(self, saved: int | None, fresh: bool, alone: bool, file: bool, own: int | None) -> None:
        if saved is None or saved >= len(self.saved):
            self._save()
            saved = -1
        state, values = self.saved[saved]
        if file:
            blob = io.BytesIO()
            torch.save(state, blob)
            blob.seek(0)
            state = torch.load(blob, weights_only=True)
        if alone:
            state = {k: t for k, t in state.items() if k in values.parameters}
        real, model = self.make(own) if fresh else (self.real, self.model)
        loaded = self.both(lambda: real.load_state_dict(state), lambda: model.load(values, alone))
        if fresh and loaded is not None:
            self.take(real, model)

    def _copy(self, by: str) -> None:
        if by == "deepcopy":
            self.model.make_missing()
        model = self.model.copied(by == "deepcopy")
        self.take(copy.deepcopy(self.real) if by == "deepcopy" else pickle.loads(pickle.dumps(self.real)), model)

    def _cast(self, to: str) -> None:
        self.real.to(to if to == "cpu" else getattr(torch, to)).to(self.dtype)

    def _prepare(self, recipe: int) -> None:
        self.both(lambda: dt.prepare(self.real, RECIPES[recipe]), lambda: self.model.prepare(RECIPES[recipe]))

    def _recipe(self, recipe: int | None) -> None:
        self.real.recipe = self.model.recipe = None if recipe is None else RECIPES[recipe]

    def _seed(self, seed: int, offset: int) -> None:
        self.real.seed_rng(seed, offset)
        self.model.rng = [seed, offset]

    def _reset(self) -> None:
        self.real.reset_scale_states()
        self.model.reset_states()

    def _prepare_weights(self, bytes: int) -> None:
        if self.prepared is None:
            self.prepared = dt.prepare_weights(self.real, self.optimizer, max_bytes=bytes)

    def _drop(self) -> None:
        if self.prepared is not None:
            self.prepared.drop()

    def _remove(self) -> None:
        if self.prepared is not None:
            self.prepared.remove()
            self.prepared = None


def words(rng: Tensor) -> list[int]:
    """Seed and offset of a random state, int32 [4]."""
    low, high, *offset = (int(n) & 0xFFFFFFFF for n in rng)
    return [low | high << 32, offset[0] | offset[1] << 32]


def failure(given: dict[str, Any], ops: list[Op]) -> tuple[list[Op], Exception] | None:
    """Returns a sequence up to the operation that fails, and its error; None where none fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done: list[Op] = []
        try:
            world = World(given)
            for op in ops:
                done.append(op)
                world.run(op)
        except Exception as e:
            return done, e
    return None


SIMPLEST: dict[str, Any] = {
    "between": [], "kind": "plain", "around": None, "cached": None, "first": None, "microbatches": 1, "reverse": False,
    "inside": False, "shared": False, "how": "eval no_grad", "step": False, "saved": None, "fresh": False,
    "file": False, "alone": False, "bytes": 0,
}  # fmt: skip


def simpler(ops: list[Op]) -> Iterator[list[Op]]:
    """Sequences with an operation less, the last ones first, or with an option that is simpler."""
    for i in reversed(range(len(ops))):
        yield ops[:i] + ops[i + 1 :]
    for i, op in enumerate(ops):
        changes = [{key: value} for key, value in SIMPLEST.items() if op.options.get(key, value) != value]
        held = op.options.get("between", [])
        changes += [{"between": held[:j] + held[j + 1 :]} for j in range(len(held))]
        for j, one in enumerate(held):
            plain = {key: value for key, value in SIMPLEST.items() if key in one}
            changes += [
                {"between": [*held[:j], one | {key: value}, *held[j + 1 :]]}
                for key, value in plain.items()
                if one[key] != value
            ]
        for change in changes:
            yield [*ops[:i], dataclasses.replace(op, options=op.options | change), *ops[i + 1 :]]


def simplest(given: dict[str, Any], ops: list[Op], error: Exception) -> tuple[list[Op], Exception]:
    """Returns a sequence that fails by an error of that class, and its error. No simpler one does, unless `SHRINK`
    seconds were not enough to tell."""
    until, tried, changed = time.monotonic() + SHRINK, 0, False
    while time.monotonic() < until:
        rest = next(itertools.islice(simpler(ops), tried, None), None)
        if rest is None and not changed:
            break
        if rest is None:
            tried, changed = 0, False
            continue
        found = failure(given, rest)
        if found is not None and type(found[1]) is type(error):
            (ops, error), changed = found, True
        else:
            tried += 1
    return ops, error


def run(d: Draw, count: Callable[[bool], None]) -> None:
    """One sequence."""
    given = config(d)
    found = failure(given, sequence(d, given["dtype"]))
    if found is not None:
        ops, error = simplest(given, *found)
        what = f"{type(error).__name__} {' '.join(str(error).split())[:300]}"
        said = f"{what} | {given} | {'; '.join(map(str, ops))}"
        raise AssertionError(said).with_traceback(error.__traceback__)
    count(True)
