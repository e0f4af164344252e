"""The primitives that are partitioned, and their rules. The others compute everything on each device."""

from __future__ import annotations

from diptych.jax.primitives.register import PARTITIONERS, PRIMITIVES
from diptych.jax.private.lowering import require_devices
from diptych.jax.sharding import activation, gemm, grouped, norm, permute, quantize
from diptych.jax.sharding.partition import OwnRule, Partitioner

RULES: dict[str, OwnRule] = {
    "amax": quantize.amax,
    "quantize": quantize.quantize,
    "dequantize": quantize.dequantize,
    "gemm": gemm.gemm,
    "bias_grad": gemm.bias_grad,
    "quantize_stack": grouped.quantize_stack,
    "grouped_gemm": grouped.grouped_gemm,
    "grouped_bias_grad": grouped.grouped_bias_grad,
    "permute_map": permute.permute_map,
    "invert_map": permute.invert_map,
    "permute": permute.permute,
    "permute_columns": permute.permute_columns,
    "unpermute": permute.unpermute,
    "unpermute_grad": permute.unpermute_grad,
    "norm": norm.norm,
    "norm_grad": norm.norm_grad,
    "activation": activation.activation,
    "activation_grad": activation.activation,
}


def partition_primitives() -> None:
    """Lets XLA partition the calls of the primitives in `RULES`."""
    for op, own in RULES.items():
        PARTITIONERS[op] = Partitioner(op, own)
        require_devices(PRIMITIVES[op])
