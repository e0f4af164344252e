"""Recognizes equations that pick an element for each target along one axis, and cross entropy, which is made of them.

Elements are picked by an index, as in `jnp.take_along_axis` and `x[jnp.arange(n), targets]`, or by a sum of products
with a one-hot array of the targets. Recognized targets are the user's own integers: the step by which JAX makes
negative ones count from the end is skipped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from diptych.jax.jaxprs.flat import literal
from diptych.lab.jax.walk import Walk, exact


class Picked(NamedTuple):
    """An array of the elements of `x` at `targets` along `axis`. `places`: the axis of x for each axis of the array, or
    -1 for an axis with one element."""

    x: Any
    axis: int
    targets: Any
    places: tuple[int, ...]


class Loss(NamedTuple):
    """An array of `factor` times -log_softmax(logits)[targets]. `places`: see `Picked`; axes of the targets that are
    not in it are summed."""

    logits: Any
    axis: int
    targets: Any
    places: tuple[int, ...]
    factor: float = 1.0


def cross_entropy(walk: Walk, v: Any) -> tuple[Loss, str] | None:
    """Returns the loss whose cross entropy `v` is, and its reduction ("none", "sum" or "mean"), or None if there is
    none."""
    found = _loss(walk, v)
    if found is None or v.aval.dtype != found.logits.aval.dtype:
        return None
    if _same(v, found.places, found):
        return (found, "none") if found.factor == 1 else None
    if any(p >= 0 for p in found.places) or v.aval.shape:
        return None
    count = math.prod(found.targets.aval.shape)
    near = [r for r, n in (("mean", count), ("sum", 1)) if abs(found.factor * n - 1) <= 2**-23]
    return (found, near[0]) if near else None


def _kept(x: Any, axis: int) -> list[int]:
    return [d for d in range(len(x.aval.shape)) if d != axis]


def _same(v: Any, places: Sequence[int], of: Picked | Loss) -> bool:
    """Returns whether an array has the axes of the targets, in their order."""
    x = of.logits if isinstance(of, Loss) else of.x
    return _has(v, places, _kept(x, of.axis), x.aval.shape)


def _has(v: Any, places: Sequence[int], want: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns whether the axes of `v` are the axes `want` of an array [*shape], in this order."""
    sizes = tuple(shape[d] for d in want)
    return tuple(v.aval.shape) == sizes and all(p == d or shape[d] == 1 for p, d in zip(places, want, strict=True))


# --- losses ---


def _loss(walk: Walk, v: Any, depth: int = 8) -> Loss | None:
    """Returns the loss that a variable holds, perhaps multiplied by a constant, with added axes of size 1, or summed;
    None if it holds no cross entropy."""
    if (found := _of_log_softmax(walk, v)) is not None:
        return found
    e = walk.made(v, "sub", "neg", "mul", "div", "reduce_sum", "squeeze", "reshape", "copy", "convert_element_type")
    if e is None or not depth:
        return None
    kind, (a, *b) = e.primitive.name, e.invars
    if kind == "sub":
        return _of_logsumexp(walk, a, b[0], 1.0) or _of_logsumexp(walk, b[0], a, -1.0)
    if kind == "mul" and walk.constant(a) is not None:
        a, b = b[0], [a]
    factor = {"neg": -1.0}.get(kind, walk.constant(b[0]) if b else 1.0)
    if not factor or (found := _loss(walk, a, depth - 1)) is None:
        return None
    if kind == "reduce_sum":
        left = [p for i, p in enumerate(found.places) if i not in e.params["axes"]]
        return found._replace(places=tuple(left))
    if not exact(found.logits.aval.dtype, v.aval.dtype):
        return None
    places = _placed(found.places, a, v)
    factor = found.factor / factor if kind == "div" else found.factor * factor
    return None if places is None else found._replace(places=places, factor=factor)


def _of_log_softmax(walk: Walk, v: Any) -> Loss | None:
    """Recognizes log-probabilities at the targets, or their negatives."""
    if (found := picked(walk, v)) is None:
        return None
    factor, x = -1.0, found.x
    if (e := walk.made(x, "neg")) is not None:
        factor, x = 1.0, e.invars[0]
    shape = tuple(x.aval.shape)
    of = walk.log_softmax(x)
    if of is None and (e := walk.made(x, "sub")) is not None:
        of = walk.logsumexp(e.invars[1], shape)
        of = of if of is not None and of.x is e.invars[0] else None
    if of is None or of.axis != found.axis:
        return None
    return Loss(of.x, of.axis, found.targets, found.places, factor)


def _of_logsumexp(walk: Walk, total: Any, at: Any, factor: float) -> Loss | None:
    """Recognizes the logarithm of the sum of exponentials minus the logits at the targets."""
    if literal(total) or literal(at) or total.aval.shape != at.aval.shape or (found := picked(walk, at)) is None:
        return None
    x, shape = found.x, tuple(found.x.aval.shape)
    of = walk.logsumexp(total, shape, found.places)
    if of is None:  # the logarithm and the logits at the targets may be computed from the logits minus their maximum
        of = walk.reduced(total, shape, "reduce_sum", log=True, places=found.places)
        if of is None or walk.summed_exp(of) is not x or (of := walk.shifted(x)) is None:
            return None
    elif of.x is not x:
        return None
    return Loss(of.x, of.axis, found.targets, found.places, factor) if of.axis == found.axis else None


# --- picked elements ---


def picked(walk: Walk, v: Any, depth: int = 4) -> Picked | None:
    """Returns the elements that a variable holds as picked from an array, None if it holds none."""
    e = walk.made(v, "gather", "dynamic_slice", "reduce_sum", "squeeze", "reshape", "broadcast_in_dim",
                  "convert_element_type")  # fmt: skip
    if e is None or not depth:
        return None
    kind, a = e.primitive.name, e.invars[0]
    if kind == "dynamic_slice":
        return _sliced(walk, e)
    if kind == "gather" and (found := _gathered(walk, e)) is not None:
        return found
    if kind == "reduce_sum":
        found = _by_product(walk, e)
        cast = walk.made(a, "convert_element_type") if found is None else None
        return found if cast is None else _by_product(walk, e, cast.invars[0])
    if kind == "gather" and not _takes_all(walk, e):
        return None
    found = picked(walk, a, depth - 1)
    if found is None or not exact(found.x.aval.dtype, v.aval.dtype):
        return None
    if kind == "gather":
        (gone,) = e.params["dimension_numbers"].collapsed_slice_dims
        return found._replace(places=tuple(p for i, p in enumerate(found.places) if i != gone))
    places = _placed(found.places, a, v)
    return None if places is None else found._replace(places=places)


def _placed(places: Sequence[int], of: Any, v: Any) -> tuple[int, ...] | None:
    """Returns the places of the axes of `v`, which has the elements of `of` in the same order; None if it does not."""
    wide = [p for p, n in zip(places, of.aval.shape, strict=True) if n != 1]
    if [n for n in of.aval.shape if n != 1] != [n for n in v.aval.shape if n != 1]:
        return None
    left = iter(wide)
    return tuple(-1 if n == 1 else next(left) for n in v.aval.shape)


def _takes_all(walk: Walk, e: Any) -> bool:
    """Returns whether a gather removes one axis with one element from an array, and keeps all elements."""
    shape, d, at = tuple(e.invars[0].aval.shape), e.params["dimension_numbers"], e.invars[1]
    while (found := walk.moved(at, [-1] * len(at.aval.shape))) is not None:
        at = found[0]
    zero = walk.filled(_counted_from_start(walk, at, 1)) == 0
    whole = tuple(e.params["slice_sizes"]) == shape and not d.operand_batching_dims
    return whole and zero and len(d.collapsed_slice_dims) == 1 and e.invars[1].aval.shape == (1,)


def _by_product(walk: Walk, e: Any, product: Any = None) -> Picked | None:
    """Recognizes x times a one-hot array of the targets, summed over the axis of the classes or over more axes."""
    product = e.invars[0] if product is None else product
    axes, shape = e.params["axes"], tuple(product.aval.shape)
    if (made := walk.made(product, "mul")) is None:
        return None
    for x, chosen in itertools.permutations(made.invars):
        if literal(x) or tuple(x.aval.shape) != shape or x.aval.dtype != product.aval.dtype:
            continue
        if (found := _one_hot(walk, chosen, shape)) is not None and found[0] in axes:
            places = [d for d in range(len(shape)) if d not in axes]
            return Picked(x, *found, tuple(places))
    return None


def _one_hot(walk: Walk, v: Any, shape: tuple[int, ...]) -> tuple[int, Any] | None:
    """Returns the axis and the targets if `v` [*shape] is 1 at each target along one axis and 0 elsewhere."""
    v = walk.uncast(walk.uncast(v))
    if (e := walk.made(v, "select_n")) is not None and len(e.invars) == 3:
        if [walk.filled(u) for u in e.invars[1:]] != [0, 1]:
            return None
        v = e.invars[0]
    if (e := walk.made(v, "eq")) is None or tuple(v.aval.shape) != shape:
        return None
    every = list(range(len(shape)))
    for targets, numbers in itertools.permutations(e.invars):
        if literal(targets) or literal(numbers) or (axis := _counts(walk, numbers, every, shape)) is None:
            continue
        kept = [d for d in every if d != axis]
        found = _targets(walk, targets, [-1 if d == axis else d for d in every], kept, shape, shape[axis])
        return None if found is None else (axis, found)
    return None


def _sliced(walk: Walk, e: Any) -> Picked | None:
    """Recognizes one element of a vector."""
    x, *at = e.invars
    if tuple(e.params["slice_sizes"]) != (1,) or len(at) != 1:
        return None
    targets = _targets(walk, at[0], [], [], tuple(x.aval.shape), x.aval.shape[0])
    return None if targets is None else Picked(x, 0, targets, (-1,))


def _gathered(walk: Walk, e: Any) -> Picked | None:
    """Recognizes one element for each index; all axes of x except one are enumerated in step with the indices' axes."""
    (x, at), d, out = e.invars, e.params["dimension_numbers"], e.outvars[0].aval.shape
    shape = tuple(x.aval.shape)
    if any(n != 1 for n in e.params["slice_sizes"]):
        return None
    of_indices = [o for o in range(len(out)) if o not in d.offset_dims]
    places = [-1] * len(out)
    for dim, i in zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True):
        places[of_indices[i]] = int(dim)
    axis, index = None, None
    for dim, part in zip(map(int, d.start_index_map), _parts(walk, at, len(d.start_index_map)), strict=True):
        place = _counts(walk, part, [*of_indices, -1], out, shape[dim])
        if place is not None and place >= 0:
            places[place] = dim
        elif axis is None:
            axis, index = dim, part
        else:
            return None
    want = [p for p in range(len(shape)) if p != axis]
    known = sorted(p for p in places if p >= 0) == [p for p in want if shape[p] != 1 or p in places]
    if axis is None or not known or any(places[o] < 0 and out[o] != 1 for o in range(len(out))):
        return None
    targets = _targets(walk, index, [*(places[o] for o in of_indices), -1], want, shape, shape[axis])
    return None if targets is None else Picked(x, axis, targets, tuple(places))


def _parts(walk: Walk, at: Any, count: int) -> list[Any]:
    """Returns the variables that are concatenated along the last axis of indices."""
    if at.aval.shape[-1] == count == 1:
        return [at]
    e = walk.made(at, "concatenate")
    if e is None or e.params["dimension"] != len(at.aval.shape) - 1 or len(e.invars) != count:
        return [None] * count
    return list(e.invars)


def _counts(walk: Walk, v: Any, places: Sequence[int], shape: Sequence[int], size: int | None = None) -> int | None:
    """Returns the place of the axis along which an array is 0, 1, 2, ... to the axis's end, else None. `size`: the
    required length of the axis."""
    if v is None or literal(v):
        return None
    at = list(places)
    while (found := walk.moved(v := _counted_from_start(walk, v, size), at)) is not None:
        v, at = found
    if (e := walk.made(v, "iota")) is None or len(at) != len(v.aval.shape):
        return None
    place, length = at[e.params["dimension"]], v.aval.shape[e.params["dimension"]]
    return place if place >= 0 and length == shape[place] and size in (None, length) else None


def _counted_from_start(walk: Walk, v: Any, size: int | None) -> Any:
    """Returns the user's indices, from which `v` was made by adding `size` to negative ones; else `v` itself."""
    e = walk.made(v, "select_n")
    if e is None or len(e.invars) != 3 or size is None:
        return v
    below, kept, more = walk.made(e.invars[0], "lt"), e.invars[1], walk.made(e.invars[2], "add")
    if below is None or more is None or not below.invars[0] is more.invars[0] is kept:
        return v
    return kept if walk.filled(below.invars[1]) == 0 and walk.filled(more.invars[1]) == size else v


def _targets(walk: Walk, v: Any, places: Sequence[int], want: Sequence[int], shape: Sequence[int], classes: int) -> Any:
    """Returns the user's integer array from which indices along an axis of an array [*shape] are made, and whose axes
    are that array's other axes, `want`; None if there is none."""
    at = list(places)
    while not literal(v) and jnp.issubdtype(v.aval.dtype, jnp.integer) and classes - 1 <= jnp.iinfo(v.aval.dtype).max:
        if (kept := _counted_from_start(walk, v, classes)) is not v:
            v = kept
        elif _has(v, at, want, shape) if len(at) == len(want) else False:
            return v
        elif (found := walk.moved(v, at)) is not None:
            v, at = found
        else:
            return None
    return None
