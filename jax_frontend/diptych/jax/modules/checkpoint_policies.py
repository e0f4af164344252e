"""`diptych.jax.checkpoint_policies`: policies of `jax.checkpoint` that know quantized products.

JAX's own policies for products (`dots_saveable` and the like) recognise `jax.lax.dot_general` alone, so they compute
quantized products a second time. Policies are values: equal ones are equal, and they can be pickled.

    jax.checkpoint(block, policy=dj.checkpoint_policies.gemms_saveable)
    jax.checkpoint(block, policy=dj.checkpoint_policies.save_from_any(gemms_saveable, quantized_saveable))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.jax.primitives.checks import copy_length
from diptych.jax.primitives.gemm import gemm_p
from diptych.jax.primitives.grouped import grouped_gemm_p
from diptych.jax.tensors.copies import CHECKPOINT_NAME

Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class GemmsSaveable:
    """Saves the results of products whose operands are both quantized, those of groups of rows included.

    `only_if_no_batch_dims`: save no product that `jax.vmap` maps over both of its operands. A product with one mapped
    operand, such as a layer's with its kernel, is saved.
    """

    only_if_no_batch_dims: bool = False

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        if prim is not gemm_p and prim is not grouped_gemm_p:
            return False
        axes = params["batch"].axes
        return not (self.only_if_no_batch_dims and axes[0] & axes[copy_length(params["a"][0])])


@dataclasses.dataclass(frozen=True)
class SaveFromAny:
    """Saves what at least one of `policies` saves; see `save_from_any`."""

    policies: tuple[Policy, ...]

    def __call__(self, prim: Any, *args: Any, **params: Any) -> bool:
        for policy in self.policies:
            saved = policy(prim, *args, **params)
            if not isinstance(saved, bool):
                raise UnsupportedError(
                    f"save_from_any: {policy!r} returned {saved!r} for {prim}, and only policies that return a bool "
                    "can be combined; write a function that asks each policy in turn"
                )
            if saved:
                return True
        return False


def save_from_any(*policies: Policy) -> Policy:
    """Returns a policy that saves what at least one of several policies saves, JAX's own among them.

    **Raises** TypeError for no policy, or for one that cannot be called. The returned policy raises
    NotImplementedError where one of them returns no bool, as JAX's policies that offload to the host do.
    """
    if not policies or not all(callable(p) for p in policies):
        raise ArgumentError(f"save_from_any takes one or more policies, functions of a primitive; got {policies!r}")
    return SaveFromAny(policies)


gemms_saveable = GemmsSaveable()
"""Saves quantized products, and nothing else: backward quantizes their operands again."""

gemms_with_no_batch_dims_saveable = GemmsSaveable(only_if_no_batch_dims=True)
"""Saves quantized products, except those that `jax.vmap` maps over both operands."""

quantized_saveable = jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
"""Saves the quantized copies that backward reads, and no product."""

dots_and_gemms_saveable = SaveFromAny((jax.checkpoint_policies.dots_saveable, gemms_saveable))
"""Saves the results of `jax.lax.dot_general` and of quantized products."""

dots_and_gemms_with_no_batch_dims_saveable = SaveFromAny(
    (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, gemms_with_no_batch_dims_saveable)
)
"""Saves the results of `jax.lax.dot_general` without batch dimensions, and quantized products that `jax.vmap` maps over
one operand at most."""
