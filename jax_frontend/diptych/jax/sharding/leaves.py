"""How the arrays inside a quantized tensor are cut, given how the tensor itself is cut.

A quantized tensor of logical shape [M, K], or a stack [G, M, K], has one logical sharding. Its arrays have other
shapes: transposed copies, a scale for each block, one amax of everything. Their shardings follow from the factors by
which `quantize` itself is partitioned, so what is placed here lies as what was quantized from a cut tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from diptych.common.errors import ArgumentError, ShapeError
from diptych.jax.sharding.quantize import COLUMNS, ROWS, blocks_of_copies, factors_of_copies
from diptych.jax.sharding.rule import Factors, Rule, check_cuts, check_whole, cuts_of, row_factors, spec_of
from diptych.jax.tensors.quantized import BUFFERS, QuantizedCopies

_OP = "leaf_shardings"


def leaf_shardings(tree: Any, sharding: Any) -> Any:
    """Returns the sharding of each array in a tree of arrays and quantized tensors.

    **Arguments:** `tree`: any pytree; its arrays may be `jax.ShapeDtypeStruct`s, as `jax.eval_shape` returns them.
    `sharding`: one sharding for all of it, or a tree of them that is a prefix of `tree`. A `QuantizedArray` of shape
    [..., K] or a `QuantizedStack` of shape [G, ..., K] counts as one array of that shape and takes one NamedSharding,
    or one PartitionSpec, whose mesh is the context's (`jax.set_mesh`). Axes that `vmap` or `scan` added are in front.

    **Returns:** a tree like `tree`, with a sharding in place of each array, or a PartitionSpec where one was given: for
    `jax.device_put`, `in_shardings` and `out_shardings` of `jax.jit`, `jax.lax.with_sharding_constraint`, specs of
    `jax.shard_map`, and checkpoints. Scales and amaxes of a whole tensor are replicated. Any other sharding than these,
    None included, is passed on to each array.

    **Raises:** ShapeError if blocks of a quantized tensor would be cut, if shards would not be equal, or for a spec
    that is longer than the shape; UnsupportedError for a cut dimension that folds into rows and is not the first
    one longer than 1; TypeError for a PartitionSpec without a mesh, or one with unconstrained dimensions.
    """
    return jax.tree.map(
        lambda s, part: jax.tree.map(lambda x: _shardings_of(x, s), part, is_leaf=_quantized),
        sharding,
        tree,
        is_leaf=lambda s: s is None or isinstance(s, (jax.sharding.Sharding, PartitionSpec)),
    )


def device_put(tree: Any, sharding: Any, **options: Any) -> Any:
    """`jax.device_put` for trees with quantized tensors, each of which takes the sharding of the tensor it stands for.

    **Arguments, raises:** as `leaf_shardings`. `options`: `donate` and others of `jax.device_put`.

    **Returns:** the tree with its arrays placed. Under `jax.jit` constrain it by `leaf_shardings` instead.
    """
    return jax.device_put(tree, leaf_shardings(tree, sharding), **options)


def _quantized(x: Any) -> bool:
    return isinstance(x, QuantizedCopies)


def _shardings_of(x: Any, sharding: Any) -> Any:
    """Returns the shardings of one array, or of a quantized tensor's arrays."""
    if not isinstance(x, QuantizedCopies) or not isinstance(sharding, (NamedSharding, PartitionSpec)):
        return jax.tree.map(lambda _: sharding, x)
    named = isinstance(sharding, NamedSharding)
    spec, mesh = (sharding.spec, sharding.mesh) if named else (sharding, jax.sharding.get_abstract_mesh())
    if mesh.empty or PartitionSpec.UNCONSTRAINED in spec:
        what = "without unconstrained dimensions" if not mesh.empty else "or a mesh that jax.set_mesh sets"
        raise ArgumentError(f"{_OP}: {x!r} takes a NamedSharding {what}, got {sharding}")
    leaves = {name: leaf for name in BUFFERS if (leaf := getattr(x, name)) is not None}
    rule = _rule(x, list(leaves))
    if len(spec) > x.ndim:
        raise ShapeError(f"{_OP}: {spec} has {len(spec)} dimensions, and {x!r} has {x.ndim}")
    check_whole(_OP, rule, [spec], [x.ndim - len(x.leading) - 1], mesh.shape)
    cuts = cuts_of(rule, [spec])
    check_cuts(_OP, rule, cuts, mesh.shape, [x.shape])
    parts = {}
    for (name, leaf), factors in zip(leaves.items(), rule.results, strict=True):
        own = PartitionSpec(*spec_of(factors[: len(leaf.shape)], cuts))  # a stack's [G] has no dimension of its own
        parts[name] = sharding.update(spec=own) if named else own
    return dataclasses.replace(x, **parts)


def _rule(x: QuantizedCopies, names: list[str]) -> Rule:
    """Returns the rule of quantizing `x`. Axes in front are factors of their own, and scales of each are one number."""
    shape = x.shape
    own = shape[len(shape) - len(x.leading) - 1 :]
    front: Factors = tuple(f"axis {i}" for i in range(len(shape) - len(own)))
    factors = factors_of_copies(x.quantizer, own)
    quantizer = x.quantizer.with_usage(rowwise=x.rowwise_data is not None, columnwise=x.columnwise_data is not None)
    tensor = (*front, *row_factors(own[:-1], ROWS), COLUMNS)
    return Rule((tensor,), tuple(front + factors[n] for n in names), blocks_of_copies(quantizer, own))
