"""Ops below the transforms of torch.func: grad, vjp, jacrev and vmap, nested in any order, and
`torch.autograd.grad(is_grads_batched=True)`.

A transform shows a call tensors of its own, which have no memory. A call becomes two Functions that torch takes through
the levels of transforms one by one, `Forward` and `Below`; below all of them the op's functions get plain tensors, as
eagerly. Invariants:

- Under vmap the op runs once for each example, with the bits of a call on that example alone.
- What backward reads is among `Forward`'s results, so that it has a level's form there; `Call.found` says what it is.
- A backward draws no random bits: its random states are saved tensors like all others.
- A `QuantizedTensor` may be an operand, which regains its class below; a result would lose it, and is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.torch.graph import eager_only
from diptych.torch.graph.program import Layout, Memo, memo_of, split
from diptych.torch.primitives.checks import outside_of_transforms, wrapped
from diptych.torch.primitives.register import stacked
from diptych.torch.private import functorch as transforms
from diptych.torch.private.functorch import transforms_active
from diptych.torch.tensors.quantized import QuantizedTensorBase

# --- levels ----------------------------------------------------------------------------------------------------------


def requires_grad(t: Tensor | None) -> bool:
    """Returns whether a transform, or autograd below all transforms, differentiates with respect to t."""
    while t is not None and not t.requires_grad and wrapped(t):
        t = transforms.unwrapped(t)
    return t is not None and t.requires_grad


def _batched_at(t: Any) -> set[int]:
    """Returns the levels of those vmaps for which t holds a tensor per example."""
    found = set()
    while wrapped(t):
        if transforms.is_batched(t):
            found.add(transforms.level_of(t))
        t = transforms.unwrapped(t)
    return found


def examples() -> int:
    """Returns the product of the batch sizes of all vmaps around a call; 1 if there is none."""
    count = 1
    if transforms_active():
        for each in transforms.vmaps():
            count *= each.batch_size()
    return count


def _spread(op: Any, rng: Tensor, draws: tuple[int, int], levels: set[int]) -> Tensor:
    """Returns a random state for each example of the vmaps at `levels`. `draws`: the number of offsets between two
    examples, and the number that an example's earlier layers use. `rng` lies behind the latter for all examples.

    **Raises** NotImplementedError unless each of these vmaps has randomness="different".
    """
    maps = [each for each in transforms.vmaps() if each.level() in levels]
    for each in maps:
        if each.randomness() != "different":
            raise UnsupportedError(
                f'{op.name}: stochastic rounding under vmap needs torch.func.vmap(..., randomness="different"), by '
                f'which each example draws its own random bits; this one has randomness="{each.randomness()}"'
            )
    with transforms.hide_transforms():
        sizes = [each.batch_size() for each in maps]
        count = torch.Size(sizes).numel()
        step, after = draws
        steps = torch.arange(count, device=rng.device).mul_(step).sub_(after * (examples() - 1))
        steps = steps.view(*sizes, *[1] * rng.dim())
        words = rng.view(torch.int64) + torch.cat([torch.zeros_like(steps), steps], -1)
        spread = words.view(torch.int32)
        for each in maps:
            spread = transforms.add_batch(spread, 0, each.level())
    return spread


# --- the functions ---------------------------------------------------------------------------------------------------


class Below(torch.autograd.Function):
    """Runs a function of plain tensors below all transforms; it has no derivative."""

    @staticmethod
    def forward(run: Any, *tensors: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        return _apart(run(*tensors), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        raise UnsupportedError(f"{ctx.run.name} has no second derivative{ctx.run.remedy}")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        raise _no_tangents(ctx.run.name)

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Any, *tensors: Any) -> Any:  # type: ignore[override]
        return _each(Below, info, in_dims, run, tensors)


class Forward(torch.autograd.Function):
    """Runs a `Call`, with results: an op's outputs, an empty tensor, and the tensors that backward reads. The empty
    tensor depends on every operand, and backward passes it to `Below`, so that a second derivative with respect to any
    operand reaches `Below`, which refuses."""

    @staticmethod
    def forward(call: Call, *tensors: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        outputs, saved = call(tensors)
        return (*outputs, outputs[0].new_empty(0, dtype=torch.float32), *_apart(saved, (*tensors, *outputs)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        found = call.found[0]
        outputs, (link, *saved) = output[: found.outputs], output[found.outputs :]
        ctx.call, ctx.forms = call, [(t.shape, t.dtype, t.device) for t in outputs]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[outputs[i] for i in found.passive], *saved)
        ctx.save_for_backward(link, *[tensors[i] for i in found.kept], *saved)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        call, found = ctx.call, ctx.call.found[0]
        given = []
        for grad, (shape, dtype, device) in zip(grads, ctx.forms, strict=False):
            given.append(torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad)
        memo, op = found.memo, call.op
        now = tuple([n for n, g in zip(call.places(), ctx.needs_input_grad[1:], strict=True) if g and n in call.needs])
        asked = now if op.parts and now != call.needs else None
        run = Backward(op, call.fields | memo.instead, call.needs, memo, found.lengths, asked)
        names = [n for n in memo.gradients if asked is None or n in asked]
        link, *saved = ctx.saved_tensors
        by_name = dict(zip(names, run.below(saved, given, link), strict=True))
        results: list[Tensor | None] = []
        for name, count in call.names:
            results += [by_name.get(name)] if count is None else [None] * count
        return None, *results

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        raise _no_tangents(ctx.call.op.name)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: Any, *tensors: Any) -> Any:  # type: ignore[override]
        return _each(Forward, info, in_dims, call, tensors)


def _no_tangents(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian): differentiate in reverse mode"
    )


def _each(function: Any, info: Any, in_dims: Any, run: Any, tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Runs a Function for each example of a vmap. Returns its results, stacked, and their batch dimensions."""
    made = []
    for i in range(info.batch_size):
        one = [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims[1:], strict=True)]
        made.append(function.apply(run, *one))
    if not made:
        raise ShapeError(f"{run.name}: vmap over a dimension of size 0, which has no example to run")
    results = tuple([stacked(each) for each in zip(*made, strict=True)])
    return results, (0,) * len(results)


def _apart(results: Sequence[Tensor], others: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the results, with a copy in place of each that is one of `others` or an earlier result: torch would
    otherwise take the two for one tensor."""
    seen, made = {id(t) for t in others}, []
    for t in results:
        made.append(t.clone() if id(t) in seen else t)
        seen.add(id(t))
    return tuple(made)


# --- an op's call ----------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """The description of a forward that ran below the transforms. `passive`: the outputs without a derivative. `kept`:
    the places of the tensors that backward reads. `lengths`: the lengths of the lists among these."""

    outputs: int
    passive: list[int]
    memo: Any
    kept: list[int]
    lengths: list[int]


class Call:
    """One call of an op. `fields`: the arguments that are no tensors. `names`: the fields of its tensors in order, each
    with the length of its list, or None for a single tensor."""

    def __init__(self, op: Any, arguments: Any, needs: tuple[str, ...]) -> None:
        self.op, self.needs, self.name = op, needs, op.name
        self.fields = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
        self.names: list[tuple[str, int | None]] = []
        self.tensors: list[Any] = []
        self.found: list[Found] = []
        for name in (*op.differentiable, *op.lists):
            value = self.fields.pop(name)
            if name in op.lists:
                held = [t for t in value if t is not None]
                self.names.append((name, len(held)))
                if len(held) < len(value):
                    raise UnsupportedError(
                        f"{op.name}: the list {name} contains None, which transforms of torch.func do not take; leave "
                        "it out, or call the op outside of the transform"
                    )
            else:
                held = [] if value is None else [value]
                self.names += [(name, None)] if held else []
                self.fields |= {} if held else {name: None}
            self.tensors += held
        for name, value in self.fields.items():
            if any([wrapped(t) for t in (value if isinstance(value, (list, tuple)) else (value,))]):
                raise UnsupportedError(
                    f"{op.name}: {name} takes no tensor of a transform of torch.func (grad, vjp, jacrev, vmap); pass a "
                    "plain tensor"
                )
        self._spread_random_states(arguments)

    def _spread_random_states(self, arguments: Any) -> None:
        drawn = self.op.draws(arguments, self.needs)
        levels = set().union(*[_batched_at(t) for t in self.tensors]) if drawn else set()
        if not levels:
            return
        for i, name in enumerate(self.places()):
            if name in drawn and not _batched_at(self.tensors[i]):  # else the caller gave each example its own state
                self.tensors[i] = _spread(self.op, self.tensors[i], drawn[name], levels)

    def places(self) -> list[str]:
        """Returns the field of each tensor."""
        return [name for name, count in self.names for _ in range(1 if count is None else count)]

    def arguments(self, tensors: Sequence[Any]) -> Any:
        made, left = object.__new__(self.op.arguments), list(tensors)
        held = made.__dict__
        held.update(self.fields)
        for name, count in self.names:
            if count is None:
                held[name] = left.pop(0)
            else:
                held[name], left = left[:count], left[count:]
        return made

    def __call__(self, tensors: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        op, a = self.op, self.arguments(tensors)
        outputs, saved = op.forward(a, self.needs)
        if any([isinstance(t, QuantizedTensorBase) for t in outputs]):
            raise UnsupportedError(
                f"{op.name}: a quantized result would lose its class in transforms of torch.func; use a recipe whose "
                "output role has no quantizer"
            )
        passive: list[int] = []
        if len(outputs) > 1 and self.needs:
            passive = [i for i, p in enumerate(op.layout(a, self.needs)) if not p.requires_grad]
        memo = op.memo(a, self.needs)
        places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, count in self.names:
            places[name] = at, 1 if count is None else count
            at += places[name][1]
        kept = [place for name in (*memo.tensors, *memo.lists) for place in range(places[name][0], sum(places[name]))]
        lengths = [places[name][1] for name in memo.lists]
        self.found[:] = [Found(len(outputs), passive, memo, kept, lengths)]
        return outputs, saved if self.needs else []


class Backward:
    """The backward of one call. `asked`: the argument of that name of a backward in parts (`CustomOp`). The other
    attributes are those of an eager call: see `Memo`."""

    def __init__(
        self,
        op: Any,
        bare: dict[str, Any],
        needs: tuple[str, ...],
        memo: Any,
        lengths: list[int],
        asked: tuple[str, ...] | None = None,
    ) -> None:
        self.op, self.bare, self.needs, self.memo, self.lengths, self.asked = op, bare, needs, memo, lengths, asked

    def below(self, saved: Sequence[Tensor], grads: Sequence[Tensor | None], *unread: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients, computed below all transforms. `unread`: tensors on which the gradients depend for
        autograd, although nothing reads them."""
        given = [g for g in grads if g is not None]
        there = [g is not None for g in grads]

        def run(*tensors: Any) -> Sequence[Tensor]:
            kept, left = list(tensors[: len(saved)]), list(tensors[len(saved) :])
            arguments = self.memo.take(self.op.arguments, self.bare, self.lengths, kept)
            layout: Layout = self.memo.layout
            part = () if self.asked is None else (self.asked,)
            every = [left.pop(0) if is_there else None for is_there in there]
            return self.op.backward(arguments, self.needs, split(kept[0], layout) if layout else kept, every, *part)

        return below(self.op.name, run, *saved, *given, *unread, remedy=self.op.remedy) if self.memo.gradients else ()


def call(op: Any, arguments: Any) -> tuple[Tensor, ...]:
    """Runs an op while transforms are active, eagerly in traced code too. Returns its outputs.

    **Raises** NotImplementedError for what has no place in a transform: weight gradients that go elsewhere than to
    autograd, quantized tensors, stochastic rounding under a vmap that has no randomness for each example.
    """
    if torch.compiler.is_compiling():
        return eager_only.outside(call, op, arguments)
    needs: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        needs = tuple([name for name in op.differentiable if requires_grad(getattr(arguments, name))])
    if needs and op.backward is None:
        wanted = ", ".join(needs)
        raise UnsupportedError(f"{op.name} has no derivative, and {wanted} require one; detach these arguments")
    if needs and op.gradients(arguments, needs) != needs:
        raise UnsupportedError(
            f"{op.name}: fuse_wgrad_accumulation and delay_wgrad_compute cannot be used inside of transforms of "
            "torch.func, which take gradients as results; make the module without them"
        )
    made = Call(op, arguments, needs)
    outputs = Forward.apply(made, *made.tensors)
    return outputs[: made.found[0].outputs]


def outside(name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Runs a verb on quantized tensors while transforms are active, as if none were active, and eagerly in traced code
    too. **Raises** NotImplementedError for a transform's tensors."""
    if torch.compiler.is_compiling():
        return eager_only.outside(outside_of_transforms, name, verb, *args, **named)
    return outside_of_transforms(name, verb, *args, **named)


class _Named:
    """A function with the op's name and the remedy that its errors contain."""

    def __init__(self, run: Callable[..., Any], name: str, remedy: str) -> None:
        self.run, self.name, self.remedy = run, name, remedy

    def __call__(self, *tensors: Any) -> Sequence[Tensor]:
        return self.run(*tensors)


def below(name: str, run: Callable[..., Sequence[Tensor]], *tensors: Any, remedy: str = "") -> tuple[Tensor, ...]:
    """Returns the tensors that run(*tensors), a part of a backward, makes below all transforms."""
    if any([transforms.is_legacy_batched(t) for t in tensors]):
        return _each_gradient(name, run, tensors)
    return Below.apply(_Named(run, name, remedy), *tensors)


def mapped(*grads: Tensor | None) -> bool:
    """Returns whether gradients have no memory, since they belong to a transform or to `is_grads_batched=True`. In
    traced code the answer is False."""
    if torch.compiler.is_compiling():
        return False
    for g in grads:
        if g is not None and transforms.is_legacy_batched(g):
            return True
    return transforms_active()


def _each_gradient(name: str, run: Callable[..., Sequence[Tensor]], tensors: Sequence[Any]) -> tuple[Tensor, ...]:
    """Runs a function for each example of `torch.autograd.grad(is_grads_batched=True)`. The vmap behind that argument
    is not torch.func's: it has levels, but does not call the `vmap` of Functions."""
    level = max(transforms.legacy_level(), 1)  # backward may run in another thread, whose own level is 0
    batched = transforms.is_legacy_batched
    each = [transforms.remove_legacy_batch(t, level, 1, 0) if batched(t) else None for t in tensors]
    if any([t is not None and batched(t) for t in each]):
        raise UnsupportedError(
            f"{name}: is_grads_batched=True cannot be used inside of another one; use torch.func.vmap"
        )
    made = []
    for i in range(max([t.shape[0] for t in each if t is not None])):
        made.append(run(*[t if all_of is None else all_of[i] for t, all_of in zip(tensors, each, strict=True)]))
    return tuple([transforms.add_legacy_batch(stacked(results), 0, level) for results in zip(*made, strict=True)])


class Verb:
    """A verb that is no `CustomOp`, in the form that `call` takes. `arguments`: a dataclass. `tensors`: the names of
    its fields that are tensors. `forward`, `backward`: as for `CustomOp`."""

    lists, remedy, parts = (), "", False

    def __init__(self, name: str, arguments: type, tensors: tuple[str, ...], forward: Any, backward: Any) -> None:
        self.name, self.arguments, self.differentiable = name, arguments, tensors
        self.forward, self.backward = forward, backward

    def keeps(self, arguments: Any, needs: tuple[str, ...]) -> tuple[str, ...]:
        return self.differentiable

    def gradients(self, arguments: Any, needs: tuple[str, ...]) -> tuple[str, ...]:
        return needs

    def memo(self, arguments: Any, needs: tuple[str, ...]) -> Memo:
        return memo_of(self, arguments, needs)

    def draws(self, arguments: Any, needs: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        return {}
