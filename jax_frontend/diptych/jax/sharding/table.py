"""The primitives that are partitioned, and their rules. All others compute everything on each device."""

from __future__ import annotations

from diptych.jax.primitives.register import PARTITIONERS, PRIMITIVES
from diptych.jax.sharding import activation, gemm, norm, quantize
from diptych.jax.sharding.partition import OwnRule, Partitioner, require_devices

RULES: dict[str, OwnRule] = {
    "amax": quantize.amax,
    "quantize": quantize.quantize,
    "dequantize": quantize.dequantize,
    "gemm": gemm.gemm,
    "bias_grad": gemm.bias_grad,
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
