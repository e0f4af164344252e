"""How a `Rule` becomes result types on Explicit meshes, and a partitioned call in the compiled program.

Both Auto and Explicit axes are lowered by `custom_partitioning`: Shardy propagates shardings by the rule's factors,
and XLA's partitioner then asks for the call on one shard. A call is **not** partitioned, and XLA gathers its operands,
where a mesh is only partly manual (inside of such a shard_map), where sizes are symbolic, and in exported programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from diptych.common.errors import UnsupportedError
from diptych.jax.primitives.checks import Aval, own_shape
from diptych.jax.primitives.ffi import Batch
from diptych.jax.sharding.rule import Factors, Rule, check_cuts, check_whole, cuts_of, operand_specs, spec_of

# In a shard, types name no mesh. JAX 0.10 asks for the shard in a thread of its own, but JAX 0.12 does it where the
# program is compiled, and there the user's mesh may be set, whose Explicit axes would cut the shard's types again.
_NO_MESH = AbstractMesh((), ())

OwnRule = Callable[..., Rule]
"""Takes the operands' shapes without batch axes, `batch`, and the primitive's parameters."""


class Partitioner(NamedTuple):
    """Partitions the calls of one primitive; `register.PARTITIONERS` holds it. `own`: the rule without batch axes."""

    op: str
    own: OwnRule

    def rule(self, avals: Sequence[Aval], batch: Batch, params: dict[str, Any]) -> Rule | None:
        """Returns the rule of a call, or None if its sizes are symbolic."""
        shapes = [own_shape(a, mask) for a, mask in zip(avals, batch.axes, strict=True)]
        if not all(isinstance(n, int) for a in avals for n in a.shape):
            return None
        own = self.own(shapes, batch, **params)
        return own.with_batch([_batch_factors(batch, m) for m in batch.axes], _batch_factors(batch))

    def types(self, avals: Sequence[Aval], outs: list[Aval], batch: Batch, params: dict[str, Any]) -> list[Aval]:
        """Returns the results' types, cut as the operands' types say. **Raises** what `check_cuts` raises."""
        specs = [a.sharding.spec for a in avals]
        if all(entry is None for spec in specs for entry in spec):
            return outs
        rule = self.rule(avals, batch, params)
        if rule is None:
            return outs
        mesh = next(a.sharding.mesh for a in avals if not a.sharding.mesh.empty)
        check_whole(self.op, rule, specs, [m.bit_count() for m in batch.axes], mesh.shape)
        cuts = cuts_of(rule, specs)
        check_cuts(self.op, rule, cuts, mesh.shape, [a.shape for a in avals])
        typed = zip(outs, rule.results, strict=True)
        return [o.update(sharding=NamedSharding(mesh, PartitionSpec(*spec_of(f, cuts)))) for o, f in typed]

    def lowering(self, ctx: Any, prim: Any, batch: Batch, params: dict[str, Any]) -> Any:
        """Returns the lowering of a partitioned call, or None if this program or call is not partitioned."""
        if not _partitioned(ctx.module_context):
            return None
        rule = self.rule(ctx.avals_in, batch, params)
        if rule is None:
            return None
        if not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"{self.op}: arrays on several devices need XLA's partitioner Shardy, and this program was told to use "
                "GSPMD; set jax_use_shardy_partitioner, or call inside of jax.shard_map"
            )
        if ctx.module_context.axis_context.device_assignment is None:
            raise UnsupportedError(
                f"{self.op}: jax {jax.__version__} lowers this program for several devices without saying which, and a "
                "partitioned call needs them; use jax 0.10 to 0.12 and a concrete mesh, or call inside of jax.shard_map"
            )
        run = functools.partial(prim.bind, batch=batch, **params)

        @custom_partitioning
        def call(*operands: Any) -> Any:
            return run(*operands)

        def partition(mesh: Any, operands: Any, results: Any) -> Any:
            cuts = cuts_of(rule, [x.sharding.spec for x in operands], [x.sharding.spec for x in results])
            check_cuts(self.op, rule, cuts, mesh.shape, [x.shape for x in operands])

            def shardings(specs: Sequence[list[Any]]) -> list[NamedSharding]:
                return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]

            of_results = shardings([spec_of(factors, cuts) for factors in rule.results])
            of_operands = shardings(operand_specs(rule, cuts))

            def shard(*xs: Any) -> list[Any]:
                with use_abstract_mesh(_NO_MESH):
                    return rule.compute(run, cuts, xs)

            return mesh, shard, of_results, tuple(of_operands)

        call.def_partition(partition, sharding_rule=lambda *_: _shardy_rule(rule))
        return mlir.lower_fun(call, multiple_results=True)


def _batch_factors(batch: Batch, mask: int = -1) -> Factors:
    return tuple(f"batch{bit}" for bit in reversed(range(batch.rank)) if mask >> bit & 1)


def _partitioned(context: Any) -> bool:
    """Returns whether XLA partitions this program over a mesh of known devices."""
    axes = context.axis_context
    several = getattr(axes, "num_devices", 1) > 1 and getattr(axes, "abstract_mesh", None) is not None
    return several and not context.lowering_parameters.for_export


def _shardy_rule(rule: Rule) -> SdyShardingRule:
    """Returns the rule as Shardy takes it. A dimension that is never cut gets a factor of its own."""
    single: list[str] = []

    def named(arrays: Sequence[Factors]) -> tuple[ArrayMapping, ...]:
        out = []
        for factors in arrays:
            names = []
            for factor in factors:
                if factor is None:
                    factor = f"whole{len(single)}"
                    single.append(factor)
                names.append(factor)
            out.append(ArrayMapping(*names))
        return tuple(out)

    operands, results = named(rule.operands), named(rule.results)
    seen = {f for factors in results for f in factors}
    reduced = dict.fromkeys(f for factors in operands for f in factors if f not in seen and f not in single)
    return SdyShardingRule(operands, results, reduction_factors=tuple(reduced), need_replication_factors=tuple(single))
